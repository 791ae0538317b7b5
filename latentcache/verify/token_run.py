"""``verify_tokens``: is this token cache still true? Reads the cache and its sources, changes neither.

``fast`` reads manifest, columns and shard indexes, stats the files of DATA, and reads those that may have changed.
``full`` reads every block and every record as well. Neither needs a tokenizer; only tokenising again does, and who
asks for that brings it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import SourceNotFoundError
from latentcache.sources.record_listing import list_files
from latentcache.sources.records import RecordScan
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import pinned
from latentcache.store.token_generation import TokenGeneration, load_tokens
from latentcache.store.token_reader import TokenReader
from latentcache.token_recipe import TokenRecipe, short, token_differences
from latentcache.verify.findings import PROBLEMS, Finding, VerifyReport, count, mender, worst
from latentcache.verify.selection import confidence
from latentcache.verify.token_entries import BlocksChecked, check_blocks
from latentcache.verify.token_sources import (
    RecordsChecked,
    Retokenise,
    as_quarantined,
    check_records,
    compare_tokens,
)

#: Opens the records of a data folder, read with the options that the manifest names.
OpenRecords = Callable[[Path, Mapping[str, Any]], RecordScan]


def verify_tokens(
    cache: Path,
    *,
    open_records: OpenRecords,
    data: Path | None = None,
    requested: TokenRecipe | None = None,
    full: bool = False,
    reencode: int = 0,
    seed: int = 0,
    retokenise: Retokenise | None = None,
) -> VerifyReport:
    """Check a token cache against its sources and against itself.

    Args:
        cache: The cache folder.
        open_records: Opens the data.
        data: The data, where it is not the recorded file or folder.
        requested: A recipe that a trainer is about to ask for; every document is stale where it differs.
        full: Read every block and every record.
        reencode: How many documents to tokenise again.
        seed: Which ones.
        retokenise: Tokenises them.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version, or a cache of pictures.
        CacheDamagedError: The manifest or a column is damaged, so nothing can be said of single documents.
        SourceError: The data is gone, or cannot be read.
    """
    started = time.monotonic()
    layout = CacheLayout(cache)
    generation = pinned(cache, load_tokens)
    place = find_records(cache, generation) if data is None else data
    blocks = check_blocks(layout, generation, full=full)
    again = retokenise if reencode else None
    fine = np.array([n for n in range(len(generation.documents)) if n not in blocks.damage], dtype=np.intp)
    wanted = np.sort(np.random.default_rng(seed).permutation(fine)[:reencode]) if again else fine[:0]
    checked = _records(generation, place, open_records, wanted, full=full, retokenise=again, layout=layout)
    decided = _by_document(generation, requested, blocks, checked)
    findings = [*decided.values(), *checked.others, *blocks.loose]
    fix = mender(cache, place, f" --reencode {reencode} --seed {seed}", generation.allow_failed)
    total = len(generation.documents)
    problems = any(finding.category in PROBLEMS for finding in decided.values())
    return VerifyReport(
        mode="full" if full else "fast",
        generation=generation.number,
        findings=tuple(finding.with_defaults(fix(finding)) for finding in findings),
        counts=count(findings, total - len(decided)),
        samples=total + len(generation.refused),
        building=layout.building.exists(),
        elapsed_s=time.monotonic() - started,
        recipe_diff=tuple(token_differences(generation.recipe, requested)) if requested else (),
        checked={
            "samples": total,
            "headers": blocks.headers,
            "payloads": blocks.payloads,
            "payload_bytes": blocks.payload_bytes,
            "records": checked.records,
            "reencoded": checked.retokenised,
        },
        recipe_id=generation.recipe.recipe_id.hex(),
        allow_failed=generation.allow_failed,
        damage=tuple(chain.from_iterable(blocks.damage.values())) + tuple(checked.drift.values()),
        confidence=confidence(checked.retokenised, total) if checked.retokenised and not problems else "",
    )


def find_records(cache: Path, generation: TokenGeneration) -> Path:
    """The recorded data, or where it would be had cache and data moved together.

    Raises:
        SourceNotFoundError: Neither is there.
    """
    source = generation.manifest["source"]
    places = [Path(source["root"]), Path(cache, source["relative"])]
    for place in places:
        if place.exists():
            return place
    raise SourceNotFoundError(
        f"the data of this cache is gone: {places[0]}",
        where=str(places[0]),
        why="no such file or folder",
        fix=f"say where it is: latentcache verify {shlex.quote(str(cache))} --data DATA",
    )


def _records(
    generation: TokenGeneration,
    place: Path,
    open_records: OpenRecords,
    wanted: Any,
    *,
    full: bool,
    retokenise: Retokenise | None,
    layout: CacheLayout,
) -> RecordsChecked:
    """Sources, and what the tokenizer makes of some of them."""
    source = generation.manifest["source"]
    if not full and retokenise is None and list_files(place).proves(source["listing"]):
        return RecordsChecked(others=[as_quarantined(dict(one)) for one in generation.refused])
    checked, records = check_records(generation, open_records(place, source["options"]), wanted, full=full)
    if retokenise is not None:
        reader = TokenReader(layout, generation)
        checked.drift = compare_tokens(reader, wanted, records, retokenise)
        checked.retokenised = len(records)
        reader.close()
    return checked


def _by_document(
    generation: TokenGeneration, requested: TokenRecipe | None, blocks: BlocksChecked, checked: RecordsChecked
) -> dict[int, Finding]:
    """What each document comes to that is not fine."""
    sides = recipe_sides(generation.recipe, requested)[:1]
    numbers = (
        range(len(generation.documents)) if sides else sorted({*blocks.damage, *checked.by_document, *checked.drift})
    )
    decided = {}
    for number in numbers:
        own = [*blocks.damage.get(number, ())]
        own += [found[number] for found in (checked.by_document, checked.drift) if number in found]
        path = generation.documents.where(number)
        own += [Finding(category="stale", reason=f"recipe:{name}", path=path, **both) for name, both in sides]
        finding = worst(own)
        if finding is not None:
            decided[number] = finding
    return decided


def recipe_sides(cached: TokenRecipe, requested: TokenRecipe | None) -> list[tuple[str, dict[str, str]]]:
    """Field and both sides for each field that differs: what was asked for, and what the cache has."""
    if requested is None:
        return []
    rows = token_differences(cached, requested)
    return [(name, {"expected": short(asked), "found": short(mine)}) for name, mine, asked in rows]

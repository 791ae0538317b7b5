"""``verify_tokens``: is this token cache still true? Reads the cache and its sources, changes neither.

``fast`` reads manifest, columns and shard indexes, stats the files of DATA, and reads those that may have changed.
``full`` reads every block, in a process of its own, and every record as well; ``sample`` does so for some. None of
them needs a tokenizer; only tokenising again does, and who asks for that brings it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.sources.record_listing import list_files
from latentcache.sources.records import RecordScan
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import TokenGeneration, load_tokens
from latentcache.store.token_reader import TokenReader
from latentcache.token_recipe import TokenRecipe, short, token_differences
from latentcache.verify.deep import read_payloads
from latentcache.verify.entries import Checked, check_entries
from latentcache.verify.findings import Finding, VerifyReport
from latentcache.verify.opening import find_data, limits_of, open_held
from latentcache.verify.selection import Deadline, Depth, confidence
from latentcache.verify.subjects import chosen_by, every
from latentcache.verify.token_sources import (
    RecordsChecked,
    Retokenise,
    check_records,
    compare_tokens,
    recorded_refusals,
)
from latentcache.verify.verdict import Seen, decide, looked_at, side_by_side, verdict

#: Opens the records of a data folder, read with the options that the manifest names.
OpenRecords = Callable[[Path, Mapping[str, Any]], RecordScan]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTokens:
    """A recipe, and the tokenizer behind it in its parts."""

    recipe: TokenRecipe
    parts: Mapping[str, str] = field(default_factory=dict)
    """Hash of each, so that those that differ are named; empty where nobody knows."""


Asked = AskedTokens | TokenRecipe | None
#: What a trainer is about to ask for, or what makes it of the generation; None where nothing is asked for.
Requested = Asked | Callable[[TokenGeneration], Asked]


def verify_tokens(
    cache: Path,
    *,
    open_records: OpenRecords,
    data: Path | None = None,
    requested: Requested = None,
    full: bool = False,
    depth: Depth | None = None,
    retokenise: Retokenise | None = None,
) -> VerifyReport:
    """Check a token cache against its sources and against itself.

    Args:
        cache: The cache folder.
        open_records: Opens the data.
        data: The data, where it is not the recorded file or folder.
        requested: Every document is stale where it differs from the recipe of the cache.
        full: Read every block and every record; short for a ``depth`` that says so.
        depth: How much to look at.
        retokenise: Tokenises what ``depth.reencode`` asks for.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version, or a cache of pictures.
        CacheDamagedError: The manifest or a column is damaged, so nothing can be said of single documents.
        SourceError: The data is gone, or cannot be read.
    """
    depth = depth or Depth(full=full)
    again = retokenise if depth.reencode else None
    return _Look(cache=cache, depth=depth, open_records=open_records, requested=requested, retokenise=again)(data)


@dataclass(slots=True, kw_only=True)
class _Look:
    """One verification."""

    cache: Path
    depth: Depth
    open_records: OpenRecords
    requested: Requested
    retokenise: Retokenise | None
    started: float = field(default_factory=time.monotonic)

    def __call__(self, data: Path | None) -> VerifyReport:
        """Look, and put together what was seen."""
        deadline = Deadline(self.depth.max_duration_s)
        layout = CacheLayout(self.cache)
        limits = limits_of(layout, self.depth)
        generation = open_held(self.cache, load_tokens)
        asked = self.requested(generation) if callable(self.requested) else self.requested
        different = asked_differences(generation, asked)
        place = find_data(self.cache, generation, self.depth, data)
        drawn, rows = chosen_by(generation, self.depth.selection)
        chosen = every(generation, drawn)
        entries = check_entries(layout, generation, chosen=rows)
        wanted = self._drawn(chosen, entries)
        deep, records = side_by_side(
            lambda: read_payloads(
                layout, generation, entries, chosen=rows, depth=self.depth, deadline=deadline, limits=limits
            ),
            lambda: self._records(generation, place, chosen, wanted, deadline),
            deadline,
        )
        again = self._again(layout, generation, wanted, entries, records, deadline)
        looked = looked_at(generation, chosen, deep, records.unasked)
        seen = Seen(
            generation=generation,
            data=place,
            chosen=chosen,
            looked=looked,
            own=_by_document(generation, different, chosen, looked, entries, records),
            entries=entries,
            deep=deep,
            others=records.others,
            checked={"records": records.records, "reencoded": again},
            recipe_diff=tuple(different),
            claim=confidence(again, len(chosen)) if again and again == len(wanted) else "",
        )
        return verdict(self.cache, self.depth, seen, self.started)

    def _drawn(self, chosen: NDArray[np.bool_], entries: Checked) -> NDArray[np.intp]:
        """The documents that are tokenised again."""
        if self.retokenise is None:
            return np.empty(0, dtype=np.intp)
        fine = chosen.copy()
        fine[list(entries.damage)] = False
        order = np.random.default_rng(self.depth.seed).permutation(np.flatnonzero(fine))
        return np.sort(order[: self.depth.reencode])

    def _records(
        self,
        generation: TokenGeneration,
        place: Path | None,
        chosen: NDArray[np.bool_],
        wanted: NDArray[np.intp],
        deadline: Deadline,
    ) -> RecordsChecked:
        """Sources, where there are any to look into."""
        if place is None:
            return RecordsChecked()
        source = generation.manifest["source"]
        proven = place.exists() and list_files(place).proves(source["listing"])
        if proven and not self.depth.reads and self.retokenise is None:
            return RecordsChecked(others=recorded_refusals(generation))
        return check_records(
            generation,
            self.open_records(place, source["options"]),
            chosen=chosen,
            wanted=wanted,
            deadline=deadline,
            reread=self._reread(chosen, wanted),
        )

    def _reread(self, chosen: NDArray[np.bool_], wanted: NDArray[np.intp]) -> NDArray[np.intp] | None:
        """The documents whose files are read whatever their stats say; None for all files."""
        if self.depth.selection is not None:
            return np.flatnonzero(chosen)
        return None if self.depth.full else wanted

    def _again(
        self,
        layout: CacheLayout,
        generation: TokenGeneration,
        wanted: NDArray[np.intp],
        entries: Checked,
        records: RecordsChecked,
        deadline: Deadline,
    ) -> int:
        """Tokenise some documents again, where that was asked for; gives how many."""
        if self.retokenise is None:
            return 0
        reader = TokenReader(layout, generation)
        try:
            return compare_tokens(reader, wanted.tolist(), records.kept, self.retokenise, entries, deadline)
        finally:
            reader.close()


def _by_document(
    generation: TokenGeneration,
    different: Sequence[tuple[str, Any, Any]],
    chosen: NDArray[np.bool_],
    looked: NDArray[np.bool_],
    entries: Checked,
    records: RecordsChecked,
) -> dict[int, Finding]:
    """What each document comes to that is not fine."""
    recipe = recipe_sides(different)

    def findings(number: int, path: str) -> list[Finding]:
        of_entry, of_source = entries.damage.get(number, ()), records.by_document.get(number)
        of_recipe = [Finding(category="stale", reason=reason, path=path, **sides) for reason, sides in recipe]
        return [*of_entry, *([of_source] if of_source else ()), *of_recipe]

    numbers = np.flatnonzero(chosen).tolist() if recipe else sorted({*entries.damage, *records.by_document})
    return decide(((number, generation.documents.where(number)) for number in numbers), looked, findings)


def asked_differences(generation: TokenGeneration, asked: Asked) -> list[tuple[str, Any, Any]]:
    """(field, as it is cached, as it is asked for) of all that differs; of a tokenizer its parts, if known.

    Args:
        generation: Of the cache.
        asked: What it is held against.
    """
    if asked is None or isinstance(asked, TokenRecipe):
        return token_differences(generation.recipe, asked) if asked else []
    made = generation.manifest.get("provenance")
    parts = made.get("parts") if isinstance(made, Mapping) else None
    known = parts if isinstance(parts, Mapping) else None
    return token_differences(generation.recipe, asked.recipe, cached_parts=known, parts=asked.parts)


def recipe_sides(different: Sequence[tuple[str, Any, Any]]) -> list[tuple[str, dict[str, str]]]:
    """What is said of each document where the recipe differs: one reason, of the first field, and all fields."""
    if not different:
        return []
    sides = {
        side: ", ".join(
            f"{row[0]} {short(row[column])}" if len(different) > 1 else short(row[column]) for row in different
        )
        for side, column in (("expected", 2), ("found", 1))
    }
    return [(f"recipe:{different[0][0]}", sides)]

"""From what a run found to the next generation: columns, refusals, and whether anything changed at all.

Guarantee: a sample is in the generation with all its entries, or it is refused with a cause; placements are
taken from the entries as they were stored, not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.sizes import Size
from latentcache.identity.stat import RACY_NS, StatMemo
from latentcache.pipeline.survey import Survey, keys_of, placements_for
from latentcache.pipeline.work import RunResult, refuse
from latentcache.recipe import Recipe
from latentcache.sources.sample import Refusal, Sample, Scan
from latentcache.store.catalog import Catalog, Located
from latentcache.store.columns import StringColumn
from latentcache.store.generation import Generation, Rows, Samples, pack_memo, unpack_memo


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """One sample with everything the generation says of it."""

    sample: Sample
    content: bytes
    memo: StatMemo
    size: Size
    entries: tuple[Located, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A generation before it is published."""

    rows: Rows
    samples: Samples
    buckets: tuple[Size, ...]
    shards: tuple[str, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[Refusal, ...]
    keys: frozenset[bytes]


def assemble(scan: Scan, plan: Survey, run: RunResult, recipe: Recipe, catalog: Catalog) -> Draft:
    """Draw up the next generation.

    Args:
        scan: The data folder.
        plan: What was known before the run.
        run: What the run found.
        recipe: Whose keys are looked up.
        catalog: Every committed entry, loaded after the run.
    """
    facts = {p.index: (p.content, p.memo or p.sample.stat, p.size) for p in plan.known}
    facts |= {index: (found.content, found.memo, found.size) for index, found in run.looked.items()}
    tables = recipe.geometry.tables()
    lost_causes = run.unencodable | {f.refusal.content: (f.refusal.cause, f.refusal.detail) for f in run.failed}
    usable, refused = [], [*scan.refused, *(failed.refusal for failed in (*plan.failed, *run.failed))]
    for index in sorted(facts):
        content, memo, size = facts[index]
        sample = scan.samples[index]
        located = [catalog.locate(key) for key in keys_of(content, placements_for(size, tables), recipe)]
        entries = tuple(entry for entry in located if entry is not None)
        if len(entries) == len(located):
            usable.append(Usable(sample=sample, content=content, memo=memo, size=size, entries=entries))
        else:
            cause, detail = lost_causes.get(content, ("entry-lost", "its entry was not committed"))
            refused.append(refuse(sample, cause, detail, stat=memo, content=content))
    ordered = tuple(sorted(refused, key=lambda item: item.name.encode("utf-8", "surrogateescape")))
    return _draft(usable, ordered, scan.notes, recipe.variants)


def unchanged(draft: Draft, recipe: Recipe, generation: Generation | None, root: str) -> bool:
    """Whether publishing the draft would say nothing new."""
    if generation is None or not generation.complete:
        return False
    if generation.recipe.as_json() != recipe.as_json() or generation.source_root != root:
        return False
    same_lists = (
        generation.buckets == draft.buckets
        and generation.shards == draft.shards
        and _settled(generation.refused) == _settled(map(refusal_json, draft.refused))
        and _settled(generation.notes) == _settled(map(refusal_json, draft.notes))
    )
    return same_lists and _same(generation.rows, draft.rows) and _same(generation.samples, draft.samples)


def refusal_json(item: Refusal) -> dict[str, Any]:
    """The form in which a refusal is kept in a generation."""
    return {
        "name": item.name,
        "cause": item.cause,
        "detail": item.detail,
        "hint": item.hint,
        "content": item.content.hex(),
        "stat": pack_memo(item.stat) if item.stat is not None else None,
    }


def _draft(
    usable: Sequence[Usable], refused: tuple[Refusal, ...], notes: tuple[Refusal, ...], variants: int
) -> Draft:
    """Columns: all pictures first, then their mirror images in the same order."""
    entries = [
        (number, entry)
        for variant in range(variants)
        for number, sample in enumerate(usable)
        for entry in _part(sample.entries, variant, variants)
    ]
    placements = [entry.facts.placement for _, entry in entries]
    buckets = tuple(sorted({p.bucket for p in placements}, key=lambda size: (-size.area, size.width)))
    shards = tuple(sorted({entry.shard for _, entry in entries}))
    bucket_number = {size: number for number, size in enumerate(buckets)}
    shard_number = {name: number for number, name in enumerate(shards)}
    rows = Rows(
        key=_bytes([entry.key for _, entry in entries], 32),
        shard=np.array([shard_number[entry.shard] for _, entry in entries], dtype=np.int32),
        offset=np.array([entry.offset for _, entry in entries], dtype=np.uint64),
        bucket=np.array([bucket_number[p.bucket] for p in placements], dtype=np.int32),
        sample=np.array([number for number, _ in entries], dtype=np.int32),
        crop=_pairs([(p.crop.top, p.crop.left) for p in placements]),
        resize=_pairs([(p.resize.height, p.resize.width) for p in placements]),
        pixel_hash=_bytes([entry.facts.pixel_hash for _, entry in entries], 16),
    )
    samples = Samples(
        names=StringColumn.of(item.sample.name for item in usable),
        captions=StringColumn.of(item.sample.caption for item in usable),
        content=_bytes([item.content for item in usable], 16),
        original_size=_pairs([(item.size.height, item.size.width) for item in usable]),
        stat=np.array([pack_memo(item.memo) for item in usable], dtype=np.uint64).reshape(-1, 6),
    )
    keys = frozenset(entry.key for _, entry in entries)
    return Draft(rows=rows, samples=samples, buckets=buckets, shards=shards, refused=refused, notes=notes, keys=keys)


def _part(entries: tuple[Located, ...], variant: int, variants: int) -> tuple[Located, ...]:
    """The entries of one variant; a sample has as many of each."""
    count = len(entries) // variants
    return entries[variant * count : (variant + 1) * count]


def _bytes(items: Sequence[bytes], width: int) -> Any:
    return np.frombuffer(b"".join(items), dtype=np.uint8).reshape(-1, width)


def _pairs(items: Sequence[tuple[int, int]]) -> Any:
    return np.array(items, dtype=np.uint32).reshape(-1, 2)


def _settled(refusals: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Refusals with, instead of the moment of hashing, whether the memo can be trusted: see :func:`_same`."""
    found = []
    for item in refusals:
        memo = unpack_memo(item["stat"]) if item.get("stat") else None
        found.append({**item, "stat": None if memo is None else (memo.identity, memo.racy)})
    return found


def _trust(stat: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The stat columns with, instead of the moment of hashing, whether the memo can be trusted."""
    times = stat.view(np.int64)
    racy = times[:, 5] - np.maximum(times[:, 1], times[:, 2]) < RACY_NS
    return np.column_stack([stat[:, :5], racy.astype(np.uint64)])


def _same(one: Rows | Samples, other: Rows | Samples) -> bool:
    """Whether two sets of columns hold the same values."""
    for name in type(one).__dataclass_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if name == "stat":  # when a file was hashed says something new only if it can be trusted from now on
            mine, theirs = _trust(mine), _trust(theirs)
        if isinstance(mine, StringColumn):
            same = np.array_equal(mine.data, theirs.data) and np.array_equal(mine.ends, theirs.ends)
        else:
            same = np.array_equal(mine, theirs)
        if not same:
            return False
    return True

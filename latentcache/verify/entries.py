"""Checks of what is stored that read no payload: shards and the headers in their indexes, a column at a time.

Guarantee: a damaged cache gives findings, never an exception and never a signal: index files are read, checked
against their checksum and never mapped. Every header is held against its key, its bucket's shape, the recipe and
the columns of the generation; a damaged block of tokens is a finding for each of its documents. Cost: about 1 µs per
entry. Memory does not grow with them: columns are taken a portion at a time, an index is read in slices; an entry
that nobody needs takes 32 bytes until all are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, StoreError
from latentcache.geometry.sizes import latent_size
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.key import KEY_BYTES
from latentcache.store.entry import unpack_header
from latentcache.store.generation import Generation
from latentcache.store.headers import header_ids, headers_hold, keyed_headers
from latentcache.store.index import IndexFile, open_index
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import AnyGeneration, TokenGeneration
from latentcache.verify.findings import Finding
from latentcache.verify.portions import Met, Portion, by_content
from latentcache.verify.subjects import field_of, name_of, samples_of
from latentcache.verify.token_entries import wrong_blocks

#: Keys compared together.
_SLICE = 1 << 16
_CONTENT_AT = KEY_BYTES - HASH_BYTES - 8

Damage = dict[int, list[Finding]]
"""Findings by sample number."""


@dataclass(slots=True, kw_only=True)
class Checked:
    """What a look at the entries came to."""

    damage: Damage = field(default_factory=lambda: defaultdict(list))
    loose: list[Finding] = field(default_factory=list)
    """Findings that belong to no sample: damaged files, orphans."""
    headers: int = 0
    whole_shards: list[int] = field(default_factory=list)
    """Shards whose index and size hold: the only ones whose payloads are worth reading."""
    unneeded: list[str] = field(default_factory=list)
    """Names of shards in use that hold entries which no sample needs."""

    def add(self, generation: AnyGeneration, row: int, category: str, reason: str, **more: str) -> None:
        """Note a finding about one row, for each sample that has it."""
        rows = generation.rows
        about = {
            "category": category,
            "reason": reason,
            "key": rows.key[row].tobytes().hex(),
            "field": field_of(generation),
            "file": f"shards/{generation.shards[int(rows.shard[row])]}",
        }
        for sample in samples_of(generation, row):
            self.damage[sample].append(Finding(path=name_of(generation, sample), **about, **more))


def check_entries(
    layout: CacheLayout, generation: AnyGeneration, *, chosen: NDArray[np.bool_] | None = None, orphans: bool = True
) -> Checked:
    """Check the entries of a generation as far as that needs no payload.

    Args:
        layout: The cache.
        generation: What the entries should be.
        chosen: (R,) which rows to look at; all where it is not given.
        orphans: Look for entries that nothing needs as well.
    """
    checked = Checked()
    unneeded: list[NDArray[np.uint8]] = []
    for number, portions in by_content(generation):
        found = _check_shard(layout.shards / generation.shards[number], portions, chosen, generation, checked)
        if found is not None:
            checked.whole_shards.append(number)
            unneeded += found
            checked.unneeded += [generation.shards[number]] if found else []
    if orphans:
        unneeded += _other_shards(layout, generation, checked)
        checked.loose += _orphans(unneeded, generation)
    return checked


def words(error: OSError | StoreError) -> str:
    """An error as one line."""
    if isinstance(error, StoreError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return error.strerror or str(error)


def _shard_state(folder: Path, error: CacheDamagedError) -> tuple[str, str, str]:
    """Category, reason and words for a shard that does not open."""
    if isinstance(error.__cause__, PermissionError):
        return "unverifiable", "permission", words(error)
    if not (folder / "data.mdb").exists():
        return "missing", "entry-lost", "its shard is gone"
    return "corrupt", "shard", words(error)


def _check_shard(
    folder: Path,
    portions: Iterator[Met],
    chosen: NDArray[np.bool_] | None,
    generation: AnyGeneration,
    checked: Checked,
) -> list[NDArray[np.uint8]] | None:
    """Hold every header of a shard against all that is known of it, or say of all its rows that it does not open.

    Returns:
        The keys of entries nobody needs; None where the shard is damaged.
    """
    unneeded: list[NDArray[np.uint8]] = []
    failed, index = None, None
    try:
        index = open_index(folder)
    except CacheDamagedError as error:
        failed = error
    for met in portions:
        wanted = np.ones(len(met.portion), dtype=np.bool_) if chosen is None else chosen[met.portion.row]
        try:
            if index is not None and failed is None:
                unneeded += _check_portion(index, met, wanted, generation, checked)
                continue
        except CacheDamagedError as error:
            failed = error
        if failed is not None:
            category, reason, why = _shard_state(folder, failed)
            for row in met.portion.row[wanted].tolist():
                checked.add(generation, row, category, reason, found=why)
    return unneeded if failed is None else None


def _check_portion(
    index: IndexFile, met: Met, wanted: NDArray[np.bool_], generation: AnyGeneration, checked: Checked
) -> list[NDArray[np.uint8]]:
    """Hold the headers of some rows of a shard against what is known; gives the keys of entries nobody needs."""
    order = np.argsort(met.portion.offset, kind="stable")
    rows, wanted = met.portion[order], wanted[order]
    listed, unneeded = np.zeros(len(rows), dtype=np.bool_), []
    for part in index.slices(contents=met.contents):
        which, entry, unused = _matched(rows.offset, part["offset"])
        same_key = (part["key"][entry] == rows.key[which]).all(axis=1)
        which, entry = which[same_key], entry[same_key]
        listed[which] = True
        if unused.any():
            unneeded.append(part["key"][unused])
        looked = wanted[which]
        _check_headers(part[entry[looked]], rows[which[looked]], generation, checked)
    for row in rows.row[wanted & ~listed].tolist():
        checked.add(generation, row, "missing", "entry-lost", found="its shard's index does not list it")
    return unneeded


def _matched(
    offsets: NDArray[np.uint64], found: NDArray[np.uint64]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
    """Pairs of a position in ``offsets`` and one in ``found`` that are equal; and (n,) what of ``found`` has none.

    Args:
        offsets: Sorted, some more than once: files with the same bytes share an entry.
        found: (n,) in any order.
    """
    first = np.searchsorted(offsets, found, side="left")
    times = np.searchsorted(offsets, found, side="right") - first
    entry = np.repeat(np.arange(len(found)), times)
    which = np.arange(len(entry)) - np.repeat(np.cumsum(times) - times, times) + np.repeat(first, times)
    return which, entry, times == 0


def _check_headers(entries: NDArray[Any], rows: Portion, generation: AnyGeneration, checked: Checked) -> None:
    """Hold the headers of some rows, beside which their entries in the index are given, against what is known."""
    checked.headers += len(rows)
    if isinstance(generation, TokenGeneration):
        for row, why in wrong_blocks(entries, rows.row, generation):
            checked.add(generation, row, "corrupt", "header", found=why)
        return
    for bucket in np.unique(rows.bucket).tolist():
        part = np.flatnonzero(rows.bucket == bucket)
        for row, why in _wrong_headers(entries[part], rows[part], bucket, generation):
            checked.add(generation, row, "corrupt", "header", found=why)


def _wrong_headers(
    entries: NDArray[Any], rows: Portion, bucket: int, generation: Generation
) -> Iterator[tuple[int, str]]:
    """Rows of one bucket whose header is not what it should be, and why."""
    spec = generation.recipe.encoder
    cells = latent_size(generation.buckets[bucket], spec.factor)
    shape = (spec.stored_channels, cells.height, cells.width)
    keyed = keyed_headers(rows.key)
    keyed[:, KEY_BYTES:] = entries["header"]
    if not headers_hold(keyed, shape, spec.storage_dtype):
        yield from _unlike(keyed, rows.row, shape, spec.storage_dtype)
    content, recipe = header_ids(keyed)
    named = keyed[:, _CONTENT_AT : _CONTENT_AT + HASH_BYTES]
    wrong = (content != rows.content).any(axis=1) | (named != rows.content).any(axis=1)
    yield from ((row, "it was made from another file") for row in rows.row[wrong].tolist())
    wrong = (recipe != np.frombuffer(generation.recipe.recipe_id, dtype=np.uint8)).any(axis=1)
    yield from ((row, "it was made by another recipe") for row in rows.row[wrong].tolist())
    wrong = (entries["facts"] != _facts(rows)).any(axis=1)
    yield from ((row, "its placement is not the recorded one") for row in rows.row[wrong].tolist())


def _unlike(
    keyed: NDArray[np.uint8], rows: NDArray[np.intp], shape: tuple[int, ...], dtype: str
) -> Iterator[tuple[int, str]]:
    """Which header does not hold, and what is wrong with it: looked at one by one."""
    for row, one in zip(rows.tolist(), keyed, strict=True):
        key, data = one[:KEY_BYTES].tobytes(), one[KEY_BYTES:].tobytes()
        try:
            header = unpack_header(data, key)
        except StoreError as error:
            yield row, error.why or error.what
            continue
        if header.shape != shape or header.dtype != dtype:
            yield row, f"shape: expected {dtype} {list(shape)}, found {header.dtype} {list(header.shape)}"


def _facts(rows: Portion) -> NDArray[np.uint8]:
    """(n, 32) the facts beside each header, from the columns: pixel hash, resize, crop."""
    numbers = np.concatenate([rows.resize, rows.crop], axis=1).astype("<u4")
    return np.concatenate([rows.pixel_hash, numbers.view(np.uint8)], axis=1)


def _other_shards(layout: CacheLayout, generation: AnyGeneration, checked: Checked) -> list[NDArray[np.uint8]]:
    """Keys of the shards that the generation does not use; a damaged one does no harm."""
    found = []
    for folder in layout.sealed_shards():
        if folder.name in generation.shards:
            continue
        try:
            found += [part["key"].copy() for part in open_index(folder).slices()]
            checked.unneeded.append(folder.name)
        except CacheDamagedError as error:
            file = f"shards/{folder.name}"
            checked.loose.append(Finding(category="orphan", reason="damaged-shard", file=file, found=words(error)))
    return found


def _orphans(unneeded: list[NDArray[np.uint8]], generation: AnyGeneration) -> list[Finding]:
    """One finding for each key that no row of the generation has."""
    if not sum(map(len, unneeded)):
        return []
    keys = np.unique(_as_items(np.concatenate(unneeded)))
    needed, columns = np.zeros(len(keys), dtype=np.bool_), generation.rows
    for start in range(0, len(columns.key), _SLICE):
        part = _as_items(columns.key[start : start + _SLICE])
        place = np.minimum(np.searchsorted(keys, part), len(keys) - 1)
        needed[place[keys[place] == part]] = True
    lost: NDArray[Any] = keys[~needed]
    flat = lost.tobytes()
    names = (flat[start : start + KEY_BYTES].hex() for start in range(0, len(flat), KEY_BYTES))
    return [Finding(category="orphan", reason="unreferenced", key=name, field=field_of(generation)) for name in names]


def _as_items(keys: NDArray[np.uint8]) -> NDArray[Any]:
    """(n,) one item for each key, in their own order. Of two keys of one length, no zero at the end is lost."""
    return np.ascontiguousarray(keys).view(f"S{KEY_BYTES}").ravel()

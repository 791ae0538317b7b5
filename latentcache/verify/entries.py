"""Checks of what is stored: shards, headers and, on request, every payload. Torch and encoders stay out.

Guarantee: a damaged cache gives findings, never an exception and never a signal: nothing is mapped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError, StoreError
from latentcache.identity.key import KEY_BYTES
from latentcache.store.catalog import Catalog
from latentcache.store.generation import Generation
from latentcache.store.index import ShardIndex, collect_rows, load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader
from latentcache.verify.findings import Finding

#: Exponent bits that are all set in NaN and infinity, per storage type.
_EXPONENT = {"float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80), "float32": ("<u4", 0x7F80_0000)}

Damage = dict[int, list[Finding]]
"""Findings by sample number."""


def check_entries(layout: CacheLayout, generation: Generation, *, full: bool) -> tuple[Damage, list[Finding]]:
    """Check every entry of a generation.

    Args:
        layout: The cache.
        generation: What the entries should be.
        full: Also read every payload and walk the pages of every shard.

    Returns:
        Findings by sample, and those that belong to no sample (damaged files, orphans).
    """
    damage: Damage = defaultdict(list)
    loose: list[Finding] = []
    indexes: list[ShardIndex] = []
    reader = EntryReader(layout, generation)
    for number, name in enumerate(generation.shards):
        rows = np.flatnonzero(generation.rows.shard == number)
        index = _open_shard(layout.shards / name, rows, generation, damage, loose)
        if index is None:
            continue
        indexes.append(index)
        for row in _lost(index, rows, generation):
            _add(damage, generation, row, "missing", "entry-lost", found="not in its shard's index")
        if full:
            loose += _check_pages(index)
    if full:
        for row, why in _damaged_payloads(reader, generation):
            _add(damage, generation, row, "corrupt", "payload", expected="the bytes that were written", found=why)
    reader.close()
    loose += _unreferenced(layout, generation, indexes)
    return damage, loose


def _open_shard(
    folder: Path, rows: NDArray[Any], generation: Generation, damage: Damage, loose: list[Finding]
) -> ShardIndex | None:
    """The shard's index, or None with findings for every row in it."""
    try:
        return load_index(folder)
    except CacheDamagedError as error:
        gone = not (folder / "data.mdb").exists()
        category, reason = ("missing", "entry-lost") if gone else ("corrupt", "shard")
        for row in rows.tolist():
            _add(damage, generation, row, category, reason, expected="a whole shard", found=error.why or error.what)
        file = f"shards/{folder.name}"
        loose.append(Finding(category=category, reason="shard", file=file, found=f"{error.what}: {error.why}"))
        return None


def _lost(index: ShardIndex, rows: NDArray[Any], generation: Generation) -> Iterator[int]:
    """Rows whose key is not at their offset in the shard's index."""
    offsets = dict(zip(index.keys(), index.rows["offset"].tolist(), strict=True))
    keys, wanted = generation.rows.key, generation.rows.offset
    for row in rows.tolist():
        if offsets.get(keys[row].tobytes()) != int(wanted[row]):
            yield row


def _check_pages(index: ShardIndex) -> list[Finding]:
    """Walk the shard's pages again and compare with its index."""
    file = f"shards/{index.folder.name}/data.mdb"
    try:
        same = np.array_equal(collect_rows(index.data), index.rows)
    except (CacheDamagedError, CorruptEntryError) as error:
        return [Finding(category="corrupt", reason="pages", file=file, found=f"{error.what}: {error.why}")]
    return [] if same else [Finding(category="corrupt", reason="pages", file=file, found="pages and index disagree")]


def _damaged_payloads(reader: EntryReader, generation: Generation) -> Iterator[tuple[int, str]]:
    """Rows whose entry the reader refuses, or that holds NaN or infinity."""
    dtype, mask = _EXPONENT[generation.recipe.encoder.storage_dtype]
    for row in np.argsort(generation.rows.offset, kind="stable").tolist():
        try:
            _, payload = reader.read(row)
        except MissingEntryError:
            continue  # its shard is gone, which is a finding already
        except StoreError as error:
            yield row, error.why or error.what
            continue
        bits = payload.view(dtype)
        if bool(((bits & mask) == mask).any()):
            yield row, "NaN or infinity"


def _unreferenced(layout: CacheLayout, generation: Generation, known: list[ShardIndex]) -> list[Finding]:
    """Entries that no sample of the generation needs, and shards of other generations that are damaged."""
    flat = generation.rows.key.tobytes()
    needed = {flat[start : start + KEY_BYTES] for start in range(0, len(flat), KEY_BYTES)}
    findings: list[Finding] = []
    indexes = list(known)
    for folder in layout.sealed_shards():
        if folder.name in generation.shards:
            continue
        try:
            indexes.append(load_index(folder))
        except CacheDamagedError as error:
            found = f"{error.what}: {error.why}"
            findings.append(Finding(category="corrupt", reason="shard", file=f"shards/{folder.name}", found=found))
    unneeded = (key for key in Catalog(indexes).keys() if key not in needed)  # noqa: SIM118 - not a mapping
    return findings + [Finding(category="orphan", reason="unreferenced", key=key.hex()) for key in unneeded]


def _add(damage: Damage, generation: Generation, row: int, category: str, reason: str, **more: str) -> None:
    sample = int(generation.rows.sample[row])
    name, key = generation.samples.names[sample], generation.rows.key[row].tobytes().hex()
    damage[sample].append(Finding(category=category, reason=reason, path=name, key=key, **more))

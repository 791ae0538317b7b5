"""Checks of what is stored: shards, headers and, on request, every payload. Torch and encoders stay out.

Guarantee: a damaged cache gives findings, never an exception and never a signal: nothing is mapped. Payloads are
read by the same function and into the same shapes as the loader's, so what passes here cannot fail there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, MissingEntryError, StoreError
from latentcache.geometry.sizes import latent_size
from latentcache.identity.key import KEY_BYTES
from latentcache.store.catalog import Catalog
from latentcache.store.entry import numpy_dtype
from latentcache.store.generation import Generation
from latentcache.store.index import ShardIndex, collect_rows, load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader
from latentcache.verify.findings import Finding

#: Exponent bits that are all set in NaN and infinity, per storage type.
_EXPONENT = {"float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80), "float32": ("<u4", 0x7F80_0000)}
_FIELD = "latents"

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
        index = _open_shard(layout.shards / name, rows, generation, damage)
        if index is None:
            continue
        indexes.append(index)
        for row in _lost(index, rows, generation):
            _add(damage, generation, row, "missing", "entry-lost", found="its shard's index does not list it")
        if full:
            loose += _check_pages(index)
    if full:
        for row, category, reason, why in _damaged_payloads(reader, generation):
            _add(damage, generation, row, category, reason, found=why)
    reader.close()
    loose += _unreferenced(layout, generation, indexes)
    return damage, loose


def _open_shard(folder: Path, rows: NDArray[Any], generation: Generation, damage: Damage) -> ShardIndex | None:
    """The shard's index, or None with findings for every row in it."""
    try:
        return load_index(folder)
    except CacheDamagedError as error:
        category, reason, found = _shard_state(folder, error)
        for row in rows.tolist():
            _add(damage, generation, row, category, reason, found=found)
        return None


def _shard_state(folder: Path, error: CacheDamagedError) -> tuple[str, str, str]:
    """Category, reason and words for a shard that does not open."""
    if isinstance(error.__cause__, PermissionError):
        return "unverifiable", "permission", _words(error)
    if not (folder / "data.mdb").exists():
        return "missing", "entry-lost", "its shard is gone"
    return "corrupt", "shard", _words(error)


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
    except (OSError, StoreError) as error:
        return [Finding(category="corrupt", reason="pages", file=file, found=_words(error))]
    return [] if same else [Finding(category="corrupt", reason="pages", file=file, found="pages and index disagree")]


def _damaged_payloads(reader: EntryReader, generation: Generation) -> Iterator[tuple[int, str, str, str]]:
    """Rows whose entry the loader would refuse, or that holds NaN or infinity: row, category, reason, words."""
    spec, rows = generation.recipe.encoder, generation.rows
    dtype, mask = _EXPONENT[spec.storage_dtype]
    cells = [latent_size(bucket, spec.factor) for bucket in generation.buckets]
    for row in np.lexsort((rows.offset, rows.shard)).tolist():
        size = cells[int(rows.bucket[row])]
        payload = np.empty((spec.stored_channels, size.height, size.width), dtype=numpy_dtype(spec.storage_dtype))
        try:
            reader.read_into(row, payload)
        except MissingEntryError as error:
            yield row, "missing", "entry-lost", error.what
            continue
        except StoreError as error:
            yield row, "corrupt", "payload", error.why or error.what
            continue
        bits = payload.view(dtype)
        if bool(((bits & mask) == mask).any()):
            yield row, "corrupt", "non-finite", "it holds NaN or infinity"


def _unreferenced(layout: CacheLayout, generation: Generation, known: list[ShardIndex]) -> list[Finding]:
    """Entries that no sample of the generation needs; a damaged shard of such entries does no harm either."""
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
            file = f"shards/{folder.name}"
            findings.append(Finding(category="orphan", reason="damaged-shard", file=file, found=_words(error)))
    unneeded = [key.hex() for key in Catalog(indexes).keys() if key not in needed]  # noqa: SIM118 - not a mapping
    return findings + [Finding(category="orphan", reason="unreferenced", key=key, field=_FIELD) for key in unneeded]


def _add(damage: Damage, generation: Generation, row: int, category: str, reason: str, **more: str) -> None:
    sample = int(generation.rows.sample[row])
    about = {
        "path": generation.samples.names[sample],
        "key": generation.rows.key[row].tobytes().hex(),
        "file": f"shards/{generation.shards[int(generation.rows.shard[row])]}",
    }
    damage[sample].append(Finding(category=category, reason=reason, field=_FIELD, **about, **more))


def _words(error: OSError | StoreError) -> str:
    """An error as one line."""
    if isinstance(error, StoreError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return error.strerror or str(error)

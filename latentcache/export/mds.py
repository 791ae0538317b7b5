"""Write rows of tokens as MDS shards: input of llm-foundry's ``StreamingTextDataset``.

A sample is a row, not a document: that reader truncates longer samples silently. A row is written without padding, in
the column ``tokens``, as an array like that of llm-foundry's own converter. Guarantee: the offsets of a shard follow
from the lengths of its rows; a token without loss is rejected, because the reader has no column for labels.

Format: mosaicml-streaming 0.13.0, ``base/format/mds/writer.py`` and ``encodings.py``: number of samples, n + 1
offsets (uint32), the shard's settings as JSON, samples. A sample is the bytes of its column (uint32), then a byte
4 * axes + log2 of the width of a side, the sides, the values. ``index.json`` (version 2) has the settings of every
shard. Reader: llm-foundry 0.22.0, ``data/text_data.py``. Cost: one shard in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import ExportError
from latentcache.export.atomic_folder import atomic_folder, put, seal
from latentcache.export.fixed_rows import FixedRows, checked, in_batches
from latentcache.store.atomic_io import make_folder
from latentcache.value import Value

#: Bytes of a shard: the default of the library's own writer.
SHARD_BYTES = 1 << 26
COLUMN = "tokens"
#: Type in the cache -> in the shards. For wide ids that of llm-foundry's converter: torch does little with uint32.
DTYPES = {"uint16": "uint16", "uint32": "int32"}


class MdsSettings(Value):
    """One export."""

    out: Path
    dtype: str
    """Type of the ids in the cache."""
    num_ids: int
    """One more than the largest id."""
    facts: Mapping[str, Any]
    """Metadata of the cache: fingerprint, layout, policy. Written beside the files."""


def export_mds(
    splits: Mapping[str, FixedRows], settings: MdsSettings, on_progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, int]:
    """Write a folder of shards for each split.

    Args:
        splits: ``train`` and, if requested, ``validation``: rows padded on the right.
        settings: Folder and vocabulary.
        on_progress: Called with rows done and rows in total.

    Returns:
        Split -> rows.
    """
    counts = {name: len(rows) for name, rows in splits.items()}
    files: dict[str, str] = {}
    with atomic_folder(settings.out) as folder:
        for name, rows in splits.items():
            make_folder(folder / name)
            shards = _Shards(folder / name, settings)
            for batch in in_batches(splits, name, on_progress):
                shards.add(unpadded(batch, rows.length))
            files |= {f"{name}/{file}": expected for file, expected in shards.finish().items()}
        dtype = DTYPES[settings.dtype]
        seal(folder, files, {**settings.facts, "format": "mds", "rows": counts, "dtype": dtype})
    return counts


def unpadded(batch: Mapping[str, Any], length: int) -> list[NDArray[np.int64]]:
    """The ids of each row without padding."""
    arrays = checked(batch, length)
    held = arrays["attention_mask"] != 0
    lengths = held.sum(axis=1)
    if not np.array_equal(held, np.arange(length) < lengths[:, None]):
        raise ExportError("a row is not padded on its right")
    if bool((held & (arrays["labels"] == -100))[:, 1:].any()):
        raise ExportError("a token has no loss", why="shards have no labels, so it would be learned")
    return [row[:count] for row, count in zip(arrays["input_ids"], lengths, strict=True)]


def sample(ids: NDArray[Any]) -> bytes:
    """One row as a sample of one column of one axis."""
    log2_width, side = next((k, kind) for k, kind in enumerate("BHI") if len(ids) < 1 << (8 << k))
    value = struct.pack(f"<B{side}", 1 << 2 | log2_width, len(ids)) + ids.tobytes()
    return struct.pack("<I", len(value)) + value


def sample_sizes(lengths: NDArray[np.integer], width: int) -> NDArray[np.int64]:
    """(n,) bytes of samples with n lengths of ids of ``width`` bytes, computed from the format alone."""
    side = np.select([lengths < 1 << 8, lengths < 1 << 16], [1, 2], 4)
    sizes: NDArray[np.int64] = 5 + side.astype(np.int64) + lengths.astype(np.int64) * width
    return sizes


class _Shards:
    """The shards of one split."""

    def __init__(self, folder: Path, settings: MdsSettings) -> None:
        self._folder, self._dtype = folder, np.dtype(DTYPES[settings.dtype]).newbyteorder("<")
        self._limit = min(settings.num_ids, np.iinfo(self._dtype).max + 1)
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": SHARD_BYTES,
            "column_names": [COLUMN],
            "column_encodings": [f"ndarray:{self._dtype.name}"],
            "column_sizes": [None],
        }
        self._head = json.dumps(self._config, sort_keys=True).encode()
        self._samples: list[bytes] = []
        self._lengths: list[int] = []
        self._bytes = 0
        self._shards: list[dict[str, Any]] = []
        self._meant: dict[str, str] = {}

    def add(self, rows: Iterable[NDArray[np.int64]]) -> None:
        """Append rows; writes full shards."""
        for ids in rows:
            if int(ids.max()) >= self._limit:
                raise ExportError(f"token id {int(ids.max())} is outside the vocabulary of {self._limit}")
            made = sample(ids.astype(self._dtype))
            if self._samples and 8 + len(self._head) + self._bytes + 4 + len(made) > SHARD_BYTES:
                self._flush()
            self._samples.append(made)
            self._lengths.append(len(ids))
            self._bytes += 4 + len(made)

    def finish(self) -> dict[str, str]:
        """Write the last shard and the index; file -> xxh3-64 of its bytes."""
        if self._samples:
            self._flush()
        index = json.dumps({"version": 2, "shards": self._shards}, sort_keys=True).encode()
        return {"index.json": put(self._folder / "index.json", [index]), **self._meant}

    def _flush(self) -> None:
        sizes = np.array([len(made) for made in self._samples])
        if not np.array_equal(sizes, sample_sizes(np.array(self._lengths), self._dtype.itemsize)):
            raise ExportError("the samples of a shard differ in length from their rows")
        count, name = len(sizes), f"shard.{len(self._shards):05d}.mds"
        begin = 4 + 4 * (count + 1) + len(self._head)
        offsets = (begin + np.concatenate(([0], np.cumsum(sizes)))).astype("<u4")
        parts = [struct.pack("<I", count), offsets.tobytes(), self._head, *self._samples]
        self._meant[name] = put(self._folder / name, parts)
        data = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
        self._shards.append({**self._config, "samples": count, "raw_data": data, "zip_data": None})
        self._samples, self._lengths, self._bytes = [], [], 0

"""MDS shards: samples of mosaicml-streaming, and rows of tokens for llm-foundry's ``StreamingTextDataset``.

Of tokens for that reader a sample is a row, not a document, because it truncates longer samples silently. A row is
written without padding, in the column ``tokens``, as an array like that of llm-foundry's own converter.

Format: mosaicml-streaming 0.13.0, ``base/format/mds/writer.py`` and ``encodings.py``: number of samples, n + 1
offsets (uint32), the shard's settings as JSON, samples. A sample is the bytes of each column (uint32), then the
columns. An array is a byte 4 * axes + log2 of the width of a side, the sides, the values. ``index.json`` (version 2)
has the settings of every shard. Reader: llm-foundry 0.22.0, ``data/text_data.py``. Cost: one shard in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.store.atomic_io import make_folder

#: Bytes of a shard: the default of the library's own writer.
SHARD_BYTES = 1 << 26
COLUMN = "tokens"
#: Type in the cache -> in the shards. For wide ids that of llm-foundry's converter: torch does little with uint32.
DTYPES = {"uint16": "uint16", "uint32": "int32"}


class Columns:
    """The columns of all shards of a folder, by name, with their encodings: ``ndarray:float16``, ``json``, ..."""

    def __init__(self, encodings: Mapping[str, str]) -> None:
        self.names = sorted(encodings)
        self._settings: dict[str, Any] = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": SHARD_BYTES,
            "column_names": self.names,
            "column_encodings": [encodings[name] for name in self.names],
            "column_sizes": [None] * len(self.names),
        }
        self._head = json.dumps(self._settings, sort_keys=True).encode()
        self.bytes = 8 + len(self._head)
        """Of a shard, beside its samples and 4 bytes for each."""

    def write_shard(self, path: Path, samples: Sequence[bytes]) -> None:
        """Write one shard."""
        count = len(samples)
        ends = np.cumsum([4 + 4 * (count + 1) + len(self._head), *map(len, samples)]).astype("<u4")
        with path.open("wb") as shard:
            shard.writelines((struct.pack("<I", count), ends.tobytes(), self._head, *samples))

    def index(self, shards: Iterable[tuple[str, int, int]]) -> bytes:
        """Contents of ``index.json``, of the name, the number of samples and the bytes of each shard."""
        entries = [
            {
                **self._settings,
                "samples": samples,
                "raw_data": {"basename": name, "bytes": size, "hashes": {}},
                "zip_data": None,
            }
            for name, samples, size in shards
        ]
        return json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode()


def sample(columns: Sequence[bytes]) -> bytes:
    """One sample, of the values of its columns in the order of their names."""
    return struct.pack(f"<{len(columns)}I", *map(len, columns)) + b"".join(columns)


def array(values: NDArray[Any]) -> bytes:
    """The value of a column ``ndarray:`` with a type: axes and sides, then the values."""
    log2_width, side = next((k, kind) for k, kind in enumerate("BHI") if max(values.shape) < 1 << (8 << k))
    return struct.pack(f"<B{values.ndim}{side}", values.ndim << 2 | log2_width, *values.shape) + values.tobytes()


def write_mds(folder: Path, dtype: str, batches: Iterable[Mapping[str, Any]]) -> None:
    """Write the shards of one split: (B, L) rows without their padding, which is on the right; all have loss."""
    make_folder(folder)
    columns, shards = Columns({COLUMN: f"ndarray:{dtype}"}), list[tuple[str, int, int]]()
    for samples in _shards(_samples(dtype, batches), columns.bytes):
        path = folder / f"shard.{len(shards):05d}.mds"
        columns.write_shard(path, samples)
        shards.append((path.name, len(samples), path.stat().st_size))
    (folder / "index.json").write_bytes(columns.index(shards))


def _samples(dtype: str, batches: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    for batch in batches:
        lengths = (np.asarray(batch["attention_mask"]) != 0).sum(axis=1)
        for ids, length in zip(np.asarray(batch["input_ids"]), lengths.tolist(), strict=True):
            yield sample([array(ids[:length].astype(np.dtype(dtype).newbyteorder("<")))])


def _shards(samples: Iterable[bytes], beside: int) -> Iterator[list[bytes]]:
    """Yield samples that share a shard, with 4 bytes each and ``beside`` for all."""
    shard, size = list[bytes](), beside
    for row in samples:
        if shard and size + 4 + len(row) > SHARD_BYTES:
            yield shard
            shard, size = [], beside
        shard.append(row)
        size += 4 + len(row)
    if shard:
        yield shard

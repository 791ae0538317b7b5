"""Write rows of tokens as MDS shards: input of llm-foundry's ``StreamingTextDataset``.

A sample is a row, not a document: that reader truncates longer samples silently. A row is written without padding, in
the column ``tokens``, as an array like that of llm-foundry's own converter.

Format: mosaicml-streaming 0.13.0, ``base/format/mds/writer.py`` and ``encodings.py``: number of samples, n + 1
offsets (uint32), the shard's settings as JSON, samples. A sample is the bytes of its column (uint32), then a byte
4 * axes + log2 of the width of a side, the sides, the values. ``index.json`` (version 2) has the settings of every
shard. Reader: llm-foundry 0.22.0, ``data/text_data.py``. Cost: one shard in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
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


def sample(ids: NDArray[Any]) -> bytes:
    """One row as a sample of one column of one axis."""
    log2_width, side = next((k, kind) for k, kind in enumerate("BHI") if len(ids) < 1 << (8 << k))
    value = struct.pack(f"<B{side}", 1 << 2 | log2_width, len(ids)) + ids.tobytes()
    return struct.pack("<I", len(value)) + value


class MdsWriter:
    """The shards of one split: rows padded on the right, all tokens with loss."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._folder, self._dtype = folder / split, np.dtype(dtype).newbyteorder("<")
        make_folder(self._folder)
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
        self._bytes = 0
        self._shards: list[dict[str, Any]] = []

    def add(self, batch: Mapping[str, Any]) -> None:
        """Append (B, L) rows without their padding; writes full shards."""
        lengths = (np.asarray(batch["attention_mask"]) != 0).sum(axis=1)
        for ids, length in zip(np.asarray(batch["input_ids"]), lengths.tolist(), strict=True):
            made = sample(ids[:length].astype(self._dtype))
            if self._samples and 8 + len(self._head) + self._bytes + 4 + len(made) > SHARD_BYTES:
                self._flush()
            self._samples.append(made)
            self._bytes += 4 + len(made)

    def finish(self) -> None:
        """Write the last shard and the index."""
        if self._samples:
            self._flush()
        index = json.dumps({"version": 2, "shards": self._shards}, sort_keys=True)
        (self._folder / "index.json").write_text(index, "utf-8")

    def _flush(self) -> None:
        sizes = np.array([len(made) for made in self._samples])
        count, name = len(sizes), f"shard.{len(self._shards):05d}.mds"
        begin = 4 + 4 * (count + 1) + len(self._head)
        offsets = (begin + np.concatenate(([0], np.cumsum(sizes)))).astype("<u4")
        with (self._folder / name).open("wb") as shard:
            shard.writelines((struct.pack("<I", count), offsets.tobytes(), self._head, *self._samples))
        data = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
        self._shards.append({**self._config, "samples": count, "raw_data": data, "zip_data": None})
        self._samples, self._bytes = [], 0

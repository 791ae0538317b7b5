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
from collections.abc import Iterable, Iterator, Mapping
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


def write_mds(folder: Path, dtype: str, batches: Iterable[Mapping[str, Any]]) -> None:
    """Write the shards of one split: (B, L) rows without their padding, which is on the right; all have loss."""
    make_folder(folder)
    config = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": SHARD_BYTES,
        "column_names": [COLUMN],
        "column_encodings": [f"ndarray:{dtype}"],
        "column_sizes": [None],
    }
    head, shards = json.dumps(config, sort_keys=True).encode(), list[dict[str, Any]]()
    for samples in _shards(_samples(dtype, batches), 8 + len(head)):
        name, count = f"shard.{len(shards):05d}.mds", len(samples)
        sizes = np.cumsum([4 + 4 * (count + 1) + len(head), *map(len, samples)]).astype("<u4")
        with (folder / name).open("wb") as shard:
            shard.writelines((struct.pack("<I", count), sizes.tobytes(), head, *samples))
        data = {"basename": name, "bytes": int(sizes[-1]), "hashes": {}}
        shards.append({**config, "samples": count, "raw_data": data, "zip_data": None})
    index = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    (folder / "index.json").write_text(index, "utf-8")


def _samples(dtype: str, batches: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    for batch in batches:
        lengths = (np.asarray(batch["attention_mask"]) != 0).sum(axis=1)
        for ids, length in zip(np.asarray(batch["input_ids"]), lengths.tolist(), strict=True):
            yield sample(ids[:length].astype(np.dtype(dtype).newbyteorder("<")))


def _shards(samples: Iterable[bytes], beside: int) -> Iterator[list[bytes]]:
    """Yield samples that share a shard, with 4 bytes each and ``beside`` for all."""
    found, size = list[bytes](), beside
    for one in samples:
        if found and size + 4 + len(one) > SHARD_BYTES:
            yield found
            found, size = [], beside
        found.append(one)
        size += 4 + len(one)
    if found:
        yield found

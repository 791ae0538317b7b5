"""Write documents as Megatron core's ``IndexedDataset``: a ``.bin`` of ids and an ``.idx`` with the begin of each.

Format: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py`` at ``00caa53`` and in the wheel of
megatron-core 0.16.1: the magic and a zero, version 1, a code for the type, the number of sequences and the number of
document indices; then a length (int32) and a byte offset (int64) for each sequence, and (int64) the sequence that
each document begins with, with the number of all of them at the end. Here each sequence is a document.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.export.documents import DocumentsFormat, Written

#: Magic, version, code of the type, sequences, document indices: 34 bytes, nothing between them.
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
#: Megatron codes of the types of ids. There is none for uint32, and no tokenizer has 2^31 ids.
CODES = {"uint16": 8, "int32": 4}


def _beside(file: Path, written: Written, facts: Mapping[str, Any]) -> None:
    """Write the index beside a file of ids."""
    lengths = np.diff(written.ends, prepend=0)
    width = np.dtype(written.dtype).itemsize
    columns = (
        lengths.astype("<i4"),
        ((written.ends - lengths) * width).astype("<i8"),
        np.arange(len(lengths) + 1, dtype="<i8"),
    )
    with file.with_suffix(".idx").open("wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, CODES[written.dtype], len(lengths), len(lengths) + 1))
        for column in columns:
            index.write(column.data.cast("B"))


MEGATRON = DocumentsFormat(
    name="megatron", ids="{split}.bin", dtypes={"uint16": "uint16", "uint32": "int32"}, beside=_beside
)

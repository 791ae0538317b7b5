"""Write documents as Megatron core's ``IndexedDataset``: a ``.bin`` of ids and an ``.idx`` with the begin of each.

Format: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py`` at ``00caa53`` and in the wheel of
megatron-core 0.16.1: the magic and a zero, version 1, a code for the type, the number of sequences and the number of
document indices; then a length (int32) and a byte offset (int64) for each sequence, and (int64) the sequence that
each document begins with, with the number of all of them at the end. Here each sequence is a document.

Megatron reads a wrong offset silently as other tokens. So the index is read back by its own offsets and compared with
the lengths in the cache.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import ExportError
from latentcache.export.atomic_folder import put
from latentcache.export.documents import DocumentsFormat, Written

#: Magic, version, code of the type, sequences, document indices: 34 bytes, nothing between them.
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
#: Megatron codes of the types of ids. There is none for uint32, and no tokenizer has 2^31 ids.
CODES = {"uint16": 8, "int32": 4}
_LONGEST = 2**31 - 1


def _beside(file: Path, written: Written, facts: Mapping[str, Any]) -> dict[str, str]:
    """Write the index beside a file of ids, and check it."""
    index = file.with_suffix(".idx")
    lengths = np.diff(written.ends, prepend=0)
    if int(lengths.max()) > _LONGEST:
        raise ExportError(
            f"a document of {int(lengths.max())} tokens",
            why="the index counts tokens with 32 bits",
            fix="cut its text into several records, and build again",
        )
    width = np.dtype(written.dtype).itemsize
    columns = (
        lengths.astype("<i4"),
        ((written.ends - lengths) * width).astype("<i8"),
        np.arange(len(lengths) + 1, dtype="<i8"),
    )
    header = HEADER.pack(MAGIC, VERSION, CODES[written.dtype], len(lengths), len(lengths) + 1)
    expected = put(index, [header, *(column.data.cast("B") for column in columns)])
    check_index(file, written)
    return {index.name: expected}


def check_index(file: Path, written: Written) -> None:
    """Read the index of a ``.bin`` as Megatron does, and compare it with the documents."""
    index, width = file.with_suffix(".idx"), np.dtype(written.dtype).itemsize
    with index.open("rb") as source:
        magic, version, code, sequences, documents = HEADER.unpack(source.read(HEADER.size))
    lengths = np.fromfile(index, "<i4", sequences, offset=HEADER.size)
    begins = np.fromfile(index, "<i8", sequences, offset=HEADER.size + 4 * sequences)
    first = np.fromfile(index, "<i8", documents, offset=HEADER.size + 12 * sequences)
    ends = begins + lengths.astype(np.int64) * width
    seen = {
        "its first bytes": (magic, version, code) == (MAGIC, VERSION, CODES[written.dtype]),
        "its size": index.stat().st_size == HEADER.size + 12 * sequences + 8 * documents,
        "the ends of its documents": _same(ends, written.ends * width),
        "the begin of each document": _same(begins[1:], ends[:-1]) and not begins[:1].any(),
        "a sequence for each document": _same(first, np.arange(len(written.ends) + 1)),
        "the size of the ids": file.stat().st_size == int(ends[-1]),
    }
    wrong = [what for what, right in seen.items() if not right]
    if wrong:
        raise ExportError("the index points to other tokens", where=str(index), why=f"wrong: {wrong[0]}")


def _same(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return bool(np.array_equal(found, wanted))


MEGATRON = DocumentsFormat(
    name="megatron", ids="{split}.bin", dtypes={"uint16": "uint16", "uint32": "int32"}, beside=_beside
)

"""Write whole documents as one file of raw token ids per split, as Megatron core and datatrove read them.

Such a file has no labels, so documents with tokens without loss are rejected.

Megatron: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py`` at ``00caa53`` and in the wheel of
megatron-core 0.16.1: beside the ``.bin`` of ids an ``.idx``: the magic and a zero, version 1, a code for the type,
the number of sequences and the number of document indices; then a length (int32) and a byte offset (int64) for each
sequence, and (int64) the sequence that each document begins with, with the number of all of them at the end. Here
each sequence is a document.

datatrove (nanotron reads it too): huggingface/datatrove 0.10.1, ``pipeline/tokens/tokenizer.py``
(``TokenizedFile``) and ``utils/dataset.py``: ``.ds`` holds ids of 2 or 4 bytes, ``.ds.index`` the end of each
document in tokens (uint64), ``.ds.metadata`` three lines: name of the tokenizer and bytes of an id, tokens, tokens as
text. Its readers take the bytes of an id as an argument and ignore that file, so the export prints the number.
``.ds.loss`` is not written: no reader opens it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.loader.documents import Documents
from latentcache.store.atomic_io import make_folder

Batch = tuple[NDArray[Any], NDArray[np.int64]]
"""Documents: their ids, and the end of each in these."""
#: Tokens in memory at once, if no document is longer.
BATCH_TOKENS = 1 << 22
#: Of Megatron: magic, version, code of the type, sequences, document indices: 34 bytes, nothing between them.
_HEADER = struct.Struct("<9sQBQQ")
#: Megatron codes of the types of ids. There is none for uint32, and no tokenizer has 2^31 ids.
_CODES = {"uint16": 8, "int32": 4}


class Ids(NamedTuple):
    """The ids of one split, as they were written."""

    dtype: np.dtype[Any]
    ends: NDArray[np.int64]
    """(D,) end of each document, in tokens from the beginning of the file."""
    last_id: int | None
    """The last id of every document; None if they differ."""


def write_megatron(folder: Path, split: str, dtype: str, batches: Iterable[Batch], tokenizer: str = "") -> Ids:
    """Write ``.bin`` and ``.idx``."""
    ids = _write_ids(folder / f"{split}.bin", "int32" if dtype == "uint32" else dtype, batches)
    (folder / f"{split}.idx").write_bytes(megatron_index(ids))
    return ids


def megatron_index(ids: Ids) -> bytes:
    """The bytes of ``.idx``."""
    lengths = np.diff(ids.ends, prepend=0)
    begins = (ids.ends - lengths) * ids.dtype.itemsize
    columns = lengths.astype("<i4"), begins.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")
    head = _HEADER.pack(b"MMIDIDX\x00\x00", 1, _CODES[ids.dtype.name], len(lengths), len(lengths) + 1)
    return b"".join([head, *(column.tobytes() for column in columns)])


def write_datatrove(folder: Path, split: str, dtype: str, batches: Iterable[Batch], tokenizer: str = "") -> Ids:
    """Write ``.ds``, ``.ds.index`` and ``.ds.metadata``; the first line of the last one has one ``|``."""
    path = folder / split / "00000_tokens.ds"
    ids = _write_ids(path, dtype, batches)
    path.with_name(f"{path.name}.index").write_bytes(ids.ends.astype("<u8").tobytes())
    name, tokens = " ".join(tokenizer.replace("|", " ").split()) or "Unknown Tokenizer", int(ids.ends[-1])
    words = f"{name}|{ids.dtype.itemsize}\n{tokens}\n{tokens / 1e9:.3g} GT"
    path.with_name(f"{path.name}.metadata").write_text(words, "utf-8")
    return ids


def _write_ids(path: Path, dtype: str, batches: Iterable[Batch]) -> Ids:
    make_folder(path.parent)
    stored, lengths, last = np.dtype(dtype), [np.empty(0, np.int64)], set[int]()
    with path.open("wb") as sink:
        for ids, ends in batches:
            lengths.append(np.diff(ends, prepend=0))
            last |= set(np.unique(ids[ends - 1]).tolist()) if len(last) < 2 else set()
            sink.write(ids.astype(stored.newbyteorder("<")).data.cast("B"))
    return Ids(stored, np.cumsum(np.concatenate(lengths)), last.pop() if len(last) == 1 else None)


FILES = {"megatron": write_megatron, "datatrove": write_datatrove}


def counts(written: Mapping[str, Ids]) -> dict[str, Any]:
    """Numbers of the export: by split, and the type and last id of all splits."""
    last = {some.last_id for some in written.values()}
    return {
        "splits": {name: len(some.ends) for name, some in written.items()},
        "tokens": {name: int(some.ends[-1]) for name, some in written.items()},
        "dtype": next(some.dtype.name for some in written.values()),
        "last_id": last.pop() if len(last) == 1 else None,
    }


def reject_masked(documents: Documents, name: str) -> None:
    """Reject documents with tokens without loss, for the format of this name, which has no labels."""
    ends = np.concatenate(([0], documents.span_ends)).astype(np.int64)
    sums = np.concatenate(([0], np.cumsum(documents.spans[:, 1], dtype=np.int64)))
    masked = np.flatnonzero(np.diff(sums[ends]) != documents.lengths)
    if len(masked):
        raise UsageError(
            f"{name} has no labels, and {len(masked)} of {len(documents)} documents have tokens without loss",
            where=documents.where(int(masked[0])),
            why="a trainer would learn all tokens, those of questions too",
            fix="--to hf-disk, which has labels; or build a cache with --loss all",
        )


def document_batches(documents: Documents) -> Iterator[Batch]:
    """Yield documents that fit into memory together."""
    lengths, start = np.asarray(documents.lengths, dtype=np.int64), 0
    all_ends = np.cumsum(lengths)
    while start < len(all_ends):
        before = int(all_ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(all_ends, before + BATCH_TOKENS, side="right")), start + 1)
        ends = all_ends[start:stop] - before
        ids = np.empty(int(ends[-1]), dtype=documents.dtype)
        documents.gather(np.arange(start, stop), ids, ends - lengths[start:stop])
        yield ids, ends
        start = stop

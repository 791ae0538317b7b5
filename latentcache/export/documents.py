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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.loader.documents import Documents
from latentcache.store.atomic_io import make_folder

#: Tokens in memory at once, if no document is longer.
BATCH_TOKENS = 1 << 22
#: Of Megatron: magic, version, code of the type, sequences, document indices: 34 bytes, nothing between them.
_HEADER = struct.Struct("<9sQBQQ")
#: Megatron codes of the types of ids. There is none for uint32, and no tokenizer has 2^31 ids.
_CODES = {"uint16": 8, "int32": 4}


class _IdsFile:
    """The ids of one split in a file, and files beside it."""

    name: str
    """The file of ids of ``{split}``, relative to the folder."""
    wide = "uint32"
    """Type in the file of ids that are uint32 in the cache."""

    def __init__(self, folder: Path, split: str, dtype: str, tokenizer: str = "") -> None:
        self.path, self.tokenizer = folder / self.name.format(split=split), tokenizer
        self.dtype = np.dtype(self.wide if dtype == "uint32" else dtype)
        make_folder(self.path.parent)
        self._lengths, self._last = [np.empty(0, np.int64)], set[int]()
        self.ends = np.empty(0, dtype=np.int64)
        """(D,) end of each document, in tokens from the beginning of the file; known at the end."""

    @property
    def last_id(self) -> int | None:
        """The last id of every document; None if they differ."""
        return next(iter(self._last)) if len(self._last) == 1 else None

    def add(self, batch: tuple[NDArray[Any], NDArray[np.int64]]) -> None:
        """Append documents: their ids, and the end of each in them."""
        ids, ends = batch
        self._lengths.append(np.diff(ends, prepend=0))
        self._last |= set(np.unique(ids[ends - 1]).tolist()) if len(self._last) < 2 else set()
        with self.path.open("ab") as sink:
            sink.write(ids.astype(self.dtype.newbyteorder("<")).data.cast("B"))

    def finish(self) -> None:
        """Write the files beside the ids."""
        self.ends = np.cumsum(np.concatenate(self._lengths))
        self.write_beside()

    def write_beside(self) -> None:
        """Write the files beside the ids."""
        raise NotImplementedError


class MegatronFile(_IdsFile):
    """``.bin`` and ``.idx``."""

    name, wide = "{split}.bin", "int32"

    def write_beside(self) -> None:
        """Write the index."""
        lengths = np.diff(self.ends, prepend=0)
        begins = (self.ends - lengths) * self.dtype.itemsize
        columns = lengths.astype("<i4"), begins.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")
        head = _HEADER.pack(b"MMIDIDX\x00\x00", 1, _CODES[self.dtype.name], len(lengths), len(lengths) + 1)
        self.path.with_suffix(".idx").write_bytes(b"".join([head, *(column.tobytes() for column in columns)]))


class DatatroveFile(_IdsFile):
    """``.ds``, ``.ds.index`` and ``.ds.metadata``."""

    name = "{split}/00000_tokens.ds"

    def write_beside(self) -> None:
        """Write ends and metadata; the first line of these has one ``|``."""
        index, words = (self.path.with_name(f"{self.path.name}.{ending}") for ending in ("index", "metadata"))
        index.write_bytes(self.ends.astype("<u8").tobytes())
        name, tokens = " ".join(self.tokenizer.replace("|", " ").split()) or "Unknown Tokenizer", int(self.ends[-1])
        words.write_text(f"{name}|{self.dtype.itemsize}\n{tokens}\n{tokens / 1e9:.3g} GT", "utf-8")


FILES: Mapping[str, type[_IdsFile]] = {"megatron": MegatronFile, "datatrove": DatatroveFile}


def counts(written: Mapping[str, _IdsFile]) -> dict[str, Any]:
    """Numbers of the export: by split, and the type and last id of all splits."""
    last = {some.last_id for some in written.values()}
    return {
        "splits": {name: len(some.ends) for name, some in written.items()},
        "tokens": {name: int(some.ends[-1]) for name, some in written.items()},
        "dtype": next(some.dtype.name for some in written.values()),
        "last_id": last.pop() if len(last) == 1 else None,
    }


def reject_masked(documents: Documents, name: str) -> None:
    """Reject documents with tokens without loss, for a format without labels.

    Args:
        documents: The documents.
        name: The format.
    """
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


def document_batches(documents: Documents) -> Iterator[tuple[int, tuple[NDArray[Any], NDArray[np.int64]]]]:
    """Yield documents that fit into memory together: their number, their ids, and the end of each in these."""
    lengths, start = np.asarray(documents.lengths, dtype=np.int64), 0
    all_ends = np.cumsum(lengths)
    while start < len(all_ends):
        before = int(all_ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(all_ends, before + BATCH_TOKENS, side="right")), start + 1)
        ends = all_ends[start:stop] - before
        ids = np.empty(int(ends[-1]), dtype=documents.dtype)
        begins = ends - lengths[start:stop]
        documents.gather(np.arange(start, stop), np.zeros_like(begins), lengths[start:stop], ids, begins)
        yield stop - start, (ids, ends)
        start = stop

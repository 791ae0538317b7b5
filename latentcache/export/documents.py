"""Write whole documents as one file of raw token ids, in the order of the cache: input of Megatron and datatrove.

Such a file has no labels, so documents with tokens without loss are rejected. Cost: one pass over the cache, 16 MB
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import PlanError, UsageError
from latentcache.export.atomic_folder import atomic_folder, seal
from latentcache.loader.documents import Documents
from latentcache.store.atomic_io import make_folder
from latentcache.value import Value

#: Tokens in memory at once, if no document is longer.
BATCH_TOKENS = 1 << 22


class Written(Value):
    """The ids of one split in its file. D documents."""

    dtype: str
    """numpy name of the type of the ids."""
    ends: NDArray[np.int64]
    """(D,) end of each document, in tokens from the beginning of the file."""
    last_id: int | None
    """The last id of every document; None if they differ."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.ends[-1])


class DocumentsFormat(Value):
    """A format of documents: a file of ids per split, and files beside it."""

    name: str
    ids: str
    """The file of ids of ``{split}``, relative to the folder."""
    dtypes: Mapping[str, str]
    """Type in the cache -> type in the file, as numpy names."""
    beside: Callable[[Path, Written, Mapping[str, Any]], None]
    """Writes the files beside a file of ids, given the metadata."""


def export_documents(
    splits: Mapping[str, Documents],
    form: DocumentsFormat,
    out: Path,
    facts: Mapping[str, Any],
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Written]:
    """Write the documents of each split.

    Args:
        splits: ``train`` and, if requested, ``validation``.
        form: The format.
        out: The folder to create.
        facts: Metadata of the cache: fingerprint, recipe. Written beside the files.
        on_progress: Called with documents done and documents in total.
    """
    for name, documents in splits.items():
        reject_masked(documents, form.name)
        if not len(documents):
            raise PlanError(f"no document is in {name}", fix="give another --validation, or more data")
    done, total = 0, sum(map(len, splits.values()))
    written = {}
    with atomic_folder(out) as folder:
        for name, documents in splits.items():
            file = folder / form.ids.format(split=name)
            make_folder(file.parent)
            dtype = np.dtype(form.dtypes[documents.dtype.name]).newbyteorder("<")
            written[name] = _write_ids(file, documents, dtype, on_progress, done, total)
            form.beside(file, written[name], facts)
            done += len(documents)
        seal(folder, {**facts, "format": form.name, **counts(written)})
    return written


def counts(written: Mapping[str, Written]) -> dict[str, Any]:
    """Numbers of the export: by split, and the type and last id of all splits."""
    last = {some.last_id for some in written.values()}
    return {
        "splits": {name: len(some.ends) for name, some in written.items()},
        "tokens": {name: some.tokens for name, some in written.items()},
        "dtype": next(some.dtype for some in written.values()),
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


def _write_ids(
    file: Path,
    documents: Documents,
    dtype: np.dtype[Any],
    on_progress: Callable[[int, int], None],
    done: int,
    total: int,
) -> Written:
    """Write the ids of all documents; calls ``on_progress`` with documents done, of this split and before."""
    lengths, last = np.asarray(documents.lengths, dtype=np.int64), set[int]()
    all_ends = np.cumsum(lengths)
    with file.open("wb") as sink:
        for some in _together(all_ends):
            ends = np.cumsum(lengths[some])
            ids = np.empty(int(ends[-1]), dtype=documents.dtype)
            begins = ends - lengths[some]
            documents.gather(np.arange(some.start, some.stop), np.zeros_like(begins), lengths[some], ids, begins)
            last |= set(np.unique(ids[ends - 1]).tolist()) if len(last) < 2 else set()
            sink.write(ids.astype(dtype).data.cast("B"))
            on_progress(done + some.stop, total)
    return Written(dtype=dtype.name, ends=all_ends, last_id=last.pop() if len(last) == 1 else None)


def _together(ends: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of documents that fit into memory together."""
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + BATCH_TOKENS, side="right")), start + 1)
        yield slice(start, stop)
        start = stop

"""Write whole documents as one file of raw token ids, in the order of the cache: input of Megatron and datatrove.

Such a file has no labels, so documents with tokens without loss are rejected. Guarantee: every id is in the
vocabulary and fits its type; each format checks its index against the lengths in the cache. Cost: one pass over
the cache, 16 MB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import ExportError, PlanError, UsageError
from latentcache.export.atomic_folder import atomic_folder, put, seal
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
    beside: Callable[[Path, Written, Mapping[str, Any]], Mapping[str, str]]
    """Writes and checks the files beside a file of ids, given the metadata: file name -> xxh3-64 of its bytes."""


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
    written, files = {}, {}
    with atomic_folder(out) as folder:
        for name, documents in splits.items():
            file = folder / form.ids.format(split=name)
            make_folder(file.parent)
            ids = _Ids(documents, form.dtypes[documents.dtype.name])
            files[str(file.relative_to(folder))] = put(file, ids.parts(on_progress, done, total))
            written[name] = ids.written()
            beside = form.beside(file, written[name], facts)
            files |= {str((file.parent / other).relative_to(folder)): expected for other, expected in beside.items()}
            done += len(documents)
        seal(folder, files, {**facts, "format": form.name, **counts(written)})
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


def vocabulary(documents: Documents) -> int:
    """Ids of the tokenizer."""
    return int(getattr(documents.recipe, "num_ids", np.iinfo(documents.dtype).max + 1))


class _Ids:
    """The ids of documents in parts, and the ids that documents end with."""

    def __init__(self, documents: Documents, dtype: str) -> None:
        self._documents, self._dtype = documents, np.dtype(dtype).newbyteorder("<")
        self._lengths = np.asarray(documents.lengths, dtype=np.int64)
        self._ends = np.cumsum(self._lengths)
        self._last: set[int] = set()

    def parts(self, on_progress: Callable[[int, int], None], before: int, total: int) -> Iterator[memoryview]:
        """Bytes of the file; calls ``on_progress`` with documents done, of this split and before."""
        for some in _together(self._ends):
            yield self._read(some).astype(self._dtype).data.cast("B")
            on_progress(before + some.stop, total)

    def written(self) -> Written:
        """Facts about all parts."""
        last = next(iter(self._last)) if len(self._last) == 1 else None
        return Written(dtype=self._dtype.name, ends=self._ends, last_id=last)

    def _read(self, some: slice) -> NDArray[Any]:
        """The ids of some documents, checked."""
        lengths = self._lengths[some]
        ends, numbers = np.cumsum(lengths), np.arange(some.start, some.stop)
        found = np.empty(int(ends[-1]), dtype=self._documents.dtype)
        self._documents.gather(numbers, np.zeros_like(lengths), lengths, found, ends - lengths)
        largest, limit = int(found.max()), min(vocabulary(self._documents), np.iinfo(self._dtype).max + 1)
        if largest >= limit:
            document = int(np.searchsorted(ends, int(found.argmax()), side="right"))
            where = self._documents.where(some.start + document)
            raise ExportError(f"token id {largest} is outside the vocabulary of {limit}", where=where)
        self._last |= set(np.unique(found[ends - 1]).tolist()) if len(self._last) < 2 else set()
        return found


def _together(ends: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of documents that fit into memory together."""
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + BATCH_TOKENS, side="right")), start + 1)
        yield slice(start, stop)
        start = stop

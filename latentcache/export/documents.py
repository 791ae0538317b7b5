"""Documents of a token cache as one file of raw ids, whole and in their order: what Megatron and datatrove read.

Decides what cannot go: such a file holds ids and no labels, so a document of which a trainer should not learn every
token is refused, not flattened. Guarantee: every id is one of the tokenizer's and fits its type; each format holds
what it wrote beside the ids against the lengths in the cache. Cost: one pass over the cache, 16 MB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import ExportError, PlanError, UsageError
from latentcache.interop.whole_folder import put, seal, whole_folder
from latentcache.loader.token_cache import TokenCache
from latentcache.plan.rows import begins
from latentcache.store.durable import make_folder

#: Ids that pass through memory at once, if one document is not longer.
BATCH_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The ids of one split, as they stand in its file. D documents."""

    dtype: str
    """numpy's name of their type."""
    ends: NDArray[np.int64]
    """(D,) where each document ends, in tokens from the beginning of the file."""
    last_id: int | None
    """The id that each document ends with; None where they end with several."""

    @property
    def tokens(self) -> int:
        """Of all documents."""
        return int(self.ends[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsFormat:
    """How a format lays documents down: a file of ids for each split, and files beside it."""

    name: str
    ids: str
    """The file of ids of ``{split}``, as seen from the folder."""
    dtypes: Mapping[str, str]
    """Type in the cache -> type in the file, both as numpy names them."""
    beside: Callable[[Path, Written, Mapping[str, Any]], Mapping[str, str]]
    """Writes and checks what stands beside a file of ids, given the facts: file name -> xxh3-64 of what was meant."""


def export_documents(
    splits: Mapping[str, TokenCache],
    form: DocumentsFormat,
    out: Path,
    facts: Mapping[str, Any],
    advanced: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Written]:
    """Write the documents of each split.

    Args:
        splits: ``train`` and, where there is one, ``validation``.
        form: In which format.
        out: The folder to make.
        facts: What the documents were made from: fingerprint of the cache, recipe. Written beside them.
        advanced: Told documents written and documents in all.

    Raises:
        UsageError: The folder is there already, or labels would be lost.
        PlanError: A split has no documents.
        ExportError: A document is not what it must be; nothing is left of the export then.
        DiskFullError: No space.
        CorruptEntryError: A block of the cache fails its check.
        MissingEntryError: A shard of the cache is gone.
    """
    for name, cache in splits.items():
        refuse_masked(cache, form.name)
        if not len(cache):
            raise PlanError(f"no document is in {name}", where=cache.name, fix="another --validation, or more data")
    done, total = 0, sum(map(len, splits.values()))
    written, files = {}, {}
    with whole_folder(out) as folder:
        for name, cache in splits.items():
            file = folder / form.ids.format(split=name)
            make_folder(file.parent)
            ids = _Ids(cache, form.dtypes[cache.recipe.dtype])
            files[str(file.relative_to(folder))] = put(file, ids.parts(partial(_later, advanced, done, total)))
            written[name] = ids.written()
            beside = form.beside(file, written[name], facts)
            files |= {str((file.parent / other).relative_to(folder)): meant for other, meant in beside.items()}
            done += len(cache)
        seal(folder, files, {**facts, "format": form.name, **counts(written)})
    return written


def counts(written: Mapping[str, Written]) -> dict[str, Any]:
    """What was written, for people and programs: by split, and what is the same for all."""
    last = {some.last_id for some in written.values()}
    return {
        "splits": {name: len(some.ends) for name, some in written.items()},
        "tokens": {name: some.tokens for name, some in written.items()},
        "dtype": next(some.dtype for some in written.values()),
        "last_id": last.pop() if len(last) == 1 else None,
    }


def refuse_masked(cache: TokenCache, name: str) -> None:
    """Refuse documents with tokens that carry no loss, for a format without labels.

    Args:
        cache: The documents.
        name: Of the format.

    Raises:
        UsageError: There are such documents; the first one is named.
    """
    documents, numbers = cache.store.documents, _numbers(cache)
    sums = np.concatenate(([0], np.cumsum(documents.spans[:, 1], dtype=np.int64)))
    learned = sums[documents.span_ends] - sums[begins(documents.span_ends)]
    masked = numbers[(learned != documents.length)[numbers]]
    if len(masked):
        raise UsageError(
            f"{name} has no labels, and {len(masked)} of {len(numbers)} documents have tokens that carry no loss",
            where=documents.where(int(masked[0])),
            why="a trainer would learn all of their tokens, those of questions too",
            fix="--to hf-disk, whose rows have labels; or build a cache with --loss all",
        )


def _later(advanced: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    advanced(before + done, total)


class _Ids:
    """The ids of a cache in parts, and what was seen of them."""

    def __init__(self, cache: TokenCache, dtype: str) -> None:
        self._cache, self._dtype, self._numbers = cache, np.dtype(dtype).newbyteorder("<"), _numbers(cache)
        self._lengths = cache.store.documents.length[self._numbers].astype(np.int64)
        self._ends = np.cumsum(self._lengths)
        self._last: set[int] = set()

    def parts(self, advanced: Callable[[int], None]) -> Iterator[memoryview]:
        """Bytes of the file; ``advanced`` is told documents."""
        for some in _together(self._ends):
            yield self._read(some).astype(self._dtype).data.cast("B")
            advanced(some.stop)

    def written(self) -> Written:
        """What all parts came to."""
        last = next(iter(self._last)) if len(self._last) == 1 else None
        return Written(dtype=self._dtype.name, ends=self._ends, last_id=last)

    def _read(self, some: slice) -> NDArray[Any]:
        """The ids of some documents, each of them looked at."""
        lengths = self._lengths[some]
        ends = np.cumsum(lengths)
        found = np.empty(int(ends[-1]), dtype=self._cache.recipe.dtype)
        self._cache.store.gather(self._numbers[some], np.zeros_like(lengths), lengths, found, ends - lengths)
        largest, limit = int(found.max()), min(self._cache.recipe.num_ids, np.iinfo(self._dtype).max + 1)
        if largest >= limit:
            document = int(np.searchsorted(ends, int(found.argmax()), side="right"))
            where = self._cache.store.documents.where(int(self._numbers[some][document]))
            raise ExportError(f"an id that cannot be: {largest}", where=where, why=f"ids are below {limit}")
        self._last |= set(np.unique(found[ends - 1]).tolist()) if len(self._last) < 2 else set()
        return found


def _numbers(cache: TokenCache) -> NDArray[np.int32]:
    """The documents of a cache or of a part of it, in their order."""
    return np.arange(len(cache.store.documents), dtype=np.int32) if cache.chosen is None else cache.chosen


def _together(ends: NDArray[np.int64]) -> Iterator[slice]:
    """Documents that pass through memory at once, given where each ends."""
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + BATCH_TOKENS, side="right")), start + 1)
        yield slice(start, stop)
        start = stop

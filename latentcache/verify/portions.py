"""Rows of a generation a portion at a time, shard by shard: a check holds no more of its columns than one portion.

A portion has at most 131 072 rows or a 64th of all, whichever is more, so that the columns are passed over 64 times
at the most, and memory grows by 2 bytes per row from 8 million rows on. Rows of a large shard are parted by the first
bits of their content hash, which is how they meet the index of the shard, or by their place in it, which is how
they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import HASH_BYTES
from latentcache.identity.key import KEY_BYTES
from latentcache.store.column_files import parts
from latentcache.store.generation import Generation
from latentcache.store.token_generation import AnyGeneration, TokenGeneration

#: Most rows of a portion, and most portions of a generation.
_ROWS, _PORTIONS = 1 << 17, 64
_CONTENT_AT = KEY_BYTES - HASH_BYTES - 8
#: What the first 16 bits of a content hash can be.
_CONTENTS = 1 << 16
_COLUMNS = ("shard", "key", "offset", "bucket", "sample", "crop", "resize", "pixel_hash")
_Wanted = Callable[[Any, slice], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Some rows of one shard with their columns, see ``store.generation.Rows``. n rows."""

    row: NDArray[np.intp]
    """(n,) their numbers in the generation."""
    shard: NDArray[np.int32]
    key: NDArray[np.uint8]
    offset: NDArray[np.uint64]
    bucket: NDArray[np.int32]
    sample: NDArray[np.int32]
    crop: NDArray[np.uint32]
    resize: NDArray[np.uint32]
    pixel_hash: NDArray[np.uint8]
    content: NDArray[np.uint8]
    """(n, 16) content hash of the sample, or of the block of tokens, of each row."""

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, which: Any) -> Portion:
        return Portion(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A portion with the contents by which its rows are found in the index of their shard."""

    portion: Portion
    contents: range
    """First 16 bits of the content hashes: no other row of the shard has them."""


def counts(generation: AnyGeneration) -> NDArray[np.intp]:
    """How many rows lie in each shard."""
    found, shard = np.zeros(len(generation.shards), dtype=np.intp), generation.rows.shard
    for part in parts(len(shard)):
        found += np.bincount(shard[part], minlength=len(found))
    return found


def by_content(generation: AnyGeneration) -> Iterator[tuple[int, Iterator[Met]]]:
    """Every shard with all its rows. What is given for a shard is to be used before the next one is asked for."""
    sizes = counts(generation)
    most = _most(int(sizes.sum()))
    for shards in _groups(sizes.tolist(), most):
        if sizes[shards.start] > most:
            yield shards.start, of_shard(generation, shards.start)
            continue
        together = _gather(generation, partial(_within, shards))
        for number in shards:
            own = together if len(shards) == 1 else together[together.shard == number]
            yield number, iter([Met(portion=own, contents=range(_CONTENTS))])


def by_place(generation: AnyGeneration, shard: int, chosen: NDArray[np.bool_] | None) -> Iterator[Portion]:
    """The rows of one shard from its front to its end; in each portion by bucket and then by place.

    Args:
        generation: Whose rows.
        shard: Position in its list.
        chosen: (R,) which rows; all where it is not given.
    """
    rows = generation.rows
    count, end = 0, 0
    for part in parts(len(rows.shard)):
        own = rows.shard[part] == shard
        if own.any():
            count, end = count + int(own.sum()), max(end, int(rows.offset[part][own].max()) + 1)
    bounds = np.linspace(0, end, 1 + max(-(-count // _most(len(rows.shard))), 1)).astype(np.uint64)
    for low, high in pairwise(bounds):

        def wanted(shards: Any, part: slice, low: Any = low, high: Any = high) -> NDArray[np.bool_]:
            here = (shards == shard) if chosen is None else (shards == shard) & chosen[part]
            if not here.any():
                return np.asarray(here)
            place = rows.offset[part]
            return np.asarray(here & (place >= low) & (place < high))

        found = _gather(generation, wanted)
        yield found[np.lexsort((found.offset, found.bucket))]


def of_rows(generation: Generation, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(R,) which rows belong to chosen samples (S,)."""
    of = np.empty(len(generation.rows.sample), dtype=np.bool_)
    for part in parts(len(of)):
        of[part] = chosen[generation.rows.sample[part]]
    return of


def _within(shards: range, shard: NDArray[np.int32], _: slice) -> NDArray[np.bool_]:
    """Whether rows lie in some shards that follow each other."""
    return (shard >= shards.start) & (shard < shards.stop)


def _most(rows: int) -> int:
    return max(_ROWS, -(-rows // _PORTIONS))


def _groups(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Shards that follow each other and are gathered together."""
    first, total = 0, 0
    for number, size in enumerate(sizes):
        if number > first and total + size > most:
            yield range(first, number)
            first, total = number, 0
        total += size
    if sizes:
        yield range(first, len(sizes))


def of_shard(generation: AnyGeneration, shard: int) -> Iterator[Met]:
    """The rows of one shard by their contents, in as many portions as it takes."""
    sizes, key = counts(generation), generation.rows.key
    times = max(-(-int(sizes[shard]) // _most(int(sizes.sum()))), 1)
    bounds = [_CONTENTS * number // times for number in range(times + 1)]
    for contents in map(range, bounds, bounds[1:]):

        def wanted(shards: Any, part: slice, some: range = contents) -> NDArray[np.bool_]:
            here: NDArray[np.bool_] = shards == shard
            if not here.any():
                return here
            keys = key[part]
            front = keys[:, _CONTENT_AT].astype(np.uint32) << 8 | keys[:, _CONTENT_AT + 1]
            return here & (front >= some.start) & (front < some.stop)

        yield Met(portion=_gather(generation, wanted), contents=contents)


def _gather(generation: AnyGeneration, wanted: _Wanted) -> Portion:
    """The rows that are wanted, by their shards and their slice of the columns."""
    rows = generation.rows
    found: dict[str, list[NDArray[Any]]] = {name: [getattr(rows, name)[:0]] for name in _COLUMNS}
    found |= {"row": [np.empty(0, dtype=np.intp)], "content": [np.empty((0, HASH_BYTES), dtype=np.uint8)]}
    for part in parts(len(rows.shard)):
        which = np.flatnonzero(wanted(rows.shard[part], part))
        if len(which):
            found["row"].append(which + part.start)
            for name in _COLUMNS:
                found[name].append(getattr(rows, name)[part][which])
            found["content"].append(_contents(generation, found["key"][-1], found["sample"][-1]))
    return Portion(**{name: np.concatenate(several) for name, several in found.items()})


def _contents(generation: AnyGeneration, keys: NDArray[np.uint8], samples: NDArray[np.int32]) -> NDArray[np.uint8]:
    """(n, 16) content hashes of some rows: those of their pictures, or, of blocks, what their keys say."""
    if isinstance(generation, TokenGeneration):
        return keys[:, _CONTENT_AT : _CONTENT_AT + HASH_BYTES]
    found: NDArray[np.uint8] = generation.samples.content[samples]
    return found

"""The names of a generation and those of a folder, gone through together: both are in byte order.

Guarantee: every sample and every file is met exactly once, whatever was added, removed or renamed between them.
Memory: one part of the folder's samples, and a few thousand names of the generation.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.sources.sample import SampleColumns
from latentcache.store.column_files import parts
from latentcache.store.columns import StringColumn

_SLICE = 1 << 13
_NOTHING = SampleColumns([], [], np.empty((0, 5), dtype=np.uint64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some samples of the generation, one after the other, and where they are among some files. n samples."""

    samples: slice
    found: SampleColumns
    place: NDArray[np.intp]
    """(n,) position of each sample in ``found``, -1 where there is no such file."""
    fresh: list[int]
    """Positions in ``found`` of files that are no samples."""


def abreast(names: StringColumn, found: Iterable[SampleColumns]) -> Iterator[Stretch]:
    """Go through both.

    Args:
        names: Of the generation's samples.
        found: The folder's samples.
    """
    start, total = 0, len(names)
    for part in found:
        end = min(start + len(part), total)
        if end > start and names.take(np.arange(start, end)) == part.names:
            yield Stretch(samples=slice(start, end), found=part, place=np.arange(end - start), fresh=[])
        else:
            last = os.fsencode(part.names[-1]) if len(part) else b""
            end = bisect_right(range(total), last, lo=start, key=lambda at: os.fsencode(names[at]))
            yield from _looked_up(names, slice(start, end), part)
        start = end
    yield from _looked_up(names, slice(start, total), _NOTHING)


def _looked_up(names: StringColumn, samples: slice, found: SampleColumns) -> Iterator[Stretch]:
    """The same where the names differ."""
    places = {name: position for position, name in enumerate(found.names)}
    met = np.zeros(len(found), dtype=np.bool_)
    for part in parts(samples.stop - samples.start, _SLICE):
        own = slice(samples.start + part.start, samples.start + part.stop)
        place = np.array([places.get(name, -1) for name in names.take(np.arange(own.start, own.stop))], dtype=np.intp)
        met[place[place >= 0]] = True
        yield Stretch(samples=own, found=found, place=place, fresh=[])
    fresh = np.flatnonzero(~met).tolist()
    if fresh:
        none = slice(samples.stop, samples.stop)
        yield Stretch(samples=none, found=found, place=np.empty(0, dtype=np.intp), fresh=fresh)

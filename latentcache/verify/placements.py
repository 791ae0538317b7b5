"""Does today's rule put each picture where it was put? Columns at once, one call of the rule for each size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Set
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.placement import Placement, place, refusal
from latentcache.geometry.sizes import Box, Size
from latentcache.store.column_files import parts
from latentcache.store.generation import Generation
from latentcache.verify.findings import Finding

#: Samples looked at together, and sizes that are remembered.
_SLICE = 1 << 16


class Placements:
    """Where the samples of a generation were put."""

    def __init__(self, generation: Generation) -> None:
        # A mirror image was put where its picture was, so one row for both: those of pictures come first.
        self._generation = generation
        self._count = len(generation.rows.sample) // generation.recipe.variants

    @cached_property
    def _rising(self) -> bool:
        """Whether rows are in the order of their samples, as builds write them."""
        last = -1
        for part in parts(self._count):
            sample = self._generation.rows.sample[part]
            if int(sample[0]) < last or bool((sample[1:] < sample[:-1]).any()):
                return False
            last = int(sample[-1])
        return True

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """The rows in the order of their samples, where they are in another one."""
        return np.argsort(self._generation.rows.sample[: self._count], kind="stable")

    def _first(self, number: int) -> int:
        """How many rows, in the order of their samples, come before those of one sample."""
        sample = self._generation.rows.sample
        if self._rising:
            return bisect_left(range(self._count), number, key=lambda row: int(sample[row]))
        return bisect_left(self._order, number, key=lambda row: int(sample[row]))

    def rows(self, number: int) -> NDArray[np.intp]:
        """The rows of one sample."""
        first, last = self._first(number), self._first(number + 1)
        return np.arange(first, last) if self._rising else self._order[first:last]

    def size(self, number: int) -> Size:
        """Pixels of the picture that was encoded."""
        return Size(*self._generation.samples.original_size[number].tolist())

    def placed(self, number: int) -> list[tuple[Placement, bytes]]:
        """How one sample was placed, with the hash of the pixels of each placement."""
        rows = self._generation.rows
        found = []
        for row in self.rows(number).tolist():
            bucket = self._generation.buckets[int(rows.bucket[row])]
            top, left = rows.crop[row].tolist()
            placement = Placement(
                bucket=bucket, resize=Size(*rows.resize[row].tolist()), crop=Box(top=top, left=left, size=bucket)
            )
            found.append((placement, rows.pixel_hash[row].tobytes()))
        return found

    def moved(self, chosen: NDArray[np.bool_] | None = None) -> Iterator[tuple[int, Finding]]:
        """Samples that the bucket rule puts elsewhere now, with the finding; of ``chosen`` (S,) only where given."""
        total, rows = len(self._generation.samples.names), self._generation.rows
        if not self._rising:
            yield from self._moved_of(slice(0, total), rows.sample[: self._count], rows.bucket[: self._count], chosen)
            return
        first = 0
        for part in parts(total, _SLICE):
            last = self._first(part.stop)
            sample, bucket = rows.sample[first:last], rows.bucket[first:last]
            yield from self._moved_of(part, sample - np.int32(part.start), bucket, chosen)
            first = last

    def _moved_of(
        self, part: slice, sample: NDArray[np.int32], bucket: NDArray[np.int32], chosen: NDArray[np.bool_] | None
    ) -> Iterator[tuple[int, Finding]]:
        """The same of some samples, whose rows are given with the samples counted from the first of them."""
        generation = self._generation
        sizes, kind = _kinds(generation.samples.original_size[part])
        expected = [self._expected(size) for size in sizes]
        allowed = np.array([[bucket in wanted for bucket in generation.buckets] for wanted in expected], np.bool_)
        allowed = allowed.reshape(len(sizes), len(generation.buckets))
        right = allowed[kind[sample], bucket]
        wrong = np.bincount(sample[~right], minlength=len(kind)) > 0
        missing = np.array([len(buckets) for buckets in expected], dtype=np.int32)[kind]
        doubtful = wrong | (missing != np.bincount(sample, minlength=len(kind)))
        numbers = np.flatnonzero(doubtful if chosen is None else doubtful & chosen[part])
        if not len(numbers):
            return
        order = np.argsort(sample, kind="stable")
        bounds = np.searchsorted(sample, [numbers, numbers + 1], sorter=order)
        for number, first, last in zip(numbers.tolist(), *bounds.tolist(), strict=True):
            found = {generation.buckets[at] for at in bucket[order[first:last]].tolist()}
            should, name = expected[int(kind[number])], generation.samples.names[part.start + number]
            if found < should and not generation.complete:  # a repair took them out
                yield part.start + number, _lost(name, should - found)
            elif found != should:
                yield part.start + number, _moved(name, should, found)

    @cached_property
    def _expected(self) -> Callable[[Size], frozenset[Size]]:
        """Where the rule puts a picture of some size; not asked again of a size that was met just now."""
        tables = self._generation.recipe.geometry.tables()

        @lru_cache(maxsize=_SLICE)
        def buckets(size: Size) -> frozenset[Size]:
            return frozenset(place(size, table).bucket for table in tables if not refusal(size, table))

        return buckets


def _kinds(original: NDArray[np.uint32]) -> tuple[list[Size], NDArray[np.int32]]:
    """The sizes that occur, and (S,) which of them each sample has."""
    known, kind = np.unique(_as_numbers(original), return_inverse=True)
    pairs = ((number >> 32, number & 0xFFFF_FFFF) for number in known.tolist())
    return [Size(*pair) for pair in pairs], kind.astype(np.int32)


def _as_numbers(sizes: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """(n,) one number for each size (n, 2), in the same order."""
    wide = sizes.astype(np.uint64)
    number: NDArray[np.uint64] = wide[:, 0] << np.uint64(32) | wide[:, 1]
    return number


def _lost(name: str, sizes: Set[Size]) -> Finding:
    wanted = " ".join(sorted(map(str, sizes)))
    return Finding(category="missing", reason="entry-lost", path=name, expected=wanted, found="it was removed")


def _moved(name: str, expected: Set[Size], found: Set[Size]) -> Finding:
    sides = (" ".join(sorted(map(str, sizes))) for sizes in (expected, found))
    return Finding(category="stale", reason="geometry-changed", path=name, expected=next(sides), found=next(sides))

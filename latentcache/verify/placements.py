"""Does today's rule put each picture where it was put? Columns at once, one call of the rule for each size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.placement import Placement, place, refusal
from latentcache.geometry.sizes import Box, Size
from latentcache.store.generation import Generation
from latentcache.store.variants import folded
from latentcache.verify.findings import Finding

#: Samples and rows looked at together.
_SLICE = 1 << 16


class Placements:
    """Where the samples of a generation were put."""

    def __init__(self, generation: Generation) -> None:
        # A mirror image was put where its picture was, so one row for both.
        self._generation = folded(generation)

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """The rows in the order of their samples; made when a single sample is asked for."""
        return np.argsort(self._generation.rows.sample, kind="stable")

    @cached_property
    def _starts(self) -> NDArray[np.intp]:
        """(S + 1,) where each sample's rows begin in that order."""
        numbers = np.arange(len(self._generation.samples.names) + 1)
        return np.searchsorted(self._generation.rows.sample, numbers, sorter=self._order)

    def rows(self, number: int) -> NDArray[np.intp]:
        """The rows of one sample."""
        rows: NDArray[np.intp] = self._order[self._starts[number] : self._starts[number + 1]]
        return rows

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

    def moved(self, present: NDArray[np.bool_]) -> Iterator[tuple[int, Finding]]:
        """Samples of ``present`` (S,) that the bucket rule puts elsewhere now, with the finding."""
        generation, rows = self._generation, self._generation.rows
        sizes, kind = _kinds(generation.samples.original_size)
        tables = generation.recipe.geometry.tables()
        expected = [{place(size, table).bucket for table in tables if not refusal(size, table)} for size in sizes]
        allowed = np.array([[bucket in wanted for bucket in generation.buckets] for wanted in expected], np.bool_)
        allowed = allowed.reshape(len(sizes), len(generation.buckets))
        missing = np.array([len(buckets) for buckets in expected], dtype=np.int32)[kind]
        wrong = np.zeros(len(kind), dtype=np.bool_)
        for start in range(0, len(rows.sample), _SLICE):
            sample, bucket = rows.sample[start : start + _SLICE], rows.bucket[start : start + _SLICE]
            right = allowed[kind[sample], bucket]
            wrong[sample[~right]] = True
            np.subtract.at(missing, sample, 1)
        doubtful = wrong | (missing != 0)
        for number in np.flatnonzero(present & doubtful).tolist():
            found = {generation.buckets[bucket] for bucket in rows.bucket[self.rows(number)].tolist()}
            should = expected[int(kind[number])]
            if found < should and not generation.complete:  # a repair took them out
                yield number, _lost(generation.samples.names[number], should - found)
            elif found != should:
                yield number, _moved(generation.samples.names[number], should, found)


def _kinds(original: NDArray[np.uint32]) -> tuple[list[Size], NDArray[np.int32]]:
    """The sizes that occur, and (S,) which of them each sample has."""
    parts = range(0, len(original), _SLICE)
    found = sorted({pair for start in parts for pair in set(map(tuple, original[start : start + _SLICE].tolist()))})
    known = _as_numbers(np.array(found, dtype=np.uint32).reshape(-1, 2))
    kind = np.empty(len(original), dtype=np.int32)
    for start in parts:
        kind[start : start + _SLICE] = np.searchsorted(known, _as_numbers(original[start : start + _SLICE]))
    return [Size(*pair) for pair in found], kind


def _as_numbers(sizes: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """(n,) one number for each size (n, 2), in the same order."""
    wide = sizes.astype(np.uint64)
    number: NDArray[np.uint64] = wide[:, 0] << np.uint64(32) | wide[:, 1]
    return number


def _lost(name: str, sizes: set[Size]) -> Finding:
    wanted = " ".join(sorted(map(str, sizes)))
    return Finding(category="missing", reason="entry-lost", path=name, expected=wanted, found="it was removed")


def _moved(name: str, expected: set[Size], found: set[Size]) -> Finding:
    sides = (" ".join(sorted(map(str, sizes))) for sizes in (expected, found))
    return Finding(category="stale", reason="geometry-changed", path=name, expected=next(sides), found=next(sides))

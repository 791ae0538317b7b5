"""Does today's rule put each picture where it was put? Columns at once, one call of the rule for each size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.placement import Placement, place, refusal
from latentcache.geometry.sizes import Box, Size
from latentcache.store.generation import Generation
from latentcache.store.variants import folded
from latentcache.verify.findings import Finding


class Placements:
    """Where the samples of a generation were put."""

    def __init__(self, generation: Generation) -> None:
        # A mirror image was put where its picture was, so one row for both.
        self._generation = generation = folded(generation)
        self._order = np.argsort(generation.rows.sample, kind="stable")
        self._starts = np.searchsorted(
            generation.rows.sample, np.arange(len(generation.samples.names) + 1), sorter=self._order
        )

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

    def moved(self, present: NDArray[np.intp]) -> Iterator[tuple[int, Finding]]:
        """Samples of ``present`` that the bucket rule puts elsewhere now, with the finding."""
        generation = self._generation
        sizes, kind = np.unique(generation.samples.original_size, axis=0, return_inverse=True)
        kind = kind.reshape(-1)
        tables = generation.recipe.geometry.tables()
        expected = [
            {place(size, table).bucket for table in tables if not refusal(size, table)}
            for size in (Size(*pair) for pair in sizes.tolist())
        ]
        allowed = np.array([[bucket in wanted for bucket in generation.buckets] for wanted in expected], np.bool_)
        allowed = allowed.reshape(len(sizes), len(generation.buckets))
        rows = generation.rows
        right = np.bincount(
            rows.sample, weights=allowed[kind[rows.sample], rows.bucket], minlength=len(generation.samples.names)
        )
        wanted = np.array([len(buckets) for buckets in expected], dtype=np.int64)[kind]
        doubtful = (right != wanted) | (np.diff(self._starts) != wanted)
        for number in present[doubtful[present]].tolist():
            found = {generation.buckets[bucket] for bucket in rows.bucket[self.rows(number)].tolist()}
            should = expected[int(kind[number])]
            if found < should and not generation.complete:  # a repair took them out
                yield number, _lost(generation.samples.names[number], should - found)
            elif found != should:
                yield number, _moved(generation.samples.names[number], should, found)


def _lost(name: str, sizes: set[Size]) -> Finding:
    wanted = " ".join(sorted(map(str, sizes)))
    return Finding(category="missing", reason="entry-lost", path=name, expected=wanted, found="it was removed")


def _moved(name: str, expected: set[Size], found: set[Size]) -> Finding:
    sides = (" ".join(sorted(map(str, sizes))) for sizes in (expected, found))
    return Finding(category="stale", reason="geometry-changed", path=name, expected=next(sides), found=next(sides))

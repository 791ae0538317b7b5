"""Buckets planned for a batch size: no image is lost, every batch is full, and no crop is larger than it must be.

Images are sorted by aspect ratio and cut into runs; each run gets the bucket that fits it. Of all ways to cut, the
one with the fewest repeated samples is taken; of equal ones that with the fewest buckets, then the one that crops
least. Images of one ratio stay together. Guarantee: the same sizes and settings give the same buckets, because
everything is counted in integers. Cost: dynamic programming over at most 4 096 ratios, about a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import RecipeError
from latentcache.geometry.sizes import Size
from latentcache.value import Value

#: Ratios that are told apart; neighbours share one beyond this number.
MAX_BINS = 4096
#: Crops are counted in millionths of the image.
_UNIT = 1_000_000
_NEVER = np.iinfo(np.int64).max
#: A repeated sample costs more than any number of buckets.
_RUNS = 1 << 13


class Target(Value):
    """What a plan has to reach."""

    batch: int
    """Samples of all ranks in one step."""
    max_crop: int = 15
    """Percent of an image that a crop may cut off."""
    max_buckets: int = 0
    """0: as many as are useful."""


class PlannedBucket(Value):
    """One bucket and the ratios that it takes: up to ``width : height``, and above those of the bucket before."""

    size: Size
    width: int
    height: int


class PlannedTable(Value):
    """Buckets by ratio, upwards; the last takes every ratio above the one before."""

    buckets: tuple[PlannedBucket, ...]
    frames: int = 1
    """Length of the clips that it is for; 1: images."""

    def within(self, image: Size) -> Size | None:
        """The bucket of an image that must not be enlarged; None: it is smaller than its bucket."""
        bucket = self.nearest(image)
        return bucket if bucket.fits(image) else None

    @cached_property
    def _bounds(self) -> list[Fraction]:
        return [Fraction(bucket.width, bucket.height) for bucket in self.buckets[:-1]]

    def nearest(self, image: Size) -> Size:
        """The bucket of an image that may be enlarged."""
        return self.buckets[bisect_left(self._bounds, Fraction(image.width, image.height))].size


@dataclass(frozen=True)
class _Ratios:
    """Distinct ratios of images, upwards, or bins of them, with what each bucket cuts off them."""

    lowest: NDArray[np.int64]
    highest: NDArray[np.int64]
    """(n, 2) the ratios at both ends of each bin, as width and height without a common divisor."""
    counts: NDArray[np.int64]
    """(n,) samples of each bin."""
    sizes: list[Size]
    """Buckets that may be used, by ratio upwards."""
    loss: NDArray[np.int64]
    """(n, buckets) millionths that a bucket cuts off an image of a bin, rounded up."""


def planned_table(
    images: NDArray[np.integer],
    times: NDArray[np.integer],
    buckets: Sequence[Size],
    target: Target,
    *,
    frames: int = 1,
) -> PlannedTable:
    """The buckets for images of these sizes.

    Args:
        images: (n, 2) height and width in pixels, below 65 536.
        times: (n,) samples of each image in an epoch.
        buckets: Sizes that may be used; of one ratio the largest is.
        target: The batch size and the limits. A limit that cannot be met is exceeded as little as possible: an image
            whose best bucket cuts off more gets that bucket, and the crop of all grows until the buckets are enough.
        frames: Length of the clips that these are; 1: images.

    Raises:
        RecipeError: There are no images, or no buckets.
    """
    if not len(images) or not buckets:
        raise RecipeError("buckets cannot be planned without images", argument="buckets", value="planned")
    ratios = _ratios(images, times, buckets)
    fits = _fits(ratios, _least_limit(ratios, target))
    runs = _cheapest(ratios, fits, target.batch, 0)
    if target.max_buckets and len(runs) > target.max_buckets:
        runs = _cheapest(ratios, fits, target.batch, target.max_buckets)
    planned = []
    for end, bucket in runs:
        # The mediant lies between the last ratio of this run and the first of the next.
        above = ratios.lowest[end] if end < len(ratios.lowest) else np.zeros(2, np.int64)
        width, height = (ratios.highest[end - 1] + above).tolist()
        planned.append(PlannedBucket(size=ratios.sizes[bucket], width=width, height=height))
    return PlannedTable(buckets=tuple(planned), frames=frames)


def _ratios(images: NDArray[np.integer], times: NDArray[np.integer], buckets: Sequence[Size]) -> _Ratios:
    sides = np.asarray(images, dtype=np.int64)[:, ::-1]
    sides = sides // np.gcd(*sides.T)[:, None]
    codes, which = np.unique(sides[:, 0] << 32 | sides[:, 1], return_inverse=True)
    aspects = np.column_stack([codes >> 32, codes & 0xFFFFFFFF])
    counts = np.bincount(which, weights=times).astype(np.int64)
    # Floats of different ratios differ, because no side has more than 16 bits.
    order = np.argsort(aspects[:, 0] / aspects[:, 1], kind="stable")
    aspects = aspects[order]
    counts = counts[order]
    # Neighbours share a bin if there are too many: each has about the same number of samples.
    bins: NDArray[np.int64] = np.arange(len(aspects), dtype=np.int64)
    if len(aspects) > MAX_BINS:
        bins = (np.cumsum(counts) - counts) * MAX_BINS // int(counts.sum())
    ends = np.flatnonzero(np.append(np.diff(bins) != 0, True)) + 1
    begins = np.append(0, ends[:-1])
    largest: dict[Fraction, Size] = {}
    for bucket in sorted(buckets, key=lambda bucket: bucket.area):
        largest[Fraction(bucket.width, bucket.height)] = bucket
    sizes = [largest[aspect] for aspect in sorted(largest)]
    lowest, highest = aspects[begins], aspects[ends - 1]
    return _Ratios(
        lowest=lowest,
        highest=highest,
        counts=np.add.reduceat(counts, begins),
        sizes=sizes,
        loss=np.maximum(_loss(lowest, sizes), _loss(highest, sizes)),
    )


def _loss(aspects: NDArray[np.int64], sizes: Sequence[Size]) -> NDArray[np.int64]:
    """(n, buckets) millionths of an image that each bucket cuts off, rounded up. All products fit into 64 bits."""
    first = aspects[:, :1] * np.array([size.height for size in sizes], dtype=np.int64)
    second = aspects[:, 1:] * np.array([size.width for size in sizes], dtype=np.int64)
    loss: NDArray[np.int64] = _UNIT - np.minimum(first, second) * _UNIT // np.maximum(first, second)
    return loss


def _fits(ratios: _Ratios, limit: int) -> NDArray[np.bool_]:
    """(n, buckets) what each bucket may take: it cuts off no more than the limit, or than the best bucket."""
    return np.asarray(ratios.loss <= np.maximum(ratios.loss.min(axis=1, keepdims=True), limit))


def _least_limit(ratios: _Ratios, target: Target) -> int:
    """The limit on crops; with a limit on buckets the smallest that it can be met with."""
    limits = range(target.max_crop * _UNIT // 100, _UNIT + 1)
    if not target.max_buckets:
        return limits[0]
    return limits[bisect_left(limits, True, key=lambda limit: _fewest(ratios, limit) <= target.max_buckets)]


def _fewest(ratios: _Ratios, limit: int) -> int:
    """Buckets that are needed so that nothing is cut off more: each takes as many ratios as it can."""
    fits = _fits(ratios, limit)
    first, runs = 0, 0
    while first < len(fits):
        ends = np.where(fits[first:].all(axis=0), len(fits) - first, np.argmin(fits[first:], axis=0))
        first += int(ends.max())
        runs += 1
    return runs


def _cheapest(ratios: _Ratios, fits: NDArray[np.bool_], batch: int, most: int) -> list[tuple[int, int]]:
    """Ends and buckets of the runs with the fewest repeats, then the fewest buckets, then the least cut.

    ``most``: buckets, 0 for any number. Row k of the tables has the best plans of k buckets, if their number is
    limited; else one row has all plans.
    """
    count = len(fits)
    samples = np.append(0, np.cumsum(ratios.counts))
    lost = np.cumsum(ratios.loss * ratios.counts[:, None], axis=0)
    lost = np.vstack([np.zeros((1, fits.shape[1]), np.int64), lost])
    rows = most + 1 if most else 1
    cost, cut = np.full((2, rows, count + 1), _NEVER // 2)
    start, choice = np.zeros((2, rows, count + 1), dtype=np.int64)
    cost[0, 0] = cut[0, 0] = 0
    begin = np.zeros(fits.shape[1], dtype=np.int64)  # where the run of ratios that a bucket fits begins
    for end in range(1, count + 1):
        begin[~fits[end - 1]] = end
        fitting = np.flatnonzero(fits[end - 1])
        columns = slice(int(fitting[0]), int(fitting[-1]) + 1)  # ratios on both sides of that of the last images
        low = int(begin[columns].min())
        firsts = np.arange(low, end)
        losses = lost[end, columns] - lost[low:end, columns]
        losses[firsts[:, None] < begin[columns]] = _NEVER // 4
        best = losses.argmin(axis=1)
        repeats = -(samples[end] - samples[low:end]) % batch
        costs = cost[:, low:end] + repeats * _RUNS + 1
        cuts = cut[:, low:end] + losses[np.arange(len(firsts)), best]
        cuts[costs > costs.min(axis=1, keepdims=True)] = _NEVER
        first = cuts.argmin(axis=1)
        row, into = (slice(0, -1), slice(1, None)) if most else (slice(None), slice(None))
        every_row = np.arange(rows)
        cost[into, end], cut[into, end] = costs[every_row, first][row], cuts[every_row, first][row]
        start[into, end], choice[into, end] = firsts[first][row], (columns.start + best[first])[row]
    runs = list[tuple[int, int]]()
    end = count
    number = int(cost[:, count].argmin())
    while end:
        runs.append((end, int(choice[number, end])))
        end = int(start[number, end])
        number = number - (most > 0)
    return runs[::-1]

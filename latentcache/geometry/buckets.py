"""The image sizes of a cache: the bucket table, made once from a few integers.

Guarantee: the same settings give the same table everywhere, in one canonical order; every side is a multiple
of ``multiple`` and within the limits; a table made from a resolution never exceeds its area.
Cost: ``nearest`` is a binary search over aspect ratios compared as integers, about 3 µs for 50 buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial, reduce
from math import isqrt

from latentcache.errors import RecipeError
from latentcache.geometry.sizes import Size, floor_to

#: Bumped when the same settings would give other integers; part of every recipe id.
GEOMETRY_RULE = 1
#: Largest side a key can name (u16).
MAX_SIDE = 65_535


@dataclass(frozen=True)
class BucketTable:
    """The target sizes of one resolution.

    ``sizes`` is canonical: by aspect ratio (width / height) upwards, then by area downwards, without repeats.
    Of several buckets with one aspect ratio only the largest is ever chosen.
    """

    sizes: tuple[Size, ...]
    grid: int = 0
    """Sides of smaller buckets are multiples of this; 0: the list holds all buckets."""
    area: int = 0
    """Pixels of a smaller bucket at most."""
    longest: int = 0
    """Longest side of a smaller bucket."""

    def __post_init__(self) -> None:
        ordered = sorted(set(self.sizes), key=lambda size: (Fraction(size.width, size.height), -size.area))
        object.__setattr__(self, "sizes", tuple(ordered))

    @cached_property
    def _largest(self) -> tuple[tuple[Size, ...], tuple[float, ...]]:
        """The largest bucket of each aspect ratio, and these ratios."""
        largest = {Fraction(size.width, size.height): size for size in reversed(self.sizes)}
        return tuple(reversed(largest.values())), tuple(map(float, reversed(largest)))

    def within(self, image: Size) -> Size | None:
        """The bucket of an image that must not be enlarged; None: there is none.

        The nearest bucket if it fits inside the image. Else a smaller one: of a list the nearest that fits; of a
        resolution the sides of the image, each reduced to the grid, as ``bucket_no_upscale`` of sd-scripts has it
        (``library/train_util.py``, ``BucketManager.select_bucket``). There the image keeps its size and is cropped;
        here it is resized to cover the bucket, which loses less of it.
        """
        best = self.nearest(image)
        if best.fits(image):
            return best
        if not self.grid:
            fitting = tuple(size for size in self.sizes if size.fits(image))
            return BucketTable(fitting).nearest(image) if fitting else None
        short = floor_to(min(image.height, image.width, isqrt(self.area), self.longest), self.grid)
        if not short:
            return None
        long = floor_to(min(max(image.height, image.width), self.area // short, self.longest), self.grid)
        return Size(short, long) if image.height <= image.width else Size(long, short)

    def nearest(self, image: Size) -> Size:
        """The bucket that keeps most of ``image`` under cover-resize and crop.

        What is kept, ``min(a, b) / max(a, b)`` of the two aspect ratios, falls on both sides of the image's
        own ratio, so the best bucket is one of its two neighbors. Ties: the larger area, then the wider.
        """
        sizes, aspects = self._largest
        # Floats of the ratios of buckets differ, and division rounds them in order: both neighbors are found.
        at = bisect_left(aspects, image.width / image.height)
        return reduce(partial(_better, image), sizes[max(at - 1, 0) : at + 1])


def bucket_table(
    *, resolution: int, multiple: int, min_side: int | None = None, max_side: int | None = None
) -> BucketTable:
    """All buckets of at most ``resolution`` squared pixels, one per side length on the grid.

    For every side ``s`` from ``min_side`` to ``max_side`` (defaults: half and twice the resolution, brought
    to the grid) in steps of ``multiple``: ``s`` by the largest multiple that keeps the area within
    ``resolution ** 2``, in both orientations; and the largest square, which that rule misses where the
    resolution is off the grid. All values in pixels. Raises RecipeError if no bucket fits.
    """
    low, high = _side_limits(resolution, multiple, min_side, max_side)
    area, square = resolution * resolution, floor_to(resolution, multiple)
    sizes = {Size(square, square)} if low <= square <= high else set()
    for side in range(low, high + 1, multiple):
        other = min(high, floor_to(area // side, multiple))
        if other >= low:
            sizes.update((Size(side, other), Size(other, side)))
    if not sizes:
        raise RecipeError(
            f"no bucket has sides of {low} to {high} pixels, multiples of {multiple}",
            argument="resolutions",
            value=resolution,
            why=f"{low}x{low} already has more than {resolution}x{resolution} pixels",
            fix="raise --resolution or lower --min-side",
        )
    return BucketTable(tuple(sizes), grid=multiple, area=area, longest=high)


def explicit_table(sizes: Iterable[Size], *, multiple: int) -> BucketTable:
    """A table from an explicit list; RecipeError if a side is too large or no multiple of the model's."""
    listed = tuple(sizes)
    for size in listed:
        if size.height % multiple or size.width % multiple or max(size.height, size.width) > MAX_SIDE:
            good = Size(_on_grid(size.height, multiple), _on_grid(size.width, multiple))
            raise RecipeError(
                f"does not fit the grid of {multiple} pixels",
                argument="buckets",
                value=str(size),
                why=f"the model needs sides that are multiples of {multiple}, at most {MAX_SIDE}",
                fix=f"use --bucket={good}",
            )
    return BucketTable(listed)


def kept(image: Size, bucket: Size) -> tuple[int, int]:
    """Fraction of ``image`` that is left after cover-resize and crop to ``bucket``: (numerator, denominator)."""
    a, b = image.width * bucket.height, bucket.width * image.height
    return (a, b) if a <= b else (b, a)


def _on_grid(side: int, multiple: int) -> int:
    """The nearest usable side below ``side``, or the smallest one."""
    return max(floor_to(min(side, MAX_SIDE), multiple), multiple)


def _better(image: Size, first: Size, second: Size) -> Size:
    """Whichever keeps more of the image; a tie goes to the larger area, then to the wider bucket."""
    (a, b), (c, d) = kept(image, first), kept(image, second)
    if a * d != c * b:
        return first if a * d > c * b else second
    return max(first, second, key=lambda size: (size.area, size.width))


def _side_limits(resolution: int, multiple: int, min_side: int | None, max_side: int | None) -> tuple[int, int]:
    """The first and last side on the grid."""
    if resolution < multiple or multiple < 1:
        raise RecipeError(
            f"must be {multiple} or more, of which every side is a multiple",
            argument="resolutions",
            value=resolution,
            fix=f"use --resolution={multiple} or more, or a smaller --bucket-step",
        )
    low = floor_to((min_side if min_side is not None else resolution // 2) + multiple - 1, multiple)
    high = floor_to(max_side if max_side is not None else 2 * resolution, multiple)
    low = max(low, multiple)
    if low > high or high > MAX_SIDE:
        limits = {"min_side": min_side, "max_side": max_side, "resolutions": resolution}
        argument, value = next((name, side) for name, side in limits.items() if side is not None)
        raise RecipeError(
            f"no bucket has sides of {low} to {high} pixels",
            argument=argument,
            value=value,
            why=f"sides are multiples of {multiple} and at most {MAX_SIDE}, by default half to twice the resolution",
            fix="widen --min-side and --max-side, or change --resolution",
        )
    return low, high

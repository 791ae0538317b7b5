"""Sizes in pixels or latent cells, the buckets of a resolution, and where an image is placed in its bucket.

Build, verify and loader all ask here, once, and store the answer. Two functions that each did this their own way
gave SimpleTuner shape mismatches. Guarantee: a size is always ``Size(height, width)``, and no float decides one. The
same settings give the same buckets on every machine, within their limits. A resized image covers its bucket, and the
crop is inside it, where its rule says. Cost: ``nearest`` takes about 3 µs for 50 buckets.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial, reduce
from math import isqrt

from latentcache.errors import RecipeError, UsageError
from latentcache.value import Value

#: Bumped when the same settings would give other integers; part of every recipe id.
GEOMETRY_RULE = 1
#: Largest side a key can name (u16).
MAX_SIDE = 65_535
#: An image of which less than 1/4 is left after the crop is rejected.
MIN_KEPT = (1, 4)
#: An image whose shorter side has fewer pixels is rejected.
MIN_SIDE = 16


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Height and width, in pixels unless a name says ``latent``."""

    height: int
    width: int

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"a size has at least one pixel on each side, got {self.height}x{self.width}")

    @classmethod
    def parse(cls, text: str) -> Size:
        """The size of ``704x1152``, height and width; raises UsageError."""
        match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
        if match is None:
            raise UsageError(
                "not a size",
                argument="buckets",
                value=text,
                why="expected HEIGHTxWIDTH",
                fix=f"--bucket={text}x{text}" if text.isdecimal() else "--bucket=704x1152",
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def area(self) -> int:
        """Number of pixels (or cells)."""
        return self.height * self.width

    def fits(self, outer: Size) -> bool:
        """True if neither side is longer than that of ``outer``."""
        return self.height <= outer.height and self.width <= outer.width

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


def square(resolution: int | Size) -> Size:
    """A resolution as a size; a number is the side of a square."""
    return Size(resolution, resolution) if isinstance(resolution, int) else resolution


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below ``numerator / denominator`` (both positive)."""
    return -(-numerator // denominator)


def floor_to(value: int, multiple: int) -> int:
    """Largest multiple of ``multiple`` not above ``value``: the rounding of bucket sides."""
    return value // multiple * multiple


def latent_size(pixels: Size, factor: int) -> Size:
    """Size of the latent grid of an image whose sides are multiples of ``factor``, as those of every table are."""
    if pixels.height % factor or pixels.width % factor:
        raise ValueError(f"{pixels} is not a multiple of the spatial factor {factor}")
    return Size(pixels.height // factor, pixels.width // factor)


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
    least = resolution // 2 if min_side is None else min_side
    low = max(ceil_div(least, multiple), 1) * multiple
    high = floor_to(2 * resolution if max_side is None else max_side, multiple)
    area = resolution * resolution
    square = floor_to(resolution, multiple)
    sizes = {Size(square, square)} if low <= square <= high else set()
    for side in range(low, min(high, MAX_SIDE) + 1, multiple):
        other = min(high, floor_to(area // side, multiple))
        if other >= low:
            sizes.update((Size(side, other), Size(other, side)))
    if not sizes or high > MAX_SIDE:
        limits = {"min_side": min_side, "max_side": max_side, "resolutions": resolution}
        argument, value = next((name, side) for name, side in limits.items() if side is not None)
        raise RecipeError(
            f"no bucket of {resolution}x{resolution} pixels has sides of {low} to {high}, multiples of {multiple}",
            argument=argument,
            value=value,
            why=f"sides have half to twice the resolution by default, and at most {MAX_SIDE} pixels",
            fix="change --resolution, --min-side, --max-side or --bucket-step",
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


class Placement(Value):
    """Resize to ``resize``, then cut ``bucket`` out at (``top``, ``left``). All in pixels."""

    bucket: Size
    resize: Size
    top: int
    left: int


#: Where the crop is in the resized image. ``random``: a number decides, drawn from the content of the file.
CROPS = ("center", "top", "random")


def place_in(image: Size, bucket: Size, crop: str = "center", draw: int = 0, resize: Size | None = None) -> Placement:
    """Cover-resize to ``bucket``, or resize to ``resize``, and crop.

    ``draw``: 64 bits that place a random crop.

    ``center``: an odd overhang loses one pixel more at the end. ``top``: the first rows, and the middle of the
    columns. ``random``: any place.
    """
    if resize is not None:
        pass
    elif image.width * bucket.height >= bucket.width * image.height:
        resize = Size(bucket.height, ceil_div(image.width * bucket.height, image.height))
    else:
        resize = Size(ceil_div(image.height * bucket.width, image.width), bucket.width)
    below, right = resize.height - bucket.height, resize.width - bucket.width
    top = 0 if crop == "top" else below // 2
    left = right // 2
    if crop == "random":
        top, left = (draw >> 32) % (below + 1), (draw & 0xFFFF_FFFF) % (right + 1)
    return Placement(bucket=bucket, resize=resize, top=top, left=left)


def flipped(placement: Placement) -> Placement:
    """The same crop in the horizontal flip: its distance from the right edge becomes the one from the left.

    SDXL is given the crop of the flipped image; sd-scripts does the same in the frame of its own ``crop_ltrb``
    (``library/train_util.py``, if ``flipped`` is true).
    """
    return replace(placement, left=placement.resize.width - placement.left - placement.bucket.width)


def enlarged(image: Size, bucket: Size) -> float:
    """Return the enlargement factor of an image that covers a bucket; 1 or less: it is not enlarged."""
    return max(bucket.height / image.height, bucket.width / image.width)


def cropped(image: Size, bucket: Size) -> float:
    """Return the percentage of an image that is cut off when it covers a bucket."""
    part, whole = kept(image, bucket)
    return 100 * (whole - part) / whole


def unusable(image: Size, bucket: Size) -> str:
    """Reason why an image cannot be used in its bucket: ``extreme-aspect``, ``too-small``; empty: it can."""
    numerator, denominator = kept(image, bucket)
    if numerator * MIN_KEPT[1] < denominator * MIN_KEPT[0]:
        return "extreme-aspect"
    return "too-small" if min(image.height, image.width) < MIN_SIDE else ""

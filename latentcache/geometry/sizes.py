"""Sizes in pixels or latent cells, and the only rounding of this project.

Guarantee: a size is always ``Size(height, width)``, in this order; no float ever decides one. Width-first
libraries (Pillow) are converted at their call and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Height and width, in pixels unless a name says ``latent``."""

    height: int
    width: int

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"a size has at least one pixel on each side, got {self.height}x{self.width}")

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

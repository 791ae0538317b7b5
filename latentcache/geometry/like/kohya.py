"""Buckets of kohya's sd-scripts, which lora-scripts uses too.

Rules (kohya-ss/sd-scripts 48d368f): ``make_bucket_resolutions`` of ``library/model_util.py``, and ``BucketManager``
and ``adjust_min_max_bucket_reso_by_steps`` of ``library/train_util.py``. The same in lora-scripts fdefba9,
``scripts/stable``. There sizes are (width, height); here they are ``Size``. Only sizes are theirs: pixels are
resized by our one kernel.
"""

from __future__ import annotations

import math
from functools import cached_property

from latentcache.errors import RecipeError
from latentcache.geometry.sizes import Size
from latentcache.value import Value

#: Defaults of ``min_bucket_reso``, ``max_bucket_reso`` and ``bucket_reso_steps``, in pixels.
MIN_SIDE, MAX_SIDE, STEP = 256, 1024, 64


class KohyaTable(Value):
    """The buckets of one resolution. All numbers in pixels."""

    resolution: Size
    """Size of an image where buckets are off; else its area is the largest of a bucket."""
    min_side: int = MIN_SIDE
    max_side: int = MAX_SIDE
    step: int = STEP
    buckets: bool = True
    """False: every image has the size ``resolution`` (``enable_bucket = false``)."""

    def __post_init__(self) -> None:
        low, high = self._limits
        if self.buckets and not low <= self.resolution.height <= high >= self.resolution.width >= low:
            raise RecipeError(
                f"kohya takes no resolution of {self.resolution}: sides are {low} to {high} pixels",
                argument="resolutions",
                value=max(self.resolution.height, self.resolution.width),
                why="min_bucket_reso and max_bucket_reso of its settings limit the resolution too",
                fix="widen --min-side and --max-side, as in the trainer's settings",
                fix_python="widen min_side and max_side, as in the trainer's settings",
            )

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """All buckets, in the trainer's order: by width, then by height."""
        if not self.buckets:
            return (self.resolution,)
        low, high = self._limits
        area, step = self.resolution.area, self.step
        square = int(math.sqrt(area) // step) * step
        pairs = {(square, square)}
        for width in range(low, high + 1, step):
            height = min(high, area // width // step * step)
            if height >= low:
                pairs |= {(width, height), (height, width)}
        return tuple(Size(height, width) for width, height in sorted(pairs))

    def nearest(self, image: Size) -> Size:
        """The bucket of an image that may be enlarged: of its own size, else of the nearest width / height."""
        if image in self.sizes:
            return image
        aspect = image.width / image.height
        return min(self.sizes, key=lambda size: abs(size.width / size.height - aspect))

    def within(self, image: Size) -> Size | None:
        """The bucket of an image that must not be enlarged; None: it is smaller than a step."""
        if not self.buckets:
            return self.resolution if self.resolution.fits(image) else None
        resized = self._reduced(image)
        height, width = (side - side % self.step for side in (resized.height, resized.width))
        return Size(height, width) if height and width else None

    def resized(self, image: Size, bucket: Size, *, upscale: bool) -> Size:
        """Size that an image is resized to before its middle is cut out."""
        if not upscale and self.buckets:
            return self._reduced(image)
        is_wider = image.width / image.height > bucket.width / bucket.height
        scale = bucket.height / image.height if is_wider else bucket.width / image.width
        return Size(int(image.height * scale + 0.5), int(image.width * scale + 0.5))

    @property
    def _limits(self) -> tuple[int, int]:
        """The shortest side rounded down to a step, the longest up."""
        return self.min_side // self.step * self.step, -(-self.max_side // self.step) * self.step

    def _reduced(self, image: Size) -> Size:
        """An image of at most the area of the resolution, one side on the grid."""
        area = self.resolution.area
        if image.area <= area:
            return image
        aspect = image.width / image.height
        width = math.sqrt(area * aspect)
        across, down = self._rounded(width), self._rounded(area / width)
        by_width = across / (self._rounded(across / aspect) or 1)
        by_height = self._rounded(down * aspect) / (down or 1)
        if abs(by_width - aspect) < abs(by_height - aspect):
            return Size(max(int(across / aspect + 0.5), 1), max(across, 1))
        return Size(max(down, 1), max(int(down * aspect + 0.5), 1))

    def _rounded(self, side: float) -> int:
        pixels = int(side + 0.5)
        return pixels - pixels % self.step


def letterbox(image: Size, bucket: Size) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the image inside its bucket, as ``get_crop_ltrb`` gives them to SDXL."""
    aspect = image.width / image.height
    if bucket.width / bucket.height > aspect:
        width, height = bucket.height * aspect, float(bucket.height)
    else:
        width, height = float(bucket.width), bucket.width / aspect
    left, top = (bucket.width - width) // 2, (bucket.height - height) // 2
    return left, top, left + width, top + height

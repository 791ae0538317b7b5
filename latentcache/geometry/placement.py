"""Place one image in a bucket. Build, verify and loader all ask here, once, and store the answer.

Guarantee: exact integers on every machine; the resized image always covers the bucket; the crop is centered
and inside the resized image. Two functions that each did this their own way gave SimpleTuner shape mismatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from latentcache.geometry.buckets import BucketTable, kept
from latentcache.geometry.sizes import Box, Size, ceil_div

#: An image of which less than 1/4 is left after the crop is rejected.
MIN_KEPT = (1, 4)
#: An image whose shorter side has fewer pixels is rejected.
MIN_SIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resize to ``resize``, then cut ``crop`` (whose size is ``bucket``). All in pixels."""

    bucket: Size
    resize: Size
    crop: Box


def place(image: Size, table: BucketTable) -> Placement:
    """Place one image (size after EXIF orientation) in the table's best bucket."""
    return place_in(image, table.nearest(image))


def place_in(image: Size, bucket: Size) -> Placement:
    """Cover-resize to ``bucket`` and crop the middle; the longer overhang loses one pixel more at the end."""
    if image.width * bucket.height >= bucket.width * image.height:
        resize = Size(bucket.height, ceil_div(image.width * bucket.height, image.height))
    else:
        resize = Size(ceil_div(image.height * bucket.width, image.width), bucket.width)
    top, left = (resize.height - bucket.height) // 2, (resize.width - bucket.width) // 2
    return Placement(bucket=bucket, resize=resize, crop=Box(top=top, left=left, size=bucket))


def flipped(placement: Placement) -> Placement:
    """The same crop in the horizontal flip: its distance from the right edge becomes the one from the left.

    SDXL is given the crop of the flipped image; sd-scripts does the same in the frame of its own ``crop_ltrb``
    (``library/train_util.py``, if ``flipped`` is true).
    """
    crop, resize = placement.crop, placement.resize
    left = resize.width - crop.left - crop.size.width
    return Placement(bucket=placement.bucket, resize=resize, crop=Box(top=crop.top, left=left, size=crop.size))


def unusable(image: Size, table: BucketTable) -> str:
    """Reason why an image of this size cannot be used: ``extreme-aspect``, ``too-small``; empty: it can."""
    numerator, denominator = kept(image, table.nearest(image))
    if numerator * MIN_KEPT[1] < denominator * MIN_KEPT[0]:
        return "extreme-aspect"
    return "too-small" if min(image.height, image.width) < MIN_SIDE else ""

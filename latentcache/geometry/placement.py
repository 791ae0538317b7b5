"""How one picture enters a bucket. Build, verify and loader all ask here, once, and store the answer.

Guarantee: exact integers on every machine; the resized picture always covers the bucket; the crop is centred
and lies inside it. Reports R5 (SimpleTuner) came from two functions that each did this their own way.
"""

from __future__ import annotations

from dataclasses import dataclass

from latentcache.geometry.buckets import BucketTable, kept
from latentcache.geometry.sizes import Box, Size, ceil_div

#: A picture of which less than 1/4 would survive the crop is refused: it would train on a sliver.
MIN_KEPT = (1, 4)
#: A picture whose shorter side has fewer pixels is refused: there is nothing in it to learn from.
MIN_SIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resize to ``resize``, then cut ``crop`` (whose size is ``bucket``). All in pixels."""

    bucket: Size
    resize: Size
    crop: Box


def place(image: Size, table: BucketTable) -> Placement:
    """Decide how one picture (size after EXIF orientation) enters the table's best bucket."""
    return place_in(image, table.nearest(image))


def place_in(image: Size, bucket: Size) -> Placement:
    """Cover-resize to ``bucket`` and crop the middle; the longer overhang loses one pixel more at the end."""
    if image.width * bucket.height >= bucket.width * image.height:
        resize = Size(bucket.height, ceil_div(image.width * bucket.height, image.height))
    else:
        resize = Size(ceil_div(image.height * bucket.width, image.width), bucket.width)
    top, left = (resize.height - bucket.height) // 2, (resize.width - bucket.width) // 2
    return Placement(bucket=bucket, resize=resize, crop=Box(top=top, left=left, size=bucket))


def mirrored(placement: Placement) -> Placement:
    """Where the same cut lies in the mirrored picture: as far from the right edge as it was from the left.

    What SDXL is told of a mirrored picture is the crop of the mirrored picture; sd-scripts does alike, in the frame
    of its own ``crop_ltrb`` (``library/train_util.py``, where ``flipped`` is true).
    """
    crop, resize = placement.crop, placement.resize
    left = resize.width - crop.left - crop.size.width
    return Placement(bucket=placement.bucket, resize=resize, crop=Box(top=crop.top, left=left, size=crop.size))


def refusal(image: Size, table: BucketTable) -> str:
    """Why a picture of this size cannot be used: ``extreme-aspect``, ``too-small``, or empty when it can."""
    numerator, denominator = kept(image, table.nearest(image))
    if numerator * MIN_KEPT[1] < denominator * MIN_KEPT[0]:
        return "extreme-aspect"
    return "too-small" if min(image.height, image.width) < MIN_SIDE else ""

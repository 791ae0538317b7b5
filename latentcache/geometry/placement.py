"""Place one image in a bucket. Build, verify and loader all ask here, once, and store the answer.

Guarantee: exact integers on every machine; the resized image always covers the bucket; the crop is inside the resized
image, where its rule says. Two functions that each did this their own way gave SimpleTuner shape mismatches.
"""

from __future__ import annotations

from dataclasses import replace

from latentcache.geometry.buckets import kept
from latentcache.geometry.sizes import Size, ceil_div
from latentcache.value import Value

#: An image of which less than 1/4 is left after the crop is rejected.
MIN_KEPT = (1, 4)
#: An image whose shorter side has fewer pixels is rejected.
MIN_SIDE = 16


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
    top, left = (0 if crop == "top" else below // 2), right // 2
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

"""Resize decoded pixels and crop them to a bucket, as the placement says.

Guarantee: the result has exactly the size of the bucket. An image that already has the resized size is not resampled.
Both kernels are 8-bit Lanczos with antialiasing. They differ by at most two levels in less than 1 % of samples; a
self-test checks this before torch is used. Costs for 12 MP to 1 MP on one core: about 20 ms with torch, 140 ms with
Pillow. Both release the GIL. Torch is imported at its use, because the import takes 5 s and not every build needs it.
"""

from __future__ import annotations

import sys
import threading
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentcache.errors import RecipeError
from latentcache.geometry.sizes import Placement, Size
from latentcache.identity.content import content_hash

#: The two kernels agree if no sample differs by more levels, and no larger fraction of samples differs at all.
MAX_LEVELS, MAX_FRACTION = 2, 0.01
_TESTED = Size(56, 40), Size(201, 150)

_THREADS = threading.Lock()


def resize_crop(pixels: NDArray[np.uint8], placement: Placement, resample: str) -> NDArray[np.uint8]:
    """Resize RGB pixels (H, W, 3) to ``placement.resize`` and crop ``placement.bucket`` (h, w, 3) from them.

    ``resample`` is ``lanczos-pil`` or ``lanczos-u8``, as in the pixel profile; raises RecipeError for another word.
    """
    if resample not in ("lanczos-pil", "lanczos-u8"):
        raise RecipeError(f"resample={resample!r}: not a known kernel", fix="use lanczos-pil or lanczos-u8")
    if pixels.shape[:2] != (placement.resize.height, placement.resize.width):
        pixels = (_pillow if resample == "lanczos-pil" else _torch)(pixels, placement.resize)
    top, left, size = placement.top, placement.left, placement.bucket
    return np.ascontiguousarray(pixels[top : top + size.height, left : left + size.width])


def pixel_hash(pixels: NDArray[np.uint8]) -> bytes:
    """xxh3-128 of the shape (3 x u32, little endian) and of the xxh3-128 of the bytes: 16 bytes.

    Equal for two files that differ only in metadata.
    """
    body = content_hash(np.ascontiguousarray(pixels).data.cast("B"))
    return content_hash(np.array(pixels.shape, "<u4").tobytes() + body)


@lru_cache(maxsize=1)
def resample_self_test() -> bool:
    """True if torch has a Lanczos kernel for uint8 that agrees with Pillow's; tested once per process.

    False for torch before 2.13, and if the code path of the processor gives other pixels. Imports torch.
    """
    y, x = np.mgrid[0:131, 0:97]
    waves = 120 + 100 * np.sin(x * y / 300)
    image = np.stack([waves, (x * 5 + y * 3) % 256, 255 * ((x // 9 + y // 7) % 2)], -1).astype(np.uint8)
    try:
        differences = [np.abs(_torch(image, size).astype(np.int16) - _pillow(image, size)) for size in _TESTED]
        return all(
            difference.max() <= MAX_LEVELS and np.count_nonzero(difference) <= MAX_FRACTION * difference.size
            for difference in differences
        )
    except (NotImplementedError, ValueError, RuntimeError):
        return False


def thread_setup() -> None:
    """Keep torch from starting helper threads in the calling thread; to be called first in every decode thread.

    ``torch.set_num_threads`` also sets the value that threads inherit at their first use of torch; a short-lived
    thread restores that. Does nothing while torch is not imported.
    """
    if "torch" not in sys.modules:
        return
    import torch  # waits for a thread that is importing it

    with _THREADS:
        threads = torch.get_num_threads()
        if threads > 1:
            torch.set_num_threads(1)
            keeper = threading.Thread(target=torch.set_num_threads, args=(threads,))
            keeper.start()
            keeper.join()


def _pillow(pixels: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(pixels).resize((size.width, size.height), Image.Resampling.LANCZOS))


def _torch(pixels: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """The uint8 Lanczos of torch on the whole frame; the pixels are a channels-last tensor already."""
    import torch
    from torch.nn.functional import interpolate

    frame = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
    planes = interpolate(frame, size=(size.height, size.width), mode="lanczos", antialias=True)[0]
    result: NDArray[np.uint8] = np.stack(list(planes.numpy()), axis=-1)  # quicker than to copy permuted planes
    return result

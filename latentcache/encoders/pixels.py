"""Decode, resize, crop and flip the images of a job, for every field that is made of pixels.

Guarantee: an image file is decoded once for all its items of a field. An unusable file becomes a failure with its
reason. A mask or control image gets the size, the crops and the flips of its sample's image. Decoding runs in any
number of threads, because simplejpeg, Pillow and torch's resize release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentcache.errors import UnusableSampleError
from latentcache.fields.clips import CLIP
from latentcache.fields.latents import MAX_PIXELS, GeometrySettings, LatentsRecipe, crop_draw
from latentcache.fields.protocol import Group, Job, Made, Output, Prepared, Producer, ProducerContext
from latentcache.geometry.sizes import Placement, Size, flipped, place_in
from latentcache.identity.content import content_hash
from latentcache.images.clips import EncodedClip
from latentcache.images.decode import EncodedImage, cut, encoded_file
from latentcache.images.resize import pixel_hash
from latentcache.sources.causes import fault, hint_for
from latentcache.sources.formats.archives import close_tables
from latentcache.sources.locations import bytes_of

Pixels = NDArray[np.uint8]
"""RGB pixels, (B, H, W, 3), C-contiguous: the bytes of a channels-last (B, 3, H, W) tensor."""

#: Bytes that decoding and resizing hold per source pixel at their peak, beside the file: measured on 16 megapixels,
#: the most expensive kind of each format (JPEG: CMYK 11.4; WebP with alpha 24.4; PNG RGBA 16.4).
_JPEG_BYTES, _MOST_BYTES = 12, 25


class PixelProducer(Producer):
    """Base of producers that encode the pixels of buckets."""

    def __init__(self, producer: Mapping[str, Any], recipe: LatentsRecipe, context: ProducerContext) -> None:
        self._recipe, self._context, self._groups = recipe, context, context.groups
        self._max_pixels = int(context.options.get("max_pixels", MAX_PIXELS))

    def prepare(self, job: Job, data: Mapping[str, bytes]) -> list[Prepared]:
        """See :class:`Producer`."""
        if not data:
            return self._without(job)
        images = list[EncodedImage | EncodedClip]()
        try:
            for value in data.values():
                images.append(encoded_file(value, max_pixels=self._max_pixels))
                if len(images) == 1:
                    _check_size(job, images[0])
            return self._items(job, images, data["image"])
        except UnusableSampleError as error:
            number = min(len(images), len(data) - 1)
            if number:
                error.what = f"{list(job.inputs.values())[number]['path']}: {error.what}"
            raise
        except MemoryError as error:
            raise fault("out-of-memory", "there is not enough memory to decode it") from error

    def source_pixels(self, job: Job, image: EncodedImage) -> NDArray[np.uint8]:
        """Decode (H, W, 3) of the image that the items of a job are made of."""
        return image.pixels(self._recipe.pixels)

    def host_bytes(self, job: Job) -> int:
        """Estimate the bytes of file, decoded image and crops at the peak of decoding."""
        crops = 3 * int(sum(np.prod(self._groups[output.group].dims) for output in job.outputs))
        height, width = (int(side) for side in job.sample_columns.get("original_size", (0, 0)))
        source = list(job.inputs.values())[-1]
        if source is None:
            return crops
        pixel_bytes = _JPEG_BYTES if source["path"].lower().endswith((".jpg", ".jpeg")) else _MOST_BYTES
        return pixel_bytes * height * width + bytes_of(self._context.root, source) + crops

    def close(self) -> None:
        """Close files."""
        close_tables()

    def _without(self, job: Job) -> list[Prepared]:
        """Give white pixels for a sample that lacks an optional image, such as a mask."""
        items = []
        for output in job.outputs:
            bucket = Size(*self._groups[output.group].dims[1:])
            pixels = np.full((bucket.height, bucket.width, 3), 255, dtype=np.uint8)
            items.append(_prepared(output, pixels, place_in(bucket, bucket), scaled=False))
        return items

    def _items(self, job: Job, images: Sequence[EncodedImage | EncodedClip], data: bytes) -> list[Prepared]:
        """Decode the last image once, crop it once for each placement, and flip the crop of a flipped variant."""
        geometry = self._recipe.geometry
        size = images[0].size
        source = images[-1]
        content = content_hash(data) if geometry.crop == "random" else b""
        placements = [
            _placement(output, self._groups[output.group], size, content, geometry) for output in job.outputs
        ]
        decoded = self.source_pixels(job, source) if isinstance(source, EncodedImage) else None
        frames = self._groups[job.outputs[0].group].dims[0]
        crops = cut(source, dict.fromkeys(placements), frames, self._recipe, decoded)
        items = []
        for output, upright in zip(job.outputs, placements, strict=True):
            pixels = crops[upright]
            placement = upright
            if geometry.flips(output.variant):
                pixels = np.ascontiguousarray(pixels[..., ::-1, :])
                placement = flipped(upright)
            items.append(_prepared(output, pixels, placement, scaled=source.size != size))
        return items


def _check_size(job: Job, image: EncodedImage | EncodedClip) -> None:
    """Reject a file whose header has another size or length than the plan was made for: it has changed."""
    frames = image.clip[:1] if isinstance(image, EncodedClip) else ()
    planned = [int(side) for side in job.sample_columns.get("original_size", ())]
    planned = [*map(int, filter(None, job.sample_columns.get(CLIP, ())[:1])), *planned]
    present = [*frames, image.size.height, image.size.width]
    if len(planned) > 1 and planned != present:
        was, now = ("x".join(map(str, sides)) for sides in (planned, present))
        detail = f"it was {was} when the build was planned and is {now} now"
        raise UnusableSampleError(detail, fix=hint_for("changing"), slug="changing")


def _prepared(output: Output, pixels: Pixels, placement: Placement, *, scaled: bool) -> Prepared:
    crop, resize = (placement.top, placement.left), (placement.resize.height, placement.resize.width)
    columns = {"crop": crop, "resize": resize, "scaled": int(scaled)}
    return Prepared(output=output, value=pixels, same=pixel_hash(pixels), columns=columns, num_bytes=pixels.nbytes)


def _placement(output: Output, group: Group, size: Size, content: bytes, geometry: GeometrySettings) -> Placement:
    """Place an item before any flip: as stored if it is made again to be compared, else by today's rule."""
    bucket = Size(*group.dims[1:])
    if "crop" not in output.columns:
        return geometry.place(size, bucket, crop_draw(content, output.variant % geometry.crops))
    (top, left), resize = (int(value) for value in output.columns["crop"]), output.columns["resize"]
    stored = Placement(bucket=bucket, resize=Size(*map(int, resize)), top=top, left=left)
    return flipped(stored) if geometry.flips(output.variant) else stored


class MaskProducer(PixelProducer):
    """Masks of a bucket."""

    def source_pixels(self, job: Job, image: EncodedImage) -> NDArray[np.uint8]:
        """(H, W, 3) of the mask: its colors, or the transparency of an image that is its own mask."""
        is_its_own_mask = len({location["path"] for location in job.inputs.values()}) == 1
        return image.opacity() if is_its_own_mask else super().source_pixels(job, image)

    def encode(self, batch: Sequence[Prepared]) -> list[Made]:
        """See :class:`Producer`. Items of one group."""
        group = self._groups[batch[0].output.group]
        images = (item.value.reshape(*group.dims[1:], 3) for item in batch)  # a clip of one frame as well
        cells = (cell_means(image, self._recipe.encoder.factor) for image in images)
        return [Made(array=array.reshape(group.shape)) for array in cells]


def cell_means(pixels: Pixels, factor: int) -> NDArray[np.uint8]:
    """Mean gray (Pillow's ``L``) of each latent cell of (H, W, 3), rounded: (1, H / factor, W / factor)."""
    gray = np.asarray(Image.fromarray(pixels).convert("L"))
    height, width = gray.shape
    cells = gray.reshape(1, height // factor, factor, width // factor, factor).mean(axis=(2, 4))
    return np.asarray(np.rint(cells), dtype=np.uint8)

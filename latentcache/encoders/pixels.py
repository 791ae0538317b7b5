"""Read, hash, decode, resize, crop and flip the images of a job, for every field that is made of pixels.

Guarantee: an image file is read once and decoded once for all its items of a field; the key's content is the hash of
the bytes that were read; an unusable file becomes a failure with its reason. A mask or control image is resized to
the size that the image of its sample is resized to, and gets the same crops and flips. Decoding runs in any number of
threads: simplejpeg, Pillow and torch's resize release the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.clips import CLIP
from latentcache.fields.latents import MAX_PIXELS, GeometrySettings, LatentsRecipe, crop_draw
from latentcache.fields.protocol import Failure, Group, Job, Output, Prepared, Producer, ProducerContext, Read
from latentcache.fields.table import STAT_WIDTH, stat_numbers
from latentcache.geometry.placement import Placement, flipped, place_in
from latentcache.geometry.sizes import Size
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.images.clips import EncodedClip
from latentcache.images.decode import EncodedImage, cut, encoded_file
from latentcache.images.headers import image_size
from latentcache.images.resize import pixel_hash, thread_setup
from latentcache.sources.archives.members import close_tables, open_image, read_image
from latentcache.sources.causes import hint_for

Pixels = NDArray[np.uint8]
"""RGB pixels, (B, H, W, 3), C-contiguous: the bytes of a channels-last (B, 3, H, W) tensor."""

#: Bytes that decoding and resizing hold per source pixel at their peak, beside the file, by its first bytes: measured
#: on 16 megapixels, the most expensive kind of each format (JPEG: CMYK 11.4; WebP with alpha 24.4; PNG RGBA 16.4).
_DECODE_BYTES = {b"\xff\xd8": 12, b"RIFF": 25}
_MOST_BYTES, _OTHER_BYTES = 25, 17
_BOXED = b"ftyp"
_HEAD_BYTES = 12
#: RGB, one byte each.
_RGB_BYTES = 3


@dataclass(slots=True)
class _Inputs:
    """The image files of a job, as far as they are read."""

    job: Job
    contents: bytes = b""
    stat: tuple[int, ...] = ()
    images: list[EncodedImage | EncodedClip] = field(default_factory=list)

    def read(self, root: str, max_pixels: int) -> None:
        """Read them in the order of the kind's inputs; the items are made of the last one."""
        for place in self.job.inputs.values():
            data, memo = read_image(root, place)
            self.contents += content_hash(data)
            self.stat += stat_numbers(memo)
            image = encoded_file(data, max_pixels=max_pixels)
            if not self.images:
                _check_size(self.job, image)
            self.images.append(image)

    @property
    def failing(self) -> str:
        """Name of the file that an error is about, for messages; empty for the image of the sample."""
        paths = [place["path"] for place in self.job.inputs.values()]
        number = min(len(self.images), len(paths) - 1)
        return f"{paths[number]}: " if number else ""

    @property
    def content(self) -> bytes:
        """What keys are made from; empty if a file was not read."""
        several = len(self.job.inputs) > 1
        if len(self.contents) < HASH_BYTES * len(self.job.inputs):
            return b""
        return content_hash(self.contents) if several else self.contents

    def failure(self, reason: str, detail: str, hint: str) -> Failure:
        """Why the job gives no item."""
        whole = self.contents if len(self.job.inputs) > 1 and self.content else b""
        return Failure(reason=reason, detail=detail, hint=hint, content=self.content, stat=self.stat, contents=whole)


class PixelProducer(Producer):
    """Base of producers that encode the pixels of buckets."""

    def __init__(self, producer: Mapping[str, Any], recipe: LatentsRecipe, context: ProducerContext) -> None:
        self._recipe, self._context, self._groups = recipe, context, context.groups
        self._max_pixels = int(context.options.get("max_pixels", MAX_PIXELS))
        self._local, self._encodes = threading.local(), threading.get_ident()

    def prepare(self, job: Job) -> Read | Failure:
        """See :class:`Producer`."""
        if None in job.inputs.values():
            return self._without(job)
        files = _Inputs(job)
        try:
            files.read(self._context.root, self._max_pixels)
            size, content = files.images[0].size, files.content
            outputs = self._context.missing(job, content)
            items = self._items(files, outputs) if outputs else []
        except UnusableSampleError as error:
            detail = "; ".join(part for part in (error.what, error.why) if part)
            return files.failure(error.slug, files.failing + detail, error.fix)
        except MemoryError:
            return files.failure(
                "out-of-memory", "there is not enough memory to decode it", hint_for("out-of-memory")
            )
        several = files.contents if len(job.inputs) > 1 else b""
        facts = {"original_size": (size.height, size.width)}
        return Read(content=content, stat=files.stat, contents=several, facts=facts, items=items)

    def own_pixels(self, job: Job, image: EncodedImage) -> NDArray[np.uint8]:
        """(H, W, 3) of the image that the items of a job are made of."""
        return image.pixels(self._recipe.pixels)

    def host_bytes(self, job: Job) -> int:
        """File, decoded image and crops at the peak of decoding."""
        crops = _RGB_BYTES * int(sum(np.prod(self._groups[output.group].dims) for output in job.outputs))
        height, width = (int(side) for side in job.facts.get("original_size", (0, 0)))
        place = list(job.inputs.values())[-1]
        if place is None:
            return crops
        try:
            with open_image(self._context.root, place) as file:
                each = bytes_per_pixel(file.read(_HEAD_BYTES))
                size = file.seek(0, 2)
                if len(job.inputs) > 1:
                    file.seek(0)
                    own = image_size(file, max_pixels=self._max_pixels)
                    height, width = own.height, own.width
        except (OSError, UnusableSampleError):
            each, size = _MOST_BYTES, 0  # prepare gives the reason
        return each * height * width + size + crops

    def close(self) -> None:
        """Close files."""
        close_tables()

    def _without(self, job: Job) -> Read:
        """White pixels for a sample whose image is not there and not needed; no file is read."""
        items = []
        for output in self._context.missing(job, job.content):
            bucket = Size(*self._groups[output.group].dims[1:])
            pixels = np.full((bucket.height, bucket.width, 3), 255, dtype=np.uint8)
            items.append(_prepared(output, pixels, place_in(bucket, bucket), scaled=False))
        contents, stat = bytes(HASH_BYTES * len(job.inputs)), (0,) * STAT_WIDTH * len(job.inputs)
        facts = {"original_size": job.facts["original_size"]}
        return Read(content=job.content, contents=contents, stat=stat, facts=facts, items=items)

    def _items(self, files: _Inputs, outputs: Sequence[Output]) -> list[Prepared]:
        """Decode once, crop once for each group and place, flip the crop for the second half of the variants."""
        self._set_up_thread()
        geometry = self._recipe.geometry
        size, content, source = files.images[0].size, files.contents[:HASH_BYTES], files.images[-1]
        groups = [self._groups[output.group] for output in outputs]
        places = [
            _placement(output, group, size, content, geometry) for output, group in zip(outputs, groups, strict=True)
        ]
        own = self.own_pixels(files.job, source) if isinstance(source, EncodedImage) else None
        crops = cut(source, dict.fromkeys(places), groups[0].dims[0], self._recipe, own)
        items = []
        for output, upright in zip(outputs, places, strict=True):
            pixels, placement = crops[upright], upright
            if geometry.flips(output.variant):
                pixels, placement = np.ascontiguousarray(pixels[..., ::-1, :]), flipped(upright)
            items.append(_prepared(output, pixels, placement, scaled=source.size != size))
        return items

    def _set_up_thread(self) -> None:
        """With its first image, unless the calling thread also encodes."""
        if not hasattr(self._local, "is_set_up"):
            if threading.get_ident() != self._encodes:
                thread_setup()
            self._local.is_set_up = True


def bytes_per_pixel(head: bytes) -> int:
    """Bytes that decoding holds per pixel at its peak, beside the file; from the first 12 bytes of the file."""
    if head[4:8] == _BOXED:  # AVIF
        return _MOST_BYTES
    found = (size for magic, size in _DECODE_BYTES.items() if head.startswith(magic))
    return next(found, _OTHER_BYTES)


def _check_size(job: Job, image: EncodedImage | EncodedClip) -> None:
    """The plan was made for the size and the frames of the header; others mean another file."""
    frames = image.clip[:1] if isinstance(image, EncodedClip) else ()
    planned = [int(side) for side in job.facts.get("original_size", ())]
    planned = [*map(int, filter(None, job.facts.get(CLIP, ())[:1])), *planned]
    found = [*frames, image.size.height, image.size.width]
    if len(planned) > 1 and planned != found:
        was, now = ("x".join(map(str, one)) for one in (planned, found))
        detail = f"it was {was} when the build was planned and is {now} now"
        raise UnusableSampleError(detail, fix=hint_for("changing"), slug="changing")


def _prepared(output: Output, pixels: Pixels, placement: Placement, *, scaled: bool) -> Prepared:
    crop, resize = (placement.top, placement.left), (placement.resize.height, placement.resize.width)
    columns = {"crop": crop, "resize": resize, "scaled": int(scaled)}
    return Prepared(output=output, value=pixels, same=pixel_hash(pixels), columns=columns, num_bytes=pixels.nbytes)


def _placement(output: Output, group: Group, size: Size, content: bytes, geometry: GeometrySettings) -> Placement:
    """Upright placement of an item: as stored if it is made again, else by today's rule."""
    bucket, (step, variant) = Size(*group.dims[1:]), divmod(output.variant, geometry.variants)
    if "crop" not in output.columns:
        draw = step if geometry.crop == "focus" else crop_draw(content, variant % geometry.crops)
        return place_in(size, bucket, geometry.crop, draw)
    (top, left), resize = (int(value) for value in output.columns["crop"]), output.columns["resize"]
    stored = Placement(bucket=bucket, resize=Size(*map(int, resize)), top=top, left=left)
    return flipped(stored) if geometry.flips(output.variant) else stored

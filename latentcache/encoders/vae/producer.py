"""Make latents in a worker: read, hash, decode, crop, encode.

Guarantee: an image file is read once and decoded once for all its items; the key's content is the hash of the decoded
bytes; an unusable file becomes a failure with its reason; latents that are not finite are never stored and never
zeroed. Decoding runs in any number of threads: simplejpeg, Pillow and torch's resize release the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.protocol import EncodedBatch, Encoder, PendingBatch, Pixels, encode
from latentcache.encoders.vae.describe import ModelDescription
from latentcache.encoders.vae.opening import EXACT, check_encoder, measured_noise, open_encoder
from latentcache.encoders.vae.storage import drawn, encoded_channels, encoded_dtype
from latentcache.errors import DeviceMemoryError, EncoderError, UnusableSampleError, UsageError
from latentcache.fields.clips import CLIP
from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.latents import MAX_PIXELS, GeometrySettings, LatentsRecipe, crop_draw
from latentcache.fields.protocol import Failure, Group, Job, Made, Output, Prepared, Producer, ProducerContext, Read
from latentcache.fields.table import stat_numbers
from latentcache.geometry.placement import Placement, flipped, place_in
from latentcache.geometry.sizes import Box, Size, latent_size
from latentcache.identity.content import content_hash
from latentcache.images.clips import EncodedClip
from latentcache.images.cut import cut, encoded_file
from latentcache.images.decode import EncodedImage
from latentcache.images.headers import since_listed
from latentcache.images.resize import pixel_hash, resample_self_test, thread_setup
from latentcache.images.scratch import Scratch
from latentcache.sources.archives.members import close_tables, open_image, read_image
from latentcache.sources.causes import hint_for

#: Bytes that decoding and resizing hold per source pixel at their peak, beside the file, by its first bytes: measured
#: on 16 megapixels, the most expensive kind of each format (JPEG: CMYK 11.4; WebP with alpha 24.4; PNG RGBA 16.4).
_DECODE_BYTES = {b"\xff\xd8": 12, b"RIFF": 25}
_MOST_BYTES, _OTHER_BYTES = 25, 17
_BOXED = b"ftyp"
_HEAD_BYTES = 12
#: RGB, one byte each.
_RGB_BYTES = 3


@dataclass(frozen=True, slots=True)
class _Value:
    """What the encoder gets for one item."""

    pixels: Pixels
    """(H, W, 3); (F, H, W, 3) if the recipe has clips"""
    noise: bytes
    """Names the noise of a draw."""


class VaeProducer(Producer):
    """Latents of images.

    Args:
        producer: ``model``: ``ModelDescription.as_json()``; ``fold``.
        recipe: Of the cache.
        context: Of the worker; its options may have ``max_pixels``.

    Raises:
        UsageError: This machine cannot resize as the recipe does.
    """

    def __init__(self, producer: Mapping[str, Any], recipe: LatentsRecipe, context: ProducerContext) -> None:
        self._recipe, self._context, self._groups = recipe, context, context.groups
        self._max_pixels = int(context.options.get("max_pixels", MAX_PIXELS))
        self._local, self._encodes = threading.local(), threading.get_ident()
        self._description = replace(ModelDescription.from_json(producer["model"]), spec=recipe.encoder)
        self._fold = bool(producer["fold"]) and recipe.geometry.clips is None
        _check_resample(recipe)
        self._encoder: Encoder
        self._is_open = False

    def open(self) -> None:
        """See :class:`Producer`.

        Raises:
            EncoderError: The model cannot be used.
            DeviceError: The device does not exist or failed.
        """
        if self._is_open:
            return
        self._encoder = open_encoder(self._description, device=self._context.device, fold=self._fold)
        self._is_open, self.device, self.noise = True, self._encoder.device, EXACT
        if self._description.needs_torch:
            check_encoder(self._encoder)
            self.noise = measured_noise(self._encoder)

    def prepare(self, job: Job) -> Read | Failure:
        """See :class:`Producer`."""
        memo, content = tuple[int, ...](), b""
        try:
            data, found = read_image(self._context.root, job.inputs["image"])
            memo, content = stat_numbers(found), content_hash(data)
            image = encoded_file(data, max_pixels=self._max_pixels)
            self._check_size(job, image)
            outputs = self._context.missing(job, content)
            items = self._items(image, outputs, content) if outputs else []
        except UnusableSampleError as error:
            detail = "; ".join(part for part in (error.what, error.why) if part)
            reason, hint = since_listed(error)
            return Failure(reason=reason, detail=detail, hint=hint, content=content, stat=memo)
        except MemoryError:
            detail, hint = "there is not enough memory to decode it", hint_for("out-of-memory")
            return Failure(reason="out-of-memory", detail=detail, hint=hint, content=content, stat=memo)
        size = (image.size.height, image.size.width)
        return Read(content=content, stat=memo, facts={"original_size": size}, items=items)

    def encode(self, batch: Sequence[Prepared]) -> _Batch:
        """See :class:`Producer`. Items of one group."""
        self.open()
        values = [item.value for item in batch]
        return _Batch(values, self._encoder.submit([value.pixels for value in values]), self._made)

    def host_bytes(self, job: Job) -> int:
        """File, decoded image and crops at the peak of decoding."""
        height, width = (int(side) for side in job.facts.get("original_size", (0, 0)))
        try:
            with open_image(self._context.root, job.inputs["image"]) as file:
                each = bytes_per_pixel(file.read(_HEAD_BYTES))
                size = file.seek(0, 2)
        except (OSError, UnusableSampleError):
            each, size = _MOST_BYTES, 0  # prepare gives the reason
        crops = sum(np.prod(self._groups[output.group].dims) for output in job.outputs)
        return each * height * width + size + _RGB_BYTES * int(crops)

    def close(self) -> None:
        """Free the memory of the device, and close files."""
        close_tables()
        if self._is_open:
            self._encoder.close()

    def _check_size(self, job: Job, image: EncodedImage | EncodedClip) -> None:
        """The plan was made for the size and the frames of the header; others mean another file.

        Raises:
            UnusableSampleError: ``changing``.
        """
        frames = image.clip[:1] if isinstance(image, EncodedClip) else ()
        planned = [int(side) for side in job.facts.get("original_size", ())]
        planned = [*map(int, filter(None, job.facts.get(CLIP, ())[:1])), *planned]
        found = [*frames, image.size.height, image.size.width]
        if len(planned) > 1 and planned != found:
            was, now = ("x".join(map(str, one)) for one in (planned, found))
            detail = f"it was {was} when the build was planned and is {now} now"
            raise UnusableSampleError(detail, fix=hint_for("changing"), slug="changing")

    def _items(self, image: EncodedImage | EncodedClip, outputs: Sequence[Output], content: bytes) -> list[Prepared]:
        """Decode once, crop once for each group and place, flip the crop for the second half of the variants."""
        geometry, groups = self._recipe.geometry, [self._groups[output.group] for output in outputs]
        places = [
            _placement(output, group, image.size, content, geometry)
            for output, group in zip(outputs, groups, strict=True)
        ]
        crops = cut(image, dict.fromkeys(places), groups[0].dims[0], self._recipe, self._scratch())
        items = []
        for output, upright in zip(outputs, places, strict=True):
            pixels, placement = crops[upright], upright
            if geometry.flips(output.variant):
                pixels, placement = np.ascontiguousarray(pixels[..., ::-1, :]), flipped(upright)
            items.append(_prepared(output, pixels, placement))
        return items

    def _scratch(self) -> Scratch:
        """Memory of the calling thread; its first image also sets the thread up, if it does not encode."""
        if not hasattr(self._local, "scratch"):
            if threading.get_ident() != self._encodes:
                thread_setup()
            self._local.scratch = Scratch()
        scratch: Scratch = self._local.scratch
        return scratch

    def _made(self, values: Sequence[_Value], encoded: EncodedBatch) -> list[Made | Failure]:
        """Items that are finite; the others are encoded again, one by one: float32 needs twice the memory."""
        encoded = self._stored(values, encoded)
        return [
            Made(array=np.ascontiguousarray(latents)) if finite else self._precisely(value)
            for value, latents, finite in zip(values, encoded.latents, encoded.finite, strict=True)
        ]

    def _precisely(self, value: _Value) -> Made | Failure:
        """One item from float32 throughout, or why there is none."""
        try:
            encoded = self._stored([value], encode(self._encoder, [value.pixels], precise=True))
        except DeviceMemoryError as error:
            return _failure("out-of-memory", f"its latents are not finite, and in float32 {error.why or error.what}")
        if encoded.finite[0]:
            return Made(array=np.ascontiguousarray(encoded.latents[0]))
        if _is_only_too_large(encoded.latents):
            storage = self._recipe.encoder.storage_dtype
            return _failure("storage-overflow", f"values beyond the range of {storage}")
        return _failure("non-finite", "the encoder gives NaN or infinity for it, also in float32")

    def _stored(self, values: Sequence[_Value], encoded: EncodedBatch) -> EncodedBatch:
        """The stored form: the encoder's result, or one draw from it."""
        _check_encoded(self._encoder, values, encoded)
        if self._recipe.encoder.posterior != "sample":
            return encoded
        return drawn(encoded, [value.noise for value in values], self._recipe)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that the device has been given; see :class:`fields.protocol.Pending`."""

    values: Sequence[_Value]
    pending: PendingBatch
    made: Callable[[Sequence[_Value], EncodedBatch], list[Made | Failure]]

    def done(self) -> bool:
        """True if ``result`` would return at once."""
        return self.pending.done()

    def result(self) -> list[Made | Failure]:
        """One per item, in order."""
        return self.made(self.values, self.pending.result())


def bytes_per_pixel(head: bytes) -> int:
    """Bytes that decoding holds per pixel at its peak, beside the file; from the first 12 bytes of the file."""
    if head[4:8] == _BOXED:  # AVIF
        return _MOST_BYTES
    found = (size for magic, size in _DECODE_BYTES.items() if head.startswith(magic))
    return next(found, _OTHER_BYTES)


def _prepared(output: Output, pixels: Pixels, placement: Placement) -> Prepared:
    same, crop, resize = pixel_hash(pixels), placement.crop, placement.resize
    return Prepared(
        output=output,
        value=_Value(pixels, output.same or same),
        same=same,
        columns={"crop": (crop.top, crop.left), "resize": (resize.height, resize.width)},
        num_bytes=pixels.nbytes,
    )


def _placement(output: Output, group: Group, size: Size, content: bytes, geometry: GeometrySettings) -> Placement:
    """Upright placement of an item: as stored if it is made again, else by today's rule."""
    bucket, (step, variant) = Size(*group.dims[1:]), divmod(output.variant, geometry.variants)
    if not output.columns:
        draw = step if geometry.crop == "focus" else crop_draw(content, variant % geometry.crops)
        return place_in(size, bucket, geometry.crop, draw)
    (top, left), resize = (int(value) for value in output.columns["crop"]), output.columns["resize"]
    stored = Placement(bucket=bucket, resize=Size(*map(int, resize)), crop=Box(top=top, left=left, size=bucket))
    return flipped(stored) if geometry.flips(output.variant) else stored


def _check_resample(recipe: LatentsRecipe) -> None:
    """Check that this machine can resize as the recipe does.

    Raises:
        UsageError: torch here has no uint8 Lanczos, or one that disagrees with Pillow.
    """
    if recipe.pixels.resample == "lanczos-u8" and not resample_self_test():
        raise UsageError(
            "--resample lanczos-u8: not possible on this machine",
            why="torch has no uint8 Lanczos here, or it disagrees with Pillow in the self-test",
            fix="install torch 2.13 or newer, or use --resample lanczos-pil (encodes everything again)",
        )


def _check_encoded(encoder: Encoder, values: Sequence[_Value], encoded: EncodedBatch) -> None:
    """Check shape and type.

    Raises:
        EncoderError: They are not those of geometry and recipe: a fault of the encoder, not of a file.
    """
    spec = encoder.spec
    cells = latent_size(Size(*values[0].pixels.shape[-3:-1]), spec.factor)
    expected = (len(values), encoded_channels(spec), cells.height, cells.width)
    shape, dtype = encoded.latents.shape, numpy_dtype(encoded_dtype(spec))
    found = (*shape[:2], *shape[-2:])  # frames of a latent are those of its group: the engine compares
    if found != expected or encoded.latents.dtype != dtype or encoded.finite.shape != expected[:1]:
        raise EncoderError(
            "the encoder gives latents of another shape or type than its description",
            where=spec.family,
            why=f"expected {expected} of {dtype}, found {found} of {encoded.latents.dtype}",
            fix="report this model: its row in encoders/vae/families.py is wrong",
        )


def _failure(reason: str, detail: str) -> Failure:
    return Failure(reason=reason, detail=detail, hint=hint_for(reason))


def _is_only_too_large(latents: NDArray[Any]) -> bool:
    """True if values were finite until they were stored as float16; bfloat16 has float32's range."""
    return latents.dtype == np.float16 and not np.isnan(latents).any()

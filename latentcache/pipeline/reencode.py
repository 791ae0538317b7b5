"""Encodes stored samples again, as a build would today: for ``verify --reencode``, which compares.

Decides how a recorded model is found and asked for again: by the name in the manifest (or another place of it), in
the precision of the recipe. Guarantee: pictures are cut where they were cut then, not where today's rule would, and a
draw from a posterior has the noise of the pixels of then: what differs is decoding or encoding. Nothing is written.
Cost: the model is opened at the first picture; one picture's pixels per entry of a chunk are held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.describe import ModelDescription, cuda_available, describe_model
from latentcache.encoders.opening import check_encoder, open_encoder
from latentcache.encoders.protocol import Encoder
from latentcache.errors import ModelNotFoundError, UnusableSampleError
from latentcache.geometry.placement import Placement, mirrored
from latentcache.geometry.sizes import Box, Size
from latentcache.identity.content import content_hash
from latentcache.identity.key import FLIPPED, VARIANT_BYTE
from latentcache.pipeline.batch_size import BatchSizes
from latentcache.pipeline.decode import decode
from latentcache.pipeline.encoding import BatchEncoder
from latentcache.pipeline.preflight import check_resample
from latentcache.pipeline.resize import pixel_hash, resize_crop
from latentcache.pipeline.work import Piece
from latentcache.recipe import EncoderSpec
from latentcache.sources.reading import read_source
from latentcache.store.entry import HEADER_BYTES, payload_array, unpack_header
from latentcache.store.generation import Generation

#: Pictures per encoder call: half of what a build takes, because it may run beside a training.
BATCH = 4
_NOTHING: NDArray[Any] = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """One entry, encoded again: what ``verify.drift`` compares."""

    row: int
    latents: NDArray[Any] = field(default_factory=lambda: _NOTHING)
    """(C, H/f, W/f) in the storage type."""
    same_pixels: bool = True
    cause: str = ""
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class Reencoder:
    """Opens the model of a generation and encodes with it. Use as a context: leaving it gives the memory back.

    Args:
        model: Where the model is, where it is not the recorded place.
        config: The configuration of a lone weights file, where it is not the recorded one.
        device: ``auto``, ``cpu`` or a torch device.
        batch_size: Pictures per encoder call at most.
    """

    model: str | None = None
    config: str | None = None
    device_name: str = "auto"
    batch_size: int = BATCH
    _description: ModelDescription | None = None
    _encoder: Encoder | None = None

    def __enter__(self) -> Reencoder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None

    @property
    def device(self) -> str:
        """Where the encoder runs; empty until it is open."""
        return self._encoder.device if self._encoder is not None else ""

    def spec(self, generation: Generation) -> EncoderSpec:
        """What the model is now: its files are read, it is not loaded.

        Raises:
            EncoderError: It is not at hand, or cannot be used.
        """
        return self._described(generation).spec

    def encode(self, generation: Generation, root: Path, rows: Sequence[int]) -> Iterator[Fresh]:
        """Encode the sources of these rows again, in any order; one that cannot be encoded says why.

        Raises:
            EncoderError: The model cannot be used.
            DeviceError: The device failed, or is not there.
            UsageError: This machine cannot resize as the recipe does.
        """
        check_resample(generation.recipe)
        pieces: list[tuple[int, Piece, bool]] = []
        for sample, own in groupby(_by_sample(generation, rows), key=lambda row: int(generation.rows.sample[row])):
            yield from _cut(generation, root, sample, list(own), pieces)
        pieces.sort(key=lambda item: item[1].placement.bucket)
        for _, group in groupby(pieces, key=lambda item: item[1].placement.bucket):
            yield from self._encoded(generation, list(group))

    def _encoded(self, generation: Generation, group: Sequence[tuple[int, Piece, bool]]) -> Iterator[Fresh]:
        """Entries of one bucket."""
        refused: dict[str, tuple[str, str]] = {}
        batches = BatchEncoder(
            encoder=self._opened(generation),
            recipe=generation.recipe,
            sizes=BatchSizes(self.batch_size),
            refuse=lambda piece, cause, detail: refused.update({piece.name: (cause, detail)}),
            warn=lambda _: None,
        )
        made = {entry.key: bytes(entry.value) for entry in batches.encode([piece for _, piece, _ in group])}
        for row, piece, same in group:
            value = made.get(piece.key)
            if value is None:
                cause, detail = refused.get(piece.name, ("not-encoded", "the encoder gave nothing for it"))
                yield Fresh(row=row, cause=cause, detail=detail)
                continue
            header = unpack_header(value[:HEADER_BYTES], piece.key)
            yield Fresh(row=row, latents=payload_array(header, value[HEADER_BYTES:]), same_pixels=same)

    def _described(self, generation: Generation) -> ModelDescription:
        if self._description is None:
            self._description = _describe(generation, self.model, self.config, self.device_name)
        return self._description

    def _opened(self, generation: Generation) -> Encoder:
        if self._encoder is None:
            description = self._described(generation)
            fold = bool(generation.manifest["provenance"].get("fold", True))
            self._encoder = open_encoder(description, device=self.device_name, fold=fold)
            if description.kind == "diffusers":
                check_encoder(self._encoder)
        return self._encoder


def _describe(generation: Generation, model: str | None, config: str | None, device: str) -> ModelDescription:
    """The model of a generation as it is now, in the precision of the generation."""
    made, spec = generation.manifest["provenance"], generation.recipe.encoder
    try:
        return describe_model(
            model or str(made["model"]),
            compute_dtype=spec.compute_dtype,
            storage_dtype=spec.storage_dtype,
            posterior=spec.posterior,
            tiling=spec.tiling,
            config=config or (made.get("model_config") if model is None else None),
            device=device,
            has_cuda=cuda_available(),
        )
    except ModelNotFoundError as error:
        if model is None:
            error.fix = "say where it is now with --model; without --reencode a check needs no model"
        raise


def _by_sample(generation: Generation, rows: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (int(generation.rows.sample[row]), row))


def _cut(
    generation: Generation, root: Path, sample: int, rows: Sequence[int], pieces: list[tuple[int, Piece, bool]]
) -> Iterator[Fresh]:
    """Read and decode one sample once and add a piece for each row; gives what could not be done."""
    recipe, content = generation.recipe, generation.samples.content[sample].tobytes()
    size = Size(*generation.samples.original_size[sample].tolist())
    try:
        data, _ = read_source(root / generation.samples.names[sample])
        found = content_hash(data)
        picture = decode(data, recipe.pixels, max_pixels=size.area) if found == content else None
    except UnusableSampleError as error:
        yield from (Fresh(row=row, cause=error.slug, detail=error.what) for row in rows)
        return
    except MemoryError:
        detail = "there is not enough memory to decode it"
        yield from (Fresh(row=row, cause="out-of-memory", detail=detail) for row in rows)
        return
    if picture is None:
        yield from (Fresh(row=row, cause="source-changed", detail=found.hex()) for row in rows)
        return
    if picture.shape[:2] != (size.height, size.width):
        detail = f"it was {size} and decodes to {Size(*picture.shape[:2])} now"
        yield from (Fresh(row=row, cause="decoder-error", detail=detail) for row in rows)
        return
    for row in rows:
        piece, then = _piece(generation, row, picture, size), generation.rows.pixel_hash[row].tobytes()
        pieces.append((row, piece, pixel_hash(piece.pixels) == then))


def _piece(generation: Generation, row: int, picture: NDArray[np.uint8], size: Size) -> Piece:
    """One picture in one bucket, where it was put then, mirrored where its entry is."""
    rows, sample = generation.rows, int(generation.rows.sample[row])
    bucket, key = generation.buckets[int(rows.bucket[row])], rows.key[row].tobytes()
    top, left = rows.crop[row].tolist()
    stored = Placement(
        bucket=bucket, resize=Size(*rows.resize[row].tolist()), crop=Box(top=top, left=left, size=bucket)
    )
    flipped = key[VARIANT_BYTE] == FLIPPED
    pixels = resize_crop(picture, mirrored(stored) if flipped else stored, generation.recipe.pixels.resample)
    return Piece(
        name=str(row),  # two files with the same bytes share a key
        key=key,
        pixels=np.ascontiguousarray(pixels[:, ::-1]) if flipped else pixels,
        pixel_hash=rows.pixel_hash[row].tobytes(),
        placement=stored,
        original_size=size,
        content=generation.samples.content[sample].tobytes(),
    )

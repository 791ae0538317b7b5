"""Images of samples for a page: the original with its crop, the latent as colors, masks; small and inline.

Preview without the encoder: a linear map from the channels of a latent to red, green and blue. It is fitted by least
squares on images that are there. Its R^2 on held-out images is part of the result; images that fit badly are marked.
Cost: about 0.1 s an image of 12 MP; fitting stops after a time.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentcache.errors import LatentcacheError, UnusableSampleError
from latentcache.fields.dtypes import as_floats
from latentcache.fields.latents import PixelProfile
from latentcache.images.clips import EncodedClip
from latentcache.images.decode import encoded_file
from latentcache.report.crops import Crops
from latentcache.sources.locations import read_image
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import Listing, listing_of, names_root
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value

#: Pixels of the longer side of a thumbnail, the frames of a film strip, and the bytes that all originals may take.
_SIDE, _FRAMES, _BUDGET = 384, 6, 2_200_000
#: Entries that a map is fitted on at most, every n-th is held out, points of an entry that are used, seconds.
MAX_FITTED, _HELD_OUT, _POINTS, _FIT_S = 512, 5, 256, 12.0
#: Images that a map needs; times the median error, and squared error of colors, above which an image fits badly.
_LEAST_FITTED, _BAD, _SMALL = 8, 6.0, 0.02

Pixels = NDArray[np.uint8]


class Originals:
    """The images that a cache was made from, read from its data."""

    def __init__(self, snapshot: Snapshot, root: Path, crops: Crops) -> None:
        self._root = names_root(root, snapshot.source)
        options = SourceOptions.from_json(snapshot.source.get("options", {}))
        self._listing: Listing = listing_of(self._root, snapshot.samples, options)
        self._crops, self._snapshot = crops, snapshot
        geometry = getattr(crops.rows.recipe, "geometry", None)
        self._clips = getattr(geometry, "clips", None)
        self._profile: PixelProfile = getattr(crops.rows.recipe, "pixels", PixelProfile())

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[int, list[Pixels] | UnusableSampleError]]:
        """(item, its frames (H, W, 3), or why they cannot be read); an image has one frame."""
        samples = self._crops.sample[list(numbers)].tolist()
        inputs = self._listing.job_inputs(samples, ("image",), strict=False)
        for number, (_, locations) in zip(numbers, inputs, strict=True):
            if locations["image"] is None:
                continue
            try:
                yield number, self._frames(read_image(self._root, locations["image"])[0], number)
            except UnusableSampleError as error:
                yield number, error

    def _frames(self, data: bytes, number: int) -> list[Pixels]:
        file = encoded_file(data)
        if not isinstance(file, EncodedClip):
            return [file.pixels(self._profile)]
        group = self._crops.rows.groups[int(self._crops.rows.group[int(self._crops.row[number])])]
        every = list(file.pixels(group.dims[0], self._clips)) if self._clips else []
        return [every[frame] for frame in _spaced(len(every))]


class Preview(Value, eq=False):
    """A linear map from C channels to red, green and blue."""

    weights: NDArray[np.float64]
    """(C + 1, 3); the last row is the constant. Colors are 0 to 1."""
    fitted: int
    """Images it was fitted on."""
    held_out: int
    r2: float
    """Part of the held-out images' variance that the map explains."""
    misfits: tuple[int, ...]
    """Items whose latents look unlike their images, worst first."""

    def colors(self, latent: NDArray[np.float32]) -> Pixels:
        """(H, W, 3) uint8 of a latent (C, H, W)."""
        channels = len(self.weights) - 1
        flat = latent[:channels].reshape(channels, -1).T
        colors = flat @ self.weights[:-1] + self.weights[-1]
        return np.asarray(np.clip(colors * 255, 0, 255).round().astype(np.uint8).reshape(*latent.shape[1:], 3))


class Stored:
    """Items of a field as floats."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._reader = EntryReader(snapshot.paths, snapshot)

    def latent(self, rows: FieldRows, row: int) -> NDArray[np.float32]:
        """(C, F, H, W) of a latent, of stored posteriors the means; raises CorruptEntryError, MissingEntryError."""
        values = as_floats(self._reader.read(rows.name, row))
        if rows.recipe is not None and rows.recipe.read_time.posterior:
            values = values[: len(values) // 2]
        return values[:, None] if values.ndim == 3 else values

    def levels(self, rows: FieldRows, row: int) -> Pixels:
        """(H, W) of a mask, from 0 to 255."""
        return np.asarray(self._reader.read(rows.name, row).squeeze(), dtype=np.uint8)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def fit_preview(
    crops: Crops, originals: Originals, stored: Stored, chosen: Sequence[int]
) -> tuple[Preview | None, str]:
    """Fit a map on first frames of up to 512 images, the ``chosen`` items first; None and why if there are few."""
    others = np.random.default_rng(0).permutation(len(crops.row))[: 2 * MAX_FITTED].tolist()
    parts, began = dict[int, tuple[NDArray[Any], NDArray[Any]]](), time.monotonic()
    for number, frames in originals.read(list(dict.fromkeys([*chosen, *others]))):
        if len(parts) == MAX_FITTED or time.monotonic() - began > _FIT_S:
            break
        if isinstance(frames, UnusableSampleError) or not frames:
            continue
        try:
            latent = stored.latent(crops.rows, int(crops.row[number]))[:, 0]
        except LatentcacheError:
            continue
        target = target_colors(crops, number, frames[0], latent.shape[1:])
        some = np.random.default_rng(number).permutation(latent[0].size)[:_POINTS]
        parts[number] = latent.reshape(len(latent), -1).T[some], target.reshape(-1, 3)[some]
    if len(parts) < _LEAST_FITTED:
        return (
            None,
            f"a preview needs {_LEAST_FITTED} images whose files and latents can be read, and there are {len(parts)}",
        )
    return _solved(parts), ""


def _solved(parts: Mapping[int, tuple[NDArray[Any], NDArray[Any]]]) -> Preview:
    """Least squares over the points of most images, measured on the others."""
    numbers = list(parts)
    held = set(numbers[::_HELD_OUT])
    fitted = [parts[number] for number in numbers if number not in held]
    points, colors = (np.concatenate(column) for column in zip(*fitted, strict=True))
    padded = np.column_stack([points, np.ones(len(points))]).astype(np.float64)
    weights = np.linalg.lstsq(padded, colors, rcond=None)[0]
    predicted = ((some @ weights[:-1] + weights[-1], target) for some, target in parts.values())
    errors = np.array([np.square(colors - target).mean() for colors, target in predicted])
    expected = np.concatenate([parts[number][1] for number in held])
    spread = float(np.square(expected - expected.mean(axis=0)).mean())
    worst = np.argsort(-errors, kind="stable")
    bad = worst[errors[worst] > max(_BAD * float(np.median(errors)), _SMALL)]
    return Preview(
        weights=np.asarray(weights, dtype=np.float64),
        fitted=len(numbers) - len(held),
        held_out=len(held),
        r2=1 - float(errors[::_HELD_OUT].mean()) / spread if spread else 0.0,
        misfits=tuple(numbers[position] for position in bad.tolist()),
    )


def target_colors(crops: Crops, number: int, pixels: Pixels, cells: tuple[int, ...]) -> NDArray[np.float64]:
    """(H, W, 3) mean colors, 0 to 1, of the crop of an image for each cell (H, W) of its latent."""
    tall, wide = pixels.shape[:2]
    box = crops.box(number)
    left, top = box["left"] * wide / 100, box["top"] * tall / 100
    region = (left, top, min(left + box["width"] * wide / 100, wide), min(top + box["height"] * tall / 100, tall))
    small = Image.fromarray(pixels).resize((cells[1], cells[0]), Image.Resampling.BOX, box=region)
    return np.asarray(small, dtype=np.float64) / 255


# thumbnails


class Thumbnails:
    """Makes small inline images that stay below a number of bytes together, for ``count`` samples."""

    def __init__(self, count: int) -> None:
        self._most = _BUDGET // max(count, 26)

    def image(self, frames: Sequence[Pixels]) -> str:
        """A data URI of an image, or of a strip of frames."""
        for side, quality in ((_SIDE, 78), (_SIDE, 55), (256, 50), (160, 40)):
            data = _webp([_small(frame, side if len(frames) == 1 else side // 2) for frame in frames], quality)
            if len(data) <= self._most:
                break
        return _uri(data)


def exact_image(label: str, frames: Sequence[Pixels]) -> dict[str, Any]:
    """``label``, ``uri`` and ``aspect`` of a latent's colors, or of a mask: nothing is resized."""
    aspect = frames[0].shape[1] / frames[0].shape[0] * len(frames)
    return {"label": label, "uri": _uri(_webp([Image.fromarray(frame) for frame in frames], 82)), "aspect": aspect}


def strip(latent: NDArray[np.float32], preview: Preview) -> list[Pixels]:
    """Colors of some frames of a latent (C, F, H, W)."""
    return [preview.colors(latent[:, frame]) for frame in _spaced(latent.shape[1])]


def _spaced(count: int) -> list[int]:
    """Up to six places from the first to the last."""
    return sorted({round(position) for position in np.linspace(0, count - 1, min(count, _FRAMES)).tolist()})


def _small(pixels: Pixels, side: int) -> Image.Image:
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
    return image


def _webp(images: Sequence[Image.Image], quality: int) -> bytes:
    """The images side by side."""
    canvas, left = Image.new("RGB", (sum(image.width for image in images), images[0].height)), 0
    for image in images:
        canvas.paste(image, (left, 0))
        left += image.width
    stream = BytesIO()
    canvas.save(stream, "WEBP", quality=quality, method=3)
    return stream.getvalue()


def _uri(data: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(data).decode('ascii')}"

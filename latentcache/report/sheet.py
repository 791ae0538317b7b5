"""The contact sheet: samples with findings and the worst crops first, as small inline images with remarks.

A preview of a latent needs no model: a linear map from its channels to red, green and blue, fitted by least squares
on the images of the sheet. Its R^2 on held-out images is part of the result. Latents that fit their image badly are
marked and come first. Cost: about 0.1 s an image of 12 MP.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentcache.errors import LatentcacheError, UnusableSampleError
from latentcache.fields.captions import BETWEEN
from latentcache.fields.dtypes import FLOATS
from latentcache.fields.latents import PixelProfile
from latentcache.fields.registry import load
from latentcache.images.clips import EncodedClip
from latentcache.images.decode import encoded_file
from latentcache.report.figures import Crops, Stored
from latentcache.sources.locations import read_image
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import listing_of, names_root
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value

#: An image of which this fraction is cut off, or that was enlarged so many times, is marked.
_MUCH_CUT, _MUCH_ENLARGED = 0.25, 1.5
#: Pixels of the longer side of a thumbnail, the frames of a film strip, and the bytes that all originals may take.
_SIDE, _FRAMES, _BUDGET = 384, 6, 2_200_000
#: Images that a preview needs, every n-th is held out, points of a latent that are used.
_LEAST_FITTED, _HELD_OUT, _POINTS = 8, 5, 256
#: Times the median error, and squared error of colors, above which a latent fits its image badly.
_BAD, _SMALL = 6.0, 0.02

Pixels = NDArray[np.uint8]


def sheet_facts(
    snapshot: Snapshot,
    crops: Crops,
    stored: Stored,
    root: Path | None,
    findings: Sequence[Mapping[str, Any]],
    count: int,
    decoded: int,
) -> dict[str, Any]:
    """Make cards for up to ``count`` samples; for the first ``decoded`` the model decodes the latents.

    ``root``: DATA, None if it is not here. ``findings``: those of ``page.report_facts``, by reason.
    """
    reasons = _reasons(findings)
    chosen = _chosen(snapshot, crops, set(reasons), count)
    cards = {number: _card(snapshot, crops, number, reasons) for number in chosen}
    most_bytes = _BUDGET // max(len(chosen), 26)
    points = dict[int, Points]()
    others = [number for number in range(len(crops.row)) if number not in cards]
    read = [*chosen, *others[: max(_LEAST_FITTED - len(chosen), 0)]]
    for number, frames in _originals(snapshot, root, crops, read) if root is not None else ():
        card = cards.get(number, {"marks": []})
        if isinstance(frames, UnusableSampleError):
            card["marks"].append({"kind": "bad", "text": f"the file: {frames.what}"})
        elif frames:
            card |= {"original": _thumbnail(frames, most_bytes), "frames": len(frames)}
            points |= _points(crops, number, frames[0], stored)
    preview = _fitted(points) if len(points) >= _LEAST_FITTED else None
    misfits = [number for number in preview.misfits if number in cards] if preview is not None else []
    for number in misfits:
        cards[number]["marks"].append({"kind": "bad", "text": "latent unlike its image"})
    decode, no_decode = _model(crops.rows) if decoded else (None, "")
    order = list(dict.fromkeys([*misfits, *chosen]))
    for number in order:
        _add_stored(cards[number], snapshot, crops, number, preview, stored)
    for number in order[:decoded] if decode is not None else ():
        _add_decoded(cards[number], stored, crops, number, decode, most_bytes)
    no_preview = f"it needs {_LEAST_FITTED} images whose files and latents can be read, and there are {len(points)}"
    return {
        "shown": len(order),
        "samples": len(np.unique(crops.sample)),
        "cards": [cards[number] for number in order],
        "preview": None
        if preview is None
        else {"r2": preview.r2, "fitted": preview.fitted, "held": preview.held_out},
        "no_preview": no_preview if root is not None else "the data of this cache is not here",
        "no_decode": no_decode,
    }


def _reasons(findings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Sort the reasons of findings by sample; a touched file is none, because a link to it makes one."""
    reasons = defaultdict[str, list[str]](list)
    for group in findings:
        if group["category"] == "touched":
            continue
        for item in group["items"]:
            for name in item["names"] or [item["name"]]:
                reasons[name].append(group["reason"])
    return reasons


def _chosen(snapshot: Snapshot, crops: Crops, named: set[str], count: int) -> list[int]:
    """Items of different samples: those with findings, then the worst crops; items of equal loss in their order."""
    loss = crops.loss
    if named:
        is_named = [name in named for name in snapshot.samples.names]
        loss = loss + np.array(is_named, dtype=np.float64)[crops.sample]
    order = np.argsort(-loss, kind="stable")
    first = np.sort(np.unique(crops.sample[order], return_index=True)[1])[:count]
    chosen: list[int] = order[first].tolist()
    return chosen


def _card(snapshot: Snapshot, crops: Crops, number: int, reasons: Mapping[str, list[str]]) -> dict[str, Any]:
    samples = snapshot.samples
    sample = int(crops.sample[number])
    name = samples.names[sample]
    caption = samples.inputs.get("caption")
    height, width = crops.original[number].tolist()
    loss, enlarged = float(crops.loss[number]), float(crops.enlarged[number])
    texts = caption.text[sample].split(BETWEEN) if caption is not None and caption.text is not None else None
    marks = [{"kind": "bad", "text": reason} for reason in reasons.get(name, ())]
    marks += [{"kind": "warn", "text": f"{loss:.0%} cut off"}] if loss > _MUCH_CUT else []
    marks += [{"kind": "warn", "text": f"enlarged {enlarged:.1f}x"}] if enlarged > _MUCH_ENLARGED else []
    marks += [{"kind": "warn", "text": "no caption"}] if texts is not None and not any(map(str.strip, texts)) else []
    return {
        "name": name,
        "captions": texts or [],
        "size": f"{width} x {height}",
        "bucket": "{1} x {0}".format(*crops.bucket[number].tolist()),
        "aspect": width / max(height, 1),
        "loss": loss,
        "enlarged": enlarged,
        "box": crops.box(number),
        "repeats": int(samples.columns["repeats"][sample]) if "repeats" in samples.columns else 1,
        "marks": marks,
        "original": "",
        "frames": 1,
        "stored": [],
    }


def _originals(
    snapshot: Snapshot, root: Path, crops: Crops, numbers: Sequence[int]
) -> Iterator[tuple[int, list[Pixels] | UnusableSampleError]]:
    """Yield (item, frames (H, W, 3) of its file, or why it cannot be read); an image has one frame."""
    folder = names_root(root, snapshot.source)
    listing = listing_of(folder, snapshot.samples, SourceOptions.from_json(snapshot.source.get("options", {})))
    inputs = listing.job_inputs(crops.sample[list(numbers)].tolist(), ("image",), strict=False)
    for number, (_, locations) in zip(numbers, inputs, strict=True):
        if locations["image"] is None:
            continue
        try:
            yield number, _frames(read_image(folder, locations["image"])[0], crops, number)
        except UnusableSampleError as error:
            yield number, error


def _frames(data: bytes, crops: Crops, number: int) -> list[Pixels]:
    """The image of a file, or up to six of the frames of a clip that were taken."""
    file = encoded_file(data)
    recipe = crops.rows.recipe
    if not isinstance(file, EncodedClip):
        return [file.pixels(getattr(recipe, "pixels", PixelProfile()))]
    clips = getattr(getattr(recipe, "geometry", None), "clips", None)
    count = crops.rows.groups[int(crops.rows.group[int(crops.row[number])])].dims[0]
    frames = list(file.pixels(count, clips)) if clips else []
    return [frames[position] for position in _spaced(len(frames))]


# previews

Points = tuple[NDArray[np.float32], NDArray[np.float64]]
"""(n, C) some points of a latent, and (n, 3) the colors of the image there, 0 to 1."""


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

    def frames(self, latent: NDArray[np.float32]) -> list[Pixels]:
        """(H, W, 3) uint8 of some frames of a latent (C, F, H, W)."""
        colors = np.tensordot(latent, self.weights[:-1], axes=(0, 0)) + self.weights[-1]
        return list(np.clip(colors[_spaced(len(colors))] * 255, 0, 255).round().astype(np.uint8))


def _points(crops: Crops, number: int, pixels: Pixels, stored: Stored) -> dict[int, Points]:
    """Some points of the first frame of an item; empty if it cannot be read."""
    try:
        latent = stored.latent(crops.rows, int(crops.row[number]))[:, 0]
    except LatentcacheError:
        return {}
    colors = target_colors(crops, number, pixels, latent.shape[1:])
    chosen = np.random.default_rng(number).permutation(latent[0].size)[:_POINTS]
    return {number: (latent.reshape(len(latent), -1).T[chosen], colors.reshape(-1, 3)[chosen])}


def target_colors(crops: Crops, number: int, pixels: Pixels, cells: tuple[int, ...]) -> NDArray[np.float64]:
    """(H, W, 3) mean colors, 0 to 1, of the crop of an image for each cell (H, W) of its latent."""
    tall, wide = pixels.shape[:2]
    box = crops.box(number)
    left, top = box["left"] * wide / 100, box["top"] * tall / 100
    region = (left, top, min(left + box["width"] * wide / 100, wide), min(top + box["height"] * tall / 100, tall))
    small = Image.fromarray(pixels).resize((cells[1], cells[0]), Image.Resampling.BOX, box=region)
    return np.asarray(small, dtype=np.float64) / 255


def _fitted(points: Mapping[int, Points]) -> Preview:
    """Least squares over the points of most images, measured on the others."""
    numbers = list(points)
    held_out = numbers[::_HELD_OUT]
    fitted = [points[number] for number in numbers if number not in held_out]
    latents, colors = (np.concatenate(column) for column in zip(*fitted, strict=True))
    padded = np.column_stack([latents, np.ones(len(latents))]).astype(np.float64)
    weights = np.linalg.lstsq(padded, colors, rcond=None)[0]
    errors = np.array([
        np.square(latent @ weights[:-1] + weights[-1] - target).mean() for latent, target in points.values()
    ])  # fmt: skip
    expected = np.concatenate([points[number][1] for number in held_out])
    variance = float(np.square(expected - expected.mean(axis=0)).mean())
    worst = np.argsort(-errors, kind="stable")
    bad = worst[errors[worst] > max(_BAD * float(np.median(errors)), _SMALL)]
    return Preview(
        weights=np.asarray(weights, dtype=np.float64),
        fitted=len(fitted),
        held_out=len(held_out),
        r2=1 - float(errors[::_HELD_OUT].mean()) / variance if variance else 0.0,
        misfits=tuple(numbers[position] for position in bad.tolist()),
    )


# images of stored values


def _add_stored(
    card: dict[str, Any], snapshot: Snapshot, crops: Crops, number: int, preview: Preview | None, stored: Stored
) -> None:
    """Add images of what is stored: latents by the map, and masks."""
    for rows, row in _items(snapshot, crops, number):
        try:
            if rows.spec.dtype not in FLOATS:
                card["stored"].append(_exact_image(rows.name, [stored.levels(rows, row)]))
            elif preview is not None:
                latent = stored.latent(rows, row)
                if len(latent) == len(preview.weights) - 1:
                    card["stored"].append(_exact_image(rows.name, preview.frames(latent)))
        except LatentcacheError as error:
            card["marks"].append({"kind": "bad", "text": f"{rows.name}: {error.what}"})


def _items(snapshot: Snapshot, crops: Crops, number: int) -> Iterator[tuple[FieldRows, int]]:
    """The item of each field with height and width that belongs to a crop."""
    bucket = tuple(crops.bucket[number].tolist())
    for rows in snapshot.fields.values():
        if tuple(rows.spec.dims[-2:]) != ("h", "w"):
            continue
        of_sample = np.flatnonzero(np.asarray(rows.sample) == crops.sample[number])
        alike = [row for row in of_sample.tolist() if rows.groups[int(rows.group[row])].dims[1:] == bucket]
        if alike:
            yield rows, alike[0]


def _model(rows: FieldRows) -> tuple[Any, str]:
    """The decoder of a field's model, or None and why there is none."""
    if rows.kind is None or not rows.kind.decoder:
        return None, "this field has no decoder"
    try:
        return load(rows.kind.decoder)(rows.recipe, rows.provenance), ""
    except LatentcacheError as error:
        return None, error.what


def _add_decoded(
    card: dict[str, Any], stored: Stored, crops: Crops, number: int, decode: Any, most_bytes: int
) -> None:
    try:
        frames: list[Pixels] = decode(stored.latent(crops.rows, int(crops.row[number])))
    except LatentcacheError as error:
        card["marks"].append({"kind": "bad", "text": f"decoding: {error.what}"})
        return
    card["stored"].append({"label": "decoded", "uri": _thumbnail(frames, most_bytes), "aspect": _aspect(frames)})


def _thumbnail(frames: Sequence[Pixels], most_bytes: int) -> str:
    """A data URI of a small image, or of a strip of frames."""
    for side, quality in ((_SIDE, 78), (_SIDE, 55), (256, 50), (160, 40)):
        images = [Image.fromarray(frame) for frame in frames]
        for image in images:
            image.thumbnail((side // min(len(frames), 2),) * 2, Image.Resampling.LANCZOS, reducing_gap=2.0)
        data = _webp(images, quality)
        if len(data) <= most_bytes:
            break
    return _uri(data)


def _exact_image(label: str, frames: Sequence[Pixels]) -> dict[str, Any]:
    """``label``, ``uri`` and ``aspect`` of a latent's colors, or of a mask: nothing is resized."""
    data = _webp([Image.fromarray(frame) for frame in frames], 82)
    return {"label": label, "uri": _uri(data), "aspect": _aspect(frames)}


def _aspect(frames: Sequence[Pixels]) -> float:
    height, width = frames[0].shape[:2]
    return float(len(frames) * width / height)


def _spaced(count: int) -> list[int]:
    """Up to six positions from the first to the last."""
    return sorted({round(position) for position in np.linspace(0, count - 1, min(count, _FRAMES)).tolist()})


def _webp(images: Sequence[Image.Image], quality: int) -> bytes:
    """The images side by side."""
    canvas = Image.new("RGB", (sum(image.width for image in images), images[0].height))
    left = 0
    for image in images:
        canvas.paste(image, (left, 0))
        left += image.width
    stream = BytesIO()
    canvas.save(stream, "WEBP", quality=quality, method=3)
    return stream.getvalue()


def _uri(data: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(data).decode('ascii')}"

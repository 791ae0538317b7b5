"""The contact sheet: samples with findings and the worst crops first, each with its images and remarks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import LatentcacheError, UnusableSampleError
from latentcache.fields.captions import BETWEEN
from latentcache.fields.dtypes import FLOATS
from latentcache.fields.registry import load
from latentcache.report.crops import Crops
from latentcache.report.preview import (
    Originals,
    Preview,
    Stored,
    Thumbnails,
    exact_image,
    fit_preview,
    strip,
)
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.verify.findings import shown_text

#: An image of which this fraction is cut off, or that was enlarged so many times, is marked.
_MUCH_CUT, _MUCH_ENLARGED = 0.25, 1.5


def sheet_facts(
    snapshot: Snapshot,
    crops: Crops,
    stored: Stored,
    root: Path | None,
    findings: Sequence[Mapping[str, Any]],
    count: int,
    decoded: int,
) -> dict[str, Any]:
    """Facts and images of up to ``count`` samples, of the first ``decoded`` also what the model decodes."""
    by_name = _by_name(findings)
    chosen = _chosen(snapshot, crops, set(by_name), count)
    originals = None if root is None else Originals(snapshot, root, crops)
    preview, why = None, "the data of this cache is not here"
    if originals is not None:
        preview, why = fit_preview(crops, originals, stored, chosen)
    misfits = preview.misfits if preview is not None else ()
    chosen = list(dict.fromkeys([*misfits, *chosen]))[:count]
    decode, no_decode = _model(crops.rows) if decoded else (None, "")
    cards = {number: _card(snapshot, crops, number, by_name) for number in chosen}
    for number in misfits:
        if number in cards:
            cards[number]["marks"].append({"kind": "bad", "text": "latent unlike its image"})
    thumbnails = Thumbnails(len(chosen))
    for number, frames in originals.read(chosen) if originals is not None else ():
        if isinstance(frames, UnusableSampleError):
            cards[number]["marks"].append({"kind": "bad", "text": f"the file: {frames.what}"})
        elif frames:
            cards[number]["original"] = thumbnails.image(frames)
            cards[number]["frames"] = len(frames)
    for position, number in enumerate(chosen):
        _add_stored(cards[number], snapshot, crops, number, preview, stored)
        if decode is not None and position < decoded:
            _add_decoded(cards[number], stored, crops, number, decode, thumbnails)
    return {
        "shown": len(chosen),
        "samples": len(np.unique(crops.sample)),
        "cards": list(cards.values()),
        "preview": None
        if preview is None
        else {"r2": preview.r2, "fitted": preview.fitted, "held": preview.held_out},
        "no_preview": why,
        "no_decode": no_decode,
    }


def _by_name(findings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Reasons of the findings of each sample that they name; a touched file, as a link to it makes one, is none."""
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
        is_named = [shown_text(name) in named for name in snapshot.samples.names]
        loss = loss + np.array(is_named, dtype=np.float64)[crops.sample]
    order = np.argsort(-loss, kind="stable")
    first = np.sort(np.unique(crops.sample[order], return_index=True)[1])[:count]
    chosen: list[int] = order[first].tolist()
    return chosen


def _card(snapshot: Snapshot, crops: Crops, number: int, findings: Mapping[str, list[str]]) -> dict[str, Any]:
    samples, sample = snapshot.samples, int(crops.sample[number])
    name, caption = shown_text(samples.names[sample]), samples.inputs.get("caption")
    size, bucket = crops.size(number)
    loss, enlarged = float(crops.loss[number]), float(crops.enlarged[number])
    texts = caption.text[sample].split(BETWEEN) if caption is not None and caption.text is not None else None
    marks = [{"kind": "bad", "text": reason} for reason in findings.get(name, ())]
    marks += [{"kind": "warn", "text": f"{loss:.0%} cut off"}] if loss > _MUCH_CUT else []
    marks += [{"kind": "warn", "text": f"enlarged {enlarged:.1f}x"}] if enlarged > _MUCH_ENLARGED else []
    marks += [{"kind": "warn", "text": "no caption"}] if texts is not None and not any(map(str.strip, texts)) else []
    return {
        "name": name,
        "captions": [shown_text(text) for text in texts or ()],
        "size": f"{size.width} x {size.height}",
        "bucket": f"{bucket.width} x {bucket.height}",
        "aspect": size.width / max(size.height, 1),
        "width": bucket.width,
        "height": bucket.height,
        "loss": loss,
        "enlarged": enlarged,
        "box": crops.box(number),
        "repeats": int(samples.columns["repeats"][sample]) if "repeats" in samples.columns else 1,
        "marks": marks,
        "original": "",
        "frames": 1,
        "stored": [],
    }


def _add_stored(
    card: dict[str, Any], snapshot: Snapshot, crops: Crops, number: int, preview: Preview | None, stored: Stored
) -> None:
    """Add images of what is stored: latents by the map, and masks."""
    for rows, row in _items(snapshot, crops, number):
        try:
            if rows.spec.dtype not in FLOATS:
                card["stored"].append(exact_image(rows.name, [stored.levels(rows, row)]))
            elif preview is not None:
                latent = stored.latent(rows, row)
                if len(latent) == len(preview.weights) - 1:
                    card["stored"].append(exact_image(rows.name, strip(latent, preview)))
        except LatentcacheError as error:
            card["marks"].append({"kind": "bad", "text": f"{rows.name}: {error.what}"})


def _items(snapshot: Snapshot, crops: Crops, number: int) -> Iterator[tuple[FieldRows, int]]:
    """The item of each field with height and width that belongs to a crop."""
    wanted = crops.rows.groups[int(crops.rows.group[int(crops.row[number])])].dims
    for rows in snapshot.fields.values():
        if tuple(rows.spec.dims[-2:]) != ("h", "w"):
            continue
        of_sample = np.flatnonzero(np.asarray(rows.sample) == crops.sample[number])
        alike = [row for row in of_sample.tolist() if rows.groups[int(rows.group[row])].dims[1:] == wanted[1:]]
        if alike:
            yield rows, alike[0]


def _model(rows: FieldRows) -> tuple[Any, str]:
    """What decodes items of a field with its model, or why nothing does."""
    if rows.kind is None or not rows.kind.decoder:
        return None, "this field has no decoder"
    try:
        return load(rows.kind.decoder)(rows.recipe, rows.provenance), ""
    except LatentcacheError as error:
        return None, error.what


def _add_decoded(
    card: dict[str, Any], stored: Stored, crops: Crops, number: int, decode: Any, thumbnails: Thumbnails
) -> None:
    try:
        frames: list[NDArray[np.uint8]] = decode(stored.latent(crops.rows, int(crops.row[number])))
    except LatentcacheError as error:
        card["marks"].append({"kind": "bad", "text": f"decoding: {error.what}"})
        return
    aspect = frames[0].shape[1] / frames[0].shape[0] * len(frames)
    card["stored"].append({"label": "decoded", "uri": thumbnails.image(frames), "aspect": aspect})

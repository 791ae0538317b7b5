"""Sizes and crops of a cache's images: aspect against crop loss, enlarged images, worst crops first.

Cost: one pass over three columns; no payload and no image is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.sizes import Size
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value
from latentcache.verify.findings import shown_text

#: Cells of the scatter: aspect from 1:4 to 4:1 on a log2 scale, and crop loss from 0 to 75 %.
_COLUMNS, _LINES, _SPREAD, _MOST_LOSS = 64, 30, 2.0, 0.75
#: Images that are named.
_NAMED = 8


class Crops(Value, eq=False):
    """The n items of a field that are cut from images, without flips and further crops of one bucket."""

    rows: FieldRows
    row: NDArray[np.int64]
    """(n,) rows of the field."""
    sample: NDArray[np.int64]
    original: NDArray[np.int64]
    """(n, 2) height and width of the image, in pixels."""
    resize: NDArray[np.int64]
    """(n, 2) height and width after the resize, in pixels."""
    bucket: NDArray[np.int64]
    """(n, 2) height and width of the crop, in pixels."""
    corner: NDArray[np.int64]
    """(n, 2) top and left of the crop, in pixels of the resized image."""

    @property
    def loss(self) -> NDArray[np.float64]:
        """(n,) fraction of the image outside the crop."""
        kept: NDArray[np.float64] = self.bucket.prod(axis=1) / np.maximum(self.resize.prod(axis=1), 1)
        return np.clip(1 - kept, 0, 1)

    @property
    def enlarged(self) -> NDArray[np.float64]:
        """(n,) enlargement; 1 or less: the image was not enlarged."""
        return np.asarray((self.resize / np.maximum(self.original, 1)).max(axis=1))

    def size(self, number: int) -> tuple[Size, Size]:
        """The image and the bucket of one item."""
        return Size(*self.original[number].tolist()), Size(*self.bucket[number].tolist())

    def box(self, number: int) -> dict[str, float]:
        """The crop in percent of the image: ``left``, ``top``, ``width``, ``height``."""
        (top, left), (height, width) = self.corner[number].tolist(), self.bucket[number].tolist()
        tall, wide = self.resize[number].tolist()
        parts = {"left": left / wide, "top": top / tall, "width": width / wide, "height": height / tall}
        return {name: round(100 * part, 2) for name, part in parts.items()}


def crops_of(snapshot: Snapshot) -> Crops | None:
    """The crops of the first field that stores them; None if no field does, or the sizes are unknown."""
    sizes = snapshot.samples.columns.get("original_size")
    rows = next((rows for rows in snapshot.fields.values() if {"crop", "resize"} <= set(rows.columns)), None)
    if rows is None or sizes is None or not len(rows):
        return None
    row = np.flatnonzero(np.asarray(rows.variant) == 0)
    sample = np.asarray(rows.sample)[row].astype(np.int64)
    dims = np.array([group.dims[1:] for group in rows.groups], dtype=np.int64).reshape(-1, 2)
    return Crops(
        rows=rows,
        row=row,
        sample=sample,
        original=np.asarray(sizes)[sample].astype(np.int64),
        resize=np.asarray(rows.columns["resize"])[row].astype(np.int64),
        bucket=dims[np.asarray(rows.group)[row]],
        corner=np.asarray(rows.columns["crop"])[row].astype(np.int64),
    )


def crop_facts(crops: Crops, snapshot: Snapshot) -> dict[str, Any]:
    """Scatter, mean and largest loss, and the images that were enlarged most."""
    loss, enlarged, names = crops.loss, crops.enlarged, snapshot.samples.names
    larger = np.flatnonzero(enlarged > 1.001)
    worst = larger[np.argsort(-enlarged[larger], kind="stable")][:_NAMED]
    return {
        "items": len(loss),
        "mean_loss": float(loss.mean()),
        "most_loss": float(loss.max()),
        "over_quarter": int((loss > 0.25).sum()),
        "points": _cells(crops, loss),
        "ticks": _ticks(crops),
        "enlarged": len(larger),
        "enlarged_most": [
            {
                "name": shown_text(names[int(crops.sample[number])]),
                "times": float(enlarged[number]),
                "size": "{1} x {0}".format(*crops.original[number].tolist()),
            }
            for number in worst.tolist()
        ],
    }


def _cells(crops: Crops, loss: NDArray[np.float64]) -> list[dict[str, float]]:
    """Items counted in cells of aspect and loss; positions are fractions of the drawing."""
    across = _across(crops.original[:, 1] / np.maximum(crops.original[:, 0], 1))
    column = np.minimum((across * _COLUMNS).astype(np.int64), _COLUMNS - 1)
    line = np.minimum((loss / _MOST_LOSS * _LINES).astype(np.int64), _LINES - 1)
    cells, counts = np.unique(column * _LINES + line, return_counts=True)
    largest = np.sqrt(counts.max(initial=1))
    return [
        {
            "x": (cell // _LINES + 0.5) / _COLUMNS,
            "y": (cell % _LINES + 0.5) / _LINES,
            "r": float(np.sqrt(count) / largest),
            "count": count,
        }
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True)
    ]


def _ticks(crops: Crops) -> list[dict[str, Any]]:
    """Where the buckets are on the axis of aspects."""
    buckets = np.unique(crops.bucket, axis=0)
    positions = _across(buckets[:, 1] / np.maximum(buckets[:, 0], 1)).tolist()
    return [
        {"x": position, "label": f"{width} x {height}"}
        for position, (height, width) in zip(positions, buckets.tolist(), strict=True)
    ]


def _across(aspect: NDArray[np.float64]) -> NDArray[np.float64]:
    """Width by height as a place from 0 to 1."""
    return np.asarray((np.clip(np.log2(np.maximum(aspect, 1e-6)), -_SPREAD, _SPREAD) + _SPREAD) / (2 * _SPREAD))

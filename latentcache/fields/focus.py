"""Points that focus crops have in their middle: a column of the samples, and the step of the crop that follows.

The step is part of the number of the variant in the key, so a point that moves the crop gives another entry.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import count_of
from latentcache.fields.table import Rejected, SampleTable
from latentcache.geometry.placement import FOCUS_STEPS

#: Column of samples, (S, 2) float32: x and y from 0 to 1 of width and height, or above 1 in pixels; -1: no point.
FOCUS = "focus"


def focus_of(samples: SampleTable) -> NDArray[np.float32]:
    """(S, 2) point of each image, see ``FOCUS``."""
    held = samples.columns.get(FOCUS)
    return np.full((len(samples), 2), -1, dtype=np.float32) if held is None else np.asarray(held)


def focus_steps(size: NDArray[np.int64], bucket: NDArray[np.int64], focus: NDArray[np.float32]) -> NDArray[np.int64]:
    """(n,) steps of ``geometry.placement``: the crop with the point in its middle, as far as the image reaches."""
    point = focus[:, ::-1].astype(np.float64)
    point = np.where((point > 1).any(axis=1, keepdims=True), point / size, point).clip(0, 1)
    scale = (bucket / size).max(axis=1, keepdims=True)
    over = np.maximum(size * scale - bucket, 0)
    axis = over.argmax(axis=1)[:, None]
    point, over, side = (np.take_along_axis(one, axis, 1)[:, 0] for one in (point, over, bucket))
    start = (point * (side + over) - side / 2) / np.maximum(over, 1)
    steps = np.floor(start.clip(0, 1) * FOCUS_STEPS + 0.5).astype(np.int64)
    return np.where((focus[:, 0] < 0) | (over < 1), FOCUS_STEPS // 2, steps)


def without_focus(samples: SampleTable, known: NDArray[np.intp], target: str) -> list[Rejected]:
    """One note for the field ``target`` if some of the images of known size have no point."""
    rows = known[focus_of(samples)[known, 0] < 0]
    if not len(rows):
        return []
    first = samples.names[int(rows[0])]
    detail = f"{count_of(len(rows), 'images have')} no point and a centered crop, the first is {first}"
    hint = "give focus_x and focus_y in a metadata table: from 0 to 1 of width and height, or in pixels"
    return [samples.note(rows, target, "no-focus", detail=detail, hint=hint)]

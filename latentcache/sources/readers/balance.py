"""Repeats of regularization images, as kohya's trainers count them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from latentcache.sources.layout import ImageSet


def balanced(sets: Sequence[ImageSet], sizes: Sequence[int]) -> dict[int, NDArray[np.int64]]:
    """Set of regularization images -> repeats of each of its images, in order; 0: left out by the trainer.

    Rule (``DreamBoothDataset``): images are taken in order, each with its repeats, until their number is that of
    the training images with repeats. If all are fewer, each in turn is repeated once more.
    """
    of_set = dict[int, NDArray[np.int64]]()
    for name in {one.balance for one in sets} - {""}:
        numbers = [number for number, one in enumerate(sets) if one.balance == name]
        wanted = sum(sizes[number] * sets[number].repeats for number in numbers if not sets[number].is_reg)
        reg = [number for number in numbers if sets[number].is_reg and sizes[number]]
        if not wanted or not reg:
            continue
        counts = [sizes[number] for number in reg]
        repeats = np.repeat([sets[number].repeats for number in reg], counts)
        missing = wanted - int(repeats.sum())
        if missing < 0:
            repeats = np.where(np.cumsum(repeats) - repeats < wanted, repeats, 0)
        else:
            repeats += missing // len(repeats) + (np.arange(len(repeats)) < missing % len(repeats))
        of_set |= zip(reg, np.split(repeats, np.cumsum(counts)[:-1]), strict=True)
    return of_set

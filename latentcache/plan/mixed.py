"""The servings of an epoch of several data sets, in an order that one more data set leaves as it is.

Guarantee: when a serving comes follows from seed, epoch, the name of its data set and its place in that alone. So
where a data set is added, and the others are served as often as before, theirs of one bucket come in the order they
had; of different buckets too, to within the steps that they stand in. Cost: one sort of the epoch's servings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.rows import begins
from latentcache.plan.shuffle import ascending, by_bucket, scattered
from latentcache.plan.weights import Mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The servings of one bucket in one epoch."""

    rows: NDArray[np.int32]
    """(S,) entries, in their order."""
    places: NDArray[np.int64]
    """(S,) when each comes among those of all buckets, rising."""
    spare: NDArray[np.int32]
    """Entries of the bucket that the epoch does not serve."""


def mixed_turns(
    bucket: NDArray[np.integer], mix: Mixture, times: NDArray[np.int32], *, seed: int, epoch: int
) -> Iterator[Turns]:
    """The servings of each bucket that has entries.

    Args:
        bucket: (N,) bucket of every entry.
        mix: The data sets.
        times: (N,) how often the epoch serves each entry.
        seed: Changes the order of all epochs.
        epoch: Number of the epoch.
    """
    count = int(bucket.max(initial=-1)) + 1
    order = _in_order(mix, times, seed, epoch)
    unserved = np.flatnonzero(times == 0).astype(np.int32)
    places, spare = by_bucket(bucket[order], count), by_bucket(bucket[unserved], count)
    served = np.bincount(bucket[order], minlength=count)
    others = np.bincount(bucket[unserved], minlength=count)
    for number, (start, first) in enumerate(zip(begins(np.cumsum(served)), begins(np.cumsum(others)), strict=True)):
        if served[number] or others[number]:
            own = places[start : start + served[number]]
            yield Turns(rows=order[own], places=own, spare=unserved[spare[first : first + others[number]]])


def _in_order(mix: Mixture, times: NDArray[np.int32], seed: int, epoch: int) -> NDArray[np.int32]:
    """(S,) the entry of each serving, in the order of the epoch."""
    drawn = np.repeat(np.arange(len(times), dtype=np.int32), times)
    turn = np.arange(len(drawn)) - np.repeat(begins(np.cumsum(times, dtype=np.int64)), times)
    values, start = [np.empty(0, dtype=np.uint64)], 0
    for first, dataset in zip(mix.starts(), mix.datasets, strict=False):
        own = slice(start, start + dataset.samples)
        place = turn[own] * dataset.entries + (drawn[own] - first)  # other servings do not move this one
        values.append(scattered(place.astype(np.uint64), seed, epoch, stream=dataset.key))
        start += dataset.samples
    return drawn[ascending(np.concatenate(values))]

"""What stands in the last step of a bucket beside the samples that are left for it.

Guarantee: under ``repeat`` it is filled with the bucket's own samples from the front. Under ``mask`` with rows that
only fill: a real row again, of which nothing may be learned, so that every rank has as many steps and nothing counts
twice. Ranks share the real rows of a step evenly, and the step before gives up rows where there are fewer than ranks:
no rank has a batch of which nothing is learned, as long as batches have two rows and there are as many as ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.plan.batches import BatchPlan, rows_of_last_step

Entries = NDArray[np.integer]


def refuse_mask(batches: BatchPlan) -> None:
    """Refuse rows that only fill, for what has no labels to say so.

    Raises:
        UsageError: The policy is ``mask``.
    """
    if batches.small_buckets == "mask":
        raise UsageError(
            "small_buckets='mask' for pictures",
            why="they have no labels that would say of which nothing is learned",
            fix="--small-buckets repeat, drop or partial",
        )


def only_fills(rows: Entries) -> NDArray[np.bool_]:
    """Which places of a plan hold a row that only fills: ``~entry``, below 0."""
    return rows < 0


def filling(rows: Entries) -> Entries:
    """Entries as rows that only fill, and the other way round."""
    return ~rows


def real(rows: Entries) -> Entries:
    """The entries that count, without the rows that only fill."""
    return rows[~only_fills(rows)]


def entries_of(rows: Entries) -> Entries:
    """The entry in each place, whether it counts or only fills."""
    return np.where(only_fills(rows), filling(rows), rows)


def named(rows: Entries, entry: Entries) -> Entries:
    """The same places under other numbers of the entries.

    Args:
        rows: Places of a plan.
        entry: (N,) the number that each entry gets.
    """
    found = entry[entries_of(rows)]
    return np.where(only_fills(rows), filling(found), found)


def filled(turns: Entries, total: int, batches: BatchPlan) -> Entries:
    """The samples of one bucket as its steps hold them.

    Args:
        turns: Its samples, in their order.
        total: Places in its steps.
        batches: Batch size, ranks and policy.
    """
    if batches.small_buckets != "mask" or total <= len(turns):
        return np.resize(turns, total)  # repeats the bucket's own samples from its front
    size = batches.global_batch_size
    last = rows_of_last_step(len(turns), batches)
    begin, end = max(total - 2 * size, 0), len(turns) - last  # the last two steps
    spare = filling(np.resize(turns, total - len(turns)))
    before = [_dealt(turns[begin:end], spare[: size - (end - begin)], batches)] if total > size else []
    used = len(spare) - (size - last)
    return np.concatenate([turns[:begin], *before, _dealt(turns[end:], spare[used:], batches)])


def _dealt(rows: Entries, spare: Entries, batches: BatchPlan) -> Entries:
    """One step: rows and what fills it, dealt out to the ranks in turn."""
    return np.concatenate([rows, spare]).reshape(batches.batch_size, batches.world_size).T.reshape(-1)

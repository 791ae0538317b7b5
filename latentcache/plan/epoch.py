"""The order of one epoch, as arithmetic: the same inputs give the same plan on any machine and any rank.

Decides which entries make which batch. Guarantee: every step has one bucket; all ranks see the same step
sequence; the order depends on (seed, epoch) and the entries, not on worker counts or library versions, because
the shuffle sorts by a fixed 64-bit mix (splitmix64, Steele, Lea, Flood 2014) instead of a library's generator.
Cost: two sorts of N 64-bit numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.batches import BatchPlan, BucketPlan, PlanReport

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_NO_ROWS = np.empty(0, dtype=np.int32)
_NO_STEPS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Every batch of one epoch."""

    rows: NDArray[np.int32]
    """Entries in the order they are served: step after step, within a step rank after rank."""
    starts: NDArray[np.int64]
    """(steps + 1,) where each step begins in ``rows``."""
    world_size: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, step: int, rank: int = 0) -> NDArray[np.int32]:
        """Entries of one rank in one step."""
        start, end = int(self.starts[step]), int(self.starts[step + 1])
        share = (end - start) // self.world_size
        return self.rows[start + rank * share : start + (rank + 1) * share]


def plan_epoch(bucket: NDArray[np.integer], report: PlanReport, *, seed: int, epoch: int) -> EpochPlan:
    """Lay out one epoch.

    Args:
        bucket: (N,) bucket of every entry, as given to ``plan_report``.
        report: How many steps each bucket has.
        seed: Changes the order of all epochs.
        epoch: Number of the epoch, from 0.
    """
    order = _shuffled(len(bucket), seed, epoch, stream=0)
    order = order[np.argsort(bucket[order], kind="stable")]  # bucket by bucket, shuffled inside
    pieces, lengths, start = [_NO_ROWS], [_NO_STEPS], 0
    for plan in report.buckets:
        mine = order[start : start + plan.samples]
        start += plan.samples
        sizes = step_sizes(plan, report.batches)
        lengths.append(sizes)
        pieces.append(np.resize(mine, int(sizes.sum())))  # repeats the bucket's own samples from its front
    steps = _shuffled(report.steps, seed, epoch, stream=1)
    return interleave(np.concatenate(pieces), np.concatenate(lengths), steps, report.batches.world_size)


def uneven(plan: EpochPlan, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of ``count`` entries, those that the epoch serves more than once, and those that it leaves out."""
    served = np.bincount(plan.rows, minlength=count)
    return np.flatnonzero(served > 1), np.flatnonzero(served == 0)


def step_sizes(plan: BucketPlan, batches: BatchPlan) -> NDArray[np.int64]:
    """(steps,) samples of all ranks in each step of one bucket."""
    sizes = np.full(plan.steps, batches.global_batch_size, dtype=np.int64)
    if plan.steps:
        sizes[-1] = plan.last * batches.world_size
    return sizes


def interleave(
    rows: NDArray[np.int32], lengths: NDArray[np.int64], order: NDArray[np.integer], world_size: int
) -> EpochPlan:
    """Put steps in another order.

    Args:
        rows: Entries, step after step.
        lengths: (steps,) entries in each step.
        order: (steps,) which step comes first, second, ...
        world_size: Ranks that share a step.
    """
    begins = np.concatenate(([0], np.cumsum(lengths)))[:-1]
    shuffled = lengths[order]
    starts = np.concatenate(([0], np.cumsum(shuffled))).astype(np.int64)
    within = np.arange(int(starts[-1]), dtype=np.int64) - np.repeat(starts[:-1], shuffled)
    return EpochPlan(rows=rows[np.repeat(begins[order], shuffled) + within], starts=starts, world_size=world_size)


def _shuffled(count: int, seed: int, epoch: int, *, stream: int) -> NDArray[np.int32]:
    """A permutation of ``range(count)``."""
    start = _mix_int(_mix_int(_mix_int(seed & _MASK) ^ (epoch & _MASK)) + stream)
    with np.errstate(over="ignore"):
        values = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        values ^= values >> np.uint64(31)
    return np.argsort(values, kind="stable").astype(np.int32)


def _mix_int(value: int) -> int:
    """splitmix64 of one number."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)

"""Says of a pass that some rank has a batch of which nothing is learned: there a mean over the labels is nan."""

from __future__ import annotations

import warnings

from latentcache.plan.epoch import EpochPlan
from latentcache.plan.fill import only_fills


def warn_of_blank(plan: EpochPlan, batch_size: int) -> None:
    """Warn of batches of one rank in which every row only fills.

    Args:
        plan: Of the pass; all of its batches are full.
        batch_size: Rows of a rank in a step.
    """
    blank = int(only_fills(plan.rows).reshape(-1, batch_size).all(axis=1).sum())
    if blank:
        warnings.warn(
            f"{blank} of {len(plan) * plan.world_size} batches of all ranks hold nothing but rows that only fill:"
            " a mean over their labels is nan; divide the sum of losses by the labels of all ranks, as the Trainer of"
            " transformers does, or take a batch_size of 2 or more, fewer ranks, or small_buckets='repeat' or 'drop'",
            stacklevel=4,
        )

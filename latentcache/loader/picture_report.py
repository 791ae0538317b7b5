"""What an epoch of pictures does, with the names of samples that it repeats or leaves out.

Guarantee: the numbers are there at once; names are looked up when they are first asked for, so that a loader of a
large cache pays nothing for them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from latentcache.loader.epochs import checked_seed
from latentcache.plan.batches import BatchPlan, PlanReport, plan_report
from latentcache.plan.epoch import with_names
from latentcache.plan.fill import refuse_mask
from latentcache.plan.weights import Mixture
from latentcache.store.generation import Generation


def picture_report(
    generation: Generation, batches: BatchPlan, mixture: Mixture | None = None, *, seed: int = 0
) -> PlanReport:
    """The report of an epoch.

    Args:
        generation: The entries.
        batches: Batch size, ranks and policy.
        mixture: How often each data set is served.
        seed: Of the order that the names are from; they are those of its first epoch.

    Raises:
        UsageError: The seed is no whole number, or the policy is ``mask``.
        PlanError: The policy ``error`` met a bucket that does not divide.
    """
    refuse_mask(batches)
    bucket = generation.rows.bucket
    report = plan_report(bucket, generation.buckets, batches, mixture)
    return with_names(report, bucket, partial(_names, generation), seed=checked_seed(seed))


def _names(generation: Generation, rows: NDArray[np.integer]) -> list[str]:
    return generation.samples.names.take(generation.rows.sample[rows].tolist())

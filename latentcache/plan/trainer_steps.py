"""Optimizer steps of a trainer that shuffles rows itself, counted as the Trainer of transformers counts them."""

from __future__ import annotations

import math

from latentcache.plan.batches import BatchPlan
from latentcache.plan.given_numbers import real, whole


def trainer_steps(
    rows: int, epochs: float, *, batch_size: int, world_size: int = 1, grad_accum: int = 1, drop_last: bool = False
) -> int:
    """Optimizer steps of so many epochs.

    Args:
        rows: Rows of all ranks together.
        epochs: Passes over them, also a fraction.
        batch_size: Rows per rank and step.
        world_size: Number of ranks.
        grad_accum: Batches of a rank per optimizer step.
        drop_last: Whether a batch that is not full is left out.

    Raises:
        UsageError: Fewer epochs than none, or a number that cannot be.
    """
    passes = real("epochs", epochs, 0, why="epochs are counted from 0", fix="steps(2, ...), or 0.5")
    plan = BatchPlan(batch_size=batch_size, world_size=world_size)
    accumulated = whole("grad_accum", grad_accum, 1, why="a step takes whole batches")
    batches = rows // plan.batch_size if drop_last else math.ceil(rows / plan.batch_size)
    batches = batches // plan.world_size if drop_last else math.ceil(batches / plan.world_size)
    return math.ceil(passes * max(math.ceil(batches / accumulated), 1))

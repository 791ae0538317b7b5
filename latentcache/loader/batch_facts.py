"""What a batch of tokens says of itself beside its tensors: which rows only fill, and plain numbers for a log.

Guarantee: of a row that only fills nothing is learned; it has the ids and the attention of a real row, because some
kernels give nan for a row without attention. Numbers are of this rank's batch and follow from it and its step alone:
the same after a resume, with batches that are read ahead and in workers. Cost: with ``meta`` one look at the mask and
the labels of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.loader.token_rows import IGNORED

Batch = dict[str, Any]


def without_labels(batch: Batch, fills: NDArray[np.bool_]) -> Batch:
    """The batch, with nothing to learn in the rows that only fill.

    Args:
        batch: ``labels`` (B, L), changed in place.
        fills: (B,) which rows.
    """
    if fills.any():
        batch["labels"][torch.from_numpy(fills)] = IGNORED
    return batch


def meta(batch: Batch, fills: NDArray[np.bool_], *, epoch: int, step: int | None) -> dict[str, int | None]:
    """``epoch``, ``step_in_epoch``, ``tokens`` of documents and those with loss, ``trainable_tokens``, of this batch.

    Args:
        batch: ``attention_mask`` and ``labels``, (B, L).
        fills: (B,) rows that only fill: none of their tokens count.
        epoch: Number of the epoch.
        step: Of the epoch, from 0; None where a batch is no step of one.
    """
    return {
        "epoch": epoch,
        "step_in_epoch": step,
        "tokens": int(batch["attention_mask"].numpy()[~fills].sum()),
        "trainable_tokens": int(np.count_nonzero(batch["labels"].numpy() != IGNORED)),
    }

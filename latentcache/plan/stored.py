"""Row plans as columns of whole numbers, and back: the form in which they are kept.

Guarantee: what comes back is equal to what was put there. Cost: one copy of the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.rows import Left, RowPlan

_COLUMNS = ("ends", "document", "start", "length")
_REASONS = ("too_long", "cut", "idle", "tail")


def as_columns(plan: RowPlan) -> dict[str, NDArray[Any]]:
    """The columns of a plan, numbers from 0 to 2^32 - 1. Its length and kind are not among them."""
    columns: dict[str, NDArray[Any]] = {name: getattr(plan, name) for name in _COLUMNS}
    for reason in _REASONS:
        left = plan.left[reason]
        columns |= {reason: left.documents, f"{reason}_tokens": np.array(divmod(left.tokens, 1 << 32))}
    return columns


def from_columns(columns: Mapping[str, NDArray[np.integer]], max_length: int, *, crossing: bool = False) -> RowPlan:
    """Inverse of :func:`as_columns`.

    Raises:
        KeyError: A column is not there.
    """
    lefts = []
    for reason in _REASONS:
        high, low = columns[f"{reason}_tokens"].tolist()
        lefts.append(Left(documents=columns[reason].astype(np.int32), tokens=(high << 32) + low))
    too_long, cut, idle, tail = lefts
    return RowPlan(
        max_length=max_length,
        ends=columns["ends"].astype(np.int64),
        document=columns["document"].astype(np.int32),
        start=columns["start"].astype(np.uint32),
        length=columns["length"].astype(np.uint32),
        crossing=crossing,
        too_long=too_long,
        cut=cut,
        idle=idle,
        tail=tail,
    )

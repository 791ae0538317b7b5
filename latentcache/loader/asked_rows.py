"""Which entries a caller asks for in one batch, where he names them himself: whole numbers of one shape.

Guarantee: what cannot stand in one batch is refused by name before anything is read. A plan's own batches need no
such look. Cost: some 10 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size


def checked_rows(rows: Any, count: int) -> NDArray[np.int64]:
    """(B,) numbers of entries, of which there are so many.

    Raises:
        UsageError: They are no numbers, none at all, or not of entries.
    """
    try:
        found = np.asarray(rows)
    except (TypeError, ValueError, RuntimeError):
        found = np.empty(0)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size or found.min() < 0 or found.max() >= count:
        said = repr(rows)
        raise UsageError(
            f"a batch of the rows {said if len(said) <= 60 else said[:60] + '...'}",
            why=f"rows are whole numbers from 0 to {count - 1}, at least one of them",
            fix="for example batch([0])",
        )
    return found.astype(np.int64, copy=False)


def require_one_bucket(rows: NDArray[np.integer], bucket: NDArray[np.integer], sizes: Sequence[Size]) -> None:
    """Nothing, where rows may stand in one batch.

    Args:
        rows: (B,) numbers of entries.
        bucket: (B,) bucket of each, as a position in ``sizes``.
        sizes: The buckets.

    Raises:
        UsageError: They are of several buckets; one row of each is named.
    """
    some, first = np.unique(bucket, return_index=True)
    if len(some) > 1:
        named = [f"row {rows[place]}: {sizes[one]}" for one, place in zip(some.tolist(), first.tolist(), strict=True)]
        raise UsageError(
            f"a batch of rows of {len(some)} buckets",
            where=", ".join(named[:8]),
            why="the entries of a batch have one shape",
            fix="ask for the rows of one bucket at a time",
        )

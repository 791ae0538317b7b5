"""What are rows of a view for those who write them down? The protocol, and the check of each batch.

Guarantee: a batch that passes has rows of one length, labels only where the mask is, and something to learn in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from latentcache.errors import ExportError

#: Rows that pass through memory at once.
BATCH_ROWS = 256
_NEEDED = ("input_ids", "attention_mask", "labels")


class FixedRows(Protocol):
    """Rows of one length: a view of a token cache."""

    @property
    def max_length(self) -> int:
        """Tokens in every row."""

    def __len__(self) -> int:
        """Rows."""

    def batch(self, rows: Any) -> Mapping[str, Any]:
        """(B, L) arrays ``input_ids``, ``attention_mask``, ``labels``; ``position_ids`` too where rows are packed."""


def in_batches(splits: Mapping[str, FixedRows], name: str, advanced: Callable[[int, int], None]) -> Iterator[Any]:
    """The rows of one split, some at a time.

    Args:
        splits: All of them, in the order they are written in.
        name: Which one.
        advanced: Told rows that were taken and rows in all, of all splits.
    """
    counts = {split: len(rows) for split, rows in splits.items()}
    total, before = sum(counts.values()), sum(counts[other] for other in list(counts)[: list(counts).index(name)])
    for start in range(0, counts[name], BATCH_ROWS):
        wanted = range(start, min(start + BATCH_ROWS, counts[name]))
        yield splits[name].batch(list(wanted))
        advanced(before + wanted.stop, total)


def checked(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The arrays of a batch, each seen to be (B, L), labels only where the mask is, at least one in every row.

    Raises:
        ExportError: As said.
    """
    arrays = {name: np.asarray(value) for name, value in batch.items() if name in (*_NEEDED, "position_ids")}
    shapes = {name: array.shape for name, array in arrays.items()}
    ids, mask, labels = (arrays[name] for name in _NEEDED)
    if set(shapes.values()) != {(len(ids), length)}:
        raise ExportError("rows of different length", why=f"expected (B, {length}), found {shapes}")
    trained = labels != -100
    if bool((trained & (mask == 0)).any()):
        raise ExportError("a label stands on padding", why="the attention mask is 0 there")
    if not bool(trained.any(axis=1).all()):
        raise ExportError("a row has no token that carries loss", why="its loss would be NaN")
    if bool((trained & (labels != ids)).any()):
        raise ExportError("a label is not the id it stands on")
    return arrays

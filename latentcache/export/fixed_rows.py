"""Rows of one length as exports read them: the protocol, and the check of each batch.

Guarantee: a checked batch has rows of one length, labels only on unmasked tokens, and a label in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from latentcache.errors import ExportError

#: Rows in memory at once.
BATCH_ROWS = 256
_NEEDED = ("input_ids", "attention_mask", "labels")


class FixedRows(Protocol):
    """Rows of one length: ``cache.rows(...)``."""

    @property
    def length(self) -> int:
        """Tokens in every row."""

    def __len__(self) -> int:
        """Rows."""

    def batch(self, rows: Any) -> Mapping[str, Any]:
        """(B, L) arrays ``input_ids``, ``attention_mask``, ``labels``; also ``position_ids`` of packed rows."""


def in_batches(splits: Mapping[str, FixedRows], name: str, on_progress: Callable[[int, int], None]) -> Iterator[Any]:
    """Yield the rows of one split in batches.

    Args:
        splits: All splits, in the order they are written in.
        name: The split.
        on_progress: Called with rows done and rows in total, of all splits.
    """
    counts = {split: len(rows) for split, rows in splits.items()}
    total, before = sum(counts.values()), sum(counts[other] for other in list(counts)[: list(counts).index(name)])
    for start in range(0, counts[name], BATCH_ROWS):
        wanted = range(start, min(start + BATCH_ROWS, counts[name]))
        yield splits[name].batch(list(wanted))
        on_progress(before + wanted.stop, total)


def checked(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Check a batch: arrays (B, L), labels only on unmasked tokens, at least one label per row."""
    arrays = {name: np.asarray(value) for name, value in batch.items() if name in (*_NEEDED, "position_ids")}
    shapes = {name: array.shape for name, array in arrays.items()}
    ids, mask, labels = (arrays[name] for name in _NEEDED)
    if set(shapes.values()) != {(len(ids), length)}:
        raise ExportError("rows of different length", why=f"expected (B, {length}), found {shapes}")
    trained = labels != -100
    if bool((trained & (mask == 0)).any()):
        raise ExportError("a padding token has a label", why="the attention mask is 0 there")
    if not bool(trained.any(axis=1).all()):
        raise ExportError("a row has no token with loss", why="its loss would be NaN")
    if bool((trained & (labels != ids)).any()):
        raise ExportError("a label differs from its token")
    return arrays

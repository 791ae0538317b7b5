"""Rows of one length as exports read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

#: Rows in memory at once.
BATCH_ROWS = 256


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

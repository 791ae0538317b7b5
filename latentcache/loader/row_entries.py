"""Rows of tokens as entries of a position: at which length each is served, and what a checkpoint calls them.

Guarantee: lengths are decided for each epoch, by the batch size that it began with, so a checkpoint of another batch
size keeps its epoch's and no later one's. Without weights they are the same in all epochs of one batch size; with
weights the shares and the steps of every epoch are those of rows of one length (``plan.lengths``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.loader.asked_rows import checked_rows, require_one_bucket
from latentcache.plan.batches import BatchPlan, PlanReport, plan_report
from latentcache.plan.epoch import EpochPlan
from latentcache.plan.fill import entries_of, filling, only_fills
from latentcache.plan.given_numbers import whole
from latentcache.plan.lengths import Drawn, drawn, each_once, fitting, merged_upward, row_and_length
from latentcache.plan.weights import Mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEntries:
    """The rows of a view as a position counts them."""

    name: bytes
    bucket: NDArray[np.int32]
    """(R,) the allowed length of each row in epochs that begin with :attr:`batch`; with weights the smallest."""
    sizes: tuple[Size, ...]
    batch: int
    """Rows of one step on all ranks."""
    also: tuple[bytes, ...] = ()
    mixture: Mixture | None = None
    tokens: NDArray[np.integer] | None = None
    """(R,) tokens of each row, where there are several lengths."""

    @classmethod
    def of(
        cls,
        rows: int,
        tokens: NDArray[np.integer] | None,
        sizes: tuple[Size, ...],
        batch: int,
        *,
        name: bytes,
        also: tuple[bytes, ...] = (),
        mixture: Mixture | None = None,
    ) -> RowEntries:
        """Decide at which length rows are served.

        Args:
            rows: How many there are.
            tokens: (R,) tokens of each row; None where they have one length.
            sizes: The allowed lengths, rising.
            batch: Rows of one step on all ranks.
            name: Names what the rows are.
            also: Other names of the same rows.
            mixture: How often each part is served, where they have weights.
        """
        batch = whole("batch", batch, 1, why="rows of one step on all ranks")
        if tokens is None:
            bucket = np.zeros(rows, dtype=np.int32)
        elif mixture is None:
            bucket = merged_upward(tokens, _widths(sizes), batch)
        else:
            bucket = fitting(tokens, _widths(sizes))
        return cls(name=name, bucket=bucket, sizes=sizes, batch=batch, also=also, mixture=mixture, tokens=tokens)

    def identities(self) -> tuple[str, ...]:
        """See ``position.Entries``."""
        facts = self.bucket.tobytes()
        if self.tokens is not None:
            facts = fitting(self.tokens, _widths(self.sizes)).tobytes() + b"drawn"
        return tuple(content_hash(name + facts).hex() for name in (self.name, *self.also))

    def drawn(self, seed: int, epoch: int, batch: int) -> Drawn | None:
        """See ``position.Entries``."""
        if self.tokens is None:
            return None
        if self.mixture is not None:
            return drawn(self.tokens, _widths(self.sizes), self.mixture, batch, seed=seed, epoch=epoch)
        laid = self.bucket if batch == self.batch else merged_upward(self.tokens, _widths(self.sizes), batch)
        return each_once(laid)

    def report(self, batches: BatchPlan, *, seed: int = 0) -> PlanReport:
        """What an epoch does; the lengths are those of the first one, where each epoch has its own.

        Raises:
            PlanError: The policy ``error`` met rows that do not divide.
        """
        first = self.drawn(seed, 0, batches.global_batch_size)
        if first is None:
            return plan_report(self.bucket, self.sizes, batches, self.mixture)
        return replace(plan_report(first.bucket, self.sizes, batches), mixture=self.mixture)

    @property
    def nested(self) -> bool:
        """See ``position.Entries``: a row fits into every longer one."""
        return len(self.sizes) > 1

    def laid(self, plan: EpochPlan, drawn: Drawn | None) -> EpochPlan:
        """See ``position.Entries``: each step at the length of its longest row, the same on all ranks."""
        if drawn is None or not len(plan):
            return plan
        places, fills = entries_of(plan.rows), only_fills(plan.rows)
        row, _ = row_and_length(drawn.entry[places], len(self.bucket))
        length = drawn.bucket[places].astype(np.int64)
        steps = np.repeat(np.maximum.reduceat(length, plan.starts[:-1]), np.diff(plan.starts))
        entry = steps * len(self.bucket) + row
        return replace(plan, rows=np.where(fills, filling(entry), entry))

    def rows(self, entries: NDArray[np.integer]) -> NDArray[np.integer]:
        """See ``position.Entries``."""
        return self._apart(entries)[0] if self.nested else entries

    def served(self, entries: NDArray[np.integer]) -> tuple[NDArray[np.integer], int]:
        """The rows of entries of one batch, those that only fill below 0, and how many tokens wide they are."""
        if not self.nested:
            return entries, self.sizes[0].width
        rows, length = self._apart(entries)
        return rows, self.sizes[int(length[0])].width

    def _apart(self, entries: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Rows, those that only fill below 0, and the allowed length of each, as a position."""
        rows, length = row_and_length(entries_of(entries), len(self.bucket))
        return np.where(only_fills(entries), filling(rows), rows), length

    def checked(self, entries: Any) -> NDArray[np.integer]:
        """Entries that a caller names himself, for one batch.

        Raises:
            UsageError: They are no entries of an epoch's plan, or are served at several lengths.
        """
        rows = len(self.bucket)
        if self.tokens is None:
            return checked_rows(entries, rows)
        asked = checked_rows(entries, rows * len(self.sizes))
        row, length = row_and_length(asked, rows)
        require_one_bucket(asked, length, self.sizes)
        longer = np.flatnonzero(fitting(self.tokens[row], _widths(self.sizes)) > length)
        if len(longer):
            raise UsageError(
                f"entry {asked[longer[0]]} is in no plan",
                why=f"its row has {self.tokens[row[longer[0]]]} tokens, its length is {self.sizes[length[0]].width}",
                fix="take entries of a plan: loader.position.whole().batch(step)",
            )
        return asked


def _widths(sizes: tuple[Size, ...]) -> list[int]:
    return [size.width for size in sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceableRows:
    """The rows of a view as ``substitute`` counts them: each is a sample, named by what stands first in it."""

    entries: RowEntries
    where: Callable[[int], str]
    """File and line of what stands first in a row."""

    @property
    def bucket(self) -> NDArray[np.int32]:
        """See ``substitute.Replaceable``: rows of one smallest length, which fit wherever one of them does."""
        tokens, sizes = self.entries.tokens, self.entries.sizes
        return self.entries.bucket if tokens is None else fitting(tokens, _widths(sizes))

    @property
    def samples(self) -> int:
        """See ``substitute.Replaceable``."""
        return len(self.bucket)

    def sample(self, row: int) -> int:
        """See ``substitute.Replaceable``."""
        return row

    def name(self, row: int) -> str:
        """See ``substitute.Replaceable``."""
        return f"row {row} ({self.where(row)})"

    def bucket_name(self, row: int) -> str:
        """See ``substitute.Replaceable``."""
        return str(self.entries.sizes[int(self.bucket[row])])

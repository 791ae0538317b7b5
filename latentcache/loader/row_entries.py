"""Rows of tokens as entries of a position: at which length each is served, and what a checkpoint calls them.

Guarantee: lengths are decided for each epoch, by the batch size that it began with, so a checkpoint of another batch
size keeps its epoch's and no later one's. Without weights they are the same in all epochs of one batch size; with
weights the shares and the steps of every epoch are those of rows of one length (``plan.lengths``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.loader.asked_rows import checked_rows, require_one_bucket
from latentcache.plan.batches import BatchPlan, PlanReport, plan_report
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

    def served(self, entries: NDArray[np.integer]) -> tuple[NDArray[np.integer], int]:
        """The rows of entries of one batch, and how many tokens wide they are served."""
        if self.tokens is None:
            return entries, self.sizes[self.bucket[entries[0]]].width
        rows, length = row_and_length(entries, len(self.bucket))
        return rows, self.sizes[length[0]].width

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

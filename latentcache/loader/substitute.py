"""A sample that is damaged or missing: an error, or another sample in its place, said and counted.

Guarantee: the sample that takes the place is of the same bucket. It follows from seed, epoch and the sample alone, so
it is the same on any number of ranks, with any batch size and after a resume. Each replaced sample is a warning once,
and is counted by name. More bad samples than 1 % (at least one) are an error after all. Cost: nothing until a sample
fails. Then each sample of its batch is read alone, and known bad ones are replaced before the next read.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeVar

import numpy as np

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError
from latentcache.plan.documents import Ints
from latentcache.plan.numbers import choice
from latentcache.plan.samples import BatchIndex, SampleIndex
from latentcache.plan.shuffle import pick

OnError = Literal["error", "substitute"]
Made = TypeVar("Made")
Read = Callable[[Ints], Made]
_BAD = (CorruptEntryError, MissingEntryError)
Bad = CorruptEntryError | MissingEntryError


class Substitutes:
    """Replaces samples that cannot be read. Counts what this process read; picklable."""

    def __init__(self, on_error: str) -> None:
        self.active = choice("on_error", on_error, ("error", "substitute")) == "substitute"
        self._bad: dict[int, Bad] = {}
        self.counts: Counter[str] = Counter()
        """Sample -> how often another took its place, as far as this process has read."""

    def read(self, index: SampleIndex, batch: BatchIndex, read: Read[Made]) -> Made:
        """Read the rows of a batch with ``read``, or those in place of bad ones."""
        rows = batch.rows
        if not self.active:
            return read(rows)
        while True:
            known = [row for row in rows.tolist() if row in self._bad]
            others = {row: self._other(index, row, batch.seed, batch.epoch) for row in known}
            served = np.array([others.get(row, row) for row in rows.tolist()]) if others else rows
            try:
                batch_values = read(served)
            except _BAD:
                before = len(self._bad)
                for row in dict.fromkeys(served.tolist()):
                    try:
                        read(np.array([row]))
                    except _BAD as cause:
                        self._remember(index, row, cause)
                if len(self._bad) == before:  # each can be read alone
                    raise
                continue
            for row in known:
                name = _name(index, row)
                bad = self._bad[row]
                self.counts[name] += 1
                if self.counts[name] == 1:
                    warnings.warn(
                        f"{bad.what}, so {_name(index, others[row])} is served in place of {name}"
                        f" (at {bad.where}; {bad.why}); fix: {bad.fix}",
                        stacklevel=2,
                    )
            return batch_values

    def _remember(self, index: SampleIndex, row: int, error: Bad) -> None:
        """A bad sample; the limit is kept here."""
        limit = max(len(index.bucket) // 100, 1)
        if row not in self._bad and len(self._bad) >= limit:
            raise CacheDamagedError(
                f"more than {limit} of {len(index.bucket)} samples are damaged or missing",
                where=error.where,
                why=f"{error.what}: {error.why}",
            ) from error
        self._bad.setdefault(row, error)

    def _other(self, index: SampleIndex, row: int, seed: int, epoch: int) -> int:
        """The sample that takes the place of a bad one: of its bucket."""
        alike = np.flatnonzero(index.bucket == index.bucket[row])
        for other in np.roll(alike, -pick(len(alike), seed, epoch, row)).tolist():
            if other not in self._bad:
                return int(other)
        cause = self._bad[row]
        bucket = index.buckets[int(index.bucket[row])]
        raise CacheDamagedError(
            f"no sample of bucket {bucket} can be read", where=cause.where, why=cause.why or cause.what
        ) from cause


def _name(index: SampleIndex, row: int) -> str:
    return index.names_of(np.array([row]))[0] if index.names_of else f"sample {row}"

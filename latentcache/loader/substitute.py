"""A sample that is damaged or missing: an error, or another sample in its place, said and counted.

Guarantee: the sample that takes the place is of the same bucket, and of the same source where that has one left;
which one it is follows from seed, epoch and the sample alone, so repeating or resuming an epoch, on any number of
ranks and with any batch size, gives the same. Nothing is replaced silently: each sample is a warning once, and is
counted by name. More bad samples than 1 % (at least one) are an error after all. Cost: nothing until a sample fails;
then the bad samples of its batch are found by halving, and known ones are replaced before the next read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError
from latentcache.plan.numbers import choice
from latentcache.plan.samples import Ints, SampleIndex
from latentcache.plan.shuffle import visit

OnError = Literal["error", "substitute"]
Made = TypeVar("Made")
Read = Callable[[Ints], Made]
_BAD = (CorruptEntryError, MissingEntryError)
Bad = CorruptEntryError | MissingEntryError


class Substitutes:
    """Replaces samples that cannot be read. Counts what this process read; picklable.

    Args:
        index: What may be bad; a sample may take the place of another of its bucket.
        name: Name of a sample, for people.
        on_error: ``error`` or ``substitute``.

    Raises:
        UsageError: The policy is not allowed.
    """

    def __init__(self, index: SampleIndex, name: Callable[[int], str], on_error: str) -> None:
        self.active = choice("on_error", on_error, ("error", "substitute")) == "substitute"
        self._index, self._name = index, name
        self._limit = max(len(index.bucket) // 100, 1)
        self._bad: dict[int, int] = {}
        self._errors: dict[int, Bad] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_index"}

    def attach(self, index: SampleIndex) -> None:
        """Go on over the same samples in another process."""
        self._index = index

    @property
    def counts(self) -> Mapping[str, int]:
        """Sample -> how often another took its place, as far as this process has read."""
        return MappingProxyType({self._name(row): times for row, times in list(self._bad.items()) if times})

    def read(self, rows: Ints, read: Read[Made], *, seed: int, epoch: int) -> tuple[Ints, Made]:
        """What ``read`` gives for the rows, or for the rows that take the place of bad ones; and those rows.

        Args:
            rows: Samples of one bucket.
            read: Reads samples, all of them checked.
            seed: Of the order.
            epoch: Number of the epoch.

        Raises:
            CorruptEntryError: A sample fails its check, under ``error``.
            MissingEntryError: A shard is gone, under ``error``.
            CacheDamagedError: Too many samples are bad, or all of a bucket.
        """
        if not self.active:
            return rows, read(rows)
        replaced = rows
        if self._bad and any(row in self._bad for row in rows.tolist()):
            replaced = self._replaced(rows, read, seed, epoch)
        try:
            return replaced, read(replaced)
        except _BAD as error:
            for row, cause in _bad_rows(replaced, read, error):
                self._remember(row, cause)
        replaced = self._replaced(rows, read, seed, epoch)
        return replaced, read(replaced)

    def _replaced(self, rows: Ints, read: Read[Any], seed: int, epoch: int) -> Ints:
        """The rows, with another in the place of each bad one."""
        found = rows.copy()
        for place, row in enumerate(rows.tolist()):
            if row in self._bad:
                found[place] = self._other(row, read, seed, epoch)
        return found

    def _other(self, row: int, read: Read[Any], seed: int, epoch: int) -> int:
        """The sample that takes the place of a bad one."""
        for other in self._others(row, seed, epoch):
            if other in self._bad:
                continue
            try:
                read(np.array([other]))
            except _BAD as error:
                self._remember(other, error)
                continue
            self._bad[row] += 1
            self._say(row, other)
            return other
        cause = self._errors[row]
        bucket = self._index.buckets[int(self._index.bucket[row])]
        raise CacheDamagedError(
            f"no sample of bucket {bucket} can be read", where=cause.where, why=cause.why or cause.what
        ) from cause

    def _remember(self, row: int, error: Bad) -> None:
        """A bad sample; the limit is kept here."""
        if row in self._bad:
            return
        if len(self._bad) >= self._limit:
            raise CacheDamagedError(
                f"more than {self._limit} of {len(self._index.bucket)} samples are damaged or missing",
                where=error.where,
                why=f"{error.what}: {error.why}",
            ) from error
        self._bad[row], self._errors[row] = 0, error

    def _say(self, row: int, other: int) -> None:
        if self._bad[row] == 1:
            error = self._errors[row]
            warnings.warn(
                f"{error.what}, so {self._name(other)} is served in place of {self._name(row)}"
                f" (at {error.where}; {error.why}); fix: {error.fix}",
                stacklevel=2,
            )

    def _others(self, row: int, seed: int, epoch: int) -> Iterator[int]:
        """The other samples of the bucket, in an order of this sample's own; those of its source come first."""
        bucket, mixture = self._index.bucket, self._index.mixture
        alike = np.flatnonzero(bucket == bucket[row])
        starts = mixture.starts() if mixture else [0, len(bucket)]
        number = int(np.searchsorted(starts, row, side="right")) - 1
        own = (alike >= starts[number]) & (alike < starts[number + 1])
        for rows in (alike[own], alike[~own]):
            start, stride = visit(len(rows), seed, epoch, row) if len(rows) else (0, 1)
            for step in range(len(rows)):
                other = int(rows[(start + step * stride) % len(rows)])
                if other != row:
                    yield other


def _bad_rows(rows: Ints, read: Read[Any], error: Bad) -> Iterator[tuple[int, Bad]]:
    """The bad ones of rows that could not be read together, each with its error, found by halving."""
    if len(rows) == 1:
        yield int(rows[0]), error
        return
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        try:
            read(part)
        except _BAD as cause:
            yield from _bad_rows(part, read, cause)

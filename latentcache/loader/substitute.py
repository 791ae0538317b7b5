"""What becomes of an entry that is damaged or missing: an error, or another entry in its place, said and counted.

Guarantee: the entry that takes the place is of the same bucket, and of the same data set where that has one left;
which one it is follows from seed, epoch and the entry alone, so that repeating or resuming an epoch, on any number of
ranks and with any batch size, gives the same. Nothing is replaced in silence: each sample is a warning once, and is
counted under its name. More bad samples than a limit are an error after all, as is a bucket without a whole entry.
Cost: nothing until an entry fails; then its batch is read again, entry by entry.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError, UsageError
from latentcache.loader.gather import Rows
from latentcache.plan.given_numbers import whole
from latentcache.plan.shuffle import visit
from latentcache.plan.weights import Mixture

OnBad = Literal["error", "substitute"]
"""``error``: an exception that names the sample. ``substitute``: another entry of its bucket takes its place."""

Made = TypeVar("Made")
_BAD = (CorruptEntryError, MissingEntryError)


class Replaceable(Protocol):
    """What may be bad: N entries, each of a sample and in a bucket. Picklable; opens no file."""

    @property
    def bucket(self) -> NDArray[np.integer]:
        """(N,) bucket of every entry: one may take the place of another of its bucket."""

    @property
    def samples(self) -> int:
        """How many different ones there are."""

    def sample(self, row: int) -> int:
        """Which one an entry is of."""

    def name(self, row: int) -> str:
        """The sample of an entry, for people."""

    def bucket_name(self, row: int) -> str:
        """The bucket of an entry, for people."""


class Substitutes:
    """Replaces entries that cannot be read. Counts what this process read; picklable.

    Args:
        entries: What may be bad.
        on_bad: The policy.
        limit: Different samples that may be bad; 1 % of all, and at least one, where it is not given.
        mixture: The data sets of the entries, if there are several.

    Raises:
        UsageError: No such policy, or a negative limit.
    """

    def __init__(
        self, entries: Replaceable, *, on_bad: str = "error", limit: int | None = None, mixture: Mixture | None = None
    ) -> None:
        if on_bad not in get_args(OnBad):
            raise UsageError(f"unknown policy on_bad={on_bad!r}", fix=f"use one of {', '.join(get_args(OnBad))}")
        if limit is not None:
            limit = whole("max_substitutes", limit, 0, why="that many samples may be bad: 0, 1, 2 or more")
        self._entries, self._replaces = entries, on_bad == "substitute"
        self._samples = entries.samples if self._replaces else 0
        self._limit = max(self._samples // 100, 1) if limit is None else limit
        self._starts = mixture.starts() if mixture else [0, len(entries.bucket)]
        self._bad: dict[int, int] = {}
        self._names: dict[int, str] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """Sample -> how often another took its place, as far as this process has read."""
        return MappingProxyType({self._names[sample]: times for sample, times in list(self._bad.items()) if times})

    def read(self, rows: Rows, make: Callable[[Rows], Made], *, seed: int, epoch: int) -> tuple[Rows, Made]:
        """What ``make`` gives for the rows, or for those that take the place of bad ones.

        Args:
            rows: Entries of one bucket.
            make: Reads entries, all of them checked.
            seed: Of the order.
            epoch: Number of the epoch.

        Returns:
            The rows that were read, and what was made of them.

        Raises:
            CorruptEntryError: An entry fails its check, under ``error``.
            MissingEntryError: A shard is gone, under ``error``.
            CacheDamagedError: Too many samples are bad, or all of a bucket.
        """
        try:
            return rows, make(rows)
        except _BAD:
            if not self._replaces:
                raise
        good = [self._whole(int(row), make, seed, epoch) for row in rows]
        return good, make(good)

    def _whole(self, row: int, make: Callable[[Rows], Any], seed: int, epoch: int) -> int:
        """The entry itself if it can be read, else the one that takes its place."""
        error = _failure(row, make)
        if error is None:
            return row
        known = self._is_known(row, error)
        for other in self._others(row, seed, epoch):
            failed = _failure(other, make)
            if failed is None:
                self._count(row, other, None if known else error)
                return other
            self._is_known(other, failed)
        raise CacheDamagedError(
            f"no entry of bucket {self._entries.bucket_name(row)} can be read",
            where=error.where,
            why=error.why or error.what,
        ) from error

    def _is_known(self, row: int, error: CorruptEntryError | MissingEntryError) -> bool:
        """Whether the sample was found bad before; the limit is kept here."""
        sample = self._entries.sample(row)
        if sample in self._bad:
            return True
        if len(self._bad) >= self._limit:
            raise CacheDamagedError(
                f"more than {self._limit} of {self._samples} samples are damaged or missing",
                where=error.where,
                why=f"{error.what}: {error.why}; max_substitutes={self._limit}",
            ) from error
        self._names[sample], self._bad[sample] = self._entries.name(row), 0
        return False

    def _count(self, row: int, other: int, error: CorruptEntryError | MissingEntryError | None) -> None:
        """One more in the place of a row; said where an error is given."""
        self._bad[self._entries.sample(row)] += 1
        if error is not None:
            warnings.warn(
                f"{error.what}, so {self._entries.name(other)} is served in place of {self._entries.name(row)}"
                f" (at {error.where}; {error.why}); fix: {error.fix}",
                stacklevel=2,
            )

    def _others(self, row: int, seed: int, epoch: int) -> Iterator[int]:
        """The other entries of the bucket, in an order of this entry's own; those of its data set come first."""
        bucket = self._entries.bucket
        alike = np.flatnonzero(bucket == bucket[row])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        own = (alike >= self._starts[number]) & (alike < self._starts[number + 1])
        for rows in (alike[own], alike[~own]):
            start, stride = visit(len(rows), seed, epoch, row) if len(rows) else (0, 1)
            for step in range(len(rows)):
                other = int(rows[(start + step * stride) % len(rows)])
                if other != row:
                    yield other


def _failure(row: int, make: Callable[[Rows], Any]) -> CorruptEntryError | MissingEntryError | None:
    try:
        make([row])
    except _BAD as error:
        return error
    return None

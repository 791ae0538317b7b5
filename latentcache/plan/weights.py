"""How often each of several data sets is served: whole numbers, decided before training, exact in every epoch.

Guarantee: an epoch serves exactly so many samples of each data set; in an epoch each entry of a data set is served
floor or ceil of (samples / entries) times, and over any stretch of epochs in a row as evenly as whole numbers can
be. No state: which entries have an extra turn follows from seed and epoch alone. Each bucket gets its share of the
extra turns to within one, so the steps of an epoch never change.

How: the entries of a data set stand in a fixed order, bucket by bucket, shuffled inside. ``x`` extra turns among
``n`` entries go to the places where floor(x * (place + epoch) / n) rises (a line drawn on a grid, Bresenham 1965):
x places in every epoch, floor or ceil of the share in any stretch of places, and the same in any stretch of epochs.
Cost: one sort of the entries of each data set that has extra turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.plan.given_numbers import several, whole
from latentcache.plan.shuffle import grouped, shuffled

#: Servings are counted in 32 bits.
MAX_SAMPLES = 2**31 - 1
#: An epoch that was not asked for by its size is not longer than that many passes over all entries together.
MAX_PASSES = 100
Weight = int | float | str | Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What an epoch takes of one data set."""

    name: str
    weight: Fraction
    entries: int
    samples: int
    """Servings in an epoch."""

    @property
    def least(self) -> int:
        """How often each entry is served in an epoch at least."""
        return self.samples // self.entries

    @property
    def most(self) -> int:
        """How often each entry is served in an epoch at most."""
        return -(-self.samples // self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Several data sets in one epoch. The entries of each lie together, in this order."""

    datasets: tuple[Dataset, ...]

    @property
    def samples(self) -> int:
        """Servings of all data sets in an epoch."""
        return sum(dataset.samples for dataset in self.datasets)

    def as_json(self) -> list[list[int]]:
        """What a checkpoint must agree with: entries and samples of each data set."""
        return [[dataset.entries, dataset.samples] for dataset in self.datasets]

    def starts(self) -> list[int]:
        """Where the entries of each data set begin, and where the last ones end."""
        return list(accumulate((dataset.entries for dataset in self.datasets), initial=0))


def mixture(
    entries: Sequence[int], weights: Sequence[Weight], *, samples: int | None = None, names: Sequence[str] = ()
) -> Mixture:
    """Decide how many samples of each data set an epoch serves.

    Args:
        entries: Entries of each data set.
        weights: Share of the samples of each, in any unit: ``[3, 1]`` is three quarters and one. A float counts as
            it is written: 0.1 is a tenth.
        samples: Servings of an epoch, shared out by largest remainder. By default the data set with the most entries
            for its weight is served exactly once and the others as often as that takes, rounded to the nearest
            number, so that every entry is served at least once.
        names: What the data sets are called; numbers where it is not given.

    Raises:
        UsageError: Not one weight for each, a weight that is not above 0, a data set without entries or without
            samples, or more samples than can be counted or than anybody would wait for.
    """
    shares = [_exact(weight) for weight in several("weights", weights, fix="one for each, for example [3, 1]")]
    if samples is not None:
        samples = whole("samples", samples, 0, why="an epoch has a whole number of them")
    if len(shares) != len(entries):
        raise UsageError(
            f"{len(shares)} weights for {len(entries)} data sets", fix="give one weight for each, in the same order"
        )
    called = tuple(names) or tuple(str(number) for number in range(len(entries)))
    for name, count in zip(called, entries, strict=True):
        if not count:
            raise UsageError(f"{name} has no entries", why="its weight cannot be served", fix="leave it out")
    counts = _once_each(entries, shares) if samples is None else largest_remainder(samples, shares)
    _check(counts, called, samples, MAX_SAMPLES if samples else MAX_PASSES * sum(entries))
    parts = zip(called, shares, entries, counts, strict=True)
    return Mixture(datasets=tuple(Dataset(name=n, weight=w, entries=e, samples=c) for n, w, e, c in parts))


def largest_remainder(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers that sum to ``total`` and lie within one of its parts by ``shares`` (Hamilton's method)."""
    whole = sum(shares)
    exact = [total * share / whole for share in shares]
    counts = [int(part) for part in exact]
    by_rest = sorted(range(len(shares)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_rest[: total - sum(counts)]:
        counts[number] += 1
    return counts


def servings(bucket: NDArray[np.integer], mix: Mixture, *, seed: int, epoch: int) -> NDArray[np.int32]:
    """(N,) how often an epoch serves each entry.

    Args:
        bucket: (N,) bucket of every entry.
        mix: The data sets.
        seed: Changes which entries have an extra turn in the same epoch.
        epoch: Number of the epoch.
    """
    num_buckets = int(bucket.max(initial=-1)) + 1
    times = np.empty(len(bucket), dtype=np.int32)
    for number, (start, dataset) in enumerate(zip(mix.starts(), mix.datasets, strict=False)):
        whole, extra = divmod(dataset.samples, dataset.entries)
        part = times[start : start + dataset.entries]
        part[:] = whole
        if extra:
            own = bucket[start : start + dataset.entries]
            order = grouped(shuffled(dataset.entries, seed, number, stream=2), own, num_buckets)
            part[order[_rises(extra, dataset.entries, epoch)]] += 1
    return times


def bucket_counts(bucket: NDArray[np.integer], mix: Mixture, num_buckets: int) -> NDArray[np.int64]:
    """(3, num_buckets) servings of each bucket: in the first epoch, in any epoch at least, and at most."""
    found = np.zeros((3, num_buckets), dtype=np.int64)
    for start, dataset in zip(mix.starts(), mix.datasets, strict=False):
        held = np.bincount(bucket[start : start + dataset.entries], minlength=num_buckets)
        whole, extra = divmod(dataset.samples, dataset.entries)
        upto = np.concatenate(([0], np.cumsum(held))) * extra // dataset.entries
        least, most = held * extra // dataset.entries, -(-held * extra // dataset.entries)
        found += held * whole + np.stack([np.diff(upto), least, most])
    return found


def _rises(extra: int, entries: int, epoch: int) -> NDArray[np.int64]:
    """The places in the fixed order that have an extra turn: where floor(extra * (place + epoch) / entries) rises."""
    risen = -(-np.arange(1, extra + 1, dtype=np.int64) * entries // extra) - 1
    return (risen - epoch % entries) % entries


def _once_each(entries: Sequence[int], shares: Sequence[Fraction]) -> list[int]:
    """Servings when the data set with the most entries for its weight is served once; the others to the nearest."""
    unit = max(count / share for count, share in zip(entries, shares, strict=True))
    return [int(unit * share + Fraction(1, 2)) for share in shares]


def _exact(weight: Weight) -> Fraction:
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        exact = Fraction(0)
    if exact <= 0:
        raise UsageError(
            f"a weight of {weight}", why="a data set that is named is served", fix="a number above 0, or leave it out"
        )
    return exact


def _check(counts: Sequence[int], names: Sequence[str], samples: int | None, limit: int) -> None:
    for name, count in zip(names, counts, strict=True):
        if count < 1:
            raise UsageError(
                f"an epoch of {samples} samples serves none of {name}",
                why="its weight is too small for that few",
                fix="more samples, a larger weight, or leave it out",
            )
    limit = min(limit, MAX_SAMPLES)
    if sum(counts) > limit:
        raise UsageError(
            f"an epoch of {sum(counts)} samples",
            why=f"it takes that many to serve every entry with these weights; at most {limit} are planned",
            fix="say how many samples an epoch has (samples=, --samples), or change the weights",
        )

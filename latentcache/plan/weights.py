"""How often each of several data sets is served: whole numbers, decided before training, exact in every epoch.

Guarantee: an epoch serves exactly so many samples of each data set; in an epoch each entry of a data set is served
floor or ceil of (samples / entries) times, and over any stretch of epochs in a row as evenly as whole numbers can
be. No state: which entries have an extra turn follows from seed, epoch and the name of the data set alone, so one
more data set, or another order of them, changes none of the others. Each bucket gets its share of the extra turns to
within one, so the steps of an epoch never change. A data set is served as often as its weight says or refused,
never cut in silence: ``max_repeat``.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.content import content_hash
from latentcache.plan.given_numbers import several, whole
from latentcache.plan.names import refuse_namesakes
from latentcache.plan.shuffle import grouped, shuffled

#: Servings are counted in 32 bits.
MAX_SAMPLES = 2**31 - 1
#: An epoch that was not asked for by its size is not longer than that many passes over all entries together.
MAX_PASSES = 100
Weight = int | float | str | Fraction
Repeats = Weight | Sequence[Weight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What an epoch takes of one data set."""

    name: str
    weight: Fraction
    entries: int
    samples: int
    """Servings in an epoch."""

    @property
    def key(self) -> int:
        """64 bits of its name: what its order follows from."""
        return int.from_bytes(content_hash(self.name.encode("utf-8", "surrogateescape"))[:8], "big")

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

    def as_json(self) -> list[list[str | int]]:
        """What a checkpoint must agree with: name, entries and samples of each data set."""
        return [[dataset.name, dataset.entries, dataset.samples] for dataset in self.datasets]

    def starts(self) -> list[int]:
        """Where the entries of each data set begin, and where the last ones end."""
        return list(accumulate((dataset.entries for dataset in self.datasets), initial=0))


def mixture(
    entries: Sequence[int],
    weights: Sequence[Weight],
    *,
    samples: int | None = None,
    names: Sequence[str] = (),
    max_repeat: Repeats | None = None,
) -> Mixture:
    """Decide how many samples of each data set an epoch serves.

    Args:
        entries: Entries of each data set.
        weights: Share of the samples of each, in any unit: ``[3, 1]`` is three quarters and one. A float counts as
            it is written: 0.1 is a tenth.
        samples: Servings of an epoch, shared out by largest remainder. By default the data set with the most entries
            for its weight is served exactly once and the others as often as that takes, rounded to the nearest
            number, so that every entry is served at least once.
        names: What the data sets are called, each another name; numbers where it is not given.
        max_repeat: How often an epoch may serve a data set over, at most: one number, or one for each; 4 is four
            servings an entry, 1.5 is one and a half on average. Any number where it is not given.

    Raises:
        UsageError: Not one weight, name or limit for each, a weight that is not above 0, two data sets of one name,
            a data set without entries or without samples, more samples than can be counted or than anybody would wait
            for, or more of a data set than ``max_repeat``.
    """
    shares = [_exact(weight) for weight in several("weights", weights, fix="one for each, for example [3, 1]")]
    if samples is not None:
        samples = whole("samples", samples, 0, why="an epoch has a whole number of them")
    called = tuple(several("names", names, fix="one for each")) or tuple(map(str, range(len(entries))))
    if not all(isinstance(name, str) for name in called):
        raise UsageError(f"names={names!r}", why="data sets are called by words", fix="a string for each")
    for what, given in (("weights", shares), ("names", called)):
        if len(given) != len(entries):
            raise UsageError(
                f"{len(given)} {what} for {len(entries)} data sets", fix="give one for each, in the same order"
            )
    refuse_namesakes(called)
    for name, count in zip(called, entries, strict=True):
        if not count:
            raise UsageError(f"{name} has no entries", why="its weight cannot be served", fix="leave it out")
    counts = _once_each(entries, shares) if samples is None else largest_remainder(samples, shares)
    _check(counts, called, samples, MAX_SAMPLES if samples else MAX_PASSES * sum(entries))
    parts = zip(called, shares, entries, counts, strict=True)
    mix = Mixture(datasets=tuple(Dataset(name=n, weight=w, entries=e, samples=c) for n, w, e, c in parts))
    if max_repeat is not None:
        _require_repeats(mix, _limits(max_repeat, called))
    return mix


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
    times = np.empty(len(bucket), dtype=np.int32)
    for start, dataset in zip(mix.starts(), mix.datasets, strict=False):
        whole, extra = divmod(dataset.samples, dataset.entries)
        part = times[start : start + dataset.entries]
        part[:] = whole
        if extra:
            met, own = _as_met(bucket[start : start + dataset.entries])
            order = grouped(shuffled(dataset.entries, seed, dataset.key, stream=2), own, len(met))
            part[order[_rises(extra, dataset.entries, epoch)]] += 1
    return times


def bucket_counts(bucket: NDArray[np.integer], mix: Mixture, num_buckets: int) -> NDArray[np.int64]:
    """(3, num_buckets) servings of each bucket: in the first epoch, in any epoch at least, and at most."""
    found = np.zeros((3, num_buckets), dtype=np.int64)
    for start, dataset in zip(mix.starts(), mix.datasets, strict=False):
        met, own = _as_met(bucket[start : start + dataset.entries])
        held = np.bincount(own, minlength=len(met))
        whole, extra = divmod(dataset.samples, dataset.entries)
        upto = np.concatenate(([0], np.cumsum(held))) * extra // dataset.entries
        least, most = held * extra // dataset.entries, -(-held * extra // dataset.entries)
        found[:, met] += held * whole + np.stack([np.diff(upto), least, most])
    return found


def _as_met(bucket: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The buckets of a data set in the order its entries meet them, and each entry's by that number.

    Numbers of buckets change with what else is combined; these do not.
    """
    first = np.full(int(bucket.max(initial=-1)) + 1, len(bucket), dtype=np.int64)
    first[bucket[::-1]] = np.arange(len(bucket) - 1, -1, -1)  # of several, what is written last stays
    met = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(bucket))]
    number = np.zeros(len(first), dtype=np.int32)
    number[met] = np.arange(len(met))
    return met, number[bucket]


def _rises(extra: int, entries: int, epoch: int) -> NDArray[np.int64]:
    """The places in the fixed order that have an extra turn: where floor(extra * (place + epoch) / entries) rises."""
    risen = -(-np.arange(1, extra + 1, dtype=np.int64) * entries // extra) - 1
    return (risen - epoch % entries) % entries


def _once_each(entries: Sequence[int], shares: Sequence[Fraction]) -> list[int]:
    """Servings when the data set with the most entries for its weight is served once; the others to the nearest."""
    unit = max(count / share for count, share in zip(entries, shares, strict=True))
    return [int(unit * share + Fraction(1, 2)) for share in shares]


def refuse_without_weights(**given: Any) -> None:
    """Refuse words that say something of shares where there are none.

    Raises:
        UsageError: One of them was given.
    """
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name}={value!r} without weights", fix="pass weights too, for example [1, 1]")


def _limits(max_repeat: Repeats, names: Sequence[str]) -> list[Fraction]:
    """How often each data set may be served over."""
    given: list[Any]
    try:
        given = [max_repeat] * len(names) if isinstance(max_repeat, str) else list(max_repeat)  # type: ignore[arg-type]
    except TypeError:  # one number, of whatever kind
        given = [max_repeat] * len(names)
    try:
        limits = [Fraction(str(limit)) for limit in given]
    except (ValueError, ZeroDivisionError):
        limits = []
    if len(limits) != len(names) or any(limit < 1 for limit in limits):
        raise UsageError(
            f"max_repeat={max_repeat!r} for {len(names)} data sets",
            why="an entry that is served comes once at least",
            fix="one number of 1 or more, or one for each data set",
        )
    return limits


def _require_repeats(mix: Mixture, limits: Sequence[Fraction]) -> None:
    """Refuse a data set that would be served over more often than it may."""
    for dataset, limit in zip(mix.datasets, limits, strict=True):
        if dataset.samples > limit * dataset.entries:
            raise UsageError(
                f"an epoch would serve {dataset.name} {dataset.samples / dataset.entries:.3g} times over,"
                f" max_repeat={_plain(limit)}",
                where=f"{dataset.samples} samples of {dataset.entries} entries, for a weight of"
                f" {_plain(dataset.weight)} in {mix.samples} samples",
                why="a share is served as it was given; what is missing is not taken from others in silence",
                fix=f"{_shorter(mix, limits)}a smaller weight for {dataset.name}, more of its data, or a larger"
                " max_repeat",
            )


def _shorter(mix: Mixture, limits: Sequence[Fraction]) -> str:
    """The longest epoch that keeps the limits, where it serves each data set at all.

    A largest remainder is never above the share rounded up, so a share below a whole number stays below it.
    """
    shares = [dataset.weight for dataset in mix.datasets]
    most = [int(limit * dataset.entries) for dataset, limit in zip(mix.datasets, limits, strict=True)]
    total = int(min(count * sum(shares) / share for count, share in zip(most, shares, strict=True)))
    if not total or min(largest_remainder(total, shares)) < 1:
        return ""
    return f"an epoch of at most {total} samples (samples=, rows=, --samples), "


def _plain(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"{float(number):g}"


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

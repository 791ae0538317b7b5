"""Mixing several sources: whole numbers of samples per epoch, decided before training, and the order they come in.

Guarantee: an epoch serves an exact number of samples of each source. In an epoch each sample of a source is served
floor or ceil of (samples / entries) times, and over any run of epochs as evenly as whole numbers can be. There is no
state: which samples get an extra occurrence follows from seed, epoch and the name of the source, so another source,
or another order of them, changes none of the others; samples of one bucket keep their order too. Each bucket gets its
part of the extra occurrences to within one, so the steps of an epoch never change.

How: the samples of a source have a fixed order, bucket by bucket, shuffled inside. ``x`` extra occurrences among
``n`` samples go to the places where floor(x * (place + epoch) / n) rises (a line drawn on a grid, Bresenham 1965).
Cost: one sort of the occurrences of an epoch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.content import content_hash
from latentcache.plan.numbers import several, whole
from latentcache.plan.shuffle import by_bucket, grouped, scattered, shuffled
from latentcache.value import Value

#: Occurrences are counted in 32 bits.
MAX_SAMPLES = 2**31 - 1
#: Without ``samples=``, an epoch is at most this many times all entries together.
MAX_PASSES = 100
Weight = int | float | str | Fraction


class MixedSource(Value):
    """What an epoch takes of one source."""

    name: str
    weight: Fraction
    entries: int
    samples: int
    """Occurrences in an epoch."""

    @property
    def key(self) -> int:
        """64 bits of the name, which decide the order."""
        return int.from_bytes(content_hash(self.name.encode("utf-8", "surrogateescape"))[:8], "big")

    @property
    def least(self) -> int:
        """Occurrences of each entry in an epoch at least."""
        return self.samples // self.entries

    @property
    def most(self) -> int:
        """Occurrences of each entry in an epoch at most."""
        return -(-self.samples // self.entries)


class Mixture(Value):
    """Several sources in one epoch. The entries of each are together, in this order."""

    sources: tuple[MixedSource, ...]

    @property
    def samples(self) -> int:
        """Occurrences of all sources in an epoch."""
        return sum(source.samples for source in self.sources)

    def as_json(self) -> list[list[str | int]]:
        """What a checkpoint must agree with: name, entries and samples of each source."""
        return [[source.name, source.entries, source.samples] for source in self.sources]

    def starts(self) -> list[int]:
        """Where the entries of each source begin, and where the last ones end."""
        return list(accumulate((source.entries for source in self.sources), initial=0))


def source_name(path: str | os.PathLike[str]) -> str:
    """Default name of the source at a path: ``/data/cats.latentcache`` is ``cats``. A link keeps its own name."""
    found = Path(path).absolute()
    last = (found.resolve() if found.name == ".." else found).name
    return last.removesuffix(".latentcache") or last


def deduplicate_names(names: Sequence[str]) -> list[str]:
    """The names, numbered from the second equal one on: ``cats``, ``cats (2)``."""
    met: Counter[str] = Counter()
    found: list[str] = []
    for name in names:
        met[name] += 1
        found.append(name if met[name] == 1 else f"{name} ({met[name]})")
    return found


def mixture(
    entries: Sequence[int],
    weights: Sequence[Weight],
    *,
    samples: int | None = None,
    names: Sequence[str] = (),
) -> Mixture:
    """Decide how many samples of each source an epoch serves.

    Args:
        entries: Entries of each source.
        weights: Fraction of the samples of each, in any unit: ``[3, 1]`` is three quarters and one. A float counts as
            it is written: 0.1 is a tenth.
        samples: Occurrences of an epoch, divided by largest remainder. By default the source with the most entries
            for its weight is served exactly once, and the others as often as that takes, rounded to the nearest
            number.
        names: Names of the sources, all different; numbers if they are not given.

    Raises:
        UsageError: A list has another length than ``entries``, a weight is not above 0, two names are equal, a source
            has no entries or would get no samples, or the epoch is too long.
    """
    fractions = [_exact(weight) for weight in several("weights", weights, fix="weights=[3, 1]: one for each source")]
    if samples is not None:
        samples = whole("samples", samples, 0)
    called = tuple(several("names", names, fix="one string for each source")) or tuple(map(str, range(len(entries))))
    if not all(isinstance(name, str) for name in called):
        raise UsageError(f"names={names!r}: must be strings", fix="one string for each source")
    for what, given in (("weights", fractions), ("names", called)):
        if len(given) != len(entries):
            raise UsageError(
                f"{what}: {len(given)} values for {len(entries)} sources", fix="give one for each, in the same order"
            )
    double = [name for name, times in Counter(called).items() if times > 1]
    if double:
        raise UsageError(f"names: two sources have the name {double[0]!r}", fix="names=[...] with different names")
    for name, count in zip(called, entries, strict=True):
        if not count:
            raise UsageError(f"weights: {name} has no entries", fix="leave it out")
    counts = _once_each(entries, fractions) if samples is None else largest_remainder(samples, fractions)
    _check(counts, called, samples, MAX_SAMPLES if samples else MAX_PASSES * sum(entries))
    parts = zip(called, fractions, entries, counts, strict=True)
    return Mixture(sources=tuple(MixedSource(name=n, weight=w, entries=e, samples=c) for n, w, e, c in parts))


def largest_remainder(total: int, fractions: Sequence[Fraction]) -> list[int]:
    """Whole numbers that sum to ``total``, each within one of its exact part (Hamilton's method)."""
    unit = sum(fractions)
    exact = [total * fraction / unit for fraction in fractions]
    counts = [int(part) for part in exact]
    by_rest = sorted(range(len(fractions)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_rest[: total - sum(counts)]:
        counts[number] += 1
    return counts


def occurrences(bucket: NDArray[np.integer], mix: Mixture, *, seed: int, epoch: int) -> NDArray[np.int32]:
    """(N,) how often an epoch serves each entry; ``bucket`` (N,) is theirs."""
    times = np.empty(len(bucket), dtype=np.int32)
    for start, source in zip(mix.starts(), mix.sources, strict=False):
        each, extra = divmod(source.samples, source.entries)
        part = times[start : start + source.entries]
        part[:] = each
        if extra:
            met, own = _as_met(bucket[start : start + source.entries])
            order = grouped(shuffled(source.entries, seed, source.key, stream=2), own, len(met))
            part[order[_rises(extra, source.entries, epoch)]] += 1
    return times


def bucket_counts(bucket: NDArray[np.integer], mix: Mixture, num_buckets: int) -> NDArray[np.int64]:
    """(3, num_buckets) occurrences of each bucket: in the first epoch, in any epoch at least, and at most."""
    found = np.zeros((3, num_buckets), dtype=np.int64)
    for start, source in zip(mix.starts(), mix.sources, strict=False):
        met, own = _as_met(bucket[start : start + source.entries])
        held = np.bincount(own, minlength=len(met))
        each, extra = divmod(source.samples, source.entries)
        upto = np.concatenate(([0], np.cumsum(held))) * extra // source.entries
        least, most = held * extra // source.entries, -(-held * extra // source.entries)
        found[:, met] += held * each + np.stack([np.diff(upto), least, most])
    return found


class BucketOrder(Value):
    """The occurrences of one bucket in one epoch."""

    rows: NDArray[np.int32]
    """(S,) entries, in order."""
    places: NDArray[np.int64]
    """(S,) position of each among those of all buckets, rising."""
    spare: NDArray[np.int32]
    """Entries of the bucket that the epoch does not serve."""


def mixed_order(
    bucket: NDArray[np.integer], mix: Mixture, times: NDArray[np.int32], *, seed: int, epoch: int
) -> Iterator[BucketOrder]:
    """The occurrences of each bucket that has entries; ``bucket`` (N,) of each, ``times`` (N,) served."""
    count = int(bucket.max(initial=-1)) + 1
    order = _in_order(mix, times, seed, epoch)
    unserved = np.flatnonzero(times == 0).astype(np.int32)
    places, spare = by_bucket(bucket[order], count), by_bucket(bucket[unserved], count)
    served = np.concatenate(([0], np.cumsum(np.bincount(bucket[order], minlength=count))))
    others = np.concatenate(([0], np.cumsum(np.bincount(bucket[unserved], minlength=count))))
    for number in range(count):
        own = places[served[number] : served[number + 1]]
        left = unserved[spare[others[number] : others[number + 1]]]
        if len(own) or len(left):
            yield BucketOrder(rows=order[own], places=own, spare=left)


def _in_order(mix: Mixture, times: NDArray[np.int32], seed: int, epoch: int) -> NDArray[np.int32]:
    """(S,) the entry of each occurrence, in the order of the epoch."""
    drawn = np.repeat(np.arange(len(times), dtype=np.int32), times)
    first_of = np.cumsum(times, dtype=np.int64) - times
    occurrence = np.arange(len(drawn)) - np.repeat(first_of, times)
    values, start = [np.empty(0, dtype=np.uint64)], 0
    for first, source in zip(mix.starts(), mix.sources, strict=False):
        own = slice(start, start + source.samples)
        place = occurrence[own] * source.entries + (drawn[own] - first)  # other occurrences do not move this one
        values.append(scattered(place.astype(np.uint64), seed, epoch, stream=source.key))
        start += source.samples
    return drawn[np.argsort(np.concatenate(values))]


def _as_met(bucket: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The buckets of a source in the order its entries meet them, and each entry's by that number.

    Numbers of buckets change with what else is combined; these do not.
    """
    first = np.full(int(bucket.max(initial=-1)) + 1, len(bucket), dtype=np.int64)
    first[bucket[::-1]] = np.arange(len(bucket) - 1, -1, -1)  # of several, the value that is written last stays
    met = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(bucket))]
    number = np.zeros(len(first), dtype=np.int32)
    number[met] = np.arange(len(met))
    return met, number[bucket]


def _rises(extra: int, entries: int, epoch: int) -> NDArray[np.int64]:
    """Places in the fixed order that get an extra occurrence: where floor(extra * (place + epoch) / n) rises."""
    risen = -(-np.arange(1, extra + 1, dtype=np.int64) * entries // extra) - 1
    return (risen - epoch % entries) % entries


def _once_each(entries: Sequence[int], fractions: Sequence[Fraction]) -> list[int]:
    """Occurrences if the source with the most entries for its weight is served once; the others to the nearest."""
    unit = max(count / fraction for count, fraction in zip(entries, fractions, strict=True))
    return [int(unit * fraction + Fraction(1, 2)) for fraction in fractions]


def _exact(weight: Weight) -> Fraction:
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        exact = Fraction(0)
    if exact <= 0:
        raise UsageError(f"weights: {weight!r} is not above 0", fix="a number above 0, or leave the source out")
    return exact


def _check(counts: Sequence[int], names: Sequence[str], samples: int | None, limit: int) -> None:
    for name, count in zip(names, counts, strict=True):
        if count < 1:
            raise UsageError(
                f"samples={samples}: an epoch would serve no sample of {name}",
                fix="more samples, a larger weight, or leave it out",
            )
    limit = min(limit, MAX_SAMPLES)
    if sum(counts) > limit:
        raise UsageError(
            f"weights: an epoch would have {sum(counts)} samples",
            why=f"that many serve every entry with these weights; at most {limit} are planned",
            fix="samples=N for the length of an epoch, or other weights",
        )

"""Mixing several sources: whole numbers of samples per epoch, decided before training.

Guarantee: an epoch serves an exact number of samples of each source. In an epoch each sample of a source is served
floor or ceil of (samples / entries) times; over any run of epochs as evenly as whole numbers can be. Seed and epoch
alone decide which samples get an extra occurrence. Each bucket gets its part of the extra occurrences to within one,
so the steps of an epoch never change.

The samples of a source have a fixed order, bucket by bucket, shuffled inside. ``x`` extra occurrences among ``n``
samples go to the places where floor(x * (place + epoch) / n) rises: a line drawn on a grid, Bresenham 1965.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.plan.numbers import several, whole
from latentcache.plan.shuffle import by_bucket, shuffled
from latentcache.value import Value

#: Occurrences are counted in 32 bits.
MAX_SAMPLES = 2**31 - 1
#: Without ``samples=``, an epoch is at most this many times all entries together.
MAX_PASSES = 100
Weight = int | float | str | Fraction


class MixedSource(Value):
    """Weight and counts of one source in an epoch."""

    name: str
    weight: Fraction
    entries: int
    samples: int
    """Occurrences in an epoch."""
    parts: int = 1
    """Caches, or parts of them, that it is made of."""


Mixture = tuple[MixedSource, ...]
"""Several sources in one epoch. The entries of each are together, in this order."""


def mixture(
    names: Sequence[str],
    entries: Sequence[int],
    weights: Sequence[Weight],
    *,
    samples: int | None = None,
) -> Mixture:
    """Decide how many samples of each source an epoch serves; ``view.combine`` says what the arguments mean.

    Equal names are numbered. A weight counts as it is written: 0.1 is a tenth. Counts are by largest remainder, or
    rounded to the nearest number.
    """
    fractions = [_exact(weight) for weight in several("weights", weights, fix="weights=[3, 1]: one for each source")]
    if len(fractions) != len(entries):
        raise UsageError(
            f"weights: {len(fractions)} values for {len(entries)} sources", fix="give one for each, in the same order"
        )
    uses: Counter[str] = Counter()
    called = []
    for name in names:
        uses[name] += 1
        called.append(name if uses[name] == 1 else f"{name} ({uses[name]})")
    if 0 in entries:
        raise UsageError(f"weights: {called[entries.index(0)]} has no entries", fix="leave it out")
    if samples is None:  # the source with the most entries for its weight is served once
        unit = max(count / fraction for count, fraction in zip(entries, fractions, strict=True))
        counts = [int(unit * fraction + Fraction(1, 2)) for fraction in fractions]
    else:
        counts = largest_remainder(whole("samples", samples, 0), fractions)
    if min(counts) < 1:
        raise UsageError(
            f"samples={samples}: an epoch would serve no sample of {called[counts.index(min(counts))]}",
            fix="more samples, a larger weight, or leave it out",
        )
    limit = MAX_SAMPLES if samples else min(MAX_PASSES * sum(entries), MAX_SAMPLES)
    if sum(counts) > limit:
        raise UsageError(
            f"weights: an epoch would have {sum(counts)} samples",
            why=f"that many serve every entry with these weights; at most {limit} are planned",
            fix="samples=N for the length of an epoch, or other weights",
        )
    parts = zip(called, fractions, entries, counts, strict=True)
    return tuple(MixedSource(name=n, weight=w, entries=e, samples=c) for n, w, e, c in parts)


def entries_of(mix: Mixture) -> Iterator[tuple[MixedSource, slice]]:
    """Every source with its entries, as a slice of all entries."""
    start = 0
    for source in mix:
        yield source, slice(start, start + source.entries)
        start += source.entries


def largest_remainder(total: int, fractions: Sequence[Fraction]) -> list[int]:
    """Whole numbers that sum to ``total``, each within one of its exact part (Hamilton's method)."""
    unit = sum(fractions)
    exact = [total * fraction / unit for fraction in fractions]
    counts = [int(part) for part in exact]
    by_rest = sorted(range(len(fractions)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_rest[: total - sum(counts)]:
        counts[number] += 1
    return counts


def occurrences(bucket: NDArray[np.integer], mix: Mixture, *, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """(N,) how often an epoch serves each entry; ``bucket`` (N,) is theirs."""
    times = np.empty(len(bucket), dtype=np.int64)
    for number, (source, entries) in enumerate(entries_of(mix)):
        quotient, extra = divmod(source.samples, source.entries)
        times[entries] = quotient
        if extra:
            order = shuffled(source.entries, seed or 0, number, stream=2)
            held = bucket[entries][order]
            order = order[by_bucket(held, int(held.max()) + 1)]
            # the places in this order where floor(extra * (place + epoch) / entries) rises
            risen = -(-np.arange(1, extra + 1, dtype=np.int64) * source.entries // extra) - 1
            times[entries][order[(risen - epoch % source.entries) % source.entries]] += 1
    return times


def bucket_counts(bucket: NDArray[np.integer], mix: Mixture, num_buckets: int) -> NDArray[np.int64]:
    """(3, num_buckets) occurrences of each bucket: in the first epoch, in any epoch at least, and at most."""
    counts = np.zeros((3, num_buckets), dtype=np.int64)
    for source, entries in entries_of(mix):
        held = np.bincount(bucket[entries], minlength=num_buckets)
        quotient, extra = divmod(source.samples, source.entries)
        upto = np.concatenate(([0], np.cumsum(held))) * extra // source.entries
        least = held * extra // source.entries
        most = -(-held * extra // source.entries)
        counts += held * quotient + np.stack([np.diff(upto), least, most])
    return counts


def _exact(weight: Weight) -> Fraction:
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        exact = Fraction(0)
    if exact <= 0:
        raise UsageError(f"weights: {weight!r} is not above 0", fix="a number above 0, or leave the source out")
    return exact

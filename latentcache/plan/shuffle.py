"""Order without a generator: every shuffle and every choice follows from a fixed mix of its inputs.

Guarantee: the same inputs give the same order on any machine and with any version of any library. The mix is
splitmix64 (Steele, Lea, Flood 2014), written out here. Cost: 0.1 s for a shuffle of a million numbers. A draw of a
stored variant depends on (seed, epoch, sample, occurrence) alone: not on rank, worker, batch size or a resume.
Samples are numbers there, because many may have the same content or caption.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import checksum
from latentcache.plan.numbers import real

Ints = NDArray[np.integer]
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MASK = 0xFFFF_FFFF_FFFF_FFFF
#: Buckets whose numbers fit are sorted as 16-bit numbers: numpy counts those instead of comparing them.
_SHORT = 1 << 16


def shuffled(count: int, seed: int | None, epoch: int, *, stream: int) -> NDArray[np.int32]:
    """A permutation of ``range(count)``; other streams are independent of it. None as seed: the numbers in order."""
    if seed is None:
        return np.arange(count, dtype=np.int32)
    state = _mix(_mix(_mix(seed & _MASK) ^ (epoch & _MASK)) + stream)
    with np.errstate(over="ignore"):
        values = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(state)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        values ^= values >> np.uint64(31)
    return np.argsort(values).astype(np.int32)


def by_bucket(bucket: NDArray[np.integer], num_buckets: int) -> NDArray[np.int64]:
    """Positions bucket by bucket, in their order inside each; no bucket is ``num_buckets`` or above."""
    return np.argsort(bucket.astype(np.uint16) if num_buckets <= _SHORT else bucket, kind="stable")


def pick(count: int, *numbers: int) -> int:
    """One of ``range(count)``, by the numbers: seed, epoch, and whatever the choice is about."""
    state = 0
    for number in numbers:
        state = _mix(state ^ (number & _MASK))
    return state % count


def in_validation(content: NDArray[np.uint8], fraction: float) -> NDArray[np.bool_]:
    """Samples of the validation part, by content hashes (S, 16) alone: not by names, order or other samples.

    So none crosses to the other part when data is added, and a larger fraction keeps all of a smaller one.
    """
    fraction = real("validation", fraction, 0, 1, why="the fraction of the samples to hold out", fix="split(0.05)")
    if fraction == 1:
        return np.ones(len(content), dtype=np.bool_)
    leading = np.ascontiguousarray(content[:, :8]).view(">u8").reshape(-1)  # as good as uniform
    return np.asarray(leading < np.uint64(int(Fraction(fraction) * (_MASK + 1))))


def drawn_of_samples(
    name: str, samples: Ints, seed_and_epoch: tuple[int, int], occurrence: Ints | None = None
) -> NDArray[np.uint64]:
    """(B,) 64 bits for each sample, by its number in the snapshot; draws of other names are independent.

    They are xxh3-64 of name, ``seed_and_epoch`` and number. From the second ``occurrence`` (B,) of a sample in
    an epoch on, the number of the occurrence is hashed too.
    """
    head = name.encode() + b"".join((word & _MASK).to_bytes(8, "little") for word in seed_and_epoch)
    again = [0] * len(samples) if occurrence is None else occurrence.tolist()
    tails = (number.to_bytes(4, "little") if number else b"" for number in again)
    draws = [
        checksum(head + sample.to_bytes(8, "little") + tail)
        for sample, tail in zip(samples.tolist(), tails, strict=True)
    ]
    return np.array(draws, dtype=np.uint64)


def _mix(value: int) -> int:
    """splitmix64 of one number."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)

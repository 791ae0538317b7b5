"""How many pictures one call of the encoder gets: found by timing real work, remembered for each bucket.

Decides, where no size was asked for: on the largest bucket with enough pictures 1, 2, 4, ... are timed, until two
sizes in a row have not gained 3 %; the smallest one within 3 % of the best is kept. Other buckets get :data:`UNTIMED`
until then, and start from it, scaled by their pixels. Guarantee: the timed batches are results like all others,
nothing is encoded twice; after the device ran out of memory a bucket never gets a larger batch again. Cost: three
smaller batches for each size tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from latentcache.geometry.sizes import Size

#: Pictures per call where too few are there to time; 2 to 8 saturate a device at 1024 x 1024 (a figure of models).
UNTIMED = 8
#: Largest size tried. One picture of 1024 x 1024 is 5 TFLOP, a small model at 256 x 256 a thousandth of it.
MOST = 64
#: Calls for each size; the first one loads and chooses kernels and does not count.
CALLS = 3
#: A gain below this does not pay for the memory.
GAIN = 1.03
#: Pictures of a bucket that is timed, at least: three calls of 1, 2, 4 and 8.
ENOUGH = CALLS * (1 + 2 + 4 + 8)
#: Pictures of a bucket that pay for compiling: 40 s at 80 pictures a second and a gain of a fourth are 12,800 at
#: 1 megapixel and a fast device, and 3,000 at 20 a second. Taken from reports; no device was at hand.
COMPILED = 3000


def worth_compiling(counts: Mapping[Size, int]) -> frozenset[Size]:
    """Buckets with so many pictures that compiled code saves more time than compiling takes."""
    return frozenset(bucket for bucket, count in counts.items() if count >= COMPILED)


@dataclass(slots=True)
class Trial:
    """Sizes being timed on one bucket."""

    bucket: Size
    pictures: int
    """Left of this bucket."""
    size: int = 1
    """Being timed."""
    over: bool = False
    _seconds: list[float] = field(default_factory=list)
    _rates: dict[int, float] = field(default_factory=dict)

    def took(self, seconds: float) -> None:
        """One call of the size being timed has taken so long."""
        self.pictures -= self.size
        self._seconds.append(seconds)
        if len(self._seconds) < CALLS:
            return
        self._rates[self.size] = self.size / max(min(self._seconds[1:]), 1e-9)
        self._seconds = []
        following = self.size * 2
        if self._flat() or following > MOST or self.pictures < CALLS * following:
            self.end()
        else:
            self.size = following

    def end(self, most: int = MOST) -> None:
        """Keep the smallest size that is nearly as good as the best, of those up to ``most``."""
        rates = {size: rate for size, rate in self._rates.items() if size <= most}
        best = max(rates.values(), default=0.0)
        self.size = min((size for size, rate in rates.items() if rate * GAIN >= best), default=min(self.size, most))
        self.over = True

    def _flat(self) -> bool:
        """Whether the last two sizes gained nothing over the best before them."""
        rates = list(self._rates.values())
        return len(rates) > 2 and max(rates[-2:]) < GAIN * max(rates[:-2])


@dataclass(slots=True)
class BatchSizes:
    """Pictures per call, for each bucket.

    Args:
        fixed: What was asked for; None to find it out.
    """

    fixed: int | None = None
    _limits: dict[Size, int] = field(default_factory=dict)
    _trial: Trial | None = None

    def expect(self, counts: Mapping[Size, int]) -> None:
        """Say how many pictures of each bucket will come; a trial that has begun goes on."""
        if self.fixed is not None or self._trial is not None:
            return
        enough = [bucket for bucket, count in counts.items() if count >= ENOUGH and bucket not in self._limits]
        if enough:
            bucket = max(enough, key=lambda size: (size.area, counts[size]))
            self._trial = Trial(bucket, counts[bucket])

    def limit(self, bucket: Size) -> int:
        """Pictures per call at most."""
        return min(self._wanted(bucket), self._limits.get(bucket, MOST if self.fixed is None else self.fixed))

    @property
    def most(self) -> int:
        """No call gets more pictures than this."""
        if self.fixed is not None:
            return self.fixed
        return UNTIMED if self._trial is None else MOST

    def timed(self, bucket: Size, size: int) -> bool:
        """Whether a batch is to be waited for, so that its time is known."""
        trial = self._trial
        return trial is not None and not trial.over and trial.bucket == bucket and trial.size == size

    def took(self, bucket: Size, size: int, seconds: float) -> None:
        """A batch has taken so long from its submission to its result."""
        if self._trial is not None and self.timed(bucket, size):
            self._trial.took(seconds)

    def halve(self, bucket: Size, size: int) -> int:
        """The device ran out of memory with this many; the size to go on with, remembered for the bucket."""
        kept = max(size // 2, 1)
        self._limits[bucket] = min(self._limits.get(bucket, kept), kept)
        if self._trial is not None and self._trial.bucket == bucket:
            self._trial.end(kept)
        return self._limits[bucket]

    def _wanted(self, bucket: Size) -> int:
        if self.fixed is not None:
            return self.fixed
        if self._trial is not None and self._trial.bucket == bucket:
            return self._trial.size
        if self._trial is None or not self._trial.over:  # of several workers, some never see the bucket being timed
            return UNTIMED
        return min(max(self._trial.size * self._trial.bucket.area // bucket.area, 1), MOST)

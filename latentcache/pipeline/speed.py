"""How close a build came to what the machine can do, and which of its stages the others waited for.

Decides what is counted: seconds that the device loop waited for decoded pictures while the device had nothing to do,
for the writer, and for the device; seconds that the device worked; pictures of each bucket. Plain numbers, so clocks
of several worker processes can be added. Guarantee: a share of the device's ceiling is said only where the ceiling
was measured. Cost: four readings of a clock for each batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from latentcache.geometry.sizes import Size

PictureFlops = Callable[[Size], float]
"""Floating-point operations of one picture of this size."""
#: Fields of a clock that are added up.
_NUMBERS = ("loops", "span_s", "device_s", "decode_wait_s", "write_wait_s", "device_wait_s", "ceiling_flops", "flops")


@dataclass(slots=True)
class StageClock:
    """What one device loop did, or the sum of several."""

    loops: int = 1
    """Device loops that were added up."""
    span_s: float = 0.0
    """From the first batch to the last, summed over the loops."""
    device_s: float = 0.0
    """Seconds that devices worked, as they say it; else the time of the call."""
    decode_wait_s: float = 0.0
    write_wait_s: float = 0.0
    device_wait_s: float = 0.0
    pictures: Counter[Size] = field(default_factory=Counter)
    """Encoded, of each bucket."""
    ceiling_flops: float = 0.0
    """Matrix products per second that the devices showed, summed; 0 where it was not measured."""
    flops: float = 0.0
    """Floating-point operations of the encoded pictures; 0 where no ceiling was measured."""
    _since: float | None = None

    def encoded(self, bucket: Size, count: int, *, device_s: float, waited_s: float) -> None:
        """A batch came back."""
        self.pictures[bucket] += count
        self.device_s += device_s
        self.device_wait_s += waited_s

    def begin(self) -> None:
        """The device loop is ready for its first batch; called again it changes nothing."""
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        """The last result is there."""
        if self._since is not None:
            self.span_s += time.monotonic() - self._since
            self._since = None

    @contextmanager
    def waiting(self, stage: str, *, counts: bool = True) -> Iterator[None]:
        """Time spent here is spent waiting for ``decode`` or ``write``, once the loop has begun."""
        started = time.monotonic()
        try:
            yield
        finally:
            if counts and self._since is not None:
                spent = time.monotonic() - max(started, self._since)
                if stage == "decode":
                    self.decode_wait_s += spent
                else:
                    self.write_wait_s += spent

    def count(self, flops: Callable[[], PictureFlops]) -> None:
        """Note how much work the pictures were, where a ceiling is there to hold it against.

        Args:
            flops: Gives what counts one picture; it costs a second, so it is not asked without a ceiling.
        """
        if self.ceiling_flops > 0 and self.pictures:
            each = flops()
            self.flops = sum(each(bucket) * count for bucket, count in self.pictures.items())

    def add(self, other: StageClock) -> None:
        """Take over what another loop did."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.pictures.update(other.pictures)

    def as_json(self) -> dict[str, Any]:
        """What it counted, as JSON values, for another process."""
        counted = [[size.height, size.width, count] for size, count in self.pictures.items()]
        return {name: getattr(self, name) for name in _NUMBERS} | {"pictures": counted}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageClock:
        """Inverse of :meth:`as_json`."""
        pictures = Counter({Size(height, width): count for height, width, count in data["pictures"]})
        return cls(**{name: data[name] for name in _NUMBERS}, pictures=pictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a build says of its speed. Rates are those of the device loops, without planning and publishing."""

    pictures_per_s: float
    megapixels_per_s: float
    bound: str
    """``device``, ``host`` (reading and decoding) or ``disk``: the stage that the others waited for."""
    device_busy: float
    """Share of the time that the device worked."""
    waits: Mapping[str, float]
    """Shares of the time that the loop waited for ``decode``, ``write`` and ``device``."""
    teraflops: float | None = None
    """Floating-point operations per second, in 10^12; None where they were not counted."""
    ceiling: float | None = None
    """Share of what the device's matrix products reach; None where that was not measured."""

    def as_json(self) -> dict[str, Any]:
        """The form of ``--json``."""
        rounded = {name: round(share, 4) for name, share in self.waits.items()}
        return {
            "pictures_per_s": round(self.pictures_per_s, 3),
            "megapixels_per_s": round(self.megapixels_per_s, 3),
            "bound": self.bound,
            "device_busy": round(self.device_busy, 4),
            "waits": rounded,
            "teraflops": None if self.teraflops is None else round(self.teraflops, 3),
            "ceiling": None if self.ceiling is None else round(self.ceiling, 4),
        }

    def in_words(self) -> str:
        """One line."""
        ceiling = "" if self.ceiling is None else f", {self.ceiling:.0%} of its ceiling"
        return (
            f"{self.bound}-bound: the device worked {self.device_busy:.0%} of the time, "
            f"{self.megapixels_per_s:.1f} MP/s{ceiling}"
        )


def speed_of(clock: StageClock) -> Speed | None:
    """What the clock of all loops comes to; None where nothing was encoded."""
    if not clock.pictures or clock.span_s <= 0:
        return None
    seconds = clock.span_s / clock.loops  # the loops ran side by side
    waits = {"decode": clock.decode_wait_s, "write": clock.write_wait_s, "device": clock.device_wait_s}
    busy = min(clock.device_s / clock.span_s, 1.0)
    stages = {"device": clock.device_s, "host": clock.decode_wait_s, "disk": clock.write_wait_s}
    rate = clock.flops / seconds if clock.ceiling_flops > 0 else None
    return Speed(
        pictures_per_s=clock.pictures.total() / seconds,
        megapixels_per_s=sum(bucket.area * count for bucket, count in clock.pictures.items()) / seconds / 1e6,
        bound=max(stages, key=lambda stage: stages[stage]),
        device_busy=busy,
        waits={name: min(spent / clock.span_s, 1.0) for name, spent in waits.items()},
        teraflops=None if rate is None else rate / 1e12,
        ceiling=None if rate is None else rate / clock.ceiling_flops,
    )

"""Which samples a check reads, and what is known of all when some were read and found whole.

``n/t`` takes the n-th of t slices: a sample is in the slice that a hash of its name says, so t runs cover all and new
files move no other. ``x%`` and ``N`` draw at random, without putting back, by a seed that is shown. A check that ran
out of time has looked at less than it chose; what it did not look at is counted as that, never as fine.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.content import checksum

_CERTAINTY = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A part of the samples. Exactly one of the three is set."""

    slice_number: int = 0
    """From 1; 0 where samples are drawn."""
    slices: int = 0
    share: float = 0.0
    """0 to 1."""
    number: int = 0
    seed: int = 0

    def choose(self, names: Iterable[str], total: int) -> NDArray[np.bool_]:
        """(S,) whether each sample is chosen.

        Args:
            names: Of all S samples.
            total: S.
        """
        if self.slices:
            wanted = self.slice_number - 1
            slices = (checksum(name.encode("utf-8", "surrogateescape")) % self.slices for name in names)
            return np.fromiter((found == wanted for found in slices), dtype=np.bool_, count=total)
        count = self.number or math.ceil(self.share * total)
        chosen = np.zeros(total, dtype=np.bool_)
        chosen[np.random.default_rng(self.seed).permutation(total)[:count]] = True
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may use that reads what is not trusted."""

    memory_bytes: int
    cpu_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much is looked at."""

    full: bool = False
    """Read every payload and every source."""
    selection: Selection | None = None
    """Read payloads and sources of these samples only, and look at no others."""
    max_duration_s: float | None = None
    isolate: bool = True
    """Read payloads in a process of its own, so that a shard cannot end this one."""
    untrusted: bool = False
    """The cache is from elsewhere: believe nothing of it, see ``verify.untrusted``."""
    limits: Limits | None = None
    """What ``verify.untrusted.check_foreign`` gave, where it was asked already."""
    reencode: int = 0
    """How many samples to encode again, by who is asked to."""
    seed: int = 0
    """Of the samples that are encoded again."""

    @property
    def mode(self) -> str:
        """``sample``, ``full`` or ``fast``."""
        return "sample" if self.selection is not None else "full" if self.full else "fast"

    @property
    def reads(self) -> bool:
        """Whether payloads and sources are read."""
        return self.mode != "fast"


class Deadline:
    """When to stop looking. Without a limit it is never over."""

    def __init__(self, limit_s: float | None) -> None:
        self._end = math.inf if limit_s is None else time.monotonic() + limit_s
        self.cancelled = False
        self._then: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Over at once: the result is not wanted any more."""
        self._end, self.cancelled = -math.inf, True
        if self._then is not None:
            self._then()

    def when_cancelled(self, then: Callable[[], None]) -> None:
        """What to do when the result is not wanted any more."""
        self._then = then
        if self.cancelled:
            then()

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() >= self._end

    @property
    def left_s(self) -> float | None:
        """Seconds left, not below 0; None without a limit."""
        return None if self._end == math.inf else max(self._end - time.monotonic(), 0.0)


def parse_selection(text: str, seed: int) -> Selection:
    """``3/10``, ``2%`` or ``500``.

    Raises:
        UsageError: It is none of them, or names a slice that is not there.
    """
    if match := re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text):
        number, slices = int(match[1]), int(match[2])
        if 1 <= number <= slices:
            return Selection(slice_number=number, slices=slices, seed=seed)
    elif match := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%", text):
        if 0 < float(match[1]) <= 100:
            return Selection(share=float(match[1]) / 100, seed=seed)
    elif re.fullmatch(r"[0-9]{1,12}", text) and int(text):
        return Selection(number=int(text), seed=seed)
    raise UsageError(
        f"--sample {text!r} names no part of the samples",
        why="expected n/t (the n-th of t slices), x% or a number of samples",
        fix="--sample 1/10, --sample 2% or --sample 300",
    )


def wrong_below(looked: int, total: int) -> float:
    """Least share of ``total`` that ``looked`` drawn ones would have shown in 95 of 100 cases, had it been wrong.

    With D wrong ones the chance to miss them all is C(total - D, looked) / C(total, looked), which for a large total
    is (1 - D/total) ** looked: then the answer is ``1 - 0.05 ** (1 / looked)``, about 3 / looked. 0 when all were
    looked at, 1 when none was.
    """
    if looked >= total:
        return 0.0
    low, high = 0, total  # high is seen with certainty enough, low is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _missed(looked, total, middle) <= 1 - _CERTAINTY + 1e-9 else (middle, high)
    return high / total


def confidence(looked: int, total: int, unit: str = "") -> str:
    """What ``looked`` clean ones out of ``total`` say of all of them, in one sentence.

    Args:
        looked: How many were drawn, and looked at.
        total: How many there are.
        unit: What was drawn, where it is not samples: ``blocks``.
    """
    what, of_what = (f" {unit}", f" of the {unit}") if unit else ("", "")
    if looked >= total:
        return f"{looked}{what} clean: that is all of them"
    share = 100 * wrong_below(looked, total)
    return f"{looked}{what} clean: 95 % sure that less than {share:.2g} %{of_what} are wrong"


def _missed(looked: int, total: int, wrong: int) -> float:
    """Chance that ``looked`` drawn ones show none of the wrong ones."""
    if wrong > total - looked:
        return 0.0
    ways = math.lgamma(total - wrong + 1) - math.lgamma(total - wrong - looked + 1)
    return math.exp(ways - math.lgamma(total + 1) + math.lgamma(total - looked + 1))

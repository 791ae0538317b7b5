"""How much of each data set was served: counted when somebody asks, from the plans and the position.

Guarantee: exact, of all ranks together, rows that fill a step by a second serving included and rows that only fill
not; the same after a resume, because nothing is added up batch by batch. Epochs before the one the loader is in count
as whole ones with the sizes in use. Cost: planning an epoch and a look at its entries; once for each whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.loader.position import Position
from latentcache.plan.fill import real
from latentcache.plan.weights import Mixture

#: What everything is called where there are no weights, and so no data sets to tell apart.
EVERYTHING = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Of one data set."""

    samples: int
    """Servings: an entry that comes twice counts twice."""
    tokens: int | None = None
    """Tokens of documents in them; None for pictures, and while the build that makes the tokens is under way."""


class Tally:
    """Counts what a position has behind it.

    Args:
        position: Of the loader.
        mixture: Its data sets, where there are several with weights.
        entries: All entries.
        tokens: (N,) tokens of each, where they are known.
    """

    def __init__(
        self, position: Position, mixture: Mixture | None, entries: int, tokens: NDArray[np.integer] | None
    ) -> None:
        self.position, self._tokens = position, tokens
        self._names = [dataset.name for dataset in mixture.datasets] if mixture else [EVERYTHING]
        self._starts = np.array(mixture.starts() if mixture else [0, entries])
        self._whole: dict[tuple[int, int], NDArray[np.int64]] = {}

    def of(self, epochs: Sequence[int]) -> dict[str, Served]:
        """Name of each data set -> what was served of it in these epochs, as far as they went."""
        found = np.zeros((2, len(self._names)), dtype=np.int64)
        for epoch in epochs:
            found += self._of_epoch(epoch)
        tokens = [None] * len(self._names) if self._tokens is None else found[1].tolist()
        counts = zip(self._names, found[0].tolist(), tokens, strict=True)
        return {name: Served(samples=samples, tokens=some) for name, samples, some in counts}

    def _of_epoch(self, epoch: int) -> NDArray[np.int64]:
        """(2, D) samples and tokens of each data set."""
        known, seed = self.position.epoch, self.position.seed
        if epoch >= known:
            return self._counted(self.position.delivered(epoch))
        if (seed, epoch) not in self._whole:
            self._whole[seed, epoch] = self._counted(self.position.delivered(epoch))
        return self._whole[seed, epoch]

    def _counted(self, entries: NDArray[np.integer]) -> NDArray[np.int64]:
        rows = real(entries)
        owner, count = np.searchsorted(self._starts, rows, side="right") - 1, len(self._names)
        samples = np.bincount(owner, minlength=count)
        tokens = samples if self._tokens is None else np.bincount(owner, self._tokens[rows], minlength=count)
        return np.stack([samples, tokens.astype(np.int64)])  # sums of doubles are exact below 2**53

"""What a position counts: entries of any kind, each in a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.sizes import Size
from latentcache.plan.epoch import EpochPlan
from latentcache.plan.lengths import Drawn


class Entries(Protocol):
    """What a position counts: entries of any kind, each in a bucket."""

    @property
    def bucket(self) -> NDArray[np.integer]:
        """(N,) bucket of every entry, as a position in ``sizes``."""

    @property
    def sizes(self) -> Sequence[Size]:
        """The buckets; rows of L tokens are 1 high and L wide."""

    def identities(self) -> tuple[str, ...]:
        """Names of these entries and their buckets: the first is saved, any of them is known again."""

    def drawn(self, seed: int, epoch: int, batch: int) -> Drawn | None:
        """The servings of an epoch, where they have other buckets in each; None where buckets stay.

        Args:
            seed: Of the order.
            epoch: Number of the epoch.
            batch: Servings of one step on all ranks, as the epoch began.
        """

    @property
    def nested(self) -> bool:
        """Whether what stands in one bucket can stand in the next one too: lengths, not shapes of pictures."""

    def laid(self, plan: EpochPlan, drawn: Drawn | None) -> EpochPlan:
        """The plan as it is served, where its steps may hold entries of several buckets.

        Args:
            plan: Of entries, or of servings that were drawn.
            drawn: Those.
        """

    def rows(self, entries: NDArray[np.integer]) -> NDArray[np.integer]:
        """The rows that entries of an epoch's plan are, as (N,) counts them; those that only fill stay below 0."""

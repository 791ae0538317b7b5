"""Pictures as entries: their buckets, and what a checkpoint and a message call them.

Guarantee: a checkpoint that was made while the cache was built goes on with the finished one, and no other does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.plan.epoch import EpochPlan
from latentcache.plan.lengths import Drawn
from latentcache.store.generation import Generation, Rows
from latentcache.store.reader import EntryReader


@dataclass(frozen=True, slots=True)
class Pictures:
    """The entries of a generation of pictures."""

    generation: Generation

    @property
    def bucket(self) -> NDArray[np.int32]:
        """See ``position.Entries``."""
        return self.generation.rows.bucket

    @property
    def sizes(self) -> tuple[Size, ...]:
        """See ``position.Entries``."""
        return self.generation.buckets

    @property
    def nested(self) -> bool:
        """A picture has its shape: see ``position.Entries``."""
        return False

    def laid(self, plan: EpochPlan, drawn: Drawn | None) -> EpochPlan:
        """It is served as it is: see ``position.Entries``."""
        del drawn
        return plan

    def identities(self) -> tuple[str, ...]:
        """See ``position.Entries``."""
        names = _by_names(self.generation)
        return (names,) if self.generation.arrivals is not None else (_by_keys(self.generation.rows), names)

    def drawn(self, seed: int, epoch: int, batch: int) -> None:
        """Buckets stay: see ``position.Entries``."""

    def rows(self, entries: NDArray[np.integer]) -> NDArray[np.integer]:
        """They are themselves: see ``position.Entries``."""
        return entries


@dataclass(frozen=True, slots=True)
class ReplaceablePictures:
    """The entries of a reader as ``substitute`` counts them; mirror images are no entries of their own."""

    reader: EntryReader

    @property
    def bucket(self) -> NDArray[np.int32]:
        """See ``substitute.Replaceable``."""
        return self.reader.generation.rows.bucket

    @property
    def samples(self) -> int:
        """See ``substitute.Replaceable``."""
        return int(np.count_nonzero(np.bincount(self.reader.generation.rows.sample)))

    def sample(self, row: int) -> int:
        """See ``substitute.Replaceable``."""
        return int(self.reader.generation.rows.sample[row])

    def name(self, row: int) -> str:
        """See ``substitute.Replaceable``."""
        return self.reader.sample_name(row)

    def bucket_name(self, row: int) -> str:
        """See ``substitute.Replaceable``."""
        return str(self.reader.generation.buckets[int(self.bucket[row])])


def _by_keys(rows: Rows) -> str:
    return content_hash(rows.key.tobytes() + rows.bucket.tobytes()).hex()


def _by_names(generation: Generation) -> str:
    """What stands for the keys of a cache whose build is under way: the samples of its rows, and their buckets."""
    names, rows = generation.samples.names, generation.rows
    facts = names.data.tobytes() + names.ends.tobytes() + rows.sample.tobytes() + rows.bucket.tobytes()
    return "coming:" + content_hash(facts).hex()

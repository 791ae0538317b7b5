"""The entries of a generation of pictures to be: whose they are, and where they turned up.

Guarantee: a row that has a place is an entry of a sealed shard under the row's key. Cost: about 200 bytes of memory
per entry that arrived.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from latentcache.errors import CacheDamagedError, CacheNotFoundError, LatentcacheError
from latentcache.identity.key import EntryKey
from latentcache.store.arrivals import ABSENT, GONE, Arrivals
from latentcache.store.coming import load_announced
from latentcache.store.generation import Generation, load_generation
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout


class ExpectedEntries:
    """Rows of pictures, as :class:`~latentcache.store.arrivals.Expected`. Picklable.

    Args:
        layout: The cache.
        generation: As it was announced; its keys, shards and offsets are filled in here.
    """

    opener = "open_cache"
    advice = ' (or loader(on_bad="substitute") to go on without it)'

    def __init__(self, layout: CacheLayout, generation: Generation) -> None:
        self._layout, self.shards = layout, list[str]()
        self._rows, self._samples = generation.rows, generation.samples
        self._buckets, self._part = generation.buckets, generation.recipe.key_part
        self.place = self._rows.shard
        order = np.argsort(self._rows.sample, kind="stable")
        ends = np.cumsum(np.bincount(self._rows.sample, minlength=len(self._samples.names)))
        self._rows_of = np.split(order, ends[:-1]) if len(ends) else []
        self._located: dict[bytes, tuple[int, int]] = {}
        self._wanted: dict[bytes, list[int]] = {}
        for sample in np.flatnonzero(self._samples.content.any(axis=1)).tolist():
            self._known(sample, self._samples.content[sample].tobytes())

    def told(self, sample: int, content: bytes | None) -> None:
        """A sample has this content; None: it cannot be used after all."""
        if content is None:
            self.place[self._rows_of[sample]] = GONE
        else:
            self._known(sample, content)

    def take(self, folder: Path) -> None:
        """The entries of a sealed shard."""
        try:
            index = load_index(folder)
        except LatentcacheError:
            return
        number = len(self.shards)
        self.shards.append(folder.name)
        for key, offset in zip(index.keys(), index.rows["offset"].tolist(), strict=True):
            self._located.setdefault(key, (number, offset))
            for row in self._wanted.pop(key, ()):
                self._put(row, number, offset)

    def finish(self) -> bool:
        """The build has ended: whatever its generation does not have will not come."""
        try:
            final = load_generation(self._layout.root)
        except (CacheNotFoundError, CacheDamagedError):
            return False
        number = {name: position for position, name in enumerate(final.samples.names)}
        for sample, name in enumerate(self._samples.names):
            rows = self._rows_of[sample]
            if (self.place[rows] >= 0).all():
                continue
            if name in number:
                self._known(sample, final.samples.content[number[name]].tobytes())
        self.place[self.place == ABSENT] = GONE
        return True

    def name(self, row: int) -> str:
        """The sample of a row."""
        return str(self._samples.names[int(self._rows.sample[row])])

    def _known(self, sample: int, content: bytes) -> None:
        """A sample's content, and so the keys of its rows."""
        self._samples.content[sample] = np.frombuffer(content, dtype=np.uint8)
        for row in self._rows_of[sample].tolist():
            bucket = self._buckets[int(self._rows.bucket[row])]
            key = EntryKey(content=content, bucket=bucket, recipe=self._part).pack()
            self._rows.key[row] = np.frombuffer(key, dtype=np.uint8)
            found = self._located.get(key)
            if found is None:
                self._wanted.setdefault(key, []).append(row)
            else:
                self._put(row, *found)

    def _put(self, row: int, shard: int, offset: int) -> None:
        self._rows.offset[row] = offset
        self.place[row] = shard


def follow(layout: CacheLayout, *, timeout_s: float) -> Generation | None:
    """The generation that a build under way will publish, filled in as it arrives; None where none is announced.

    Args:
        layout: The cache.
        timeout_s: How long one batch waits for its entries, seconds.

    Raises:
        CacheFormatError: Announced by a newer version, or a build of tokens.
        CacheDamagedError: The announcement is damaged.
    """
    announced = load_announced(layout)
    if announced is None:
        return None
    expected = ExpectedEntries(layout, announced)
    arrivals = Arrivals(layout, expected, announced.manifest, timeout_s=timeout_s)
    return replace(announced, shards=expected.shards, arrivals=arrivals)

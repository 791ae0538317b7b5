"""Pictures of one run that have equal pixels in other bytes: the first one is encoded, the others take its latents.

Decides who is the first, by pixels and bucket; a mirror image that looks like its picture counts as equal, as it does
between builds. Guarantee: a copy is made of a committed entry alone, when everything else is done; whoever waited for
an entry that never came is let go, to be encoded itself. A build that ends before its copies are made leaves them to
the next one, which finds the entry by its pixels. Cost: about 120 bytes for each entry of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from latentcache.pipeline.encoding import new_entry
from latentcache.pipeline.survey import keys_of, placements_for, stored_placements
from latentcache.pipeline.work import Cut, Looked
from latentcache.recipe import Recipe
from latentcache.store.catalog import Catalog, Located
from latentcache.store.entry import NewEntry

#: Where a key says how large its picture is.
_SIZE = slice(2, 8)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An entry that is to be a copy of another one."""

    index: int
    """Of its sample."""
    pixels: bytes


class Twins:
    """Who encodes which pixels in one run."""

    def __init__(self) -> None:
        self._first: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        self._alone = False

    @property
    def waiting(self) -> int:
        """How many entries are to be copies."""
        return len(self._waiting)

    def is_first(self, key: bytes, pixel_hash: bytes, index: int) -> bool:
        """Whether an entry is to be encoded; else it waits. Asked again, the answer is the same.

        Args:
            key: Of the entry.
            pixel_hash: Of the picture in its bucket.
            index: Of its sample.
        """
        pixels = pixel_hash + key[_SIZE]
        if self._alone or self._first.setdefault(pixels, key) == key:
            return True
        self._waiting[key] = _Waiting(index, pixels)
        return False

    def let_go(self, committed: Collection[bytes]) -> dict[bytes, int]:
        """Those who wait for an entry that was not committed: key -> index of the sample.

        From now on nobody waits: of many equal pictures that cannot be encoded each would wait for the last.
        """
        left = [key for key, item in self._waiting.items() if self._first[item.pixels] not in committed]
        self._alone = True
        return {key: self._waiting.pop(key).index for key in left}

    def copies(self, looked: Mapping[int, Looked], recipe: Recipe, catalog: Catalog) -> list[tuple[Located, Cut]]:
        """What is to be copied, and what the copies say of themselves, in the order in which the first ones lie.

        Args:
            looked: What was found in the samples; those that are not among it have been refused meanwhile.
            recipe: Of the run.
            catalog: Has the entries of the run; one that cannot be found any more has no copies.
        """
        tables, found = recipe.geometry.tables(), []
        for key, item in self._waiting.items():
            sample, first = looked.get(item.index), catalog.locate(self._first[item.pixels])
            if sample is None or first is None:
                continue
            placements = placements_for(sample.size, tables)
            keys = keys_of(sample.content, placements, recipe)
            if key in keys:  # else the file was edited between two looks
                cut = Cut(
                    key=key,
                    pixel_hash=first.facts.pixel_hash,
                    placement=stored_placements(placements, recipe)[keys.index(key)],
                    original_size=sample.size,
                    content=sample.content,
                )
                found.append((first, cut))
        return sorted(found, key=lambda pair: (pair[0].shard, pair[0].offset))


def copied(
    copies: Sequence[tuple[Located, Cut]], recipe: Recipe, payload: Callable[[Located], bytes | None]
) -> Iterator[NewEntry]:
    """The entries; of one whose latents fail their check there is no copy.

    Args:
        copies: Of :meth:`Twins.copies`.
        recipe: Of the run.
        payload: Latents of a committed entry.
    """
    for first, cut in copies:
        latents = payload(first)
        if latents is not None:
            yield new_entry(cut, recipe, first.header.shape, latents)

"""Finished documents of other caches, taken over in place of being made: how shares of several nodes become one.

Decides by content and recipe: a document is taken where a record of the same content was tokenised by the same
recipe, wherever that was. Guarantee: what is taken lies in a block that passed its check now, and what is damaged is
said; other caches are only read, and held against collection. Documents are put into blocks in the order of their
records, so the blocks are those of a build that made all by itself. Cost: each other cache is read once to be checked
and once to be taken from, and 60 bytes of memory a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.errors import CacheDamagedError, CacheNotFoundError, CorruptEntryError, StaleCacheError, UsageError
from latentcache.pipeline.token_checks import refused_before
from latentcache.pipeline.token_inputs import TokenBefore, read_token_before
from latentcache.pipeline.token_known import Known, known_documents
from latentcache.sources.sample import Refusal
from latentcache.store.blocks import Block, Tokenised, unpack_block
from latentcache.store.catalog import load_catalog, payload_of
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import pinned
from latentcache.store.token_generation import TokenGeneration, load_tokens
from latentcache.token_recipe import short, token_differences

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCache:
    """One cache that documents are taken from."""

    layout: CacheLayout
    known: Known
    refused: Mapping[bytes, Refusal]
    """Records that the same tokenizer refused there, by content hash."""
    notes: tuple[str, ...] = ()
    """What a user should know of it."""
    held: TokenGeneration | None = None
    """Its generation, pinned."""


def checked_other(cache: Path, wanted: TokeniserDescription, into: Path) -> TokenBefore:
    """What is known of a cache to take documents from; none of its blocks is read.

    Args:
        cache: Its folder.
        wanted: What the documents are to be made by.
        into: The cache that is built.

    Raises:
        UsageError: It is the cache that is built.
        CacheNotFoundError: There is no cache.
        CacheFormatError: It holds pictures, or was written by a newer version.
        StaleCacheError: It was made by another recipe; the fields that differ are named.
    """
    if cache.resolve() == into.resolve():
        raise UsageError(
            f"--take-from {cache} is the cache that is built", fix="leave it out: what it has is used anyway"
        )
    before = read_token_before(CacheLayout(cache))
    if before.recipe is None:
        raise CacheNotFoundError(
            f"there is nothing to take from {cache}",
            where=str(cache),
            why=before.damage or "no build was begun there",
            fix="check the path, or leave it out: what it would have had is tokenised here",
        )
    _refuse_other_recipe(cache, before, wanted)
    return before


def open_other(cache: Path, wanted: TokeniserDescription, into: Path) -> OtherCache:
    """A cache to take documents from, finished or not, with every block of the recipe read and checked.

    Args:
        cache: Its folder.
        wanted: What the documents are to be made by.
        into: The cache that is built.

    Raises:
        UsageError: As :func:`checked_other`.
        CacheNotFoundError: As :func:`checked_other`.
        CacheFormatError: As :func:`checked_other`.
        StaleCacheError: As :func:`checked_other`.
    """
    before, layout, recipe = checked_other(cache, wanted, into), CacheLayout(cache), wanted.recipe
    held = None if before.generation is None or before.damage else pinned(cache, load_tokens)
    catalog = load_catalog(layout)
    known = known_documents(catalog, None, recipe)
    notes = [f"{cache}: {_damaged(len(known.damaged), 'block')}"] if known.damaged else []
    notes += [f"{cache}: {_damaged(len(catalog.damaged), 'shard')}"] if catalog.damaged else []
    if before.generation is None or not before.generation.complete or layout.building.exists():
        notes.append(f"{cache} is not finished: what it has is taken, the rest is tokenised here")
    refused = refused_before(before.generation, recipe)
    return OtherCache(layout=layout, known=known, refused=refused, notes=tuple(notes), held=held)


def _damaged(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''} damaged: what is needed of it is tokenised here"


def _refuse_other_recipe(cache: Path, before: TokenBefore, wanted: TokeniserDescription) -> None:
    assert before.recipe is not None
    made = {} if before.generation is None else before.generation.manifest["provenance"]
    parts = made.get("parts") if before.recipe == getattr(before.generation, "recipe", None) else None
    different = token_differences(before.recipe, wanted.recipe, cached_parts=parts, parts=dict(wanted.parts))
    if not different:
        return
    changes = ", ".join(f"{name}: {short(was)} -> {short(now)}" for name, was, now in different)
    raise StaleCacheError(
        f"{cache} was made by another recipe than this build",
        where=str(cache),
        why=changes,
        fix="build it again with the tokenizer and the flags of this build, or leave it out",
        differences=tuple((name, str(was), str(now)) for name, was, now in different),
    )


@dataclass(slots=True, kw_only=True)
class Taken:
    """What other caches have of N records."""

    caches: Sequence[OtherCache] = ()
    cache: NDArray[np.int32]
    """(N,) which of them has each record's document, -1 where none has."""
    number: NDArray[np.int64]
    """(N,) which document there."""
    _blocks: dict[int, tuple[int, Block]] = field(default_factory=dict, repr=False)
    """The block of each cache that was read last, and its number: documents are asked for in about their order."""

    @property
    def there(self) -> NDArray[np.bool_]:
        """(N,) whether a record's document can be taken."""
        return self.cache >= 0

    def length(self, rows: NDArray[np.intp]) -> int:
        """Tokens of some records' documents together.

        Args:
            rows: (n,) which records; all of them are there.
        """
        lengths = ((one.known.documents.length, self.cache[rows] == place) for place, one in enumerate(self.caches))
        return sum(int(length[self.number[rows][own]].sum(dtype=np.int64)) for length, own in lengths)

    def documents(self, content: NDArray[np.uint8], rows: NDArray[np.intp]) -> Iterator[Tokenised]:
        """The documents of some records, read as they are asked for.

        Args:
            content: (N, 16) content hashes of all records.
            rows: (n,) which of them, upwards.

        Raises:
            CacheDamagedError: A block that was whole when it was checked cannot be read any more.
        """
        for row in rows.tolist():
            yield self._document(content[row].tobytes(), int(self.cache[row]), int(self.number[row]))

    def _document(self, content: bytes, place: int, number: int) -> Tokenised:
        held = self.caches[place].known.documents
        block = self._block(place, int(held.block[number]))
        start, first = int(held.start[number]), int(held.span_ends[number - 1]) if number else 0
        return Tokenised(
            content=content,
            ids=block.ids[start : start + int(held.length[number])],
            runs=held.spans[first : int(held.span_ends[number])],
            control_strings=int(held.control[number]),
        )

    def _block(self, place: int, number: int) -> Block:
        if self._blocks.get(place, (-1,))[0] != number:
            other = self.caches[place]
            located = other.known.blocks[number]
            payload = payload_of(located, other.layout.shards)
            try:
                if payload is None:
                    raise CorruptEntryError("a block of tokens is damaged")
                self._blocks[place] = number, unpack_block(located.header, payload)
            except CorruptEntryError as error:
                raise CacheDamagedError(
                    f"a block of {other.layout.root} cannot be read any more",
                    where=str(other.layout.shards / located.shard),
                    why="it was whole when this build began",
                    fix="run the same command again: what cannot be taken is tokenised",
                ) from error
        return self._blocks[place][1]


def find_taken(caches: Sequence[OtherCache], content: NDArray[np.uint8], wanted: NDArray[np.bool_]) -> Taken:
    """Where each wanted record's document is taken from: the first cache that has it.

    Args:
        caches: In the order in which they were named.
        content: (N, 16) content hashes of records.
        wanted: (N,) which are to be made or taken.
    """
    cache, number = np.full(len(content), -1, dtype=np.int32), np.full(len(content), -1, dtype=np.int64)
    for place, one in enumerate(caches):
        missing = np.flatnonzero(wanted & (cache < 0))
        found = one.known.find(content[missing])
        cache[missing[found >= 0]], number[missing[found >= 0]] = place, found[found >= 0]
    return Taken(caches=caches, cache=cache, number=number)


def in_order(
    made: Iterator[_Item], taken: Iterator[_Item], rows: NDArray[np.intp], other: NDArray[np.intp]
) -> Iterator[_Item]:
    """Two streams as one, in the order of their records.

    Args:
        made: What was made of the records ``rows``.
        taken: What was taken for the records ``other``.
        rows: (m,) upwards.
        other: (t,) upwards; none of them is in ``rows``.
    """
    before = np.searchsorted(other, rows)
    done = 0
    for one, ready in zip(made, before.tolist(), strict=True):
        for _ in range(ready - done):
            yield next(taken)
        done = ready
        yield one
    yield from taken

"""The documents of a generation of tokens to be: in which block each of them turned up, and what it came to.

A record's content is known from the start, so a block of any build by the same recipe will do, also one that another
build than the announced one made. Guarantee: a document that has a place lies in a block of a sealed shard that
passed its check now, or that the generation before uses whole; a process checks a block again when it first reads
from it. Cost: one read of each block that is new or used in part, and 8 bytes of memory a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CacheNotFoundError, CorruptEntryError, LatentcacheError
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.key import KIND_TOKENS, RECIPE_BYTES, EntryKey
from latentcache.store.arrivals import ABSENT, GONE, Arrivals
from latentcache.store.blocks import unpack_block
from latentcache.store.catalog import Located, payload_of
from latentcache.store.documents import Documents, as_items, take_spans
from latentcache.store.entry import unpack_facts, unpack_header
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.token_coming import load_announced_tokens
from latentcache.store.token_generation import TokenGeneration, load_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The documents of one block."""

    content: NDArray[np.uint8]
    start: NDArray[np.uint32]
    length: NDArray[np.uint32]
    span_ends: NDArray[np.int64]
    spans: NDArray[np.uint32]


class ExpectedDocuments:
    """Rows of documents, as :class:`~latentcache.store.arrivals.Expected`. Picklable.

    Args:
        layout: The cache.
        generation: As it was announced; its documents and blocks are filled in here.
        before: The generation that is current, where there is one: its blocks are known without reading them.
    """

    opener = "open_tokens"
    advice = ""

    def __init__(
        self, layout: CacheLayout, generation: TokenGeneration, before: TokenGeneration | None = None
    ) -> None:
        self._layout, self._recipe, self.shards = layout, generation.recipe, list[str]()
        self._documents, self._blocks = generation.documents, generation.blocks
        self.place = self._documents.block
        items = as_items(self._documents.content)
        self._order = np.argsort(items, kind="stable")
        self._sorted = items[self._order]
        self._tables: list[_Table] = []
        same = before is not None and before.recipe.recipe_id == self._recipe.recipe_id
        self._before = before if same else None
        self._rows_before = _by_block(self._before)

    def told(self, sample: int, content: bytes | None) -> None:
        """A record cannot be used after all; what its content is was known before."""
        if content is None and self.place[sample] == ABSENT:
            self.place[sample] = GONE

    def take(self, folder: Path) -> None:
        """The blocks of a sealed shard."""
        try:
            index = load_index(folder)
        except LatentcacheError:
            return
        number = len(self.shards)
        self.shards.append(folder.name)
        for row, key in enumerate(index.keys()):
            if key[0] == KIND_TOKENS and key[-RECIPE_BYTES:] == self._recipe.key_part:
                self._take_block(folder, number, key, index.rows[row])

    def finish(self) -> bool:
        """The build has ended: whatever its generation does not have will not come."""
        try:
            final = load_tokens(self._layout.root)
        except LatentcacheError:
            return False
        there = np.isin(as_items(self._documents.content), as_items(final.documents.content))
        self.place[(self.place == ABSENT) & ~there] = GONE
        return not (self.place == ABSENT).any()

    def name(self, row: int) -> str:
        """File and line of a document."""
        return self._documents.where(row)

    def some(self, rows: NDArray[np.integer]) -> Documents:
        """Some documents that are there, with their runs, as columns of their own.

        Args:
            rows: (n,) their numbers.
        """
        runs = [self._runs(int(row)) for row in rows]
        names = ("content", "block", "start", "length", "source", "line")
        return Documents(
            span_ends=np.cumsum([len(one) for one in runs], dtype=np.int64),
            spans=np.concatenate(runs) if runs else np.empty((0, 2), dtype=np.uint32),
            sources=self._documents.sources,
            **{name: getattr(self._documents, name)[rows] for name in names},
        )

    def _runs(self, row: int) -> NDArray[np.uint32]:
        table = self._tables[int(self.place[row])]
        place = int(np.searchsorted(table.start, self._documents.start[row]))
        return table.spans[int(table.span_ends[place - 1]) if place else 0 : int(table.span_ends[place])]

    def _take_block(self, folder: Path, shard: int, key: bytes, row: Any) -> None:
        """Give its documents their places, where one of them has none yet."""
        header = unpack_header(row["header"].tobytes(), key)
        if header.recipe_id != self._recipe.recipe_id:
            return
        table = self._known(key, header.original_size.height) or self._read(folder, key, row)
        if table is None:
            return
        rows, which = self._wanted(table.content)
        if not len(rows):
            return
        number, blocks = len(self._tables), self._blocks
        blocks.key[number] = np.frombuffer(key, dtype=np.uint8)
        blocks.shard[number], blocks.offset[number] = shard, row["offset"]
        blocks.tokens[number] = header.true_length
        blocks.ids_hash[number] = row["facts"][:HASH_BYTES]
        self._tables.append(table)
        self._documents.start[rows], self._documents.length[rows] = table.start[which], table.length[which]
        self.place[rows] = number

    def _wanted(self, content: NDArray[np.uint8]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows that have no place yet, and the number in the block of the document that each of them is."""
        items = as_items(content)
        first = np.searchsorted(self._sorted, items, side="left")
        count = np.searchsorted(self._sorted, items, side="right") - first
        ends = np.cumsum(count)
        where = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - (ends - count), count)
        rows, which = self._order[where], np.repeat(np.arange(len(items)), count)
        absent = self.place[rows] < 0
        return rows[absent], which[absent]

    def _known(self, key: bytes, documents: int) -> _Table | None:
        """A block that the generation before uses whole, by its columns; of another they name some documents only."""
        rows, before = self._rows_before.get(key), self._before
        if rows is None or before is None or len(rows) != documents:
            return None
        ends, spans = take_spans(before.documents.span_ends, before.documents.spans, rows)
        columns = {name: getattr(before.documents, name)[rows] for name in ("content", "start", "length")}
        return _Table(span_ends=ends, spans=spans, **columns)

    def _read(self, folder: Path, key: bytes, row: Any) -> _Table | None:
        """A block by its payload; None for one that is damaged."""
        header = unpack_header(row["header"].tobytes(), key)
        facts = unpack_facts(row["facts"].tobytes(), EntryKey.unpack(key).bucket)
        place = Located(key=key, shard=folder.name, offset=int(row["offset"]), header=header, facts=facts)
        payload = payload_of(place, folder.parent)
        if payload is None:
            return None
        try:
            block = unpack_block(header, payload)
        except CorruptEntryError:
            return None
        columns = {name: np.array(getattr(block, name)) for name in ("content", "length", "spans")}
        return _Table(start=block.start, span_ends=block.span_ends, **columns)


def _by_block(generation: TokenGeneration | None) -> Mapping[bytes, NDArray[np.intp]]:
    """Key of each block -> one row for each of its documents, by their places in it."""
    if generation is None:
        return {}
    documents, blocks = generation.documents, generation.blocks
    order = np.lexsort((documents.start, documents.block))
    block, start = documents.block[order], documents.start[order]
    again = np.append(False, (block[1:] == block[:-1]) & (start[1:] == start[:-1]))[: len(order)]
    order = order[~again]  # records that are equal have one document
    ends = np.cumsum(np.bincount(documents.block[order], minlength=len(blocks)))
    return {key.tobytes(): rows for key, rows in zip(blocks.key, np.split(order, ends[:-1]), strict=True)}


def follow_tokens(layout: CacheLayout, *, timeout_s: float) -> TokenGeneration | None:
    """The generation that a build under way will publish, filled in as it arrives; None where none is announced.

    Args:
        layout: The cache.
        timeout_s: How long one batch waits for its documents, seconds.

    Raises:
        CacheFormatError: Announced by a newer version, or a build of pictures.
        CacheDamagedError: The announcement is damaged.
    """
    announced = load_announced_tokens(layout)
    if announced is None:
        return None
    try:
        before = load_tokens(layout.root)
    except (CacheNotFoundError, CacheDamagedError):
        before = None
    expected = ExpectedDocuments(layout, announced, before)
    arrivals = Arrivals(layout, expected, announced.manifest, timeout_s=timeout_s)
    return replace(announced, shards=expected.shards, arrivals=arrivals, expected=expected)

"""Checks of stored tokens: shards, headers of blocks, and where asked for every payload against the columns.

Guarantee: a damaged cache gives findings, never an exception and never a signal: files are read, not mapped. A block
that is damaged is a finding for each document in it. Cost: 20 us a block without payloads; with them one pass over
all ids, and one over the pages of each shard.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from latentcache.errors import CacheDamagedError, StoreError
from latentcache.identity.key import KIND_TOKENS
from latentcache.store.blocks import Block, block_facts
from latentcache.store.documents import take_spans
from latentcache.store.entry import unpack_header
from latentcache.store.index import ShardIndex, load_index, rows_at
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import TokenGeneration
from latentcache.store.token_reader import TokenReader
from latentcache.verify.entries import words
from latentcache.verify.findings import Finding
from latentcache.verify.trees import pages_found

FIELD = "input_ids"


@dataclass(slots=True, kw_only=True)
class BlocksChecked:
    """What a look at the blocks came to."""

    damage: dict[int, list[Finding]] = field(default_factory=lambda: defaultdict(list))
    """By document."""
    loose: list[Finding] = field(default_factory=list)
    """Findings that belong to no document."""
    headers: int = 0
    payloads: int = 0
    payload_bytes: int = 0

    def add(self, generation: TokenGeneration, block: int, category: str, reason: str, found: str) -> None:
        """Note a finding about every document of one block."""
        blocks = generation.blocks
        about = {
            "key": blocks.key[block].tobytes().hex(),
            "file": f"shards/{generation.shards[int(blocks.shard[block])]}",
            "found": found,
        }
        for document in np.flatnonzero(generation.documents.block == block).tolist():
            path = generation.documents.where(document)
            self.damage[document].append(Finding(category=category, reason=reason, path=path, field=FIELD, **about))


def check_blocks(layout: CacheLayout, generation: TokenGeneration, *, full: bool) -> BlocksChecked:
    """Check the blocks of a generation.

    Args:
        layout: The cache.
        generation: What the blocks should be.
        full: Read every payload and walk the pages of every shard.
    """
    checked = BlocksChecked()
    reader = TokenReader(layout, generation)
    for number, name in enumerate(generation.shards):
        own = np.flatnonzero(generation.blocks.shard == number)
        index = _open_shard(layout, name, own.tolist(), generation, checked)
        if index is None:
            continue
        found = rows_at(index, generation.blocks.offset[own])
        for block, row in zip(own.tolist(), found.tolist(), strict=True):
            if _check_header(index, block, row, generation, checked) and full:
                _check_payload(reader, block, checked)
        _orphans(index, generation, checked)
        if full and (why := pages_found(layout, name, lambda: False)):
            for block in own.tolist():
                checked.add(generation, block, "corrupt", "pages", why)
    _other_shards(layout, generation, checked)
    reader.close()
    return checked


def _open_shard(
    layout: CacheLayout, name: str, blocks: list[int], generation: TokenGeneration, checked: BlocksChecked
) -> ShardIndex | None:
    """The shard's index, or None with findings for every block in it."""
    folder = layout.shards / name
    try:
        return load_index(folder)
    except CacheDamagedError as error:
        category, reason, found = "corrupt", "shard", words(error)
        if isinstance(error.__cause__, PermissionError):
            category, reason = "unverifiable", "permission"
        elif not (folder / "data.mdb").exists():
            category, reason, found = "missing", "entry-lost", "its shard is gone"
        for block in blocks:
            checked.add(generation, block, category, reason, found)
        return None


def _check_header(
    index: ShardIndex, block: int, row: int, generation: TokenGeneration, checked: BlocksChecked
) -> bool:
    """Hold one header against all that is known of it; False with a finding where it is not what it should be."""
    blocks = generation.blocks
    key = blocks.key[block].tobytes()
    if row < 0 or index.rows["key"][row].tobytes() != key:
        checked.add(generation, block, "missing", "entry-lost", "its shard's index does not list it")
        return False
    checked.headers += 1
    try:
        header = unpack_header(index.rows["header"][row].tobytes(), key)
    except StoreError as error:
        checked.add(generation, block, "corrupt", "header", error.why or error.what)
        return False
    facts = block_facts(blocks.ids_hash[block].tobytes())
    expected = (KIND_TOKENS, generation.recipe.dtype, generation.recipe.recipe_id, int(blocks.tokens[block]), facts)
    found = (header.kind, header.dtype, header.recipe_id, header.true_length, index.rows["facts"][row].tobytes())
    named = header.content == key[8:24] and header.recipe_id[:8] == key[24:]
    if expected != found or not named:
        checked.add(generation, block, "corrupt", "header", "its header is not that of the recorded block")
        return False
    return True


def _check_payload(reader: TokenReader, block: int, checked: BlocksChecked) -> None:
    """Read one block and hold its table against the columns."""
    generation = reader.generation
    try:
        found = reader.check(block)
    except StoreError as error:
        checked.add(generation, block, "corrupt", "payload", getattr(error, "why", "") or error.what)
        return
    checked.payloads += 1
    checked.payload_bytes += found.ids.nbytes
    why = _unlike(found, generation, block)
    if why:
        checked.add(generation, block, "corrupt", "columns", why)


def _unlike(found: Block, generation: TokenGeneration, block: int) -> str:
    """In what the columns and the table of a block differ; empty where they do not."""
    documents = generation.documents
    own = np.flatnonzero(documents.block == block)
    place = np.searchsorted(found.start, documents.start[own])
    inside = place < len(found.start)
    if not inside.all() or (found.start[place] != documents.start[own]).any():
        return "a document does not begin where the columns say"
    pairs: dict[str, tuple[Any, Any]] = {
        "length": (found.length[place], documents.length[own]),
        "content hash": (found.content[place], documents.content[own]),
        "count of control strings": (found.control[place], generation.control[own]),
    }
    for name, (theirs, mine) in pairs.items():
        if not np.array_equal(theirs, mine):
            return f"the {name} of a document is not the recorded one"
    mine_ends, mine_spans = take_spans(documents.span_ends, documents.spans, own)
    ends, spans = take_spans(found.span_ends, found.spans, place)
    if not (np.array_equal(ends, mine_ends) and np.array_equal(spans, mine_spans)):
        return "the runs with loss of a document are not the recorded ones"
    return ""


def _orphans(index: ShardIndex, generation: TokenGeneration, checked: BlocksChecked) -> None:
    """Blocks of a shard that no document needs."""
    needed = {key.tobytes() for key in generation.blocks.key}
    checked.loose += [
        Finding(category="orphan", reason="unreferenced", key=key.hex(), field=FIELD)
        for key in index.keys()  # noqa: SIM118 - a method of its own
        if key not in needed
    ]


def _other_shards(layout: CacheLayout, generation: TokenGeneration, checked: BlocksChecked) -> None:
    """Shards that the generation does not use; a damaged one does no harm."""
    for folder in layout.sealed_shards():
        if folder.name in generation.shards:
            continue
        try:
            _orphans(load_index(folder), generation, checked)
        except CacheDamagedError as error:
            parts = {"file": f"shards/{folder.name}", "found": words(error)}
            checked.loose.append(Finding(category="orphan", reason="damaged-shard", **parts))

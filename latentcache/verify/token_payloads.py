"""Checks that read every byte of blocks of tokens: payloads against their checksums, tables against the columns.

Guarantee: what passes here cannot fail in a loader, because the loader's own reader does the reading. Nothing is
mapped. Cost: one pass over the ids, and one over the documents of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import MissingEntryError, StoreError
from latentcache.store.blocks import Block
from latentcache.store.documents import take_spans
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import TokenGeneration
from latentcache.store.token_reader import TokenReader
from latentcache.verify.payloads import Message, scan_shard
from latentcache.verify.portions import by_place


def scan_blocks(
    layout: CacheLayout,
    generation: TokenGeneration,
    shards: list[int],
    *,
    chosen: NDArray[np.bool_] | None = None,
    pages: bool = True,
    over: Callable[[], bool] = bool,
) -> Iterator[Message]:
    """Read the blocks of some shards. Arguments and messages as for ``payloads.scan_shards``; a row is a block."""
    reader, held = TokenReader(layout, generation), DocumentsOfBlocks(generation)
    try:
        for number in shards:
            rows = chain.from_iterable(portion.row.tolist() for portion in by_place(generation, number, chosen))
            blocks = _blocks(reader, held, rows, over)
            yield from scan_shard(layout, generation, number, blocks, pages=pages, over=over)
    finally:
        reader.close()


class DocumentsOfBlocks:
    """Which documents each block holds, put in order once.

    Args:
        generation: Whose documents they are.
    """

    def __init__(self, generation: TokenGeneration) -> None:
        block = generation.documents.block
        self._order = np.argsort(block, kind="stable")
        self._starts = np.searchsorted(block, np.arange(len(generation.blocks) + 1), sorter=self._order)

    def __getitem__(self, block: int) -> NDArray[np.intp]:
        """Positions of the documents of one block, upwards."""
        own: NDArray[np.intp] = self._order[self._starts[block] : self._starts[block + 1]]
        return own


def _blocks(
    reader: TokenReader, held: DocumentsOfBlocks, rows: Iterable[int], over: Callable[[], bool]
) -> Iterator[Message]:
    """Blocks that a loader would refuse, or that are not those of the columns, and how far it came."""
    for done, block in enumerate(rows, 1):
        if over():
            return
        num_bytes, about = 0, {"row": block, "category": "corrupt"}
        try:
            found = reader.check(block)
        except MissingEntryError as error:
            yield about | {"category": "missing", "reason": "entry-lost", "found": error.what}
        except StoreError as error:
            yield about | {"reason": "payload", "found": error.why or error.what}
        else:
            num_bytes = HEADER_BYTES + found.num_bytes
            why = _unlike(found, reader.generation, held[block])
            if why:
                yield about | {"reason": "columns", "found": why}
        yield {"upto": done, "bytes": num_bytes}


def _unlike(found: Block, generation: TokenGeneration, own: NDArray[np.intp]) -> str:
    """In what the columns of its documents and the table of a block differ; empty where they do not."""
    documents = generation.documents
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

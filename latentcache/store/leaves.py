"""The leaves of a shard's trees, many pages at a time: what ``slots`` finds one by one, where nothing is unusual.

Guarantee: what is yielded is what :func:`latentcache.store.pages.slots` yields, held by the same checks. A page that
is not as a sealed shard has it is a ``ValueError`` that only says "look closer": ``slots`` says what it is.
Never maps the file. Memory: one block of pages, whatever the size of the shard. Cost: 0.2 µs per entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.store.durable import open_file
from latentcache.store.pages import BIG_VALUE, BRANCH_PAGE, LEAF_PAGE, NO_PAGE, PAGE_HEADER_BYTES, Meta, tree_root

_BLOCK_BYTES = 1 << 20
#: Levels of a tree: LMDB itself follows no more (CURSOR_STACK).
_MOST_LEVELS = 32
_NODE_BYTES = 8
#: Where the header of a page has its flags and the end of its pointers, in words of two bytes.
_FLAGS_WORD, _LOWER_WORD = 5, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafBlock:
    """Some nodes of a database, in key order."""

    fronts: NDArray[np.uint8]
    """(N, key bytes + value bytes asked for) each key, with its value behind it."""
    offsets: NDArray[np.int64]
    """(N,) where each value begins, in bytes from the start of the file."""
    lengths: NDArray[np.int64]
    """(N,) bytes of each value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """A file that is walked; a tree has no loops, so no page is met twice."""

    descriptor: int
    meta: Meta
    seen: set[int]


def leaf_blocks(
    path: Path, database: str, meta: Meta, *, key_bytes: int, value_bytes: int = 0
) -> Iterator[LeafBlock]:
    """Every key of a named database with the place of its value, in key order.

    Args:
        path: The LMDB file.
        database: Its name.
        meta: Which state of the file to walk.
        key_bytes: Length that all keys have.
        value_bytes: Length that all values have, where they are wanted with their keys and lie in the leaves.

    Raises:
        ValueError: A page, a key or a value has another form.
        CacheDamagedError: The pages that lead to the database contradict themselves.
        OSError: The file cannot be read.
    """
    descriptor = open_file(path)
    try:
        root = tree_root(descriptor, path, database, meta)
        walk = _Walk(descriptor=descriptor, meta=meta, seen=set())
        for numbers, pages in _leaf_pages(walk, [] if root == NO_PAGE else [root], 1):
            yield _block(meta, numbers, pages, key_bytes, value_bytes)
    finally:
        os.close(descriptor)


def _leaf_pages(walk: _Walk, numbers: list[int], level: int) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
    """Leaves among these pages and below them, in order: page numbers, and (L, page size) their bytes."""
    if level > _MOST_LEVELS:
        raise ValueError(f"more than {_MOST_LEVELS} levels")
    step = max(1, _BLOCK_BYTES // walk.meta.page_size)
    for start in range(0, len(numbers), step):
        some = numbers[start : start + step]
        pages = _read(walk, some)
        kinds = pages.view("<u2")[:, _FLAGS_WORD] & (BRANCH_PAGE | LEAF_PAGE)
        if (kinds == LEAF_PAGE).all():
            yield some, pages
        elif (kinds == BRANCH_PAGE).all():
            for branch in [_children(page) for page in pages]:
                yield from _leaf_pages(walk, branch, level + 1)
        else:
            raise ValueError("pages of one level are of several kinds")


def _read(walk: _Walk, numbers: list[int]) -> NDArray[np.uint8]:
    """(L, page size) pages that lie in the file and were not met before."""
    size = walk.meta.page_size
    if max(numbers) > walk.meta.last_page or len({*numbers}) < len(numbers) or not walk.seen.isdisjoint(numbers):
        raise ValueError("a page is out of reach or met twice")
    walk.seen.update(numbers)
    pages = np.empty((len(numbers), size), dtype=np.uint8)
    flat = pages.reshape(-1).data
    for place, number in enumerate(numbers):
        if os.preadv(walk.descriptor, [flat[place * size : (place + 1) * size]], number * size) != size:
            raise ValueError("a page ends early")
    return pages


def _children(page: NDArray[np.uint8]) -> list[int]:
    """Page numbers that a branch points to, in order."""
    low, high, flags, _ = _node_words(page, _nodes(page[None]))
    children: list[int] = (low | high << 16 | flags << 32).tolist()
    return children


def _nodes(pages: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(N,) where each node of (L, page size) pages begins, in bytes from the first page on."""
    count, size = pages.shape
    words = pages.view("<u2")
    lower = words[:, _LOWER_WORD].astype(np.int64)
    if ((lower < PAGE_HEADER_BYTES) | (lower > size) | (lower % 2 != 0)).any():
        raise ValueError("a page is neither branch nor leaf")
    counts = (lower - PAGE_HEADER_BYTES) // 2
    page = np.repeat(np.arange(count), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    pointers = words[page, PAGE_HEADER_BYTES // 2 + np.arange(len(page)) - first].astype(np.int64)
    if ((pointers % 2 != 0) | (pointers + _NODE_BYTES > size)).any():
        raise ValueError("a page points outside itself")
    starts: NDArray[np.int64] = page * size + pointers
    return starts


def _node_words(pages: NDArray[np.uint8], starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Low, high, flags and key length of each node: (N,) four times."""
    words = pages.reshape(-1).view("<u2")
    return [words[starts // 2 + place].astype(np.int64) for place in range(4)]


def _block(meta: Meta, numbers: list[int], pages: NDArray[np.uint8], key_bytes: int, value_bytes: int) -> LeafBlock:
    """Nodes of some leaves, after checking that each value lies inside its page or inside the file."""
    size, starts = meta.page_size, _nodes(pages)
    low, high, flags, key_lengths = _node_words(pages, starts)
    lengths, big = low | high << 16, flags & BIG_VALUE != 0
    places = starts % size + _NODE_BYTES + key_bytes
    if (key_lengths != key_bytes).any() or (places + np.where(big, 8, lengths) > size).any():
        raise ValueError("a key has another length, or a value leaves its page")
    if value_bytes and (big | (lengths != value_bytes)).any():
        raise ValueError("a value has another length or pages of its own")
    offsets = np.array(numbers, dtype=np.int64)[starts // size] * size + places
    pointers = _gather(pages, starts[big] + _NODE_BYTES + key_bytes, 8).view("<u8")[:, 0]
    if (pointers > meta.last_page).any():
        raise ValueError("a value leaves the file")
    offsets[big] = pointers.astype(np.int64) * size + PAGE_HEADER_BYTES
    if (offsets + lengths > meta.file_bytes).any():
        raise ValueError("a value leaves the file")
    fronts = _gather(pages, starts + _NODE_BYTES, key_bytes + value_bytes)
    return LeafBlock(fronts=fronts, offsets=offsets, lengths=lengths)


def _gather(pages: NDArray[np.uint8], starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
    """(N, length) bytes from each start on; C-contiguous."""
    flat = pages.reshape(-1)
    everywhere: NDArray[Any] = np.ndarray((len(flat) - length + 1,), f"V{length}", flat.data, strides=(1,))
    found: NDArray[np.uint8] = everywhere[starts].view(np.uint8).reshape(len(starts), length)
    return found

"""Blocks: many tokenised documents in one entry, whole and self-describing. Normative text: docs/format/tokens.md.

Decides how documents are put together: in their order, as many as fit a block; one that fits none has a block of its
own. Guarantee: the same documents in the same order give the same blocks, whoever tokenised them and however often a
build was killed; a block holds what is needed to find its documents again without any column; a payload that
contradicts itself is refused. Cost: 2 or 4 bytes a token, 28 a document, 8 a run, half a page a block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import HASH_BYTES, checksum, content_hash
from latentcache.identity.key import KIND_TOKENS, EntryKey
from latentcache.recipe import DTYPES
from latentcache.store.entry import HEADER_BYTES, EntryHeader, NewEntry, numpy_dtype, pack_header
from latentcache.token_recipe import TokenRecipe

#: Bytes of a value at most: 64 pages of LMDB, whose first 16 bytes are its own.
BLOCK_BYTES = 64 * 4096 - 16
#: What a block costs beside ids: per document, per run.
_DOCUMENT_BYTES, _RUN_BYTES = HASH_BYTES + 3 * 4, 8
_ONE = Size(1, 1)
_FACTS = struct.Struct("<4I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    """One document on its way into a block."""

    content: bytes
    """xxh3-128 of its record, 16 bytes."""
    ids: NDArray[Any]
    """(n,) at least one, of the recipe's type."""
    runs: NDArray[np.uint32]
    """(r, 2) first token and number of tokens of each run with loss; rising, not touching."""
    control_strings: int = 0
    """Control strings that stand in the record as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What a block holds: D documents, S runs."""

    ids: NDArray[Any]
    """(T,) of all documents, one after the other."""
    content: NDArray[np.uint8]
    """(D, 16)"""
    length: NDArray[np.uint32]
    """(D,)"""
    control: NDArray[np.uint32]
    """(D,) control strings that stand in each record as text."""
    span_ends: NDArray[np.int64]
    """(D,) where the runs of each document end in ``spans``."""
    spans: NDArray[np.uint32]
    """(S, 2)"""

    @property
    def num_bytes(self) -> int:
        """Of its payload."""
        return int(self.ids.nbytes) + _DOCUMENT_BYTES * len(self.length) + _RUN_BYTES * len(self.spans)

    @property
    def start(self) -> NDArray[np.uint32]:
        """(D,) where the ids of each document begin."""
        ends = np.cumsum(self.length, dtype=np.int64)
        return (ends - self.length).astype(np.uint32)


class BlockFiller:
    """Takes documents in their order and gives blocks as they are full.

    Args:
        recipe: What the documents were made by.
        block_bytes: Bytes of a value at most.
    """

    def __init__(self, recipe: TokenRecipe, block_bytes: int = BLOCK_BYTES) -> None:
        self._recipe, self._most = recipe, block_bytes
        self._documents: list[Tokenised] = []
        self._bytes = HEADER_BYTES

    def add(self, document: Tokenised) -> NewEntry | None:
        """Take one more document; the block that it does not fit into any more, if there is one."""
        size = DTYPES[self._recipe.dtype][1] * len(document.ids) + _DOCUMENT_BYTES + _RUN_BYTES * len(document.runs)
        full = self.finish() if self._bytes + size > self._most else None
        self._documents.append(document)
        self._bytes += size
        return full

    def finish(self) -> NewEntry | None:
        """What is left, if anything is."""
        documents, self._documents, self._bytes = self._documents, [], HEADER_BYTES
        return pack_block(documents, self._recipe) if documents else None


def pack_block(documents: Sequence[Tokenised], recipe: TokenRecipe) -> NewEntry:
    """The entry that holds these documents.

    Raises:
        ValueError: No document, one without a token, ids that do not fit, or runs that leave their document.
    """
    ids = [_checked_ids(document, recipe) for document in documents]
    contents = b"".join(document.content for document in documents)
    if len(contents) != HASH_BYTES * len(documents) or not documents:
        raise ValueError(f"{len(documents)} documents with {len(contents)} bytes of content hashes")
    numbers = np.array([(len(one.ids), len(one.runs), one.control_strings) for one in documents], dtype="<u4").T
    runs = np.concatenate([one.runs.reshape(-1, 2) for one in documents]).astype("<u4")
    tokens = np.concatenate(ids)
    payload = b"".join([tokens.tobytes(), contents, numbers.tobytes(), runs.tobytes()])
    block = _table(payload, len(documents), len(tokens), recipe.dtype)
    _check(block)
    content = content_hash(contents)
    key = EntryKey(content=content, bucket=_ONE, recipe=recipe.key_part, kind=KIND_TOKENS).pack()
    header = EntryHeader(
        kind=KIND_TOKENS,
        dtype=recipe.dtype,
        shape=(len(payload) // tokens.itemsize,),
        payload_checksum=checksum(payload),
        content=content,
        recipe_id=recipe.recipe_id,
        original_size=Size(len(documents), 1),
        true_length=len(tokens),
    )
    return NewEntry(key=key, value=pack_header(header, key) + payload, facts=block_facts(content_hash(tokens.data)))


def block_facts(ids_hash: bytes) -> bytes:
    """The 32 bytes beside the header of a block: xxh3-128 of its ids, and the places of a picture of one pixel."""
    return ids_hash + _FACTS.pack(1, 1, 0, 0)


def unpack_block(header: EntryHeader, payload: bytes | memoryview, *, where: str = "") -> Block:
    """Inverse of :func:`pack_block` for a payload whose checksum was seen to hold; believes nothing else.

    Raises:
        CorruptEntryError: The table does not fit its ids, its header or itself.
    """
    try:
        if header.kind != KIND_TOKENS or header.dtype not in ("uint16", "uint32"):
            raise ValueError(f"kind {header.kind} of {header.dtype} is no block of tokens")
        if len(payload) != header.payload_bytes:
            raise ValueError(f"expected {header.payload_bytes} bytes, found {len(payload)}")
        block = _table(payload, header.original_size.height, header.true_length, header.dtype)
        _check(block)
        if content_hash(block.content.tobytes()) != header.content:
            raise ValueError("its documents are not those it is named by")
    except ValueError as error:
        raise CorruptEntryError("a block of tokens is damaged", where=where, why=str(error)) from error
    return block


def _table(payload: bytes | memoryview, documents: int, tokens: int, dtype: str) -> Block:
    """The parts of a payload, over the same memory."""
    itemsize = DTYPES[dtype][1]
    place = tokens * itemsize
    num_runs, rest = divmod(len(payload) - place - documents * _DOCUMENT_BYTES, _RUN_BYTES)
    if num_runs < 0 or rest:
        raise ValueError(f"{len(payload)} bytes cannot hold {tokens} tokens of {documents} documents")
    ids = np.frombuffer(payload, dtype=numpy_dtype(dtype), count=tokens)
    content = np.frombuffer(payload, dtype=np.uint8, count=documents * HASH_BYTES, offset=place)
    place += documents * HASH_BYTES
    numbers = np.frombuffer(payload, dtype="<u4", count=3 * documents, offset=place).reshape(3, documents)
    spans = np.frombuffer(payload, dtype="<u4", count=2 * num_runs, offset=place + 12 * documents)
    ends = np.cumsum(numbers[1], dtype=np.int64)
    return Block(
        ids=ids,
        content=content.reshape(-1, HASH_BYTES),
        length=numbers[0],
        control=numbers[2],
        span_ends=ends,
        spans=spans.reshape(-1, 2),
    )


def _check(block: Block) -> None:
    if int(block.length.sum(dtype=np.int64)) != len(block.ids) or not block.length.all():
        raise ValueError(f"documents of {block.length[:4].tolist()}... tokens in a block of {len(block.ids)}")
    check_spans(block.length, block.span_ends, block.spans)


def check_spans(length: NDArray[np.uint32], ends: NDArray[np.int64], spans: NDArray[np.uint32]) -> None:
    """Refuse runs that leave their document, are empty, touch, or do not rise.

    Args:
        length: (D,) tokens of each document.
        ends: (D,) where the runs of each document end.
        spans: (S, 2) first token and number of tokens.

    Raises:
        ValueError: As said.
    """
    counts = np.diff(ends, prepend=np.int64(0))
    if (counts < 0).any() or int(ends[-1] if len(ends) else 0) != len(spans):
        raise ValueError(f"the ends of runs do not rise to {len(spans)}")
    begins = spans[:, 0].astype(np.int64)
    stops = begins + spans[:, 1]
    document = np.repeat(np.arange(len(length)), counts)
    if not spans[:, 1].all() or (stops > length[document]).any():
        raise ValueError("a run is empty or leaves its document")
    if ((begins[1:] <= stops[:-1]) & (document[1:] == document[:-1])).any():
        raise ValueError("runs touch, or do not rise")


def _checked_ids(document: Tokenised, recipe: TokenRecipe) -> NDArray[Any]:
    """The ids in their storage type; what does not fit is never cut."""
    ids, stored = document.ids, numpy_dtype(recipe.dtype)
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < recipe.num_ids:
        found = f"{int(ids.min())} to {int(ids.max())}" if len(ids) else "no ids"
        raise ValueError(f"a document has ids from 0 to {recipe.num_ids - 1}, got {found}")
    converted: NDArray[Any] = ids.astype(stored, copy=False)
    return converted

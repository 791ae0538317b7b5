"""Turn encoded items into entries: one each, or many small ones in a block. Normative text: docs/format/entry.md.

Blocks take items in their order, as many as fit into 64 pages; an item that fits into no block gets one of its own.
The same items in the same order give the same blocks. A block's key holds the hash of the contents of its items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.protocol import FieldKind, FieldRecipe
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.identity.key import CONTENT_AT, KEY_BYTES
from latentcache.store.entry import (
    CONTENT,
    COUNT_SUFFIX,
    LENGTH,
    PACKED,
    RAGGED,
    SAME,
    NewEntry,
    as_payload,
    pack_entry,
)

#: Bytes of a block's value at most: 64 pages of LMDB, whose first 16 bytes are its own.
BLOCK_BYTES = 64 * 4096 - 16
#: Bytes of a block beside its items and columns, at most.
_HEAD_BYTES, _COLUMN_BYTES = 256, 48
_CONTENT = slice(CONTENT_AT, CONTENT_AT + HASH_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One encoded item on its way into an entry."""

    key: bytes
    """32 bytes."""
    array: NDArray[Any]
    """In the storage type, of the group's shape; bfloat16 as uint16."""
    same: bytes = b""
    """16-byte hash of exactly what the encoder saw; empty if the kind has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The kind's own columns; zeros for those that are missing."""
    ragged_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """(k, ...) each; no values for those that are missing."""


def pack_items(
    items: Sequence[Item], recipe: FieldRecipe, kind: FieldKind, packing: str | None = None
) -> list[NewEntry]:
    """The entries that hold these items, in their order.

    Args:
        items: Of one field.
        recipe: What they were made by.
        kind: Whose items they are.
        packing: ``entry`` or ``block``; by default the kind's.

    Raises:
        ValueError: An array of another type, or of no elements.
    """
    packer = _Packer(recipe, kind)
    if (packing or kind.packing) == "entry":
        return [packer.entry([item], packed=False) for item in items]
    return [packer.entry(block, packed=True) for block in packer.blocks(items)]


class _Packer:
    """Packs items of one field."""

    def __init__(self, recipe: FieldRecipe, kind: FieldKind) -> None:
        self.recipe_id, self.spec, self.kind = recipe.recipe_id, recipe.spec, kind
        self._row_bytes = HASH_BYTES + 4 + sum(
            np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in kind.columns.values()
        )
        self._head_bytes = _HEAD_BYTES + _COLUMN_BYTES * (len(kind.columns) + 2 * len(kind.ragged_columns))

    def blocks(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Items that share a block: neighbours with keys that differ in their contents only, of equal shape."""
        block: list[Item] = []
        size, group = 0, None
        for item in items:
            own = item.key[:CONTENT_AT], item.key[_CONTENT.stop :], item.array.shape[self.spec.ragged :]
            more = item.array.nbytes + self._row_bytes + len(item.same)
            more += sum(4 + np.asarray(values).nbytes for values in item.ragged_columns.values())
            if block and (own != group or size + more > BLOCK_BYTES):
                yield block
                block = []
            size, group = (size if block else self._head_bytes) + more, own
            block.append(item)
        if block:
            yield block

    def entry(self, items: Sequence[Item], *, packed: bool) -> NewEntry:
        """One entry that holds these items."""
        first, ragged = items[0], self.spec.ragged
        if any(len(item.key) != KEY_BYTES or not item.array.size for item in items):
            raise ValueError("an item needs a key of 32 bytes and at least one element")
        columns: dict[str, NDArray[Any]] = {}
        if packed:
            join = np.concatenate if ragged else np.stack
            array = join([item.array for item in items]) if len(items) > 1 or not ragged else first.array
            contents = b"".join(item.key[_CONTENT] for item in items)
            key = first.key[:CONTENT_AT] + content_hash(contents) + first.key[_CONTENT.stop :]
            columns[CONTENT] = np.frombuffer(contents, dtype=np.uint8).reshape(-1, HASH_BYTES)
            if any(item.same for item in items):
                hashes = b"".join(item.same or bytes(HASH_BYTES) for item in items)
                columns[SAME] = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
            if ragged:
                columns[LENGTH] = np.array([len(item.array) for item in items], dtype=np.uint32)
        else:
            array, key = first.array, first.key
        value = pack_entry(
            key=key,
            recipe_id=self.recipe_id,
            dtype=self.spec.dtype,
            shape=array.shape,
            payload=as_payload(array, self.spec.dtype),
            flags=PACKED * packed | RAGGED * ragged,
            items=len(items),
            same=bytes(HASH_BYTES) if packed else first.same or bytes(HASH_BYTES),
            columns=columns | self._own_columns(items),
        )
        return NewEntry(key=key, value=value, item_keys=tuple(item.key for item in items))

    def _own_columns(self, items: Sequence[Item]) -> dict[str, NDArray[Any]]:
        """The kind's own columns; those that are zeros for all items are left out."""
        columns: dict[str, NDArray[Any]] = {}
        for name, (dtype, shape) in self.kind.columns.items():
            nothing = np.zeros(shape, dtype=dtype)
            values = np.array([item.columns.get(name, nothing) for item in items], dtype=dtype)
            values = values.reshape(len(items), *shape)
            if values.any():
                columns[name] = values
        for name, (dtype, shape) in self.kind.ragged_columns.items():
            nothing = np.zeros((0, *shape), dtype=dtype)
            parts = [np.asarray(item.ragged_columns.get(name, nothing), dtype=dtype) for item in items]
            parts = [part.reshape(-1, *shape) for part in parts]
            if any(map(len, parts)):
                columns[name] = np.concatenate(parts)
                columns[name + COUNT_SUFFIX] = np.array([len(part) for part in parts], dtype=np.uint32)
        return columns

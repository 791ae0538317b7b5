"""The bytes of one entry: a head that proves itself, then the raw payload. Normative text: docs/format/entry.md.

The head holds the key, the recipe id, and type and shape of the payload. It also has the columns that a build needs
to resume: content hashes, same-hashes, lengths and the kind's own columns. Its last 8 bytes are a checksum over all
bytes before them. LMDB starts a large value 16 bytes into a page, and a head has 48 (mod 64) bytes. So the payload is
on a 64-byte boundary. Blocks take items in their order, as many as fit into 64 pages. An item that fits into no block
gets one of its own. The same items in the same order give the same blocks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from latentcache.errors import CorruptEntryError
from latentcache.fields.dtypes import DTYPES, numpy_dtype
from latentcache.fields.protocol import FieldKind, FieldRecipe, FieldSpec
from latentcache.identity.content import CONTENT_SLICE, HASH_BYTES, KEY_BYTES, checksum, content_hash
from latentcache.store.atomic_io import Buffer
from latentcache.store.paths import FORMAT_VERSION, other_format

#: The last byte is the version of the format.
MAGIC = b"LCE%d" % FORMAT_VERSION
MAX_DIMENSIONS = 8
PACKED, RAGGED = 1, 2
#: Bytes of the fixed part and of the checksum at the end of a head; what a head's length leaves when divided by 64.
FIXED_BYTES, CHECKSUM_BYTES, _REST = 96, 8, 48
#: Byte of a head at which the key begins.
KEY_AT = 32
#: Names of columns that the format itself defines.
CONTENT, SAME, LENGTH = "content", "same", "length"
COUNT_SUFFIX = "#"
#: Magic, kind, dtype, ndim, flags, head_bytes, items, payload_bytes, payload_checksum, key, recipe_id, same.
FIXED = struct.Struct(f"<4sBBBBIIQQ{KEY_BYTES}s{HASH_BYTES}s{HASH_BYTES}s")
_DTYPE_NAMES = {code: name for name, (code, _) in DTYPES.items()}
#: Bytes of a block's value at most: 64 pages of LMDB, whose first 16 bytes are its own.
BLOCK_BYTES = 64 * 4096 - 16
#: Bytes of a head beside its rows, and of a row beside its ragged columns, about.
_HEAD_BYTES, _ROW_BYTES = 2048, 96


class EntryHeader(NamedTuple):
    """The head of one entry. N items; a block has them, or their elements, along the first axis of its payload."""

    key: bytes
    """32 bytes: the item's key, or that of the block."""
    dtype: str
    shape: tuple[int, ...]
    packed: bool
    """True for a block."""
    ragged: bool
    items: int
    payload_bytes: int
    payload_checksum: int
    """xxh3-64."""
    recipe_id: bytes
    head_bytes: int
    content: NDArray[np.uint8]
    """(N, 16) contents of their keys."""
    same: NDArray[np.uint8]
    """(N, 16) hashes of exactly what the encoder saw; zeros if the kind has none."""
    start: NDArray[np.uint32]
    """(N,) where each begins along the first axis."""
    length: NDArray[np.uint32]
    """(N,) elements of each; zeros if items are not ragged."""
    columns: Mapping[str, NDArray[Any]]
    """(N, ...) the kind's own columns."""
    ragged_columns: Mapping[str, tuple[NDArray[np.int64], NDArray[Any]]]
    """Those with several values per item: where the values of each end (N,), and all values."""

    def item_keys(self) -> NDArray[np.uint8]:
        """(N, 32) keys of the items."""
        keys = np.tile(np.frombuffer(self.key, dtype=np.uint8), (self.items, 1))
        keys[:, CONTENT_SLICE] = self.content
        return keys

    def item(self, payload: memoryview, position: int) -> NDArray[Any]:
        """One item of the payload, over the same memory."""
        array = np.frombuffer(payload, dtype=numpy_dtype(self.dtype)).reshape(self.shape)
        if not self.packed:
            return array
        start = int(self.start[position])
        return array[start : start + int(self.length[position])] if self.ragged else array[start]

    def item_columns(self, position: int) -> dict[str, NDArray[Any]]:
        """Own columns of one item: its value, or its values in a ragged one."""
        columns = {name: values[position] for name, values in self.columns.items()}
        for name, (ends, values) in self.ragged_columns.items():
            columns[name] = values[int(ends[position - 1]) if position else 0 : int(ends[position])]
        return columns


# Not frozen: there is one for each item, and a frozen one takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class Item:
    """One encoded item on its way into an entry."""

    key: bytes
    """32 bytes."""
    array: NDArray[Any]
    """In the storage type, of the group's shape; bfloat16 as uint16."""
    same: bytes = b""
    """16-byte hash of exactly what the encoder saw; empty if the kind has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The kind's own columns: zeros for those that are missing, (k, ...) for ragged ones; others are not kept."""


class NewEntry(NamedTuple):
    """One entry ready to be written."""

    key: bytes
    value: Buffer
    """Head and payload."""
    item_keys: tuple[bytes, ...]


def pack_items(items: Sequence[Item], recipe: FieldRecipe, kind: FieldKind) -> list[NewEntry]:
    """The entries that hold these items of one field, in their order, made by a recipe; the kind says how."""
    packed = kind.packing == "block"
    groups = _blocks(items, recipe.spec, kind) if packed else ([item] for item in items)
    return [_entry(group, recipe, kind, packed=packed) for group in groups]


def _blocks(items: Sequence[Item], spec: FieldSpec, kind: FieldKind) -> Iterator[list[Item]]:
    """Items that share a block: neighbors with keys that differ in their contents only, of equal shape."""
    block: list[Item] = []
    size = 0
    group = None
    for item in items:
        alike = item.key[: CONTENT_SLICE.start], item.key[CONTENT_SLICE.stop :], item.array.shape[spec.ragged :]
        ragged = [np.asarray(item.columns[name]).nbytes for name in kind.ragged_columns if name in item.columns]
        more = item.array.nbytes + sum(ragged) + _ROW_BYTES
        if block and (alike != group or size + more > BLOCK_BYTES):
            yield block
            block = []
        size = (size if block else _HEAD_BYTES) + more
        group = alike
        block.append(item)
    if block:
        yield block


def _entry(items: Sequence[Item], recipe: FieldRecipe, kind: FieldKind, *, packed: bool) -> NewEntry:
    first, ragged, dtype = items[0], recipe.spec.ragged, recipe.spec.dtype
    wanted = numpy_dtype(dtype)
    for item in items:
        if len(item.key) != KEY_BYTES or not item.array.size or item.array.dtype != wanted:
            raise ValueError(f"an item needs a key of 32 bytes and elements of {dtype}, got {item.array.dtype}")
    array, key, same = first.array, first.key, first.same
    columns: dict[str, NDArray[Any]] = {}
    if packed:
        if len(items) > 1 or not ragged:
            array = (np.concatenate if ragged else np.stack)([item.array for item in items])
        contents = b"".join(item.key[CONTENT_SLICE] for item in items)
        same = b""
        key = first.key[: CONTENT_SLICE.start] + content_hash(contents) + first.key[CONTENT_SLICE.stop :]
        columns[CONTENT] = np.frombuffer(contents, dtype=np.uint8).reshape(-1, HASH_BYTES)
        if any(item.same for item in items):
            same_hashes = b"".join(item.same or bytes(HASH_BYTES) for item in items)
            columns[SAME] = np.frombuffer(same_hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        if ragged:
            columns[LENGTH] = np.array([len(item.array) for item in items], dtype=np.uint32)
    payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    shape = struct.pack(f"<{array.ndim}I", *array.shape)
    table = shape + _pack_table(columns | _own_columns(items, kind), FIXED_BYTES + len(shape))
    head_bytes = FIXED_BYTES + len(table) + CHECKSUM_BYTES
    front = MAGIC, key[0], DTYPES[dtype][0], array.ndim, PACKED * packed | RAGGED * ragged, head_bytes
    sizes, hashes = (len(items), len(payload), checksum(payload)), (key, recipe.recipe_id, same or bytes(HASH_BYTES))
    value = bytearray(head_bytes + len(payload))
    FIXED.pack_into(value, 0, *front, *sizes, *hashes)
    value[FIXED_BYTES : head_bytes - CHECKSUM_BYTES] = table
    with memoryview(value) as memory:
        struct.pack_into("<Q", value, head_bytes - CHECKSUM_BYTES, checksum(memory[: head_bytes - CHECKSUM_BYTES]))
    value[head_bytes:] = payload
    return NewEntry(key=key, value=value, item_keys=tuple(item.key for item in items))


def _own_columns(items: Sequence[Item], kind: FieldKind) -> dict[str, NDArray[Any]]:
    """The kind's own columns; those that are zeros for all items are left out."""
    columns: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape) in kind.columns.items():
        nothing = np.zeros(shape, dtype=dtype)
        values = np.array([item.columns.get(name, nothing) for item in items], dtype=dtype)
        if values.any():
            columns[name] = values.reshape(len(items), *shape)
    for name, (dtype, shape) in kind.ragged_columns.items():
        nothing = np.zeros((0, *shape), dtype=dtype)
        parts = [np.asarray(item.columns.get(name, nothing), dtype=dtype).reshape(-1, *shape) for item in items]
        if any(map(len, parts)):
            columns[name] = np.concatenate(parts)
            columns[name + COUNT_SUFFIX] = np.array([len(part) for part in parts], dtype=np.uint32)
    return columns


def read_header(data: Buffer, key: bytes | None = None, length: int | None = None) -> EntryHeader:
    """Parse a head, which more bytes may follow, and believe nothing that it does not prove.

    ``key`` is the key that it must have, ``length`` that of head and payload; None: any is right. Raises
    CorruptEntryError, or CacheFormatError for another version of the format.
    """
    hexed = (bytes(data[KEY_AT : KEY_AT + KEY_BYTES]) if key is None else key).hex()
    try:
        header = _parsed(memoryview(data), key)
        if length not in (None, header.head_bytes + header.payload_bytes):
            raise ValueError(f"expected {header.head_bytes + header.payload_bytes} bytes, found {length}")
    except (ValueError, struct.error, LookupError, SafetensorError) as error:
        raise CorruptEntryError(
            "the head of an entry is damaged", key=hexed, reason="header", why=str(error)
        ) from error
    return header


def _parsed(data: memoryview, key: bytes | None) -> EntryHeader:
    if len(data) < FIXED_BYTES or bytes(data[:3]) != MAGIC[:3]:
        raise ValueError(f"expected a head that starts with {MAGIC!r}, found {bytes(data[:4])!r}")
    fixed = FIXED.unpack_from(data)
    _, kind, code, ndim, flags, head_bytes, items, payload_bytes, payload_checksum, stored_key, recipe_id, same = (
        fixed
    )
    if not FIXED_BYTES < head_bytes <= len(data) or head_bytes % 64 != _REST:
        raise ValueError(f"a head of {head_bytes} bytes, {len(data)} are there")
    stop = head_bytes - CHECKSUM_BYTES
    expected = checksum(data[:stop])
    computed = int.from_bytes(data[stop:head_bytes], "little")
    if expected != computed:
        raise ValueError(f"header checksum: expected {expected:016x}, found {computed:016x}")
    if data[3] != MAGIC[3]:
        raise other_format(data[3] - ord("0"), f"entry {stored_key.hex()}")
    if key is not None and stored_key != key:
        raise ValueError(f"it is that of {stored_key.hex()}")
    if kind != stored_key[0] or code not in _DTYPE_NAMES or not 1 <= ndim <= MAX_DIMENSIONS or not items:
        raise ValueError(f"kind {kind}, type {code}, {ndim} dimensions, {items} items")
    shape = struct.unpack_from(f"<{ndim}I", data, FIXED_BYTES)
    dtype = _DTYPE_NAMES[code]
    if 0 in shape or math.prod(shape) * DTYPES[dtype][1] != payload_bytes:
        raise ValueError(f"{dtype} {shape} in {payload_bytes} bytes")
    table = _read_table(data[FIXED_BYTES + 4 * ndim : stop])
    content, start, length = _items(stored_key, flags, items, shape, table)
    hashes = table.pop(SAME, None) if flags & PACKED else np.frombuffer(same, dtype=np.uint8)[None]
    columns, ragged = _split_columns(table, items)
    return EntryHeader(
        key=stored_key,
        dtype=dtype,
        shape=shape,
        packed=bool(flags & PACKED),
        ragged=bool(flags & RAGGED),
        items=items,
        payload_bytes=payload_bytes,
        payload_checksum=payload_checksum,
        recipe_id=recipe_id,
        head_bytes=head_bytes,
        content=content,
        same=np.zeros((items, HASH_BYTES), dtype=np.uint8) if hashes is None else _shaped(hashes, items),
        start=start,
        length=length,
        columns=columns,
        ragged_columns=ragged,
    )


def _items(
    key: bytes, flags: int, items: int, shape: tuple[int, ...], table: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]]:
    """Content, start and length of each item; takes the columns of the format out of the table."""
    nothing = np.zeros(items, dtype=np.uint32)
    if not flags & PACKED:
        if items != 1 or {CONTENT, SAME, LENGTH} & table.keys():
            raise ValueError(f"{items} items in an entry that is no block")
        content = np.frombuffer(key[CONTENT_SLICE], dtype=np.uint8)[None]
        return content, nothing, nothing + np.uint32(shape[0]) if flags & RAGGED else nothing
    content = _shaped(table.pop(CONTENT), items)
    if content_hash(content.tobytes()) != key[CONTENT_SLICE]:
        raise ValueError("its items are not those that it is named by")
    if not flags & RAGGED:
        if shape[0] != items:
            raise ValueError(f"{items} items in {shape}")
        return content, np.arange(items, dtype=np.uint32), nothing
    length = table.pop(LENGTH).astype(np.uint32)
    ends = np.cumsum(length, dtype=np.int64)
    if length.shape != (items,) or int(ends[-1]) != shape[0]:
        raise ValueError(f"lengths of {int(ends[-1])} in {shape}")
    return content, (ends - length).astype(np.uint32), length


def _shaped(hashes: NDArray[Any], items: int) -> NDArray[np.uint8]:
    if hashes.shape != (items, HASH_BYTES) or hashes.dtype != np.uint8:
        raise ValueError(f"hashes of {hashes.dtype} {hashes.shape}")
    return hashes


def _split_columns(
    table: dict[str, NDArray[Any]], items: int
) -> tuple[dict[str, NDArray[Any]], dict[str, tuple[NDArray[np.int64], NDArray[Any]]]]:
    ragged = {}
    for name in [name.removesuffix(COUNT_SUFFIX) for name in table if name.endswith(COUNT_SUFFIX)]:
        counts, values = table.pop(name + COUNT_SUFFIX), table.pop(name)
        ends = np.cumsum(counts, dtype=np.int64)
        if counts.shape != (items,) or counts.dtype.kind != "u" or int(ends[-1]) != len(values):
            raise ValueError(f"column {name} has {len(counts)} counts for {len(values)} values")
        ragged[name] = ends, values
    for name, values in table.items():
        if len(values) != items:
            raise ValueError(f"column {name} has {len(values)} rows")
    return table, ragged


def _pack_table(columns: Mapping[str, NDArray[Any]], front_bytes: int) -> bytes:
    """Columns as safetensors; spaces in its header bring the head, which has other bytes in front, to its length."""
    data: bytes = save({name: np.ascontiguousarray(values) for name, values in columns.items()})
    stop = 8 + int.from_bytes(data[:8], "little")
    spaces = (_REST - front_bytes - len(data) - CHECKSUM_BYTES) % 64
    return (stop - 8 + spaces).to_bytes(8, "little") + data[8:stop] + b" " * spaces + data[stop:]


def _read_table(data: memoryview) -> dict[str, NDArray[Any]]:
    """Inverse of :func:`_pack_table`."""
    table: dict[str, NDArray[Any]] = load(bytes(data))
    for name, values in table.items():
        if not values.ndim:
            raise ValueError(f"column {name} has no rows")
    return table

"""The index of a sealed shard, and the walk over LMDB's pages that makes it. Normative text: docs/format/shard.md.

The walk starts at the root of the newest valid meta page, so that only committed entries are indexed: LMDB leaves
stale and uncommitted pages in the file. It reads many pages at once and follows nothing outside the file or twice.
Every head is checked before it is indexed. Nothing is mapped. Cost: about 3 us per entry.
Source of the page layout: ``mdb.c`` of LMDB 0.9 (MDB_page, MDB_meta, MDB_db, MDB_node), 64-bit.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CacheFormatError, CorruptEntryError
from latentcache.fields.dtypes import DTYPES
from latentcache.identity.content import HASH_BYTES, checksum
from latentcache.identity.key import KEY_BYTES, joined_keys, split_keys
from latentcache.store.atomic_io import open_file
from latentcache.store.columns import ColumnFile, write_columns
from latentcache.store.entry import (
    CHECKSUM_BYTES,
    FIXED_BYTES,
    FIXED_DTYPE,
    MAGIC,
    MAX_DIMENSIONS,
    PACKED,
    RAGGED,
    EntryHeader,
    read_header,
)
from latentcache.value import Value

#: Name of the index in the folder of a shard.
INDEX = "index.safetensors"
#: Bytes of a page's header; a value with pages of its own begins behind it.
PAGE_HEADER_BYTES = 16
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<IIQQ")  # magic, version, address, map size; behind the page header
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow pages, entries, root
_META_BYTES = _META.size + 2 * _DB.size + 16
_BRANCH_PAGE, _LEAF_PAGE, _BIG_VALUE = 0x01, 0x02, 0x01
_NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF
_BLOCK_BYTES = 1 << 20
#: Levels of a tree: LMDB itself follows no more (CURSOR_STACK).
_MOST_LEVELS = 32
_NODE_BYTES = 8
#: Words of two bytes of a page header: flags, and the end of its pointers.
_FLAGS_WORD, _LOWER_WORD = 5, 6
#: Bytes of a value that are read at first; the head of an entry that is no block is shorter.
_FRONT_BYTES = 256
_HEADS_TOGETHER = 1 << 14
_VALUES = ("keys", "offsets", "lengths")
_WIDTHS = np.zeros(256, dtype=np.float64)
_WIDTHS[[code for code, _ in DTYPES.values()]] = [width for _, width in DTYPES.values()]


class Meta(Value):
    """The newer of a file's two meta pages."""

    page_size: int
    last_page: int
    transaction: int
    root: int
    map_size: int

    @property
    def file_bytes(self) -> int:
        """Bytes the file must have."""
        return (self.last_page + 1) * self.page_size

    def as_metadata(self) -> dict[str, str]:
        """What the index says of the file it was made from."""
        return {
            "data_bytes": str(self.file_bytes),
            "page_size": str(self.page_size),
            "transaction": str(self.transaction),
        }


def read_meta(path: Path) -> Meta:
    """The newer valid meta page of ``data.mdb``, after checking that the file is as long as it says.

    Raises:
        CacheDamagedError: No valid meta page, another format, or the file is shorter than it must be.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            front = file.read(2 * 65_536)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CacheDamagedError("a shard cannot be read", where=str(path), why=str(error)) from error
    first = _parse_meta(front, 0)
    seconds = [first.page_size] if first else [4096, 8192, 16_384, 32_768, 65_536]
    metas = [meta for meta in (first, *(_parse_meta(front, at) for at in seconds)) if meta is not None]
    if not metas:
        raise CacheDamagedError("a shard is no LMDB 0.9 file", where=str(path), why="no valid meta page")
    meta = max(metas, key=lambda found: found.transaction)
    if size < meta.file_bytes:
        raise CacheDamagedError(
            "a shard is truncated", where=str(path), why=f"expected {meta.file_bytes} bytes, found {size}"
        )
    return meta


def _parse_meta(front: bytes, offset: int) -> Meta | None:
    if len(front) < offset + PAGE_HEADER_BYTES + _META_BYTES:
        return None
    magic, version, _, map_size = _META.unpack_from(front, offset + PAGE_HEADER_BYTES)
    databases = offset + PAGE_HEADER_BYTES + _META.size
    page_size = _DB.unpack_from(front, databases)[0]
    if magic != _MAGIC or version & 0x3FFF != _VERSION:
        return None
    if not 512 <= page_size <= 65_536 or page_size & (page_size - 1):
        return None
    root = _DB.unpack_from(front, databases + _DB.size)[-1]
    last_page, transaction = struct.unpack_from("<QQ", front, databases + 2 * _DB.size)
    return Meta(page_size=page_size, last_page=last_page, transaction=transaction, root=root, map_size=map_size)


class Values(Value):
    """Keys of a database and the places of their values, in key order."""

    keys: NDArray[np.uint8]
    """(N, 32)"""
    offsets: NDArray[np.int64]
    """(N,) where each value begins, in bytes from the start of the file."""
    lengths: NDArray[np.int64]
    """(N,) bytes of each value."""


def walk(descriptor: int, meta: Meta) -> Iterator[Values]:
    """Every committed key with the place of its value, in key order, some thousand at a time."""
    seen: set[int] = set()
    for numbers, pages in _leaf_pages(descriptor, meta, seen, [] if meta.root == _NO_PAGE else [meta.root], 1):
        yield leaf_values(meta, numbers, pages)


def _leaf_pages(
    descriptor: int, meta: Meta, seen: set[int], numbers: list[int], level: int
) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
    """Leaves among these pages and below them, in order: page numbers, and (L, page size) their bytes."""
    if level > _MOST_LEVELS:
        raise ValueError(f"more than {_MOST_LEVELS} levels")
    step = max(1, _BLOCK_BYTES // meta.page_size)
    for start in range(0, len(numbers), step):
        some = numbers[start : start + step]
        if max(some) > meta.last_page or len({*some}) < len(some) or not seen.isdisjoint(some):
            raise ValueError("a page is out of reach or met twice")
        seen.update(some)
        pages = _read_pages(descriptor, meta.page_size, some)
        kinds = pages.view("<u2")[:, _FLAGS_WORD] & (_BRANCH_PAGE | _LEAF_PAGE)
        if (kinds == _LEAF_PAGE).all():
            yield some, pages
        elif (kinds == _BRANCH_PAGE).all():
            for page in pages:
                low, high, flags, _ = _node_words(page, _nodes(page[None]))
                yield from _leaf_pages(descriptor, meta, seen, (low | high << 16 | flags << 32).tolist(), level + 1)
        else:
            raise ValueError("pages of one level are of several kinds")


def _read_pages(descriptor: int, size: int, numbers: list[int]) -> NDArray[np.uint8]:
    pages = np.empty((len(numbers), size), dtype=np.uint8)
    flat = pages.reshape(-1).data
    for place, number in enumerate(numbers):
        if os.preadv(descriptor, [flat[place * size : (place + 1) * size]], number * size) != size:
            raise ValueError("a page ends early")
    return pages


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


def leaf_values(meta: Meta, numbers: list[int], pages: NDArray[np.uint8]) -> Values:
    """Keys and places of some leaves, after checking that each value is inside its page or inside the file."""
    size, starts = meta.page_size, _nodes(pages)
    low, high, flags, key_lengths = _node_words(pages, starts)
    lengths, big = low | high << 16, flags & _BIG_VALUE != 0
    places = starts % size + _NODE_BYTES + KEY_BYTES
    if (key_lengths != KEY_BYTES).any() or (places + np.where(big, 8, lengths) > size).any():
        raise ValueError("a key has another length, or a value leaves its page")
    offsets = np.array(numbers, dtype=np.int64)[starts // size] * size + places
    pointers = gather_bytes(pages, starts[big] + _NODE_BYTES + KEY_BYTES, 8).view("<u8")[:, 0]
    if (pointers > meta.last_page).any():
        raise ValueError("a value leaves the file")
    offsets[big] = pointers.astype(np.int64) * size + PAGE_HEADER_BYTES
    if (offsets + lengths > meta.file_bytes).any():
        raise ValueError("a value leaves the file")
    return Values(keys=gather_bytes(pages, starts + _NODE_BYTES, KEY_BYTES), offsets=offsets, lengths=lengths)


def gather_bytes(pages: NDArray[np.uint8], starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
    """(N, length) bytes from each start on; C-contiguous."""
    flat = pages.reshape(-1)
    everywhere: NDArray[Any] = np.ndarray((len(flat) - length + 1,), f"V{length}", flat.data, strides=(1,))
    found: NDArray[np.uint8] = everywhere[starts].view(np.uint8).reshape(len(starts), length)
    return found


class ShardIndex:
    """What a shard holds: E entries with I items, in key order. Columns are read when they are asked for.

    Attributes:
        folder: Of the shard.
        entries, items: Their numbers.
        block: (E,) items of a block; 0 for an entry that is an item.
        offset, head, bytes, checksum: (E,) where the payload begins, bytes before it, its bytes, its xxh3-64.
    """

    def __init__(self, folder: Path, columns: Any, metadata: dict[str, str]) -> None:
        self.folder, self.columns, self.metadata = folder, columns, metadata
        self.block, self.offset, self.head = columns["block"], columns["offset"], columns["head"]
        self.bytes, self.checksum = columns["bytes"], columns["checksum"]
        self.entries = len(self.offset)
        self.has_blocks = bool(len(columns["item.content"]))
        self.items = int(np.maximum(np.asarray(self.block), 1).sum()) if self.has_blocks else self.entries

    @property
    def data(self) -> Path:
        """The LMDB file."""
        return self.folder / "data.mdb"

    def check(self) -> None:
        """Read every column and hold it against its checksum."""
        self.columns.check()

    def entry_keys(self, entries: Any = slice(None)) -> NDArray[np.uint8]:
        """(n, 32) keys of entries."""
        frames = np.asarray(self.columns["frames"])
        return joined_keys(self.columns["content"][entries], frames[self.columns["frame"][entries]])

    def entry_of_items(self) -> NDArray[np.int64]:
        """(I,) the entry of each item."""
        counts = np.maximum(np.asarray(self.block).astype(np.int64), 1)
        return np.repeat(np.arange(self.entries), counts)

    def item_columns(self, *names: str) -> dict[str, NDArray[Any]]:
        """Of all items, in entry order, as asked for: ``content`` (I, 16), ``frame`` (I,) and ``same`` (I, 16)."""
        found = {name: np.asarray(self.columns[name]) for name in names}
        if self.has_blocks:
            entry = self.entry_of_items()
            in_block = np.asarray(self.block)[entry] > 0
            found = {name: column[entry] for name, column in found.items()}
            for name in {"content", "same"}.intersection(names):
                found[name][in_block] = self.columns[f"item.{name}"]
        return found

    def keys(self) -> NDArray[np.uint8]:
        """(I, 32) keys of all items."""
        columns = self.item_columns("content", "frame")
        return joined_keys(columns["content"], np.asarray(self.columns["frames"])[columns["frame"]])

    def lengths(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """(I,) start and (I,) length of all items in their entries."""
        length = np.asarray(self.columns["length"])
        if not self.has_blocks:
            return np.zeros(self.items, dtype=np.uint32), length
        entry = self.entry_of_items()
        block = np.asarray(self.block)
        in_block = block[entry] > 0
        length = length[entry]
        length[in_block] = self.columns["item.length"]
        first = np.cumsum(np.maximum(block, 1).astype(np.int64)) - np.maximum(block, 1)
        width = np.where((length == 0) & in_block, 1, length).astype(np.int64)
        ends = np.cumsum(width)
        before = (ends - width)[first]
        return (ends - width - before[entry]).astype(np.uint32), length


def collect_index(data: Path, meta: Meta | None = None) -> dict[str, NDArray[Any]]:
    """The columns of the index of a shard, from its pages and heads.

    Raises:
        CacheDamagedError: The shard is truncated or its pages contradict themselves.
        CorruptEntryError: A head fails its check.
        CacheFormatError: An entry of a newer version.
    """
    meta = read_meta(data) if meta is None else meta
    try:
        descriptor = open_file(data)
    except OSError as error:
        raise CacheDamagedError("a shard cannot be read", where=str(data), why=str(error)) from error
    try:
        parts = [_indexed(descriptor, some, data) for some in _together(walk(descriptor, meta))]
    except CorruptEntryError as error:
        error.where = error.where or str(data)
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, CacheDamagedError | CacheFormatError):
            raise
        raise CacheDamagedError("the pages of a shard are damaged", where=str(data), why=str(error)) from error
    finally:
        os.close(descriptor)
    parts = parts or [_indexed(-1, Values(keys=np.zeros((0, 32), np.uint8), offsets=_NONE, lengths=_NONE), data)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns["content"], columns["frames"], columns["frame"] = split_keys(columns.pop("key"))
    return columns


_NONE = np.zeros(0, dtype=np.int64)


def _together(values: Iterator[Values]) -> Iterator[Values]:
    """The same, more at a time: the heads of a few thousand entries are checked at once."""
    waiting = list[Values]()
    for some in chain(values, [None]):
        waiting += [] if some is None else [some]
        if waiting and (some is None or sum(len(one.keys) for one in waiting) >= _HEADS_TOGETHER):
            yield Values(**{name: np.concatenate([getattr(one, name) for one in waiting]) for name in _VALUES})
            waiting = []


def _indexed(descriptor: int, values: Values, data: Path) -> dict[str, NDArray[Any]]:
    """Columns of some entries, with ``key``, after checking their heads."""
    fronts = _fronts(descriptor, values)
    fixed = np.ascontiguousarray(fronts[:, :FIXED_BYTES]).view(FIXED_DTYPE)[:, 0]
    single = (fixed["flags"] & PACKED == 0) & (fixed["head_bytes"] <= _FRONT_BYTES)
    good = single & _plausible(fixed, fronts, values)
    good[good] = _signed(fronts[good], fixed["head_bytes"][good])
    columns: dict[str, NDArray[Any]] = {
        "key": values.keys,
        "offset": (values.offsets + fixed["head_bytes"]).astype(np.uint64),
        "head": fixed["head_bytes"].astype(np.uint32),
        "bytes": fixed["payload_bytes"].astype(np.uint64),
        "checksum": fixed["payload_checksum"].astype(np.uint64),
        "block": np.zeros(len(fixed), dtype=np.uint32),
        "same": np.where((fixed["flags"] & PACKED == 0)[:, None], fixed["same"], 0).astype(np.uint8),
        "length": np.where(fixed["flags"] & (PACKED | RAGGED) == RAGGED, _first_dimension(fronts), np.uint32(0)),
    }
    blocks = []
    for row in np.flatnonzero(~good).tolist():
        place, length = int(values.offsets[row]), int(values.lengths[row])
        header = checked_head(descriptor, place, length, values.keys[row].tobytes())
        if header.packed:
            blocks.append(header)
            columns["block"][row] = header.items
    empty = np.zeros((0, HASH_BYTES), dtype=np.uint8)
    columns["item.content"] = np.concatenate([empty, *(header.content for header in blocks)])
    columns["item.same"] = np.concatenate([empty, *(header.same for header in blocks)])
    columns["item.length"] = np.concatenate([np.zeros(0, np.uint32), *(header.length for header in blocks)])
    return columns


def _fronts(descriptor: int, values: Values) -> NDArray[np.uint8]:
    """(N, 256) the first bytes of values; zeros behind values that are shorter."""
    fronts = np.zeros((len(values.offsets), _FRONT_BYTES), dtype=np.uint8)
    memory, read = fronts.reshape(-1).data, os.preadv
    wanted = np.minimum(values.lengths, _FRONT_BYTES).tolist()
    for row, (offset, size) in enumerate(zip(values.offsets.tolist(), wanted, strict=True)):
        place = row * _FRONT_BYTES
        if read(descriptor, (memory[place : place + size],), offset) != size:
            raise ValueError("a value ends early")
    return fronts


def _plausible(fixed: NDArray[Any], fronts: NDArray[np.uint8], values: Values) -> NDArray[np.bool_]:
    """(N,) True if the fixed part of a head agrees with its key, its shape and the length of its value."""
    ndim = fixed["ndim"]
    shapes = np.ascontiguousarray(fronts[:, FIXED_BYTES : FIXED_BYTES + 4 * MAX_DIMENSIONS]).view("<u4")
    inside = np.arange(MAX_DIMENSIONS) < ndim[:, None]
    elements = np.where(inside, shapes, 1).astype(np.float64).prod(axis=1)
    right = (fixed["magic"] == np.void(MAGIC)) & (fixed["items"] == 1) & (fixed["kind"] == values.keys[:, 0])
    right &= (ndim >= 1) & (ndim <= MAX_DIMENSIONS) & (fixed["key"] == values.keys).all(axis=1)
    right &= (fixed["head_bytes"] > FIXED_BYTES) & (fixed["head_bytes"] % 64 == 48)
    right &= (elements > 0) & (elements * _WIDTHS[fixed["dtype"]] == fixed["payload_bytes"])
    right &= fixed["head_bytes"].astype(np.int64) + fixed["payload_bytes"].astype(np.int64) == values.lengths
    found: NDArray[np.bool_] = right
    return found


def _signed(fronts: NDArray[np.uint8], head_bytes: NDArray[np.integer]) -> NDArray[np.bool_]:
    """(n,) True if the checksum at the end of a head holds."""
    memory = np.ascontiguousarray(fronts).reshape(-1).data
    stops = head_bytes.astype(np.int64) - CHECKSUM_BYTES
    begins = np.arange(len(fronts)) * _FRONT_BYTES
    spans = zip(begins.tolist(), (begins + stops).tolist(), strict=True)
    found = np.array([checksum(memory[begin:stop]) for begin, stop in spans], dtype=np.uint64)
    stored = (
        gather_bytes(np.ascontiguousarray(fronts), begins + stops, CHECKSUM_BYTES) if len(fronts) else fronts[:, :8]
    )
    same: NDArray[np.bool_] = found == np.ascontiguousarray(stored).view("<u8")[:, 0]
    return same


def _first_dimension(fronts: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(fronts[:, FIXED_BYTES : FIXED_BYTES + 4]).view("<u4")[:, 0]


def checked_head(descriptor: int, offset: int, length: int, key: bytes | None = None) -> EntryHeader:
    """The head of a value of known length.

    Raises:
        CorruptEntryError: It is damaged, or head and payload have another length.
        CacheFormatError: It is of a newer version.
        OSError: The file cannot be read.
    """
    front = os.pread(descriptor, min(length, _FRONT_BYTES), offset)
    size = int.from_bytes(front[8:12], "little")
    if _FRONT_BYTES < size <= length:
        front = os.pread(descriptor, size, offset)
    header = read_header(front, key)
    if header.head_bytes + header.payload_bytes != length:
        why = f"expected {header.head_bytes + header.payload_bytes} bytes, found {length}"
        raise CorruptEntryError("the length of an entry is wrong", key=header.key.hex(), why=why)
    return header


def write_index(folder: Path, name: str) -> int:
    """Index a closed shard of this final name; return the number of entries."""
    meta = read_meta(folder / "data.mdb")
    columns = collect_index(folder / "data.mdb", meta)
    write_columns(folder / INDEX, columns, _made_from(name, meta))
    return len(columns["offset"])


def _made_from(name: str, meta: Meta) -> dict[str, str]:
    """What an index says of the shard that it was made from."""
    return {**meta.as_metadata(), "shard": name}


def load_index(folder: Path, *, check_data: bool = True) -> ShardIndex:
    """Open the index of a sealed shard.

    Args:
        folder: ``shards/<id>``.
        check_data: See that it belongs to the shard as it is now; False for a shard that may be damaged.

    Raises:
        CacheDamagedError: The index is damaged, or the shard is truncated or another one.
    """
    file = ColumnFile(folder / INDEX)
    index = ShardIndex(folder, file, file.metadata)
    expected = _made_from(folder.name, read_meta(folder / "data.mdb")) if check_data else {}
    for name, value in expected.items():
        if file.metadata.get(name) != value:
            why = f"{name}: expected {file.metadata.get(name)}, found {value}"
            raise CacheDamagedError("a shard is not the one its index was made from", where=str(folder), why=why)
    return index


def checked_index(folder: Path, *, check_data: bool = True) -> ShardIndex:
    """The index of a sealed shard with all columns checked. Arguments and errors as :func:`load_index`."""
    index = load_index(folder, check_data=check_data)
    index.check()
    return index


def open_shard_index(folder: Path) -> ShardIndex:
    """What is committed in a shard that is being written, or was when its builder died; nothing is written.

    Errors as :func:`collect_index`.
    """
    meta = read_meta(folder / "data.mdb")
    return ShardIndex(folder, collect_index(folder / "data.mdb", meta), meta.as_metadata())

"""One LMDB shard: written in batches, sealed, indexed, copied. Normative text: docs/format/shard.md.

When :meth:`ShardWriter.write` returns, its entries survive ``kill -9`` and a power cut. LMDB has its default flags:
``sync=False`` lost synced entries in 54 of 120 simulated power cuts. A map that is too small grows and the batch is
replayed. A sealed shard is never opened for writing again, so readers need no lock. An open transaction holds its
bytes in memory, so callers commit at about 16 MiB.

The index is made by a walk over LMDB's pages. It starts at the root of the newest valid meta page, because LMDB
leaves stale and uncommitted pages in the file. It follows nothing outside the file or twice. Every head is checked
before it is indexed. Nothing is mapped. Cost: about 15 us per entry. Source of the page layout: ``mdb.c`` of LMDB 0.9
(MDB_page, MDB_meta, MDB_db, MDB_node), 64-bit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, DiskFullError, StoreError
from latentcache.failpoint import failpoint
from latentcache.identity.content import CONTENT_SLICE, HASH_BYTES, KEY_BYTES, checksum
from latentcache.store.atomic_io import (
    DISK_FULL,
    file_descriptor,
    make_folder,
    sync_file,
    sync_folder,
    unreadable,
    writing,
)
from latentcache.store.columns import ColumnFile, write_columns
from latentcache.store.entry import EntryHeader, NewEntry, read_header
from latentcache.store.gather import read_at
from latentcache.store.paths import FORMAT_VERSION, OPEN_SUFFIX, CachePaths, other_format

INDEX = "index.safetensors"
#: First map size. Growing costs 0.1 ms; a huge map breaks under address space limits.
FIRST_MAP_BYTES = 1 << 30
_KEEP_FREE_BYTES = 64 << 20
_COMMIT_BYTES = 16 << 20
#: Bytes of a page's header; a value with pages of its own begins behind it.
PAGE_HEADER_BYTES = 16
_MAGIC, _VERSION = 0xBEEFC0DE, 1
#: A page header, then magic, version, address, map size; of two databases page size, flags, depth, branch, leaf and
#: overflow pages, entries, root; last page, transaction.
_META = struct.Struct("<16xIIQQ" + 2 * "IHHQQQQQ" + "QQ")
_BRANCH_PAGE, _LEAF_PAGE, _BIG_VALUE = 0x01, 0x02, 0x01
_NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF
#: Low and high half of a value's length (of a page's number, with the flags), flags, length of the key.
_NODE = struct.Struct("<HHHH")
#: Byte of a page header with its flags; behind them is the end of its pointers.
_FLAGS_AT = 10
#: Bytes of a value that are read at first; the head of an entry that is no block is shorter.
_FRONT_BYTES = 256
_HEADS_TOGETHER = 1 << 14
_ENTRY_TYPES = np.dtype("V32,u8,u4,u8,u8,u4")
_ENTRY_TYPES.names = ("key", "offset", "head", "bytes", "checksum", "items")
#: Columns of items that heads have.
_ITEM_COLUMNS: dict[str, NDArray[Any]] = {
    "content": np.zeros((0, HASH_BYTES), np.uint8),
    "same": np.zeros((0, HASH_BYTES), np.uint8),
    "start": np.zeros(0, np.uint32),
    "length": np.zeros(0, np.uint32),
}


_OwnColumns = tuple[int, dict[str, NDArray[Any]]]
"""Number of items, and columns of them that belong to their kinds."""
StoredValue = tuple[bytes, int, int]
"""A key, and offset in the file and length of its value in bytes."""


class ShardWriter:
    """An open shard. One thread of one process writes it; use as a context manager or call :meth:`close`."""

    def __init__(self, folder: Path, *, map_bytes: int = FIRST_MAP_BYTES) -> None:
        fresh = not folder.exists()
        make_folder(folder)
        self.folder = folder
        self._environment: Any = None
        try:
            with _storing(folder):
                # 0 pins the 0.9 format whatever LMDB_DEFAULT_LIB_VERSION says: 1.0 moves values by 8 bytes.
                self._environment = lmdb.open(
                    str(folder),
                    map_size=map_bytes,
                    lock=False,  # there is one writer; a lock file is mapped, and a SIGBUS on a full disk
                    lib_version=0,
                    sync=True,
                    metasync=True,
                    writemap=False,
                    readahead=False,
                )
                sync_folder(folder)
                sync_folder(folder.parent)
        except StoreError:
            self.close()
            if fresh:  # half of an empty shard would be taken for a damaged one
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def write(self, entries: Sequence[NewEntry]) -> None:
        """Commit a batch; all of it is durable when this returns, or none of it is there.

        A key that is in the shard already keeps its entry: same key, same bytes.
        """
        with _storing(self.folder):
            while True:
                try:
                    self._commit(entries)
                    break
                except lmdb.MapFullError:
                    size = self._environment.info()["map_size"]
                    self._environment.set_mapsize(size + max(size, 2 * sum(len(entry.value) for entry in entries)))
                    failpoint("map-grown")
            failpoint("after-commit")

    def seal(self, name: str = "") -> Path:
        """Close the shard and give it its final name, by default that of the open shard; remove an empty one.

        Returns the sealed folder, which does not exist when the shard was empty.
        """
        with _storing(self.folder):
            self._environment.sync(True)
            self.close()
            return seal_folder(self.folder, name)

    def close(self) -> None:
        """Close the environment. Committed entries stay where they are, in the open shard."""
        if self._environment is not None:
            self._environment.close()

    def _commit(self, entries: Sequence[NewEntry]) -> None:
        with self._environment.begin(write=True) as transaction:
            failpoint("before-put")
            for entry in entries:
                transaction.put(entry.key, entry.value, overwrite=False)
            failpoint("after-put")


@contextlib.contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Turn errors of LMDB and of the system into errors of this package."""
    with writing(folder):
        try:
            yield
        except lmdb.Error as error:
            code = getattr(error, "code", None)
            # LMDB reports a full disk as EIO, because it names a short write so.
            if code in DISK_FULL or (code == errno.EIO and not _has_room(folder)):
                raise DiskFullError("the disk is full", where=str(folder), why=str(error)) from error
            problem, fix = "a shard cannot be written or read", "check the disk, then run again"
            raise StoreError(problem, where=str(folder), why=str(error), fix=fix) from error


def seal_folder(folder: Path, name: str = "") -> Path:
    """Index a closed shard, rename ``<id>.open`` to ``<id>`` or ``name``. Idempotent; safe to kill at any point."""
    sealed = folder.with_name(name or folder.name.removesuffix(OPEN_SUFFIX))
    # A builder killed in the middle of a commit leaves a state that only the memory of the system may hold: an index
    # of it, durable, over a file that is not, would make a power cut later turn a whole shard into a damaged one.
    sync_file(folder / "data.mdb")
    columns = collect_index(folder / "data.mdb")
    _write(folder, sealed.name, columns)
    if not len(columns["offset"]):
        shutil.rmtree(folder)
        return sealed
    with suppress(OSError):  # advice to people; a file system without modes does no harm
        (folder / "data.mdb").chmod(0o444)
    sync_folder(folder)
    folder.rename(sealed)
    failpoint("after-rename")
    sync_folder(folder.parent)
    failpoint("folder-synced")
    return sealed


def _has_room(folder: Path) -> bool:
    """Return True if the shard could grow: no full disk, no used-up quota, no file size limit."""
    try:
        size = (folder / "data.mdb").stat().st_size
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), size, _KEEP_FREE_BYTES)
    except (OSError, AttributeError) as error:  # macOS lacks the call
        return getattr(error, "errno", 0) not in DISK_FULL
    return True


class Meta(NamedTuple):
    """The newer of a file's two meta pages."""

    page_size: int
    last_page: int
    transaction: int
    root: int

    @property
    def file_bytes(self) -> int:
        """Bytes the file must have."""
        return (self.last_page + 1) * self.page_size


def read_meta(path: Path) -> Meta:
    """The newer valid meta page of ``data.mdb``; CacheDamagedError if there is none or the file is too short."""
    try:
        with file_descriptor(path) as descriptor:
            front = read_at(descriptor, 0, 2 * 65_536).tobytes()
            size = os.fstat(descriptor).st_size
    except OSError as error:
        raise unreadable(path, error) from error
    pages = [_parse_meta(front, at) for at in (0, 4096, 8192, 16_384, 32_768, 65_536)]
    metas = [meta for meta in pages if meta is not None]
    if not metas:
        raise CacheDamagedError("a shard is no LMDB 0.9 file", where=str(path), why="no valid meta page")
    metas = [meta for meta in metas if meta.page_size == metas[0].page_size]
    meta = max(metas, key=lambda meta: meta.transaction)
    if size < meta.file_bytes:
        why = f"expected {meta.file_bytes} bytes, found {size}"
        raise CacheDamagedError("a shard is truncated", where=str(path), why=why)
    return meta


def _parse_meta(front: bytes, offset: int) -> Meta | None:
    """The meta page at an offset, which is 0 or the page size."""
    if len(front) < offset + _META.size:
        return None
    magic, version, _, _, page_size, *_, root, last_page, transaction = _META.unpack_from(front, offset)
    if magic != _MAGIC or version & 0x3FFF != _VERSION or (offset and offset != page_size):
        return None
    if not 512 <= page_size <= 65_536 or page_size & (page_size - 1):
        return None
    return Meta(page_size, last_page, transaction, root)


def walk(descriptor: int, meta: Meta) -> Iterator[StoredValue]:
    """Every committed key with offset and length of its value, in key order. Raises ValueError, struct.error."""
    size = meta.page_size
    stack = [] if meta.root == _NO_PAGE else [meta.root]
    seen = set[int]()
    while stack:
        number = stack.pop()
        if number > meta.last_page or number in seen:
            raise ValueError("a page is out of reach or met twice")
        seen.add(number)
        page = read_at(descriptor, number * size, size).tobytes()
        if int.from_bytes(page[:8], "little") != number:
            raise ValueError("a page is in the place of another")
        flags, lower = struct.unpack_from("<HH", page, _FLAGS_AT)
        pointers = struct.unpack_from(f"<{(lower - PAGE_HEADER_BYTES) // 2}H", page, PAGE_HEADER_BYTES)
        nodes = [(pointer + _NODE.size, *_NODE.unpack_from(page, pointer)) for pointer in pointers]
        if flags & (_BRANCH_PAGE | _LEAF_PAGE) == _BRANCH_PAGE:
            stack += [low | high << 16 | more << 32 for _, low, high, more, _ in reversed(nodes)]
            continue
        if flags & (_BRANCH_PAGE | _LEAF_PAGE) != _LEAF_PAGE:
            raise ValueError("a page is neither branch nor leaf")
        for at, low, high, more, key_bytes in nodes:
            start, length = at + KEY_BYTES, low | high << 16
            offset, end = number * size + start, start + length
            if more & _BIG_VALUE:
                first = int.from_bytes(page[start : start + 8], "little")
                end = start + 8
                offset = first * size + PAGE_HEADER_BYTES
            if key_bytes != KEY_BYTES or end > size or offset + length > meta.file_bytes:
                raise ValueError("a key has another length, or a value leaves its page or the file")
            yield page[at:start], offset, length


class ShardIndex:
    """Content of a shard: E entries in key order, and their I items. Columns are read when they are asked for.

    ``offset`` (E,) is where the payload begins, ``head`` the bytes before it, ``bytes`` its size and ``checksum`` its
    xxh3-64. The items of an entry follow each other; their columns have names such as ``item.length``.
    """

    def __init__(self, folder: Path, columns: Any, *, is_rewritten: bool = False) -> None:
        self.folder, self.columns = folder, columns
        self.is_rewritten = is_rewritten
        """True if it may lack entries that the shard was sealed with."""
        self.key, self.offset, self.head = columns["key"], columns["offset"], columns["head"]
        self.bytes, self.checksum = columns["bytes"], columns["checksum"]
        self.entries, self.items = len(self.key), len(columns["item.key"])

    def keys(self, items: Any = slice(None)) -> NDArray[np.uint8]:
        """(n, 32) keys of items."""
        return np.asarray(self.columns["item.key"][items])

    def is_beyond_end(self) -> NDArray[np.bool_]:
        """(E,) True for entries that the end of the file cuts off."""
        data = self.folder / "data.mdb"
        try:
            with file_descriptor(data) as descriptor:  # only the size of a regular file counts
                size = os.fstat(descriptor).st_size
        except OSError as error:
            raise unreadable(data, error) from error
        return np.asarray(np.asarray(self.offset) + np.asarray(self.bytes) > size)

    def columns_without(self, removed: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        """The columns without some entries, which are True in ``removed`` (E,)."""
        kept = ~removed
        entry = np.asarray(self.columns["item.entry"])
        is_item = kept[entry]
        columns = dict[str, NDArray[Any]]()
        for name in self.columns:
            rows = kept if name in (_ENTRY_TYPES.names or ()) else is_item
            if name.endswith(".values"):
                rows = np.repeat(is_item, self.columns[name.removesuffix("values") + "counts"])
            columns[name] = np.asarray(self.columns[name])[rows]
        columns["item.entry"] = (np.cumsum(kept, dtype=np.uint32) - np.uint32(1))[entry[is_item]]
        return columns


def collect_index(data: Path) -> dict[str, NDArray[Any]]:
    """The columns of the index of a shard: CacheDamagedError for its pages, CorruptEntryError for a head."""
    meta = read_meta(data)
    try:
        with file_descriptor(data) as descriptor:
            values = walk(descriptor, meta)
            parts = [_indexed([])]
            own_columns = list[_OwnColumns]()
            while some := list(islice(values, _HEADS_TOGETHER)):
                heads = [(key, offset, checked_head(descriptor, offset, length, key)) for key, offset, length in some]
                parts.append(_indexed(heads))
                own_columns.append(_joined([(header.items, _own_columns(header)) for _, _, header in heads]))
    except CorruptEntryError as error:
        error.where = error.where or str(data)
        raise
    except OSError as error:
        raise unreadable(data, error) from error
    except (ValueError, struct.error) as error:
        raise CacheDamagedError("the pages of a shard are damaged", where=str(data), why=str(error)) from error
    return _index_columns(parts, own_columns)


def _index_columns(
    parts: Sequence[Mapping[str, NDArray[Any]]], own_columns: Sequence[_OwnColumns]
) -> dict[str, NDArray[Any]]:
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    items = columns.pop("items")
    entry = columns["item.entry"] = np.repeat(np.arange(len(items), dtype=np.uint32), items)
    columns["item.key"] = columns["key"][entry]
    columns["item.key"][:, CONTENT_SLICE] = columns.pop("item.content")
    return columns | _joined(own_columns)[1]


def _indexed(heads: Sequence[tuple[bytes, int, EntryHeader]]) -> dict[str, NDArray[Any]]:
    """The columns of the format, of entries with these keys, offsets and heads; the number and contents of items."""
    table = np.array(
        [
            (key, offset + head.head_bytes, head.head_bytes, head.payload_bytes, head.payload_checksum, head.items)
            for key, offset, head in heads
        ],
        dtype=_ENTRY_TYPES,
    )
    columns: dict[str, NDArray[Any]] = {name: np.ascontiguousarray(table[name]) for name in _ENTRY_TYPES.names or ()}
    columns["key"] = columns["key"].view(np.uint8).reshape(-1, KEY_BYTES)
    for name, nothing in _ITEM_COLUMNS.items():
        columns[f"item.{name}"] = np.concatenate([nothing, *(getattr(head, name) for _, _, head in heads)])
    return columns


def _own_columns(header: EntryHeader) -> dict[str, NDArray[Any]]:
    """Columns of an entry that belong to its kind; of a ragged one the counts of values, and the values."""
    kind = header.key[0]
    columns = {f"columns/{kind}/{name}": values for name, values in header.columns.items()}
    for name, (ends, values) in header.ragged_columns.items():
        columns[f"ragged/{kind}/{name}.counts"] = np.diff(ends, prepend=0)
        columns[f"ragged/{kind}/{name}.values"] = values
    return columns


def _joined(parts: Sequence[_OwnColumns]) -> _OwnColumns:
    """Columns of parts, one after the other; zeros for items that lack one."""
    columns = dict[str, NDArray[Any]]()
    for name in sorted({name for _, part in parts for name in part}):
        like = next(part[name] for _, part in parts if name in part)
        values = list[NDArray[Any]]()
        for items, part in parts:
            lacking = 0 if name.endswith(".values") else items
            values.append(part[name] if name in part else np.zeros((lacking, *like.shape[1:]), like.dtype))
        columns[name] = np.concatenate(values)
    return sum(items for items, _ in parts), columns


def checked_head(descriptor: int, offset: int, length: int, key: bytes | None = None) -> EntryHeader:
    """The head of a value of known length; raises as :func:`read_header`, and OSError."""
    front = read_at(descriptor, offset, min(length, _FRONT_BYTES)).tobytes()
    size = int.from_bytes(front[8:12], "little")
    if _FRONT_BYTES < size <= length:
        front = read_at(descriptor, offset, size).tobytes()
    return read_header(front, key, length)


def read_entry(descriptor: int, offset: int, length: int, key: bytes | None = None) -> tuple[EntryHeader, memoryview]:
    """The head of an entry, and its value of ``length`` bytes from byte ``offset`` on: head and payload, all proven.

    ``key`` None: any is right. Raises as :func:`read_header`; CorruptEntryError also if the payload fails its check,
    or is not there; OSError.
    """
    if not 0 <= offset <= offset + length <= os.fstat(descriptor).st_size:
        raise CorruptEntryError("a shard ends before an entry", key=(key or b"").hex(), reason="truncated")
    value = read_at(descriptor, offset, length)
    header = read_header(value, key, length)
    computed = checksum(value[header.head_bytes :])
    if computed != header.payload_checksum:
        why = f"checksum: expected {header.payload_checksum:016x}, found {computed:016x}"
        raise CorruptEntryError("the payload of an entry is damaged", key=header.key.hex(), reason="payload", why=why)
    return header, value


def remove_entries(folder: Path, keys: NDArray[Any]) -> None:
    """Take the entries with these keys, (n,) S32, out of the index of a shard: no build uses them any more."""
    index = load_index(folder)
    removed = np.isin(np.asarray(index.key).view("S32")[:, 0], keys)
    if removed.any():
        _write(folder, folder.name, index.columns_without(removed), rewritten="yes")


def mend_index(folder: Path) -> bool:
    """Write the index of a sealed shard again, with the entries that are there; False if there are none."""
    columns = _index_columns([_indexed([])], [])
    with suppress(CacheDamagedError, CorruptEntryError):
        columns = collect_index(folder / "data.mdb")
    with suppress(CacheDamagedError):
        index = checked_index(folder)
        columns = index.columns_without(index.is_beyond_end())
    _write(folder, folder.name, columns, rewritten="yes")
    return len(columns["offset"]) > 0


def _write(folder: Path, name: str, columns: Mapping[str, Any], **more: str) -> None:
    write_columns(folder / INDEX, columns, {"shard": name, "format": str(FORMAT_VERSION), **more})


def load_index(folder: Path) -> ShardIndex:
    """Open the index of a sealed shard; CacheDamagedError if it is damaged, or that of another shard.

    CacheFormatError for another version of the format.
    """
    file = ColumnFile(folder / INDEX)
    version = file.metadata.get("format", "1")
    if version != str(FORMAT_VERSION):
        raise other_format(int(version), folder, folder.parent.parent)
    if file.metadata.get("shard") != folder.name:
        why = f"it is the index of shard {file.metadata.get('shard')}"
        raise CacheDamagedError("a shard has the index of another one", where=str(folder), why=why)
    return ShardIndex(folder, file, is_rewritten="rewritten" in file.metadata)


def checked_index(folder: Path) -> ShardIndex:
    """As :func:`load_index`, with all columns checked."""
    index = load_index(folder)
    index.columns.check()
    return index


def copy_entries(paths: CachePaths, source: Path, spans: NDArray[Any]) -> str:
    """Copy entries of a shard, of this or another cache, into a new sealed one; gives its name.

    ``spans``: (n,) ``SPAN_DTYPE``, at least one. Raises CorruptEntryError or CacheDamagedError if an entry fails
    its check, StoreError if it cannot be read; nothing is copied then.
    """
    name = os.urandom(8).hex()
    folder = paths.scratch / f"{name}{OPEN_SUFFIX}"
    for parent in (paths.scratch, paths.shards):
        make_folder(parent)
    try:
        with writing(folder), contextlib.closing(ShardWriter(folder)) as writer:
            batch: list[NewEntry] = []
            size = 0
            for entry in _intact(source / "data.mdb", spans):
                batch.append(entry)
                size += len(entry.value)
                if size >= _COMMIT_BYTES:
                    writer.write(batch)
                    batch = []
                    size = 0
            writer.write(batch)
            writer.seal().rename(paths.shard(name))
            sync_folder(paths.shards)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            paths.scratch.rmdir()
    return name


def _intact(data: Path, spans: NDArray[Any]) -> Iterator[NewEntry]:
    """The entry in each span of a file, proven."""
    spans = spans[np.unique(spans["offset"], return_index=True)[1]]  # each once, in the order of the file
    try:
        with file_descriptor(data) as descriptor:
            for key, offset, head, size in spans.tolist():
                header, value = read_entry(descriptor, offset - head, head + size, bytes(key))
                yield NewEntry(header.key, value, tuple(item.tobytes() for item in header.item_keys()))
    except OSError as error:
        raise unreadable(data, error) from error

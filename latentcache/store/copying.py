"""Copies what is whole of a shard that may be damaged into a new one. Runs in a process of its own.

Guarantee: an entry is copied only when its header belongs to its key and header, facts and payload pass their
checks; it then has the same bytes. Nothing is mapped, no page is met twice, nothing beyond the file is asked for.
What is left of a process that dies is what it had committed. It ends when its parent does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, DiskFullError, StoreError
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES, EntryKey
from latentcache.store.durable import open_file
from latentcache.store.entry import (
    FACTS_BYTES,
    HEADER_BYTES,
    RECORD_BYTES,
    NewEntry,
    unpack_facts,
    unpack_header,
    unpack_record,
)
from latentcache.store.index import load_rows
from latentcache.store.pages import read_meta, slots
from latentcache.store.shard import ShardWriter

#: Where an entry may lie: its key, its facts, and the byte offset of its header in ``data.mdb``.
PLACE_DTYPE = np.dtype([("key", "u1", (KEY_BYTES,)), ("facts", "u1", (FACTS_BYTES,)), ("offset", "<u8")])
_COMMIT_BYTES = 16 << 20


@dataclass(slots=True)
class Copied:
    """What was copied, and how many distinct keys were met that could not be."""

    saved: int = 0
    lost: int = 0


def copy_entries(source: Path, writer: ShardWriter, *, skip: set[bytes], hints: NDArray[Any], only: bool) -> Copied:
    """Copy every whole entry of a shard.

    Args:
        source: Folder of the shard, sealed or not.
        writer: The new shard.
        skip: Keys that are not wanted; those that were copied are added.
        hints: PLACE_DTYPE rows: further places where entries of the shard may lie.
        only: Copy what ``hints`` names, and nothing else.

    Raises:
        DiskFullError: No space.
        StoreError: The new shard cannot be written.
    """
    copied, seen = Copied(), set[bytes]()
    try:
        descriptor = open_file(source / "data.mdb")
    except OSError:
        return copied
    try:
        batch: list[NewEntry] = []
        waiting = 0
        for key, facts, offset in _hinted(hints) if only else _places(source, hints):
            if key in skip:
                continue
            seen.add(key)
            value = _whole_value(descriptor, key, facts, offset)
            if value is not None:
                skip.add(key)
                copied.saved += 1
                waiting += len(value)
                batch.append(NewEntry(key=key, value=value, facts=facts))
            if waiting >= _COMMIT_BYTES:
                writer.write(batch)
                batch, waiting = [], 0
        if batch:
            writer.write(batch)
    finally:
        os.close(descriptor)
    copied.lost = len(seen) - copied.saved
    return copied


def serve() -> int:
    """Answer the one request on standard input, as :func:`latentcache.store.salvage.salvage` sends it."""
    request = json.loads(sys.stdin.buffer.readline())
    keys, rows = (sys.stdin.buffer.read(request[name]) for name in ("skip_bytes", "hint_bytes"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    skip = {keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)}
    hints = np.frombuffer(rows, dtype=PLACE_DTYPE)
    try:
        writer = ShardWriter(Path(request["target"]))
        copied = copy_entries(Path(request["source"]), writer, skip=skip, hints=hints, only=request["only"])
        writer.seal()
    except StoreError as error:
        parts = {name: getattr(error, name) for name in ("what", "where", "why", "fix")}
        return _answer({"full": isinstance(error, DiskFullError), "error": parts})
    return _answer({"saved": copied.saved, "lost": copied.lost})


def _answer(value: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(value))
    sys.stdout.flush()
    return 0


def _end_with_parent() -> None:
    """The parent writes nothing more and closes the pipe when it is done, or dead.

    Not through ``sys.stdin``: its lock, held by this thread, would abort the interpreter at its end.
    """
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _places(source: Path, hints: NDArray[Any]) -> Iterator[tuple[bytes, bytes, int]]:
    """Key, facts and offset of what the shard should hold, by its index, by the hints, or by what is left of it."""
    try:
        rows = load_rows(source).rows
    except CacheDamagedError:
        yield from _hinted(hints)
        yield from _from_pages(source / "data.mdb")
    else:
        yield from _hinted(rows)
        yield from _hinted(hints)


def _hinted(rows: NDArray[Any]) -> Iterator[tuple[bytes, bytes, int]]:
    for row in rows:
        yield row["key"].tobytes(), row["facts"].tobytes(), int(row["offset"])


def _from_pages(data: Path) -> Iterator[tuple[bytes, bytes, int]]:
    """By the pages of the file, as far as they can be read; facts come from the records."""
    try:
        meta = read_meta(data, whole=False)
    except CacheDamagedError:
        return
    facts = {}
    with os.fdopen(open_file(data), "rb", buffering=0) as file:
        for slot in slots(data, "head", meta, passing=True):
            record = os.pread(file.fileno(), RECORD_BYTES, slot.offset)
            try:
                facts[slot.key] = unpack_record(record, slot.key)[1]
            except (StoreError, ValueError):
                continue
    for slot in slots(data, "blob", meta, passing=True):
        if slot.key in facts:
            yield slot.key, facts[slot.key], slot.offset


def _whole_value(descriptor: int, key: bytes, facts: bytes, offset: int) -> bytes | None:
    """Header and payload at an offset, where they are what the key says."""
    try:
        unpack_facts(facts, EntryKey.unpack(key).bucket)
        packed = os.pread(descriptor, HEADER_BYTES, offset)
        header = unpack_header(packed, key)
        wanted = HEADER_BYTES + header.payload_bytes
        if offset + wanted > os.fstat(descriptor).st_size:
            return None
        value = os.pread(descriptor, wanted, offset)
    except (StoreError, ValueError, OSError, OverflowError):
        return None
    payload = memoryview(value)[HEADER_BYTES:]
    return value if len(value) == wanted and checksum(payload) == header.payload_checksum else None

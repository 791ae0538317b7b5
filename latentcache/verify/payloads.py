"""Read every payload: sequentially, shard by shard, against its checksum, its head and the rules of its kind.

Nothing is mapped. Two threads read, hash and check, each in one buffer, so memory stays flat. What passes here cannot
fail in a reader, which checks the same checksum of the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.failpoint import failpoint
from latentcache.fields.dtypes import numpy_dtype
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import open_file
from latentcache.store.entry import head_intact, read_header
from latentcache.verify.entries import Store, View, shard_parts, unreadable, words

_THREADS = 2
#: Bytes read at once, and the largest gap between two entries that is read over.
_READ_BYTES, _GAP_BYTES = 4 << 20, 1 << 16
#: Reads that are planned ahead of the threads.
_AHEAD = 8


@dataclass(slots=True, kw_only=True)
class Scanned:
    """Result of reading payloads."""

    read: dict[str, NDArray[np.bool_]]
    """(E,) by field: entries about which all is known that was asked for."""
    payloads: int = 0
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Entries of one field that are read at once."""

    view: View
    entries: NDArray[np.intp]
    first: int
    """Where the read begins, and its length, in bytes."""
    length: int


#: (entry, category, reason, text, intact) of an entry that is wrong.
_Wrong = tuple[int, str, str, str, bool]


def scan_payloads(store: Store, chosen: Mapping[str, NDArray[np.bool_]], over: Callable[[], bool] = bool) -> Scanned:
    """Read the chosen entries, and note what is wrong with them.

    Args:
        store: What is checked; shards that cannot be read have their findings already.
        chosen: (E,) by field.
        over: Asked before each read; True ends the scan.
    """
    scanned = Scanned(read={name: ~chosen[name] for name in store.views})
    unreadable_shards = np.setdiff1d(np.arange(len(store.snapshot.shards)), store.readable)
    for name, view in store.views.items():
        scanned.read[name] |= np.isin(view.shard, unreadable_shards)
    buffers: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(_THREADS):
        buffers.put(bytearray(_READ_BYTES))
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, parts in shard_parts(store, chosen):
            failpoint("scan-shard")
            _scan_shard(store, number, parts, scanned, pool, buffers, over)
            if over():
                break
    return scanned


def _scan_shard(
    store: Store,
    number: int,
    parts: list[tuple[View, NDArray[np.intp]]],
    scanned: Scanned,
    pool: ThreadPoolExecutor,
    buffers: SimpleQueue[bytearray],
    over: Callable[[], bool],
) -> None:
    try:
        descriptor = open_file(store.paths.data(store.snapshot.shards[number]))
    except OSError as error:
        for view, entries in parts:
            store.note(view, "unverifiable", unreadable(error), entries, found=words(error))
            scanned.read[view.name][entries] = True
        return

    def look(run: _Run) -> list[_Wrong] | None:
        if over():
            return None
        buffer = buffers.get()
        try:
            if len(buffer) < run.length:
                buffer = bytearray(run.length)
            return _look(descriptor, run, memoryview(buffer)[: run.length])
        finally:
            buffers.put(buffer)

    try:
        size = os.fstat(descriptor).st_size
        runs = (run for view, entries in parts for run in _runs(view, _within(scanned, view, entries, size)))
        while ahead := list(islice(runs, _AHEAD * _THREADS)):
            for run, wrong in zip(ahead, pool.map(look, ahead), strict=True):
                if wrong is not None:
                    _take(store, scanned, run, wrong)
    finally:
        os.close(descriptor)


def _within(scanned: Scanned, view: View, entries: NDArray[np.intp], size: int) -> NDArray[np.intp]:
    """Entries that the file can hold; the check of the indexes has noted the others."""
    inside = (view.offset[entries] + view.bytes[entries] <= size) & (view.head[entries] <= view.offset[entries])
    scanned.read[view.name][entries[~inside]] = True
    return entries[inside]


def _take(store: Store, scanned: Scanned, run: _Run, wrong: list[_Wrong]) -> None:
    """Add the result of one run to the findings."""
    view, entries = run.view, run.entries
    scanned.read[view.name][entries] = True
    scanned.payloads += len(entries)
    scanned.payload_bytes += int(view.bytes[entries].sum())
    causes: dict[tuple[str, str, bool], list[tuple[int, str]]] = {}
    for entry, category, reason, text, intact in wrong:
        causes.setdefault((category, reason, intact), []).append((entry, text))
    for (category, reason, intact), pairs in causes.items():
        numbers, texts = np.array([entry for entry, _ in pairs]), [text for _, text in pairs]
        store.note(view, category, reason, numbers, found=texts.__getitem__, intact=intact)


def _runs(view: View, entries: NDArray[np.intp]) -> Iterator[_Run]:
    """Entries that are close together, as far as one read goes; an entry larger than that is a read of its own."""
    starts = view.offset[entries] - view.head[entries]
    ends = view.offset[entries] + view.bytes[entries]
    far = np.flatnonzero((starts[1:] - ends[:-1] > _GAP_BYTES) | (starts[1:] < ends[:-1])) + 1
    for place in np.split(np.arange(len(entries)), far):
        first = 0
        while first < len(place):
            begin = int(starts[place[first]])
            last = max(first + 1, int(np.searchsorted(ends[place], begin + _READ_BYTES, side="right")))
            part = place[first:last]
            yield _Run(view=view, entries=entries[part], first=begin, length=int(ends[part[-1]]) - begin)
            first = last


def _look(descriptor: int, run: _Run, buffer: memoryview) -> list[_Wrong]:
    """Read the entries of a run and check each of them."""
    wrong, view = list[_Wrong](), run.view
    try:
        got = os.preadv(descriptor, [buffer], run.first) if run.length else 0
        while 0 < got < run.length and (more := os.preadv(descriptor, [buffer[got:]], run.first + got)):
            got += more
    except OSError as error:
        reason, text = unreadable(error), words(error)
        return [(entry, "unverifiable", reason, text, False) for entry in run.entries.tolist()]
    offsets, heads, sizes = (column[run.entries].tolist() for column in (view.offset, view.head, view.bytes))
    sums, rows = view.checksum[run.entries].tolist(), view.first_rows(run.entries).tolist()
    for entry, offset, head, size, expected, row in zip(
        run.entries.tolist(), offsets, heads, sizes, sums, rows, strict=True
    ):
        at = offset - run.first
        if at + size > got:
            wrong.append((entry, "corrupt", "truncated", "its shard ends before it", False))
            continue
        payload = buffer[at : at + size]
        found = checksum(payload)
        if found != expected:
            text = f"checksum: expected {expected:016x}, found {found:016x}"
            wrong.append((entry, "corrupt", "payload", text, False))
        elif text := _wrong_head(buffer[at - head : at], view, entry):
            wrong.append((entry, "corrupt", "header", text, False))
        elif text := _wrong_values(payload, view, row):
            wrong.append((entry, "corrupt", "values", text, True))
    return wrong


def _wrong_head(head: memoryview, view: View, entry: int) -> str:
    """Why the head of an entry is wrong; empty if it is right. Parsed only if its checksum or its key is wrong."""
    key = view.key[entry].tobytes()
    if head_intact(head, key):
        return ""
    try:
        read_header(head, key)
    except StoreError as error:
        return words(error)
    return ""


def _wrong_values(payload: memoryview, view: View, row: int) -> str:
    """Why the kind does not accept a payload whose checksum is right; empty if it does, or is not installed."""
    rows = view.rows
    if rows.kind is None or rows.recipe is None:
        return ""
    group, own = rows.groups[int(view.group[row])], {name: column[row] for name, column in view.own.items()}
    shape = group.shape
    try:
        values: NDArray[Any] = np.frombuffer(payload, dtype=numpy_dtype(rows.spec.dtype))
        many = rows.spec.ragged or rows.packing == "block"
        values = values.reshape(-1, *(shape[1:] if rows.spec.ragged else shape)) if many else values.reshape(shape)
    except ValueError:
        return f"{len(payload)} bytes are no {rows.spec.dtype} of shape {list(shape)}"
    text: str = rows.kind.check(group, values, own, rows.recipe)
    return text

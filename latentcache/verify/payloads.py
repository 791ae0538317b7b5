"""Read every payload: sequentially, shard by shard, against its checksum, its head and the rules of its kind.

Nothing is mapped, and one buffer is read into, so memory stays flat. The system reads the next run ahead while one is
checked. What passes here cannot fail in a reader, which checks the same checksum of the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.failpoint import failpoint
from latentcache.fields.dtypes import numpy_dtype
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.atomic_io import open_file
from latentcache.store.entry import CHECKSUM_BYTES, FIXED_BYTES, KEY_AT, MAGIC, read_header
from latentcache.store.index import gather_bytes
from latentcache.value import Value
from latentcache.verify.entries import Store, View, shard_parts, unreadable, words

#: Bytes read at once, and the largest gap between two entries that is read over.
_READ_BYTES, _GAP_BYTES = 4 << 20, 1 << 16
_ADVISE = getattr(os, "posix_fadvise", None)


@dataclass(slots=True, kw_only=True)
class Scanned:
    """Result of reading payloads."""

    payloads: int = 0
    payload_bytes: int = 0


class _Run(Value):
    """Entries of one field that are read at once."""

    view: View
    entries: NDArray[np.intp]
    first: int
    """Where the read begins, and its length, in bytes."""
    length: int


#: (entry, category, reason, text, intact) of an entry that is wrong.
_Wrong = tuple[int, str, str, str, bool]


def scan_payloads(store: Store, chosen: Mapping[str, NDArray[np.bool_]]) -> Scanned:
    """Read the chosen entries, and note what is wrong with them."""
    scanned, buffer = Scanned(), bytearray(_READ_BYTES)
    for number, parts in shard_parts(store, chosen):
        failpoint("scan-shard")
        try:
            descriptor = open_file(store.paths.data(store.snapshot.shards[number]))
        except OSError as error:
            for view, entries in parts:
                store.note(view, "unverifiable", unreadable(error), entries, found=words(error))
            continue
        try:
            size = os.fstat(descriptor).st_size
            for run in (run for view, entries in parts for run in _runs(view, _within(view, entries, size))):
                if len(buffer) < run.length:
                    buffer = bytearray(run.length)
                _take(store, scanned, run, _look(descriptor, run, memoryview(buffer)[: run.length]))
        finally:
            os.close(descriptor)
    return scanned


def _within(view: View, entries: NDArray[np.intp], size: int) -> NDArray[np.intp]:
    """Entries that the file can hold; the check of the indexes has noted the others."""
    inside = (view.offset[entries] + view.bytes[entries] <= size) & (view.head[entries] <= view.offset[entries])
    return entries[inside]


def _take(store: Store, scanned: Scanned, run: _Run, wrong: list[_Wrong]) -> None:
    """Add the result of one run to the findings."""
    view, entries = run.view, run.entries
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
    """Read the entries of a run, and check all of them at once; the wrong ones are looked at again one by one."""
    wrong, view, entries = list[_Wrong](), run.view, run.entries
    try:
        got = os.preadv(descriptor, [buffer], run.first) if run.length else 0
        while 0 < got < run.length and (more := os.preadv(descriptor, [buffer[got:]], run.first + got)):
            got += more
        if _ADVISE is not None:
            _ADVISE(descriptor, run.first + run.length, _READ_BYTES, os.POSIX_FADV_WILLNEED)
    except OSError as error:
        reason, text = unreadable(error), words(error)
        return [(entry, "unverifiable", reason, text, False) for entry in entries.tolist()]
    begins = view.offset[entries] - run.first
    beyond = begins + view.bytes[entries] > got
    if beyond.any():
        wrong += [(entry, "corrupt", "truncated", "its shard ends before it", False) for entry in entries[beyond]]
        entries, begins = entries[~beyond], begins[~beyond]
    ends, expected = begins + view.bytes[entries], view.checksum[entries]
    pairs = zip(begins.tolist(), ends.tolist(), strict=True)
    found = np.array([checksum(buffer[begin:end]) for begin, end in pairs], dtype=np.uint64)
    same = found == expected
    for one in () if same.all() else np.flatnonzero(~same).tolist():
        text = f"checksum: expected {int(expected[one]):016x}, found {int(found[one]):016x}"
        wrong.append((int(entries[one]), "corrupt", "payload", text, False))
    whole = same & _heads_intact(buffer, view, entries, begins)
    for one in () if whole.all() else np.flatnonzero(same & ~whole).tolist():
        entry, begin = int(entries[one]), int(begins[one])
        text = _wrong_head(buffer[begin - int(view.head[entry]) : begin], view.key[entry].tobytes())
        if text:
            wrong.append((entry, "corrupt", "header", text, False))
    if view.rows.kind is not None and view.rows.recipe is not None:
        wrong += _wrong_values(buffer, view, entries[whole], begins[whole])
    return wrong


def _heads_intact(
    buffer: memoryview, view: View, entries: NDArray[np.intp], begins: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """(n,) heads of the right keys whose checksums hold; they may still contradict themselves."""
    heads = view.head[entries]
    firsts, stops, keys = begins - heads, begins - CHECKSUM_BYTES, view.key[entries]
    good: NDArray[np.bool_] = heads > FIXED_BYTES
    if not good.all():
        good[good] = _heads_intact(buffer, view, entries[good], begins[good])
        return good
    pairs = zip(firsts.tolist(), stops.tolist(), strict=True)
    found = np.array([checksum(buffer[first:stop]) for first, stop in pairs], dtype=np.uint64)
    pages = np.frombuffer(buffer, dtype=np.uint8)
    fronts, stored = gather_bytes(pages, firsts, FIXED_BYTES), gather_bytes(pages, stops, CHECKSUM_BYTES)
    good &= (fronts[:, : len(MAGIC)] == np.frombuffer(MAGIC, dtype=np.uint8)).all(axis=1)
    good &= (fronts[:, KEY_AT : KEY_AT + KEY_BYTES] == keys).all(axis=1)
    good &= found == stored.view("<u8")[:, 0]
    return good


def _wrong_head(head: memoryview, key: bytes) -> str:
    """Why the head of an entry is wrong; empty if it is right after all."""
    try:
        read_header(head, key)
    except StoreError as error:
        return words(error)
    return ""


def _wrong_values(
    buffer: memoryview, view: View, entries: NDArray[np.intp], begins: NDArray[np.int64]
) -> list[_Wrong]:
    """Entries whose payloads the kind does not accept, although their checksums are right."""
    wrong, rows = list[_Wrong](), view.first_rows(entries)
    group, size = view.group[rows], view.bytes[entries]
    many = view.rows.spec.ragged or view.rows.packing == "block"
    step = np.diff(begins)
    # Entries of one shape that follow each other at one distance are one array.
    cut = np.ones(len(entries) + 1, dtype=np.bool_)
    if not many and len(entries):
        cut[1:-1] = (group[1:] != group[:-1]) | (size[1:] != size[:-1])
        cut[2:-1] |= step[1:] != step[:-1]
    bounds = np.flatnonzero(cut).tolist()
    for first, stop in pairwise(bounds):
        distance = int(step[first]) if stop - first > 1 else 0
        some = rows[first:stop], int(begins[first]), int(size[first]), distance
        if not _why_wrong(buffer, view, *some):
            continue
        for one in range(first, stop):
            text = _why_wrong(buffer, view, rows[one : one + 1], int(begins[one]), int(size[one]), 0)
            if text:
                wrong.append((int(entries[one]), "corrupt", "values", text, True))
    return wrong


def _why_wrong(buffer: memoryview, view: View, rows: NDArray[np.intp], begin: int, size: int, distance: int) -> str:
    """Why the kind does not accept payloads of ``size`` bytes, one every ``distance`` bytes; empty: it does."""
    spec, kind = view.rows.spec, view.rows.kind
    assert kind is not None
    assert view.rows.recipe is not None
    group, dtype = view.rows.groups[int(view.group[rows[0]])], numpy_dtype(spec.dtype)
    own = {name: column[rows] for name, column in view.own.items()}
    try:
        values: NDArray[Any] = np.frombuffer(buffer, dtype, size // dtype.itemsize, begin)
        if spec.ragged or view.rows.packing == "block":
            values = values.reshape(-1, *(group.shape[1:] if spec.ragged else group.shape))
            own = {name: column[0] for name, column in own.items()}
        else:
            strides = values.reshape(group.shape).strides
            values = np.ndarray((len(rows), *group.shape), dtype, buffer, begin, (distance, *strides))
    except ValueError:
        return f"{size} bytes are no {spec.dtype} of shape {list(group.shape)}"
    text: str = kind.check(group, values, own, view.rows.recipe)
    return text

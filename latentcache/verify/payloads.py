"""Read every payload: sequentially, shard by shard, against its checksum, its head and the rules of its kind.

Two threads read entries one after the other. Nothing is mapped, and a thread needs memory for one entry, so it stays
flat.
What passes here cannot fail in a reader, which checks the same checksum of the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError, StoreError
from latentcache.failpoint import failpoint
from latentcache.fields.dtypes import numpy_dtype
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.atomic_io import opened
from latentcache.store.entry import CHECKSUM_BYTES, FIXED_BYTES, KEY_AT, MAGIC
from latentcache.store.gather import read_at
from latentcache.store.index import read_entry
from latentcache.verify.entries import Check, View, unreadable, words

#: Bytes of a batch of entries, about.
_BATCH_BYTES = 64 << 20
_THREADS = 2
Wrong = tuple[str, str, str]
"""Category, reason and text of what is wrong with an entry."""


def scan_payloads(check: Check, chosen: Mapping[str, NDArray[np.bool_]]) -> None:
    """Read the chosen entries, and note what is wrong with them."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for number in check.readable:
            parts = [(view, view.in_shard(number, chosen[view.name])) for view in check.views.values()]
            failpoint("scan-shard")
            try:
                with opened(check.paths.data(check.snapshot.shards[number])) as descriptor:
                    for view, entries in parts:
                        _scan_field(check, view, entries, descriptor, pool)
            except OSError as error:
                for view, entries in parts:
                    check.note(view, "unverifiable", unreadable(error), entries, found=words(error))


def _scan_field(check: Check, view: View, entries: NDArray[np.intp], descriptor: int, pool: Executor) -> None:
    batches = _batches(view, entries, os.fstat(descriptor).st_size)
    for some, wrong in zip(batches, pool.map(partial(_scan, view, descriptor), batches), strict=True):
        check.payloads += len(some)
        check.payload_bytes += int(view.bytes[some].sum())
        for entry, (category, reason, text) in wrong.items():
            check.note(view, category, reason, np.array([entry]), found=text, intact=reason == "values")


def _batches(view: View, entries: NDArray[np.intp], size: int) -> list[NDArray[np.intp]]:
    """Entries that a file of this size can hold; the check of the indexes has noted the others."""
    inside = (view.offset[entries] + view.bytes[entries] <= size) & (view.head[entries] <= view.offset[entries])
    entries = entries[inside]
    ends = np.cumsum(view.head[entries] + view.bytes[entries])
    return np.split(entries, np.flatnonzero(np.diff(ends // _BATCH_BYTES)) + 1) if len(entries) else []


def _scan(view: View, descriptor: int, entries: NDArray[np.intp]) -> dict[int, Wrong]:
    """Find wrong entries of one field in one shard, in order of offset."""
    first, size = view.offset[entries] - view.head[entries], view.head[entries] + view.bytes[entries]
    room = memoryview(bytearray(int(size.max(initial=0))))
    found: dict[int, Wrong] = {}
    for entry, begin, count in zip(entries.tolist(), first.tolist(), size.tolist(), strict=True):
        try:
            value = read_at(descriptor, begin, room[:count])
            is_right = len(value) == count and _is_right(view, entry, value)
        except OSError:
            is_right = False
        wrong = _wrong_values(view, value[int(view.head[entry]) :]) if is_right else _wrong(view, entry, descriptor)
        if wrong is not None:
            found[entry] = wrong
    return found


def _is_right(view: View, entry: int, value: memoryview) -> bool:
    """True if an entry is as it was written: ``read_entry`` without parsing its head."""
    head_bytes = int(view.head[entry])
    head, payload = value[:head_bytes], value[head_bytes:]
    if head_bytes <= FIXED_BYTES or head[: len(MAGIC)] != MAGIC:
        return False
    if head[KEY_AT : KEY_AT + KEY_BYTES] != view.key[entry].tobytes():
        return False
    stored = int.from_bytes(head[-CHECKSUM_BYTES:], "little")
    return checksum(head[:-CHECKSUM_BYTES]) == stored and checksum(payload) == int(view.checksum[entry])


def _wrong(view: View, entry: int, descriptor: int) -> Wrong | None:
    """Return the damage of an entry, which is read again; None: there is none."""
    head, size, key = int(view.head[entry]), int(view.bytes[entry]), view.key[entry].tobytes()
    try:
        header, _ = read_entry(descriptor, int(view.offset[entry]) - head, head + size, key)
    except OSError as error:
        return "unverifiable", unreadable(error), words(error)
    except StoreError as error:
        return "corrupt", error.reason if isinstance(error, CorruptEntryError) else "header", words(error)
    if (header.head_bytes, header.payload_checksum) != (head, int(view.checksum[entry])):
        return "corrupt", "header", "its length or checksum differs from the snapshot"
    return None


def _wrong_values(view: View, payload: memoryview) -> Wrong | None:
    """Return why the kind rejects the values of an entry; None: it accepts them."""
    kind, recipe = view.rows.kind, view.rows.recipe
    if kind is None or recipe is None:
        return None
    try:
        failure = kind.check(np.frombuffer(payload, numpy_dtype(view.rows.spec.dtype)), recipe)
    except ValueError as error:  # they are not a whole number of values
        return "corrupt", "values", str(error)
    return None if failure is None else ("corrupt", "values", failure.detail)

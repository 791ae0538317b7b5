"""Read every payload: sequentially, shard by shard, against its checksum, its head and the rules of its kind.

Entries that follow each other are read and checked at once, by two threads. Where one does not pass, each of them is
read again alone, to say which and why. Nothing is mapped, and a thread needs memory for one read, so it stays flat.
What passes here cannot fail in a reader, which checks the same checksum of the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError, StoreError
from latentcache.failpoint import failpoint
from latentcache.fields.dtypes import Limit, numpy_dtype
from latentcache.identity.key import KEY_BYTES
from latentcache.store.atomic_io import opened
from latentcache.store.entry import CHECKSUM_BYTES, FIXED_BYTES, KEY_AT, MAGIC
from latentcache.store.gather import scan
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
    """Find wrong entries of one field in one shard, in order of offset: all at once, else one by one."""
    if _are_fine(view, descriptor, entries):
        return {}
    found = ((entry, _wrong(view, entry, descriptor)) for entry in entries.tolist())
    return {entry: wrong for entry, wrong in found if wrong is not None}


def _are_fine(view: View, descriptor: int, entries: NDArray[np.intp]) -> bool:
    """True if all entries are as they were written; heads may still contradict themselves."""
    kind, recipe, head = view.rows.kind, view.rows.recipe, view.head[entries]
    limit = Limit(0, 1) if kind is None or recipe is None else kind.limit(recipe)
    if limit is None or not (head > FIXED_BYTES).all():
        return False
    places, dtype = (view.offset[entries] - head, head, view.bytes[entries]), numpy_dtype(view.rows.spec.dtype)
    try:
        found = scan(descriptor, *places, dtype, limit)
    except (OSError, ValueError):  # or a payload is not a whole number of values
        return False
    if found is None:
        return False
    heads, of_heads, of_payloads = found
    ends = np.cumsum(head)
    fronts = _bytes_at(heads, ends - head, FIXED_BYTES)
    stored = _bytes_at(heads, ends - CHECKSUM_BYTES, CHECKSUM_BYTES)
    return (
        np.array_equal(of_payloads, view.checksum[entries])
        and np.array_equal(of_heads, stored.view("<u8")[:, 0])
        and bool((fronts[:, : len(MAGIC)] == np.frombuffer(MAGIC, dtype=np.uint8)).all())
        and np.array_equal(fronts[:, KEY_AT : KEY_AT + KEY_BYTES], view.key[entries])
    )


def _wrong(view: View, entry: int, descriptor: int) -> Wrong | None:
    """Return the problem of an entry, which is read alone; None: there is none."""
    head, size, key = int(view.head[entry]), int(view.bytes[entry]), view.key[entry].tobytes()
    try:
        header, value = read_entry(descriptor, int(view.offset[entry]) - head, head + size, key)
    except OSError as error:
        return "unverifiable", unreadable(error), words(error)
    except StoreError as error:
        return "corrupt", error.reason if isinstance(error, CorruptEntryError) else "header", words(error)
    if (header.head_bytes, header.payload_checksum) != (head, int(view.checksum[entry])):
        return "corrupt", "header", "its length or checksum differs from the snapshot"
    text = _why_wrong(view, int(view.first_rows(np.array([entry]))[0]), value[head:])
    return ("corrupt", "values", text) if text else None


def _why_wrong(view: View, row: int, payload: memoryview) -> str:
    """Return why the kind rejects the payload of an entry, which holds this row; empty: it accepts it."""
    spec, kind, recipe = view.rows.spec, view.rows.kind, view.rows.recipe
    if kind is None or recipe is None:
        return ""
    group = view.rows.groups[int(view.group[row])]
    try:
        values: NDArray[Any] = np.frombuffer(payload, numpy_dtype(spec.dtype))
        values = values.reshape(-1, *(group.shape[1:] if spec.ragged else group.shape))
    except ValueError:
        return f"{len(payload)} bytes are no {spec.dtype} of shape {list(group.shape)}"
    failure = kind.check(values, recipe)
    return "" if failure is None else failure.detail


def _bytes_at(memory: NDArray[np.uint8], starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
    """(N, length) bytes from each start on; C-contiguous."""
    everywhere: NDArray[Any] = np.ndarray((len(memory) - length + 1,), f"V{length}", memory.data, strides=(1,))
    found: NDArray[np.uint8] = everywhere[starts].view(np.uint8).reshape(len(starts), length)
    return found

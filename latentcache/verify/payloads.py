"""Read every payload: sequentially, shard by shard, against its checksum, its head and the rules of its kind.

Entries that follow each other are read and checked at once, by two threads. Where one does not pass, each of them is
read again alone, to say which and why. Nothing is mapped, and a thread needs memory for one read, so it stays flat.
What passes here cannot fail in a reader, which checks the same checksum of the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.failpoint import failpoint
from latentcache.fields.dtypes import Limit, numpy_dtype
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.atomic_io import open_file
from latentcache.store.entry import CHECKSUM_BYTES, FIXED_BYTES, KEY_AT, MAGIC, read_header
from latentcache.store.gather import LIBRARY, scan
from latentcache.store.index import gather_bytes
from latentcache.verify.entries import Store, View, unreadable, words

#: Most entries of a batch, and their bytes: one is larger if its last entry is.
_BATCH_ENTRIES, _BATCH_BYTES = 4096, 64 << 20
#: Without the compiled library: bytes of payloads that are in memory at once, unless one is larger.
_READ_BYTES = 4 << 20
_THREADS = 2


def scan_payloads(store: Store, chosen: Mapping[str, NDArray[np.bool_]]) -> None:
    """Read the chosen entries, and note what is wrong with them."""
    for view in store.views.values():
        _check_columns(store, view, chosen[view.name])
    with ThreadPoolExecutor(_THREADS) as pool:
        for number in store.readable:
            parts = [(view, view.in_shard(number)) for view in store.views.values()]
            parts = [(view, entries[chosen[view.name][entries]]) for view, entries in parts]
            failpoint("scan-shard")
            try:
                descriptor = open_file(store.paths.data(store.snapshot.shards[number]))
            except OSError as error:
                for view, entries in parts:
                    store.note(view, "unverifiable", unreadable(error), entries, found=words(error))
                continue
            try:
                size = os.fstat(descriptor).st_size
                for view, entries in parts:
                    batches = [_Batch(view, some, descriptor) for some in _batches(view, entries, size)]
                    for batch, fine in zip(batches, pool.map(_Batch.is_fine, batches), strict=True):
                        store.payloads += len(batch.entries)
                        store.payload_bytes += int(batch.size.sum())
                        for entry in () if fine else batch.entries.tolist():
                            _examine(store, view, entry, descriptor)
            finally:
                os.close(descriptor)


def _check_columns(store: Store, view: View, chosen: NDArray[np.bool_]) -> None:
    """Note entries with a row whose own columns its kind does not accept, such as loss spans behind its tokens."""
    if view.rows.kind is not None:
        columns = {**view.rows.columns, **view.rows.ragged_columns}
        wrong = view.rows.kind.wrong_rows(np.asarray(view.rows.length), columns)
        for entry in np.unique(view.entry[wrong & chosen[view.entry]]) if wrong.any() else ():
            text = "its columns do not fit its length"
            store.note(view, "corrupt", "values", np.array([entry]), found=text, intact=True)


def _batches(view: View, entries: NDArray[np.intp], size: int) -> list[NDArray[np.intp]]:
    """Entries that a file of this size can hold; the check of the indexes has noted the others."""
    inside = (view.offset[entries] + view.bytes[entries] <= size) & (view.head[entries] <= view.offset[entries])
    entries = entries[inside]
    return [entries[part] for part in _parts(view.bytes[entries], _BATCH_BYTES)]


def _parts(size: NDArray[np.int64], most_bytes: int) -> Iterator[slice]:
    """Cut entries of these sizes into parts; one that is larger is a part of its own."""
    ends, first = np.cumsum(size), 0
    while first < len(size):
        before = int(ends[first - 1]) if first else 0
        fits = int(np.searchsorted(ends, before + most_bytes, side="right")) - first
        yield slice(first, first := first + min(max(fits, 1), _BATCH_ENTRIES))


class _Batch:
    """Entries of one field in one shard, by their offset."""

    def __init__(self, view: View, entries: NDArray[np.intp], descriptor: int) -> None:
        self.view, self.entries, self.descriptor = view, entries, descriptor
        self.head, self.size = view.head[entries], view.bytes[entries]
        self.first = view.offset[entries] - self.head
        self.places = self.first, self.head, self.size
        kind, recipe = view.rows.kind, view.rows.recipe
        self.limit = Limit(0, 1) if kind is None or recipe is None else kind.limit(recipe)

    def is_fine(self) -> bool:
        """True if all entries are as they were written."""
        if not (self.head > FIXED_BYTES).all():
            return False
        limit, width = self.limit, numpy_dtype(self.view.rows.spec.dtype).itemsize
        if LIBRARY is not None and LIBRARY.hash and limit is not None and (width in (2, 4) or not limit.mask):
            found = scan(self.descriptor, self.first, self.head, self.size, (width, *limit))
        else:
            try:
                found = self._read()
            except OSError:
                return False
        return found is not None and self._as_written(*found)

    def _as_written(
        self, heads: NDArray[np.uint8], of_heads: NDArray[np.uint64], of_payloads: NDArray[np.uint64]
    ) -> bool:
        """True for heads of the right keys whose checksums hold, and the payloads' too.

        Heads may still contradict themselves.
        """
        view, ends = self.view, np.cumsum(self.head)
        fronts = gather_bytes(heads, ends - self.head, FIXED_BYTES)
        stored = gather_bytes(heads, ends - CHECKSUM_BYTES, CHECKSUM_BYTES)
        return (
            np.array_equal(of_payloads, view.checksum[self.entries])
            and np.array_equal(of_heads, stored.view("<u8")[:, 0])
            and bool((fronts[:, : len(MAGIC)] == np.frombuffer(MAGIC, dtype=np.uint8)).all())
            and np.array_equal(fronts[:, KEY_AT : KEY_AT + KEY_BYTES], view.key[self.entries])
        )

    def _read(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint64]] | None:
        """As :func:`~latentcache.store.gather.scan`, in Python."""
        heads, memory = memoryview(bytearray(int(self.head.sum()))), memoryview(bytearray(_READ_BYTES))
        of_heads, of_payloads, at = list[int](), list[int](), 0
        for part in _parts(self.size, _READ_BYTES):
            total, payloads, end = int(self.size[part].sum()), list[memoryview](), 0
            memory = memory if total <= len(memory) else memoryview(bytearray(total))
            for first, head, size in zip(*(one[part].tolist() for one in self.places), strict=True):
                pieces = heads[at : at + head], memory[end : end + size]
                if os.preadv(self.descriptor, pieces, first) < head + size:
                    return None
                of_heads.append(checksum(pieces[0][:-CHECKSUM_BYTES]))
                of_payloads.append(checksum(pieces[1]))
                payloads.append(pieces[1])
                at, end = at + head, end + size
            if not self._accepted(part, payloads, memory[:total]):
                return None
        hashes = np.array([of_heads, of_payloads], dtype=np.uint64)
        return np.frombuffer(heads, dtype=np.uint8), hashes[0], hashes[1]

    def _accepted(self, some: slice, payloads: list[memoryview], together: memoryview) -> bool:
        """True if the kind accepts these payloads."""
        if self.limit is not None:
            dtype = numpy_dtype(self.view.rows.spec.dtype)
            return len(together) % dtype.itemsize == 0 and self.limit.holds(np.frombuffer(together, dtype))
        rows = self.view.first_rows(self.entries[some]).tolist()
        return not any(_why_wrong(self.view, row, one) for row, one in zip(rows, payloads, strict=True))


def _examine(store: Store, view: View, entry: int, descriptor: int) -> None:
    """Read one entry, and note what is wrong with it."""
    category, reason, text = _wrong(view, entry, descriptor)
    if category:
        store.note(view, category, reason, np.array([entry]), found=text, intact=reason == "values")


def _wrong(view: View, entry: int, descriptor: int) -> tuple[str, str, str]:
    """Category, reason and text of what is wrong with an entry; empty if it is right."""
    head, size, key = int(view.head[entry]), int(view.bytes[entry]), view.key[entry].tobytes()
    value, got = memoryview(bytearray(head + size)), 0
    try:
        while more := os.preadv(descriptor, [value[got:]], int(view.offset[entry]) - head + got):
            got += more
    except OSError as error:
        return "unverifiable", unreadable(error), words(error)
    if got < len(value):
        return "corrupt", "truncated", "its shard ends before it"
    expected, found = int(view.checksum[entry]), checksum(value[head:])
    if found != expected:
        return "corrupt", "payload", f"checksum: expected {expected:016x}, found {found:016x}"
    try:
        if read_header(value[:head], key).head_bytes != head:
            return "corrupt", "header", "its length differs from the snapshot"
    except StoreError as error:
        return "corrupt", "header", words(error)
    text = _why_wrong(view, int(view.first_rows(np.array([entry]))[0]), value[head:])
    return ("corrupt", "values", text) if text else ("", "", "")


def _why_wrong(view: View, row: int, payload: memoryview) -> str:
    """Why the kind does not accept the payload of an entry, which holds this row; empty: it does."""
    spec, kind, recipe = view.rows.spec, view.rows.kind, view.rows.recipe
    if kind is None or recipe is None:
        return ""
    group = view.rows.groups[int(view.group[row])]
    try:
        values: NDArray[Any] = np.frombuffer(payload, numpy_dtype(spec.dtype))
        values = values.reshape(-1, *(group.shape[1:] if spec.ragged else group.shape))
    except ValueError:
        return f"{len(payload)} bytes are no {spec.dtype} of shape {list(group.shape)}"
    return kind.check(group, values, recipe)

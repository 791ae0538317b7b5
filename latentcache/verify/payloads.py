"""Read every payload against its checksum, its head and the rules of its kind; encode samples again and compare.

Two threads read entries one after the other. Nothing is mapped, and a thread needs memory for one entry, so it stays
flat. What passes here cannot fail in a reader, which checks the same checksum of the same bytes.

Samples are encoded by the caller, one field after the other, so that one model is loaded at a time. The field's kind
decides what noise is (``kind.compare``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError, StoreError
from latentcache.failpoint import failpoint
from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.protocol import Described, Difference, Failure, Made
from latentcache.store.atomic_io import file_descriptor
from latentcache.store.index import read_entry
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows
from latentcache.verify.entries import BadEntries, Check, Depth, View, confidence, reason_word, words
from latentcache.verify.findings import PROBLEMS, Reencoded

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
                with file_descriptor(check.paths.data(check.snapshot.shards[number])) as descriptor:
                    for view, entries in parts:
                        _scan_field(check, view, entries, descriptor, pool)
            except OSError as error:
                for view, entries in parts:
                    check.note(view, "unverifiable", reason_word(error), entries, found=words(error))


def _scan_field(check: Check, view: View, entries: NDArray[np.intp], descriptor: int, pool: Executor) -> None:
    batches = _batches(view, entries, os.fstat(descriptor).st_size)
    for some, wrong in zip(batches, pool.map(partial(_scan, view, descriptor), batches), strict=True):
        check.payloads += len(some)
        check.payload_bytes += int(view.bytes[some].sum())
        for entry, (category, reason, text) in wrong.items():
            check.note(view, category, reason, np.array([entry]), found=text)


def _batches(view: View, entries: NDArray[np.intp], size: int) -> list[NDArray[np.intp]]:
    """Entries that a file of this size can hold; the check of the indexes has noted the others."""
    inside = (view.offset[entries] + view.bytes[entries] <= size) & (view.head[entries] <= view.offset[entries])
    entries = entries[inside]
    ends = np.cumsum(view.head[entries] + view.bytes[entries])
    return np.split(entries, np.flatnonzero(np.diff(ends // _BATCH_BYTES)) + 1) if len(entries) else []


def _scan(view: View, descriptor: int, entries: NDArray[np.intp]) -> dict[int, Wrong]:
    """Find wrong entries of one field in one shard, in order of offset."""
    wrong = ((entry, _wrong(view, entry, descriptor)) for entry in entries.tolist())
    return {entry: damage for entry, damage in wrong if damage is not None}


def _wrong(view: View, entry: int, descriptor: int) -> Wrong | None:
    """Read an entry, and return its damage; None: there is none."""
    head, size, key = int(view.head[entry]), int(view.bytes[entry]), view.key[entry].tobytes()
    try:
        header, value = read_entry(descriptor, int(view.offset[entry]) - head, head + size, key)
    except OSError as error:
        return "unverifiable", reason_word(error), words(error)
    except StoreError as error:
        return "corrupt", error.reason if isinstance(error, CorruptEntryError) else "header", words(error)
    if (header.head_bytes, header.payload_checksum) != (head, int(view.checksum[entry])):
        return "corrupt", "header", "its length or checksum differs from the snapshot"
    return _wrong_values(view, value[head:])


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


#: Encode the inputs of rows of a field again, in any order, with a described encoder: each row, its item or why there
#: is none (``source-changed``: the input is another one), and the device.
Reencode = Callable[..., Iterable[tuple[int, Made | Failure, str]]]


def reencode_samples(
    check: Check,
    reencode: Reencode,
    descriptions: Mapping[str, Described],
    root: Path,
    chosen: NDArray[np.bool_],
    depth: Depth,
) -> Reencoded:
    """Encode some of the chosen samples (S,) without a problem again, all fields of each, and note what differs."""
    fine = chosen & ~check.findings.of(*PROBLEMS)
    # In an order of its own: one fine sample more or less moves no other in or out but the last.
    order = np.random.default_rng(depth.seed).permutation(len(fine))
    drawn = order[fine[order]][: depth.reencode]
    differences, failed, device = list[Difference](), set[int](), ""
    reader = EntryReader(check.paths, check.snapshot)
    try:
        for view in check.views.values():
            known = view.rows.kind is not None and view.rows.recipe is not None
            rows, described = np.flatnonzero(np.isin(view.sample, drawn)).tolist(), descriptions.get(view.name)
            arguments = check.snapshot, root, view.name, rows, described
            for row, item, used in reencode(*arguments, device=depth.device) if known and rows else ():
                device = used or device
                difference = _compare(check, reader, view, row, item, device)
                if difference is None:
                    failed.add(int(view.sample[row]))
                else:
                    differences.append(difference)
    finally:
        reader.close()
    samples, drifted = max(len(drawn) - len(failed), 0), sum(difference.differs for difference in differences)
    return Reencoded(
        asked=depth.reencode,
        seed=depth.seed,
        samples=samples,
        entries=len(differences),
        drifted=drifted,
        device=device,
        largest=max((difference.largest for difference in differences), default=0.0),
        mean=max((difference.mean for difference in differences), default=0.0),
        confidence=confidence(samples, int(fine.sum())) if samples and not drifted and not failed else "",
    )


def _compare(
    check: Check, reader: EntryReader, view: View, number: int, item: Made | Failure, device: str
) -> Difference | None:
    """Compare a stored item with the item that was encoded now; None if that is not possible."""
    rows, row = view.rows, np.array([number])
    sample, entry = view.sample[row], view.entry[row]
    if isinstance(item, Failure):
        if item.reason == "source-changed":
            check.findings.add("stale", "source-changed", sample, found=item.detail)
        else:
            text = f"{item.reason}: {item.detail}" if item.detail else item.reason
            check.findings.add("unverifiable", "not-encoded", sample, field=view.name, found=text)
        return None
    try:
        stored = reader.read(view.name, number)
    except StoreError as error:
        is_unread = type(error) is StoreError or getattr(error, "reason", "") == "io-error"
        category, reason = ("unverifiable", "io-error") if is_unread else ("corrupt", "payload")
        check.note(view, category, reason, entry, found=words(error))
        return None
    assert rows.kind is not None
    assert rows.recipe is not None
    difference = rows.kind.compare(stored, item.array, {**rows.noise, "device": device}, rows.recipe)
    other = [name for name, value in item.columns.items() if not _equal(_stored_column(rows, name, number), value)]
    if difference.differs or other:
        # A block holds items of other samples: it has to go, and only this sample has drifted.
        check.bad.append(BadEntries(view.name, "drift", entry))
        text = difference.detail if difference.differs else f"other values of {', '.join(other)}"
        keys = rows.row_keys(row)
        check.findings.add("drift", "reencoded", sample, field=view.name, keys=keys, expected="as stored", found=text)
    return replace(difference, differs=bool(difference.differs or other))


def _equal(stored: NDArray[Any], now: Any) -> bool:
    """Exactly; measurements, which are floats, within a tenth."""
    return np.allclose(stored, now, rtol=0.1) if stored.dtype.kind == "f" else np.array_equal(stored, now)


def _stored_column(rows: FieldRows, name: str, row: int) -> NDArray[Any]:
    """The stored value of one of a kind's own columns."""
    if name in rows.ragged_columns:
        ends, values = rows.ragged_columns[name]
        return np.asarray(values[int(ends[row - 1]) if row else 0 : int(ends[row])])
    return np.asarray(rows.columns[name][row]) if name in rows.columns else np.empty(0)

"""Choose what a check reads, and check entries: indexes and file sizes against a snapshot's columns, then payloads.

``n/t`` takes the entries whose key falls into the n-th of t slices. Keys hold content hashes, so t runs read every
entry once, and new entries move no other.

A damaged cache gives findings, never an exception: indexes are read and checked, never mapped. All comparisons are
vectorized, about 1 us per entry; a damaged block is a finding for each of its samples.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, LatentcacheError, StoreError, UsageError
from latentcache.failpoint import failpoint
from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.strings import Strings
from latentcache.fields.table import Rejected
from latentcache.identity.content import CONTENT_SLICE
from latentcache.plan.documents import spread
from latentcache.sources.known import match_names
from latentcache.store.atomic_io import file_descriptor
from latentcache.store.shard import ShardIndex, checked_index, read_entry
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value
from latentcache.verify.findings import HINTS, Finding, Findings

_CERTAINTY = 0.95
#: Threads that read payloads, and entries that a thread reads at a time.
_THREADS, _BATCH_ENTRIES = 2, 64
#: Reason of entries that are not there.
LOST = "lost"


class Depth(Value):
    """Extent of a check."""

    full: bool = False
    """Read every payload and every source."""
    slice: tuple[int, int] | None = None
    """Read payloads and sources of this slice only: its number, from 1, and how many there are."""
    untrusted: bool = False
    """The cache comes from elsewhere: links in it are errors, and the data that it names is not read."""
    reencode: int = 0
    """Samples to encode again."""
    seed: int = 0
    """Seed for choosing the samples to encode again."""
    device: str = "auto"
    """Device that encodes them."""

    @property
    def mode(self) -> str:
        """``sample``, ``full`` or ``fast``."""
        return "sample" if self.slice is not None else "full" if self.full else "fast"

    @property
    def reads(self) -> bool:
        """True if payloads and sources are read."""
        return self.mode != "fast"


def parse_slice(text: str) -> tuple[int, int]:
    """Read ``3/10``: the third of ten slices."""
    parts = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    number, count = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    if not 1 <= number <= count:
        why = "expected n/t, slice n of t"
        raise UsageError("names no part of the cache", argument="sample", value=text, why=why, fix="give 1/7")
    return number, count


def _chosen(
    snapshot: Snapshot, part: tuple[int, int] | None
) -> tuple[NDArray[np.bool_], dict[str, NDArray[np.bool_]]]:
    """Select samples (S,) of a snapshot, and entries (E,) by field: those of a slice, or all."""
    samples = np.full(len(snapshot.samples), part is None)
    fields = snapshot.fields
    if part is None:
        return samples, {name: np.ones(rows.entries, dtype=np.bool_) for name, rows in fields.items()}
    entries, (number, count) = dict[str, NDArray[np.bool_]](), part
    for name, rows in fields.items():  # the first half of the content hash keeps variants of one input together
        half = np.ascontiguousarray(np.asarray(rows.key)[:, CONTENT_SLICE][:, :8]).view("<u8").ravel()
        entries[name] = half % np.uint64(count) == np.uint64(number - 1)
        samples[np.asarray(rows.sample)[entries[name][np.asarray(rows.entry)]]] = True
    return samples, entries


def confidence(looked: int, total: int, unit: str = "samples") -> str:
    """State in one sentence what ``looked`` clean units out of ``total`` say of all of them."""
    if looked >= total:
        return f"{looked} {unit} clean: all of them"
    # So many wrong ones would be missed in one of twenty draws with replacement; a draw without it misses fewer.
    percent = 100 * (1 - (1 - _CERTAINTY) ** (1 / looked)) if looked else 100
    return f"{looked} {unit} clean: 95 % sure that less than {percent:.2g} % of the {unit} are wrong"


class View:
    """One field of a snapshot with its columns in memory."""

    def __init__(self, rows: FieldRows, samples: int) -> None:
        self.rows = rows
        self.name = rows.name
        self.shard, self.checksum, self.key = map(np.asarray, (rows.shard, rows.checksum, rows.key))
        self.offset, self.head, self.bytes = (
            np.asarray(column).astype(np.int64) for column in (rows.offset, rows.head, rows.bytes)
        )
        self.sample, self.entry, self.group = map(np.asarray, (rows.sample, rows.entry, rows.group))
        # The columns are what was written; a crafted snapshot may still point outside itself.
        within = ((self.shard, len(rows.shards)), (self.sample, samples), (self.entry, len(self)),
                  (self.group, len(rows.groups)))  # fmt: skip
        outside = any(
            len(column) and not 0 <= int(column.min()) <= int(column.max()) < most for column, most in within
        )
        if outside or (len(self) and not len(self.entry)):
            problem = f"the field {self.name!r} of a snapshot contradicts itself"
            raise CacheDamagedError(problem, why="a row points outside")

    def __len__(self) -> int:
        return len(self.shard)

    @cached_property
    def _by_shard(self) -> tuple[NDArray[np.intp], NDArray[Any]]:
        order = np.lexsort((self.offset, self.shard))
        return order, self.shard[order]

    @cached_property
    def _by_entry(self) -> tuple[NDArray[np.intp], NDArray[Any]]:
        order = np.argsort(self.entry, kind="stable")
        return order, self.entry[order]

    def in_shard(self, number: int, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
        """Entries of a shard, by their offset; only those that are ``chosen`` (E,) if it is given."""
        order, shard = self._by_shard
        first, last = np.searchsorted(shard, [number, number + 1])
        entries = order[first:last]
        return entries if chosen is None else entries[chosen[entries]]

    def rows_of(self, entries: NDArray[np.integer]) -> NDArray[np.intp]:
        """Rows that hold something of these entries (n,)."""
        order, entry = self._by_entry
        first = np.searchsorted(entry, entries, "left")
        return order[spread(first, np.searchsorted(entry, entries, "right") - first)]


class BadEntries(NamedTuple):
    """Entries of one field that must go, or are gone; a repair works from them."""

    field: str
    reason: str
    """Problem with their bytes, or :data:`LOST`."""
    entries: NDArray[np.integer]


class Check:
    """A check of one snapshot: its columns in memory, findings so far, entries that must go.

    ``samples`` (S,) and ``entries``, (E,) by field, are those that are looked at.
    """

    def __init__(self, snapshot: Snapshot, depth: Depth) -> None:
        self.snapshot, self.paths, self.depth = snapshot, snapshot.paths, depth
        self.samples, self.entries = _chosen(snapshot, depth.slice)
        self.findings = Findings(snapshot.samples)
        self.views = {name: View(rows, len(snapshot.samples)) for name, rows in snapshot.fields.items()}
        self.bad: list[BadEntries] = []
        self.damaged: set[str] = set()
        """Shards whose index is damaged."""
        self.headers = self.payloads = self.payload_bytes = 0
        """Entries that were looked at and read, and the bytes of them."""
        self.unneeded = 0
        """Entries of its shards that the snapshot does not need."""
        self.readable: list[int] = []
        """Shards whose data file is there and may be read."""

    @cached_property
    def rejected_whole(self) -> list[Rejected]:
        """Rejected inputs that are no samples of the snapshot: no field could use them."""
        by_label = dict[str, Rejected]()
        for item in self.snapshot.rejected:
            if not by_label.setdefault(item.label, item).content and item.content:  # better one that names its bytes
                by_label[item.label] = item
        row = match_names(Strings.of(by_label), self.findings.table.names).tolist()
        return [item for item, number in zip(by_label.values(), row, strict=True) if number < 0]

    def note(
        self,
        view: View,
        category: str,
        reason: str,
        entries: NDArray[np.integer],
        *,
        found: str = "",
    ) -> None:
        """Note n entries of one shard: a finding for each sample that holds something of them."""
        if not len(entries):
            return
        if category in ("corrupt", "missing"):
            self.bad.append(BadEntries(view.name, LOST if category == "missing" else reason, entries))
        rows = view.rows_of(entries)
        self.findings.add(
            category,
            reason,
            view.sample[rows],
            field=view.name,
            file=f"shards/{self.snapshot.shards[int(view.shard[entries[0]])]}",
            keys=view.rows.row_keys(rows),
            found=found,
        )


def check_entries(check: Check) -> None:
    """Compare index and size of every shard with the entries of the snapshot."""
    for number, name in enumerate(check.snapshot.shards):
        wanted = [(view, view.in_shard(number, check.entries[view.name])) for view in check.views.values()]
        try:
            size = check.paths.data(name).stat().st_size
        except OSError as error:
            gone = isinstance(error, FileNotFoundError | NotADirectoryError)
            category, reason = ("missing", "entry-lost") if gone else ("unverifiable", reason_word(error))
            for view, entries in wanted:
                check.note(view, category, reason, entries, found="its shard is gone" if gone else words(error))
            continue
        index = _index(check, name)
        if index is not None:
            needed = sum(len(view.in_shard(number)) for view in check.views.values())
            check.unneeded += max(index.entries - needed, 0)
        check.readable.append(number)
        for view, entries in wanted:
            beyond = (view.offset[entries] + view.bytes[entries] > size) | (view.offset[entries] < view.head[entries])
            check.note(view, "corrupt", "truncated", entries[beyond], found=f"its shard ends at byte {size}")
            if index is not None:
                _check_index(check, view, entries[~beyond], index)
    for view in check.views.values():
        _check_rows(check, view, check.entries[view.name])


def words(error: OSError | LatentcacheError) -> str:
    """An error in one line."""
    if isinstance(error, LatentcacheError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return error.strerror or str(error)


def reason_word(error: OSError) -> str:
    """Reason word of an error that says nothing about the bytes."""
    return "permission" if isinstance(error, PermissionError) else "io-error"


def scan_payloads(check: Check) -> None:
    """Read the chosen entries, and note what is wrong with them.

    What passes here cannot fail in a reader, which compares the same checksum with the same bytes. A thread needs
    memory for one entry.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        for number in check.readable:
            failpoint("scan-shard")
            for view in check.views.values():
                entries = view.in_shard(number, check.entries[view.name])
                batches = np.split(entries, range(_BATCH_ENTRIES, len(entries), _BATCH_ENTRIES))
                try:
                    with file_descriptor(check.paths.data(check.snapshot.shards[number])) as descriptor:
                        for damage in chain.from_iterable(pool.map(partial(_damage, view, descriptor), batches)):
                            entry, category, reason, text = damage
                            check.note(view, category, reason, np.array([entry]), found=text)
                except OSError as error:
                    check.note(view, "unverifiable", reason_word(error), entries, found=words(error))
                    continue
                check.payloads += len(entries)
                check.payload_bytes += int(view.bytes[entries].sum())


def _damage(view: View, descriptor: int, entries: NDArray[np.intp]) -> list[tuple[int, str, str, str]]:
    """Wrong entries of a shard, each with category, reason and text."""
    kind, recipe, dtype = view.rows.kind, view.rows.recipe, numpy_dtype(view.rows.spec.dtype)
    damage = list[tuple[int, str, str, str]]()
    for entry in entries.tolist():
        head, size, key = int(view.head[entry]), int(view.bytes[entry]), view.key[entry].tobytes()
        try:
            header, value = read_entry(descriptor, int(view.offset[entry]) - head, head + size, key)
            if (header.head_bytes, header.payload_checksum) != (head, int(view.checksum[entry])):
                raise CorruptEntryError("its length or checksum differs from the snapshot", reason="header")
            failure = (
                None if kind is None or recipe is None else kind.check(np.frombuffer(value[head:], dtype), recipe)
            )
            if failure is not None:
                raise CorruptEntryError(failure.detail, reason="values")
        except OSError as error:
            damage.append((entry, "unverifiable", reason_word(error), words(error)))
        except StoreError as error:
            damage.append((entry, "corrupt", getattr(error, "reason", "header"), words(error)))
        except ValueError as error:  # they are not a whole number of values
            damage.append((entry, "corrupt", "values", str(error)))
    return damage


def _index(check: Check, name: str) -> ShardIndex | None:
    """The index of a shard; None with a finding if it is damaged."""
    try:
        return checked_index(check.paths.shard(name))
    except StoreError as error:
        category, reason = "corrupt", "index"
        if isinstance(error, CacheDamagedError):
            check.damaged.add(name)
        elif isinstance(error.__cause__, OSError):
            category = "unverifiable"
            reason = reason_word(error.__cause__)
        file = f"shards/{name}/index.safetensors"
        finding = Finding(category=category, reason=reason, file=file, found=words(error), hint=HINTS[category])
        check.findings.others.append(finding)
        return None


def _check_index(check: Check, view: View, entries: NDArray[np.intp], index: ShardIndex) -> None:
    """Compare entries of a shard with what its index says of them."""
    check.headers += len(entries)
    if not index.entries:
        check.note(view, "missing", "entry-lost", entries, found="the index of its shard lists nothing")
        return
    offset = np.asarray(index.offset).astype(np.int64)
    order = np.argsort(offset, kind="stable")
    position = order[np.minimum(np.searchsorted(offset[order], view.offset[entries]), len(order) - 1)]
    listed = (offset[position] == view.offset[entries]) & (index.key[position] == view.key[entries]).all(axis=1)
    same = np.asarray(index.bytes)[position].astype(np.int64) == view.bytes[entries]
    same &= np.asarray(index.head)[position].astype(np.int64) == view.head[entries]
    same &= np.asarray(index.checksum)[position] == view.checksum[entries]
    check.note(view, "missing", "entry-lost", entries[~listed], found="the index of its shard does not list it")
    wrong = entries[listed & ~same]
    check.note(view, "corrupt", "header", wrong, found="its size or checksum differs from the index of its shard")


def _check_rows(check: Check, view: View, chosen: NDArray[np.bool_]) -> None:
    """See that every row lies within its entry and has the size that its group says."""
    rows = view.rows
    spec = view.rows.spec
    itemsize = numpy_dtype(spec.dtype).itemsize
    shapes = [group.shape for group in rows.groups]
    element = np.array(
        [itemsize * int(np.prod(shape[1:] if spec.ragged else shape)) for shape in shapes], dtype=np.int64
    )
    unit = element if len(element) == 1 else element[view.group]
    size = view.bytes[view.entry]
    if rows.packing == "block" or spec.ragged:  # any number of rows
        wrong = np.add(rows.start, rows.length if spec.ragged else 1, dtype=np.int64) * unit > size
        if len(element) == 1:
            wrong |= (view.bytes % np.maximum(unit, 1) != 0)[view.entry]
        else:
            wrong |= size % np.maximum(unit, 1) != 0
    else:
        wrong = (unit != size) | (np.asarray(rows.start) != 0)
    if wrong.any():
        bad = np.unique(view.entry[wrong])
        check.note(view, "corrupt", "header", bad[chosen[bad]], found="a row of the snapshot lies outside its entry")

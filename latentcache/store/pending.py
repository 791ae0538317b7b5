"""The snapshot of a streaming build: samples, rows and keys are known, and places as soon as shards are sealed.

The build publishes it in ``snapshots/pending`` before it encodes. A reader looks up the keys of newly sealed shards.
Nothing else is written for it but a line for each item that fails. Rows keep their positions in any case.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import (
    CacheDamagedError,
    CacheNotFoundError,
    MissingEntryError,
    NotYetEncodedError,
    StoreError,
)
from latentcache.fields.protocol import FieldKind, FieldRecipe
from latentcache.fields.table import Rejected
from latentcache.store.atomic_io import make_folder, read_file, remove_durably, sync_folder, writing
from latentcache.store.catalog import LOCATION_TYPES, catalog_of
from latentcache.store.index import load_index
from latentcache.store.lock import Lease, builder_name
from latentcache.store.paths import CachePaths
from latentcache.store.publish import NewSnapshot, field_columns, write_snapshot
from latentcache.store.snapshot import MANIFEST, FieldRows, Snapshot, open_snapshot, read_snapshot

#: One line for each item that failed: sample row, field, reason.
FAILED = "failed.jsonl"
_WAIT_S = 0.2


def pending_field(kind: FieldKind, recipe: FieldRecipe, *, sample: NDArray[np.integer], **columns: Any) -> FieldRows:
    """A field whose items are not there yet; columns of rows, ``groups`` and ``key`` (R, 32) of items."""
    nothing = np.zeros(len(sample), dtype=np.int64)
    columns |= dict.fromkeys(("shard", "offset", "head", "bytes", "checksum", "start", "length"), nothing)
    return field_columns(kind, recipe, sample=sample, entry=np.arange(len(sample), dtype=np.int32), **columns)


def publish_pending(paths: CachePaths, new: NewSnapshot) -> None:
    """Publish the snapshot of a build that begins; the caller holds the builder lock."""
    end_pending(paths)
    make_folder(paths.pending)
    with writing(paths.pending):
        (paths.pending / FAILED).touch()
    write_snapshot(paths.pending, replace(new, shards=("pending",)))
    with writing(paths.pending):
        sync_folder(paths.pending.parent)


def reject_pending(paths: CachePaths, rejected: Iterable[tuple[int, str, Rejected]]) -> None:
    """Say that items will not come: sample row, field and reason of each. Errors as :func:`publish_pending`."""
    lines = [json.dumps({"sample": sample, "field": field, "why": _why(one)}) for sample, field, one in rejected]
    with writing(paths.pending), (paths.pending / FAILED).open("ab", buffering=0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
        os.fsync(file.fileno())


def end_pending(paths: CachePaths) -> None:
    """Remove the snapshot of a build that has ended, or was killed. Errors as :func:`publish_pending`."""
    if paths.pending.exists():
        remove_durably(paths.pending / MANIFEST)
        shutil.rmtree(paths.pending, ignore_errors=True)


def open_pending(root: Path, timeout_s: float = 600.0) -> Snapshot | None:
    """The snapshot that a streaming build will make; None if a build has ended here and no streaming build runs.

    Waits for a build that has not published it yet while there is no finished snapshot.
    """
    paths, deadline = CachePaths(root), time.monotonic() + timeout_s
    while True:
        if (paths.pending / MANIFEST).exists():
            with contextlib.suppress(FileNotFoundError):
                snapshot = read_snapshot(paths, paths.pending, 0)
                return replace(snapshot, pending=Pending(snapshot, timeout_s))
        with contextlib.suppress(CacheNotFoundError):
            if paths.current_snapshot() and not paths.pending.exists():
                return None
        if time.monotonic() >= deadline:
            raise CacheNotFoundError(
                f"no streaming build in {root}",
                where=str(root),
                why=f"none began within {timeout_s:g} s",
                fix=f"start `latentcache build DATA --out {shlex.quote(str(root))} --stream`, or open the finished"
                " cache without follow=True",
                slug="cache-unfinished",
            )
        time.sleep(_WAIT_S)


class _Places:
    """Places of the rows of one field, as far as they are known. R rows."""

    def __init__(self, key: NDArray[np.uint8]) -> None:
        keys = np.ascontiguousarray(key).view("S32")[:, 0]
        self.order = np.argsort(keys, kind="stable")
        self.keys = keys[self.order]
        self.at: Any = np.zeros(len(keys), dtype=LOCATION_TYPES).view(np.recarray)
        self.at["shard"] = -1
        self.failed = np.zeros(len(keys), dtype=np.bool_)

    def take(self, shard: int, index: Any) -> None:
        """Take the items of a newly sealed shard; rows that are known already stay where they are."""
        keys = np.ascontiguousarray(index.keys()).view("S32")[:, 0]
        low, high = np.searchsorted(self.keys, keys, "left"), np.searchsorted(self.keys, keys, "right")
        count = high - low
        item = np.repeat(np.arange(len(keys)), count)
        rows = self.order[np.arange(len(item)) + np.repeat(low - (np.cumsum(count) - count), count)]
        new = self.at.shard[rows] < 0
        rows, item = rows[new], item[new]
        found = catalog_of([index]).locations(item)
        found.shard = -1
        self.at[rows] = found
        self.at.shard[rows] = shard  # last: it says that the others are there


class Pending:
    """Finds the items of a streaming build as its shards are sealed. Picklable; threads may share it."""

    def __init__(self, snapshot: Snapshot, timeout_s: float) -> None:
        self._snapshot, self._paths, self.timeout_s = snapshot, snapshot.paths, timeout_s
        self.shards: list[str] = []
        """Names that places point into."""
        self.places = {name: _Places(np.asarray(rows.key)) for name, rows in snapshot.fields.items()}
        self._reasons: dict[tuple[str, int], str] = {}
        self._read = 0
        self._lease: Lease | None = None
        self._lock = threading.Lock()

    def length(self, field: str, rows: NDArray[np.integer]) -> NDArray[np.uint32]:
        """(n,) elements of rows of a ragged field; 0 for rows that are not there."""
        found: NDArray[np.uint32] = self.places[field].at.length[rows]
        return found

    def ready(self, field: str, rows: NDArray[np.integer]) -> None:
        """Return when all of these rows (n,) can be read; MissingEntryError if one was rejected."""
        ended, places, deadline = False, self.places[field], time.monotonic() + self.timeout_s
        while len(absent := rows[places.at.shard[rows] < 0]):
            if ended:
                self._read_rejected(field)
            for row in absent[places.failed[absent]].tolist():
                name, why = self._name(field, row)
                raise MissingEntryError(f"the {field} of {name} cannot be made", where=str(self._paths.root), why=why)
            if ended or time.monotonic() >= deadline:
                raise self._not_yet(field, int(absent[0]), "" if ended else f"{self.timeout_s:g} s")
            # Asked before the last look. A build that has ended removes the manifest after it has published.
            ended = not builder_name(self._paths.lock) or not (self._paths.pending / MANIFEST).exists()
            if not self.poll() and not ended:
                time.sleep(_WAIT_S)

    def poll(self) -> bool:
        """Look for newly sealed shards and failed items; True if there were any."""
        with self._lock:
            found = self._poll_shards() | self._poll_failed()
            if self._lease is None and not (self._paths.pending / MANIFEST).exists():
                with contextlib.suppress(StoreError, OSError):  # the finished build keeps the shards from collection
                    self._lease = Lease(self._paths.snapshot(self._paths.current_snapshot()) / MANIFEST)
        return found

    def __reduce__(self) -> Any:
        return Pending, (self._snapshot, self.timeout_s)

    def _poll_shards(self) -> bool:
        new = [folder for folder in self._paths.sealed_shards() if folder.name not in self.shards]
        for folder in new:
            with contextlib.suppress(CacheDamagedError):
                index = load_index(folder)
                for places in self.places.values():
                    places.take(len(self.shards), index)
            self.shards.append(folder.name)
        return bool(new)

    def _poll_failed(self) -> bool:
        whole = b""
        with contextlib.suppress(OSError):
            data = read_file(self._paths.pending / FAILED)[self._read :]
            whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for one in map(json.loads, whole.splitlines()):
            self._fail(one["sample"], one["field"], one["why"])
        return bool(whole)

    def _fail(self, sample: int, field: str, why: str) -> None:
        for name in [field] if field else self.places:
            self.places[name].failed |= np.asarray(self._snapshot.fields[name].sample) == sample
            self._reasons[name, sample] = why

    def _read_rejected(self, field: str) -> None:
        with contextlib.suppress(StoreError):
            rejected = open_snapshot(self._paths.root).rejected
            numbers = {name: number for number, name in enumerate(self._snapshot.samples.names)} if rejected else {}
            for one in rejected:
                sample = numbers.get(one.label)
                if sample is not None and one.target in ("", field):
                    self._fail(sample, field, _why(one))

    def _name(self, field: str, row: int) -> tuple[str, str]:
        """The name of a row's sample, and why it was rejected."""
        sample = int(self._snapshot.fields[field].sample[row])
        return self._snapshot.samples.names[sample], self._reasons.get((field, sample), "")

    def _not_yet(self, field: str, row: int, waited: str) -> NotYetEncodedError:
        why, fix = "the build is not running and has not made it", "run the same `latentcache build --stream` again"
        if waited:
            why = f"it was not encoded within {waited}; {builder_name(self._paths.lock) or 'no build'} is running"
            fix = "wait longer: open_cache(..., timeout_s=...)"
        what = f"the {field} of {self._name(field, row)[0]} are not encoded yet"
        return NotYetEncodedError(what, where=str(self._paths.root), why=why, fix=fix)


def _why(one: Rejected) -> str:
    return " ".join(filter(None, (one.reason, one.detail)))

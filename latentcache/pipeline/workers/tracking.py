"""Which outputs of its jobs a worker has to make, and which jobs are settled.

A job is settled when the keys of all its outputs are committed, or it has failed. Equal inputs are found before a
build; two that slip through are made twice, and the store keeps one item for their key.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from latentcache.fields.protocol import Failure, FieldKind, FieldRecipe, Group, Job, Output, Read
from latentcache.identity.content import HASH_BYTES
from latentcache.store.catalog import Catalog


@dataclass(slots=True, eq=False)
class Unit:
    """Jobs that a worker was given together; their small items are packed in blocks of their own."""

    number: int
    unmade: int
    """Jobs that are not encoded yet."""
    probe: bool = False
    """True for work whose result is dropped: it shows that the worker works."""
    items: list[tuple[int, Any]] = field(default_factory=list)
    """Items that wait to be packed, with their place in the unit."""


@dataclass(slots=True, eq=False)
class TrackedJob:
    """One job of a worker."""

    index: int
    """Number of the job in the build."""
    job: Job
    unit: Unit
    missing: Sequence[Output] | None = None
    """Outputs that this job makes; None until they are known."""
    content: bytes = b""
    """The content hash that the keys are made from."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """Item key by ``Output.item``."""
    there: frozenset[bytes] = frozenset()
    """Those that were committed before this run."""
    open: set[bytes] = field(default_factory=set)
    """Keys that are not committed."""
    unmade: int = 0
    """Outputs that are not encoded."""
    read: Read | None = None
    whole: bool = False
    """True: it is made in one call with others, and its inputs are not read by themselves."""
    made: bool = False
    settled: bool = False


class Tracker:
    """The jobs of one worker. Every method may be called from any thread."""

    def __init__(self, kind: FieldKind, recipe: FieldRecipe, groups: Sequence[Group], lookup: Catalog | None) -> None:
        self._kind, self._recipe, self._groups, self._lookup = kind, recipe, groups, lookup
        self._waiting: dict[bytes, list[TrackedJob]] = {}
        self._committed: set[bytes] = set()
        self._copied: set[bytes] = set()
        self._lock = threading.RLock()
        self._rows: list[list[Any]] = []
        self._done: list[int] = []
        self._failed: list[list[Any]] = []
        self.counts: Counter[str] = Counter()

    def add_committed(self, keys: Iterable[bytes]) -> None:
        """Note keys that another worker of this build has committed."""
        with self._lock:
            self._committed.update(keys)

    def look_up(self, jobs: Sequence[TrackedJob], contents: Sequence[bytes]) -> None:
        """Find the item keys of jobs, by the content hash of their inputs, and which of them are committed."""
        outputs = [output for tracked in jobs for output in tracked.job.outputs]
        if not outputs:
            return
        repeated = [content * len(tracked.job.outputs) for tracked, content in zip(jobs, contents, strict=True)]
        keys = self._kind.keys(
            np.frombuffer(b"".join(repeated), dtype=np.uint8).reshape(-1, HASH_BYTES),
            np.array([output.group for output in outputs], dtype=np.int32),
            np.array([output.variant for output in outputs], dtype=np.uint8),
            self._groups,
            self._recipe,
        )
        there = np.zeros(len(keys), dtype=bool) if self._lookup is None else self._lookup.find(keys) >= 0
        rows = zip(map(bytes, keys), there.tolist(), strict=True)
        for tracked, content in zip(jobs, contents, strict=True):
            found = {output.item: next(rows) for output in tracked.job.outputs}
            tracked.content = content
            tracked.keys = {item: key for item, (key, _) in found.items()}
            tracked.there = frozenset(key for key, exists in found.values() if exists)

    def missing(self, tracked: TrackedJob, content: bytes) -> Sequence[Output]:
        """Outputs that this job has to make, given the content hash of its inputs."""
        if tracked.content != content:
            self.look_up([tracked], [content])
        if tracked.unit.probe:
            tracked.missing = tracked.job.outputs
            return tracked.missing
        tracked.missing = []
        with self._lock:
            for output in tracked.job.outputs:
                key = tracked.keys[output.item]
                if key in tracked.there or key in self._committed:
                    self.counts["skipped"] += key in tracked.there
                else:
                    tracked.missing.append(output)
                    tracked.open.add(key)
                    self._waiting.setdefault(key, []).append(tracked)
            return tracked.missing

    def was_read(self, tracked: TrackedJob, read: Read) -> None:
        """Note what reading a job gave."""
        with self._lock:
            tracked.read = read
            self.settle_if_done(tracked)

    def copied(self, key: bytes) -> None:
        """Note that an item is a copy of one with an equal ``same`` hash."""
        with self._lock:
            self._copied.add(key)

    def was_committed(self, keys: Sequence[bytes]) -> list[bytes]:
        """Note items that are durable; gives those that were not before."""
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in self._committed]
            self._committed.update(new)
            for key in new:
                self.counts["copied" if key in self._copied else "encoded"] += 1
                for tracked in self._waiting.pop(key, ()):
                    tracked.open.discard(key)
                    self.settle_if_done(tracked)
            return new

    def fail(self, tracked: TrackedJob, failure: Failure) -> None:
        """Settle a job that gives no item."""
        with self._lock:
            if tracked.settled:
                return
            tracked.settled = True
            read = tracked.read or Read(content=tracked.job.content)
            with_content = replace(failure, content=failure.content or read.content, stat=failure.stat or read.stat)
            if not tracked.unit.probe:
                self._failed.append([tracked.index, with_content])

    def settle_if_done(self, tracked: TrackedJob) -> None:
        """Settle a job of which all items are committed."""
        with self._lock:
            read = tracked.read
            if tracked.open or tracked.settled or tracked.unit.probe or (read is None and not tracked.whole):
                return
            tracked.settled = True
            if read is None:
                self._done.append(tracked.index)
            else:
                contents = (read.contents or read.content).hex()
                self._rows.append([tracked.index, contents, list(map(int, read.stat)), read.facts])

    def take_settled(self) -> dict[str, Any]:
        """What was settled since the last call.

        Returns:
            ``jobs``: rows (number, content, stat, facts); ``done``: numbers of jobs that were not read; ``failed``:
            rows (number, failure); ``counts``.
        """
        with self._lock:
            found = {"jobs": self._rows, "done": self._done, "failed": self._failed, "counts": dict(self.counts)}
            self._rows, self._done, self._failed = [], [], []
            self.counts.clear()
        return found

    @property
    def num_settled(self) -> int:
        """Jobs that wait to be reported."""
        return len(self._rows) + len(self._done) + len(self._failed)

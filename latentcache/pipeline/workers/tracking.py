"""Which outputs of its jobs a worker has to make, and which jobs are settled.

A job is settled when all its outputs are committed or it has failed. Guarantee: two jobs of one worker with the same
item key share one item: the first one makes it, the others wait for its commit, or fail as it does. Jobs of different
workers are not compared: files of equal size are given to one worker.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.protocol import Failure, FieldKind, FieldRecipe, Group, Job, Output, Read
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.key import KEY_BYTES
from latentcache.pipeline.workers.transport import to_json
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


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Jobs of a unit that are made in one call."""

    unit: Unit
    jobs: Mapping[int, Job]
    keys: Sequence[bytes]
    """The item key of each."""


@dataclass(slots=True, eq=False)
class Tracked:
    """One job of a worker."""

    index: int
    """Number of the job in the build."""
    job: Job
    unit: Unit
    missing: tuple[Output, ...] | None = None
    """Outputs that this job makes; None until they are known."""
    content: bytes = b""
    """The content hash that the keys are made from."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """Item key by ``Output.item``."""
    committed: frozenset[bytes] = frozenset()
    """Those that were committed before this run."""
    open: set[bytes] = field(default_factory=set)
    """Keys that are not committed."""
    unmade: int = 0
    """Outputs that are not encoded."""
    read: Read | None = None
    made: bool = False
    settled: bool = False
    doomed: Failure | None = None
    """Why the job that would have made its items failed, while this one was being prepared."""


class Tracker:
    """The jobs of one worker, told apart by item keys. Every method may be called from any thread.

    Args:
        kind: Of the field.
        recipe: Of the field.
        groups: Of the field.
        lookup: Committed items; None: there are none.
    """

    def __init__(
        self,
        kind: FieldKind,
        recipe: FieldRecipe,
        groups: Sequence[Group],
        lookup: Catalog | None,
    ) -> None:
        self._kind, self._recipe, self._groups, self._lookup = kind, recipe, groups, lookup
        self._makers: dict[bytes, list[Tracked]] = {}
        self._committed: set[bytes] = set()
        self._copied: set[bytes] = set()
        self._lock = threading.RLock()
        self._rows: list[list[Any]] = []
        self._whole: dict[bytes, int] = {}
        self._done: list[int] = []
        self._failed: list[list[Any]] = []
        self.counts: Counter[str] = Counter()

    def add_committed(self, keys: Iterable[bytes]) -> None:
        """Note keys that another worker of this build has committed."""
        with self._lock:
            self._committed.update(keys)

    def make_whole(self, jobs: Mapping[int, Job]) -> list[bytes] | None:
        """Item keys of jobs that are made without preparing: all have one output and known content, and are new."""
        if any(not job.content or len(job.outputs) != 1 for job in jobs.values()):
            return None
        outputs = [job.outputs[0] for job in jobs.values()]
        keys = self._keys(outputs, b"".join(job.content for job in jobs.values()))
        if self._lookup is not None and (self._lookup.find(keys) >= 0).any():
            return None
        packed = keys.tobytes()
        found = dict(zip((packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)), jobs, strict=True))
        with self._lock:
            if len(found) < len(jobs) or any(found.keys() & some for some in (self._committed, self._whole.keys())):
                return None
            self._whole.update(found)
        return list(found)

    def give_up_whole(self, keys: Iterable[bytes]) -> None:
        """Note that jobs are prepared one by one after all."""
        with self._lock:
            for key in keys:
                del self._whole[key]

    def fail_whole(self, key: bytes, job: Job, failure: Failure) -> None:
        """Settle a job of :meth:`make_whole` that gives no item."""
        with self._lock:
            content = failure.content or job.content
            self._failed.append([self._whole.pop(key), to_json(replace(failure, content=content))])

    def _keys(self, outputs: Sequence[Output], contents: bytes) -> NDArray[np.uint8]:
        """(n, 32) item keys of outputs, with the content hash of each."""
        return self._kind.keys(
            np.frombuffer(contents, dtype=np.uint8).reshape(-1, HASH_BYTES),
            np.array([output.group for output in outputs], dtype=np.int32),
            np.array([output.variant for output in outputs], dtype=np.uint8),
            self._groups,
            self._recipe,
        )

    def look_up(self, jobs: Sequence[Tracked], contents: Sequence[bytes]) -> None:
        """Find the item keys of jobs, by the content hash of their inputs, and which of them are committed."""
        outputs = [output for tracked in jobs for output in tracked.job.outputs]
        if not outputs:
            return
        repeated = [content * len(tracked.job.outputs) for tracked, content in zip(jobs, contents, strict=True)]
        keys = self._keys(outputs, b"".join(repeated))
        there = np.zeros(len(keys), dtype=bool) if self._lookup is None else self._lookup.find(keys) >= 0
        rows = zip(keys, there.tolist(), strict=True)
        for tracked, content in zip(jobs, contents, strict=True):
            tracked.content = content
            found = {output.item: next(rows) for output in tracked.job.outputs}
            tracked.keys = {item: key.tobytes() for item, (key, _) in found.items()}
            tracked.committed = frozenset(tracked.keys[item] for item, (_, exists) in found.items() if exists)

    def missing(self, tracked: Tracked, content: bytes) -> tuple[Output, ...]:
        """Outputs that this job has to make, given the content hash of its inputs."""
        if tracked.content != content:
            self.look_up([tracked], [content])
        outputs = tracked.job.outputs
        if tracked.unit.probe:
            return outputs
        with self._lock:
            for output in outputs:
                key = tracked.keys[output.item]
                if key in tracked.committed or key in self._committed:
                    self.counts["skipped"] += key in tracked.committed
                elif key not in tracked.open:
                    tracked.open.add(key)
                    self._makers.setdefault(key, []).append(tracked)
            return tuple(o for o in outputs if self._makers.get(tracked.keys[o.item], [None])[0] is tracked)

    def was_read(self, tracked: Tracked, read: Read) -> None:
        """Note what reading a job gave."""
        with self._lock:
            tracked.read = read
            if tracked.doomed is not None:
                self.fail(tracked, tracked.doomed)
            self._settle_if_done(tracked)

    def copied(self, key: bytes) -> None:
        """Note that an item is a copy of one with an equal ``same`` hash."""
        with self._lock:
            self._copied.add(key)

    def was_committed(self, keys: Sequence[bytes]) -> None:
        """Note items that are durable."""
        with self._lock:
            self._committed.update(keys)
            whole = [self._whole.pop(key, -1) for key in keys]
            done = [index for index in whole if index >= 0]
            self._done += done
            self.counts["encoded"] += len(done)
            for key in [key for key, index in zip(keys, whole, strict=True) if index < 0]:
                self.counts["copied" if key in self._copied else "encoded"] += 1
                self._copied.discard(key)
                for tracked in self._makers.pop(key, ()):
                    tracked.open.discard(key)
                    self._settle_if_done(tracked)

    def fail(self, tracked: Tracked, failure: Failure) -> None:
        """Settle a job that gives no item, and jobs of equal inputs that waited for its items."""
        with self._lock:
            if tracked.settled:
                return
            tracked.settled = True
            read = tracked.read
            own = failure
            if read is not None:
                own = replace(failure, content=failure.content or read.content, stat=failure.stat or read.stat)
            if not tracked.unit.probe:
                self._failed.append([tracked.index, to_json(own)])
            waiting: dict[int, Tracked] = {}
            for key in tracked.open:
                makers = self._makers.pop(key, [])
                if makers and makers[0] is not tracked:
                    self._makers[key] = [one for one in makers if one is not tracked]
                    continue
                waiting |= {other.index: other for other in makers[1:]}
            tracked.open.clear()
            for other in waiting.values():
                if other.read is None:
                    other.doomed = failure
                else:
                    self.fail(other, failure)

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

    def _settle_if_done(self, tracked: Tracked) -> None:
        read = tracked.read
        if read is not None and not tracked.open and not tracked.settled and not tracked.unit.probe:
            tracked.settled = True
            contents = (read.contents or read.content).hex()
            self._rows.append([tracked.index, contents, list(map(int, read.stat)), to_json(read.facts)])

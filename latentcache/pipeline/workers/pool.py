"""The workers of one run: units of work for them, their start, and everything that they report.

Units are cut in the order of the plan and never depend on the number of workers, so item keys, item bytes and blocks
do not either. The event file is written by the build process alone, after each durable commit.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.protocol import Failure, FieldKind, Job, WorkSize, join_noise
from latentcache.fields.registry import field_kinds
from latentcache.fields.table import STAT_WIDTH
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.key import KEY_BYTES
from latentcache.pipeline.devices import Device, devices_for
from latentcache.pipeline.workers.batching import reason
from latentcache.pipeline.workers.events import EventLog
from latentcache.pipeline.workers.memory import (
    BASE_BYTES,
    default_budget,
    default_threads,
    default_workers,
    host_memory,
)
from latentcache.pipeline.workers.process import NO_MEMORY, WarmWorker, WorkerHandle, WorkerProcess, WorkerThread
from latentcache.pipeline.workers.transport import Message, failure_of, split_keys
from latentcache.pipeline.workers.worker import Task
from latentcache.store.atomic_io import reading
from latentcache.store.index import load_index
from latentcache.store.paths import OPEN_SUFFIX, CachePaths
from latentcache.store.shard import recover_shard
from latentcache.value import Value

#: Units of entries that a build has where there are enough jobs, and jobs of one of them at least.
_UNITS, _SMALLEST = 64, 8
#: Keys of a dead worker's last reports that are told to the one that gets its jobs, with each of them.
_RECENT_KEYS = 4096
#: One core for each of several CPU workers.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(slots=True, eq=False, kw_only=True)
class WorkUnit:
    """Jobs that are leased together."""

    jobs: dict[int, Job]
    """By number. A settled job is taken out."""
    known: bytes = b""
    """Item keys (32 bytes each) that a dead worker committed of them."""
    alone: bool = False
    """One job under suspicion: for a worker that has nothing else."""
    probe: bool = False
    """A job that has succeeded before; its result is dropped."""
    deaths: int = 0
    """Fresh workers that it has ended, alone."""
    unmade: int = 0
    """Jobs that its worker has not encoded yet."""


@dataclass(slots=True)
class Progress:
    """How far a run is. One object, updated in place."""

    field: str
    total: int
    """Items of all jobs."""
    cost_total: int = 0
    done: int = 0
    """Items of jobs that are settled: committed, found committed, or failed."""
    cost_done: int = 0
    encoded: int = 0
    """Items that were computed and committed."""
    copied: int = 0
    skipped: int = 0
    failed: int = 0
    """Jobs."""
    written_bytes: int = 0
    restarts: int = 0
    began: float = 0.0
    """``time.monotonic()`` when the first encoder was open; 0.0: nothing had to be encoded so far."""


class ReadColumns(Value):
    """What reading the inputs of n jobs gave; a row per job that did not fail."""

    sample: NDArray[np.int32]
    """(n,) ``Job.sample``."""
    content: NDArray[np.uint8]
    """(n, k, 16) of each file of a job that was told."""
    stat: NDArray[np.uint64]
    """(n, k, 6) their stat memos; zeros if there is none."""
    facts: Mapping[str, NDArray[Any]]
    """(n, ...) ``Read.facts``, by name."""

    @classmethod
    def joined(cls, parts: Sequence[ReadColumns]) -> ReadColumns:
        """The rows of several."""
        if not parts:
            empty = np.empty(0, dtype=np.int32)
            content, stat = np.empty((0, 0, HASH_BYTES), np.uint8), np.empty((0, 0, STAT_WIDTH), np.uint64)
            return cls(sample=empty, content=content, stat=stat, facts={})
        return cls(
            sample=np.concatenate([one.sample for one in parts]),
            content=np.concatenate([one.content for one in parts]),
            stat=np.concatenate([one.stat for one in parts]),
            facts={name: np.concatenate([one.facts[name] for one in parts]) for name in parts[0].facts},
        )


class RunResult(Value):
    """What a run made, and what became of its jobs."""

    read: ReadColumns
    failed: tuple[tuple[int, Failure], ...]
    """``Job.sample`` and why it gives no item."""
    encoded: int
    """Distinct items computed and committed."""
    progress: Progress
    encode_s: float
    """Seconds from the first open encoder to the end; 0.0: nothing was encoded."""
    waits: Mapping[str, float]
    """Seconds, summed over workers, that the thread with the encoder spent: ``prepare`` waiting for inputs to be read
    and decoded, ``encode`` in the encoder, ``write`` waiting for the disk, ``idle`` without work."""
    noise: Mapping[str, Any]


def worker_count(task: Task, kind: FieldKind, total_cost: int) -> int:
    """Worker processes of a run; 0: a thread of the build, because a process would cost more than it saves."""
    if kind.device == "cpu":
        count = default_workers(total_cost, kind.work.worker_cost) if task.workers is None else task.workers
        return max(count, 1) if task.needs_torch else count
    devices = devices_for(task.device, needs_torch=task.needs_torch)
    in_thread = len(devices) == 1 and not task.needs_torch and "*" not in task.device
    return 0 if in_thread else len(devices)


class WorkerPool:
    """Starts the workers of one run, and gathers their results.

    Args:
        task: What is made.
        total: Number of jobs.
        total_cost: Sum of their costs.
        items: Number of their items [default: one for each job].
        events: Told of each durable commit.
        warm: May have workers ready; holds the lock on the cache, which workers inherit.
        failed: Told of each job that gives no item, as soon as that is known.
    """

    def __init__(
        self,
        task: Task,
        *,
        total: int,
        total_cost: int,
        items: int | None = None,
        events: EventLog | None = None,
        warm: WarmWorker | None = None,
        failed: Callable[[Job, Failure], None] = lambda job, failure: None,
    ) -> None:
        self.kind = field_kinds()[task.field]
        self.workers = worker_count(task, self.kind, total_cost)
        count = max(self.workers, 1)
        self.devices: Sequence[Device]
        if self.kind.device == "cpu":
            self.devices = [Device(label="cpu", name="cpu", variables=_ONE_THREAD)] * count
            self.threads = task.decode_threads or 1
        else:
            self.devices = devices_for(task.device, needs_torch=task.needs_torch)
            self.threads = task.decode_threads or default_threads(count)
        self._bounded = self.kind.device == "cpu" and self.workers > 0
        batch = task.batch_size or self.kind.work.batch_items
        self.low_water = max(min(2 * max(batch, self.threads), -(-total // count)), 1)
        """A worker with fewer jobs to encode gets the next unit."""
        self._budget = task.host_memory or default_budget()
        self._share = max(self._budget // count, 1)
        self._task, self._paths = task, CachePaths(Path(task.cache))
        self._total, self._cost = total, total_cost // count
        self._events, self._warm, self._lock = events, warm, warm.lock_fd if warm is not None else None
        self.progress = Progress(task.field, total if items is None else items, total_cost)
        self._reported: dict[str, list[bytes]] = {}
        self._keys: list[bytes] = []
        self._read: list[ReadColumns] = []
        self._failed: list[tuple[int, Failure]] = []
        self._on_failed = failed
        self._waits: Counter[str] = Counter()
        self._noise: Mapping[str, Any] = {}

    # -- units

    def units(self, jobs: Iterable[Job]) -> Iterator[WorkUnit]:
        """Jobs as units; a job for which there is not enough memory fails without being read."""
        limit = max(self._limit // self.kind.work.cost_bytes, self.kind.work.unit_cost)
        most = self.kind.work.unit_jobs
        if self.kind.packing == "entry":
            most = min(most, max(-(-self._total // (_UNITS * _SMALLEST)) * _SMALLEST, _SMALLEST))

        def fitting() -> Iterator[tuple[int, Job]]:
            for number, job in enumerate(jobs):
                if job.cost > limit:
                    self.failed(job, self._too_large(job))
                else:
                    yield number, job

        for unit in cut(fitting(), self.kind.work, most):
            yield WorkUnit(jobs=unit)

    @property
    def _limit(self) -> int:
        """Bytes that one job may take: of the budget where the memory of workers is limited, else of the machine."""
        return self._budget if self.kind.device == "cpu" else max(self._budget, host_memory())

    def _too_large(self, job: Job, cause: str = "") -> Failure:
        needed = job.cost * self.kind.work.cost_bytes
        found = f"a worker {cause}" if cause else f"needs about {needed:,} bytes to be prepared"
        return Failure(
            reason=reason(self.kind, "memory"),
            detail=f"its size is {job.cost:,} and it {found}; --host-memory is {self._limit:,}",
            hint="give more memory with --host-memory, or remove the sample",
            content=job.content,
        )

    # -- called by the scheduler

    def deadlines(self, job: Job | None) -> float:
        """Deadlines that a job may take."""
        return job.cost / self.kind.work.unit_cost if job is not None and self.kind.device == "cpu" else 1.0

    def start(self, device: Device, *, again: bool) -> tuple[WorkerHandle, dict[str, Any], str]:
        """A worker, the head of its ``open`` message, and the name of its shard. A thread is started once only."""
        shard = os.urandom(8).hex()
        task = replace(
            self._task,
            shard=shard,
            device=device.name,
            decode_threads=self.threads,
            host_memory=self._share,
            bounded=self._bounded,
            cost=self._cost,
        )
        self._reported[shard] = []
        head = {"task": task}
        if not self.workers and not again:
            return WorkerThread(), head, shard
        warm = self._warm.take(device) if self._warm is not None and not again else None
        return warm or WorkerProcess(device.variables, lock=self._lock, again=again), head, shard

    def keep(self, device: Device, handle: WorkerHandle) -> bool:
        """Keep a worker that is done for the next field; False if there is no use for it."""
        if self._warm is None or isinstance(handle, WorkerThread):
            return False
        self._warm.keep(device, handle)
        return True

    def bound(self, handle: WorkerHandle, *, alone: bool) -> None:
        """Limit the memory of a worker before it gets a unit; a job that is tried alone gets all of the budget."""
        if self._bounded:
            handle.limit(BASE_BYTES + (self._budget if alone else self._share))

    def recovered(self, shard: str) -> bytes:
        """Seal a dead worker's shard; gives the item keys that it committed last, reported or not."""
        folder = self._paths.shards / f"{shard}{OPEN_SUFFIX}"
        if folder.exists():
            recover_shard(folder, self._paths.quarantine, self._salvage)
        reported = b"".join(self._reported.pop(shard))
        known = set(split_keys(reported))
        found: list[bytes] = []
        for one in self._paths.all_sealed():
            if one.name.partition("-")[0] == shard:
                with reading(one):
                    found += split_keys(np.asarray(load_index(one).keys()).tobytes())
        new = [key for key in found if key not in known]
        self._take_keys(b"".join(new))
        self.progress.encoded += len(new)
        return reported[-_RECENT_KEYS * KEY_BYTES :] + b"".join(new)

    def _salvage(self, lost: Path) -> None:
        # Only damaged shards need it.
        from latentcache.store.salvage import salvage

        salvage(self._paths, lost)

    def committed(self, shard: str, message: Message, settled: dict[int, Job]) -> None:
        """Take a ``committed`` message, with the jobs that it settles."""
        body = message.body
        self._take_keys(body)
        if shard in self._reported and body:
            self._reported[shard].append(body)
        progress = self.progress
        progress.encoded += message["encoded"]
        progress.copied += message["copied"]
        progress.skipped += message["skipped"]
        progress.written_bytes += message["bytes"]
        rows = [row for row in message["jobs"] if row[0] in settled]
        if rows:
            width = len(rows[0][1]) // (2 * HASH_BYTES)
            content = np.frombuffer(bytes.fromhex("".join(row[1] for row in rows)), dtype=np.uint8)
            stat = np.array([row[2] or [0] * (width * STAT_WIDTH) for row in rows], dtype=np.uint64)
            self._read.append(
                ReadColumns(
                    sample=np.array([settled[row[0]].sample for row in rows], dtype=np.int32),
                    content=content.reshape(len(rows), width, HASH_BYTES),
                    stat=stat.reshape(len(rows), width, STAT_WIDTH),
                    facts={name: np.array([row[3][name] for row in rows]) for name in rows[0][3]},
                )
            )
        done = [settled[number] for number in (*message["done"], *(row[0] for row in rows)) if number in settled]
        progress.done += sum(len(job.outputs) for job in done)
        progress.cost_done += sum(job.cost for job in done)
        for number, failure in message["failed"]:
            if number in settled:
                self.failed(settled[number], failure_of(failure))

    def failed(self, job: Job, failure: Failure) -> None:
        """Note a job that gives no item."""
        self._failed.append((job.sample, failure))
        self._on_failed(job, failure)
        self.progress.failed += 1
        self.progress.done += len(job.outputs)
        self.progress.cost_done += job.cost

    def crash(self, job: Job, cause: str, *, encoding: bool) -> Failure:
        """The failure of a job that ends its workers; ``cause`` say how, with their last line on stderr."""
        if NO_MEMORY.search(cause):
            return self._too_large(job, cause)
        stage = "encode" if encoding else "prepare"
        detail = f"a worker process {cause} whenever it {'encoded' if encoding else 'prepared'} this sample"
        return Failure(reason=reason(self.kind, stage), detail=detail, content=job.content)

    def ended(self, message: Message) -> None:
        """Take the ``opened`` or ``ended`` message of a worker."""
        if message.kind == "opened":
            self.progress.began = self.progress.began or time.monotonic()
        self._waits.update(message.head.get("waits", {}))
        if message.head.get("noise"):
            self._noise = join_noise(self._noise, message["noise"])

    def _take_keys(self, keys: bytes) -> None:
        if keys:
            self._keys.append(keys)
            if self._events is not None:
                self._events.commit(split_keys(keys))

    # -- the result

    def result(self) -> RunResult:
        """Everything that was gathered."""
        keys = np.unique(np.frombuffer(b"".join(self._keys), dtype=f"S{KEY_BYTES}"))
        return RunResult(
            read=ReadColumns.joined(self._read),
            failed=tuple(self._failed),
            encoded=max(len(keys) - self.progress.copied, 0),
            progress=self.progress,
            encode_s=time.monotonic() - self.progress.began if self.progress.began else 0.0,
            waits={name: self._waits.get(name, 0.0) for name in ("prepare", "encode", "write", "idle")},
            noise=self._noise,
        )


def cut(jobs: Iterable[tuple[int, Job]], work: WorkSize, most: int) -> Iterator[dict[int, Job]]:
    """Jobs in units, in order, of limited number and cost."""
    unit: dict[int, Job] = {}
    cost = 0
    for number, job in jobs:
        if unit and (len(unit) >= most or cost + job.cost > work.unit_cost):
            yield unit
            unit, cost = {}, 0
        unit[number] = job
        cost += job.cost
    if unit:
        yield unit

"""Give units of work to workers, and replace workers that die, hang or fail.

A unit is queued, leased or done. Units are cut in the order of the plan. They do not depend on the number of workers,
nor do item keys, item bytes and blocks. If a worker dies, each job that it had begun is tried again alone, on an idle
worker. A job is rejected only if it ended two fresh workers alone, and the second one had just encoded a job that is
known to be good. Six deaths in a row end the build, and nothing is published. So a dead device or another program's
memory never rejects good samples. A device whose workers die rests before the next one starts.

Guarantee: every job ends settled, whichever workers die; after a stop request each worker commits its batches in
hand. The build computes nothing here, so it takes signals at once.
"""

from __future__ import annotations

import math
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from latentcache.errors import DeviceError, DeviceMemoryError, LatentcacheError, StoreError, WorkerError
from latentcache.fields.protocol import Failure, FieldKind, Job
from latentcache.fields.registry import field_kinds
from latentcache.identity.key import KEY_BYTES
from latentcache.pipeline.devices import Device, devices_for
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.workers.batching import cut, reason
from latentcache.pipeline.workers.memory import (
    BASE_BYTES,
    default_budget,
    default_threads,
    default_workers,
    host_memory,
)
from latentcache.pipeline.workers.process import NO_MEMORY, WarmWorker, WorkerHandle, WorkerProcess, WorkerThread
from latentcache.pipeline.workers.results import EventLog, Progress, RunResult
from latentcache.pipeline.workers.transport import Form, as_error, split_keys
from latentcache.pipeline.workers.watchdog import ENCODING, Watchdog, deadline_s
from latentcache.pipeline.workers.worker import Task
from latentcache.store.atomic_io import reading
from latentcache.store.index import load_index
from latentcache.store.paths import OPEN_SUFFIX, CachePaths

#: Seconds between two looks at the workers.
_TICK_S = 0.1
#: Deaths in a row after which a known-good job is tried, and that end the build.
_PROBE_AFTER, _MOST_DEATHS = 3, 6
#: Seconds that a device rests after its second death in a row, doubled after each further one, and at most.
_REST_S, _MOST_REST_S = 0.25, 60.0
#: Units of entries that a build has where there are enough jobs, and jobs of one of them at least.
_UNITS, _SMALLEST = 64, 8
#: Keys of a dead worker's last reports that are sent with each of its jobs to the next worker.
_RECENT_KEYS = 4096
#: One core for each of several CPU workers.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(slots=True, eq=False, kw_only=True)
class _Unit:
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
    suspected: float = math.inf
    """Time of the first of these deaths."""
    unmade: int = 0
    """Jobs that its worker has not encoded yet."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Slot:
    """A device, which has one worker at a time."""

    device: Device
    started: bool = False
    deaths: int = 0
    """Workers that died since one of them encoded a job."""
    rests_until: float = 0.0

    def rest(self) -> None:
        """Note a death; from the second one in a row on, the next start waits."""
        self.deaths += 1
        if self.deaths > 1:
            self.rests_until = time.monotonic() + min(_REST_S * 2.0 ** min(self.deaths - 2, 10), _MOST_REST_S)


@dataclass(slots=True, eq=False, kw_only=True)
class _Worker:
    """A worker that runs."""

    slot: _Slot
    handle: WorkerHandle
    shard: str
    watchdog: Watchdog
    fresh: bool
    """True for a new process that has encoded nothing but jobs that are known to be good."""
    succeeded: float = -math.inf
    """Time of its last success."""
    leases: dict[int, _Unit] = field(default_factory=dict)
    reported: list[bytes] = field(default_factory=list)
    """Item keys of its commits."""
    opened: bool = False
    ending: bool = False
    last: Form = field(default_factory=dict)
    """Its ``ended`` message."""
    stuck: str = ""

    @property
    def alone(self) -> bool:
        """True if it tries a suspicious unit."""
        return any(unit.alone or unit.probe for unit in self.leases.values())

    @property
    def error(self) -> BaseException | None:
        return as_error(self.last["error"]) if "error" in self.last else None

    def settle(self, numbers: Sequence[int]) -> dict[int, Job]:
        """Its jobs of these numbers, which are taken out of their units."""
        settled: dict[int, Job] = {}
        for lease, unit in list(self.leases.items()):
            if not unit.probe:
                settled |= {one: unit.jobs.pop(one) for one in numbers if one in unit.jobs}
                if not unit.jobs:
                    del self.leases[lease]
        return settled


def worker_count(task: Task, kind: FieldKind, total_cost: int) -> int:
    """Worker processes of a run; 0: a thread of the build, because a process would cost more than it saves."""
    if kind.device == "cpu":
        count = default_workers(total_cost, kind.work.worker_cost) if task.workers is None else task.workers
        return max(count, 1) if task.needs_torch else count
    devices = devices_for(task.device, needs_torch=task.needs_torch)
    in_thread = len(devices) == 1 and not task.needs_torch and "*" not in task.device
    return 0 if in_thread else len(devices)


class Run:
    """Makes the items of the jobs of one field.

    Device, memory and threads of the ``task`` are those of all workers together; ``jobs`` are taken as workers have
    room. ``good`` are jobs whose items are committed: one is encoded again if no other job has succeeded. A run that
    is asked to ``stop`` returns with everything committed that workers had.
    """

    def __init__(
        self,
        task: Task,
        jobs: Iterable[Job],
        *,
        total: int,
        total_cost: int,
        items: int | None = None,
        good: Iterable[Job] = (),
        stop: StopSignal,
        warm: WarmWorker,
        events: EventLog | None = None,
        failed: Callable[[Job, Failure], None] = lambda job, failure: None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._kind, self._paths = field_kinds()[task.field], CachePaths(Path(task.cache))
        progress = Progress(task.field, total if items is None else items, total_cost)
        self._results, self._stop, self._warm, self._warn = RunResult(progress, events, failed), stop, warm, warn
        on_cpu = self._kind.device == "cpu"
        self._processes = worker_count(task, self._kind, total_cost)
        count = max(self._processes, 1)
        devices = [Device(label="cpu", name="cpu", variables=_ONE_THREAD)] * count
        if not on_cpu:
            devices = devices_for(task.device, needs_torch=task.needs_torch)
        self._slots = [_Slot(device=device) for device in devices]
        self._budget = task.host_memory or default_budget()
        self._limit = self._budget if on_cpu else max(self._budget, host_memory())
        """Bytes that one job may take: the budget if the memory of workers is limited, else that of the machine."""
        self._task = replace(
            task,
            decode_threads=task.decode_threads or (1 if on_cpu else default_threads(count)),
            host_memory=max(self._budget // count, 1),
            bounded=on_cpu and self._processes > 0,
            cost=total_cost // count,
        )
        batch, threads = task.batch_size or self._kind.work.batch_items, self._task.decode_threads or 1
        self._low_water = max(min(2 * max(batch, threads), -(-total // count)), 1)
        """A worker with fewer jobs to encode gets the next unit."""
        self._workers: list[_Worker] = []
        self._fresh = self._units(jobs, total)
        self._ahead: deque[_Unit] = deque()
        """Units to lease before fresh ones."""
        self._trials: deque[_Unit] = deque()
        """Jobs under suspicion."""
        self._good: tuple[int, Job] | None = None
        """A job that has succeeded."""
        self._committed_before = iter(good)
        self._number = self._streak = 0
        self._deadline, self._looked_at = deadline_s(), time.monotonic()
        self._selector = selectors.DefaultSelector()

    def run(self, advanced: Callable[[Progress], None] = lambda progress: None) -> RunResult:
        """Do everything, or what a stop request leaves time for; ``advanced`` is called ten times a second."""
        try:
            while not self._stop.requested and (self._waiting() or self._workers):
                self._start()
                self._lease()
                self._receive()
                self._look()
                advanced(self._results.progress)
        finally:
            late = self._shut_down()
            self._selector.close()
            advanced(self._results.progress)
        if late is not None:
            raise late
        self._results.finish()
        return self._results

    # -- giving out

    def _units(self, jobs: Iterable[Job], total: int) -> Iterator[_Unit]:
        """Jobs as units; a job for which there is not enough memory fails without being read."""
        work = self._kind.work
        limit, most = max(self._limit // work.cost_bytes, work.unit_cost), work.unit_jobs
        if self._kind.packing == "entry":
            most = min(most, max(-(-total // (_UNITS * _SMALLEST)) * _SMALLEST, _SMALLEST))

        def fitting() -> Iterator[tuple[int, Job]]:
            for number, job in enumerate(jobs):
                if job.cost > limit:
                    self._results.fail(job, self._too_large(job))
                else:
                    yield number, job

        for unit in cut(fitting(), lambda one: one[1].cost, most, work.unit_cost):
            yield _Unit(jobs=dict(unit))

    def _fill(self, count: int) -> None:
        """Take fresh units until so many are at hand."""
        self._ahead.extend(islice(self._fresh, max(count - len(self._ahead), 0)))

    def _waiting(self) -> int:
        """Units that no worker has; one for each device is looked for."""
        self._fill(len(self._slots))
        return len(self._ahead) + len(self._trials) + (self._probe() is not None)

    def _probe(self) -> _Unit | None:
        """A job that is known to be good, if it is time to see that workers still work."""
        probing = any(unit.probe for worker in self._workers for unit in worker.leases.values())
        return None if self._streak < _PROBE_AFTER or probing else self._known_good()

    def _known_good(self) -> _Unit | None:
        if self._good is None:
            self._good = next(((-1, job) for job in self._committed_before), None)
        return None if self._good is None else _Unit(jobs=dict([self._good]), probe=True)

    def _start(self) -> None:
        """A worker for each free device, while there is work for it. A thread is started once only."""
        idle = sum(not worker.leases and not worker.ending for worker in self._workers)
        taken, now = [worker.slot for worker in self._workers], time.monotonic()
        free = [slot for slot in self._slots if slot not in taken and slot.rests_until <= now]
        for slot in free[: max(self._waiting() - idle, 0)]:
            device, kept = slot.device, None
            if not slot.started:
                kept = self._warm.take(device) if self._processes else WorkerThread()
            handle = kept or WorkerProcess(device.variables, lock=self._warm.lock_fd, again=slot.started)
            shard = os.urandom(8).hex()
            handle.open(replace(self._task, shard=shard, device=device.name))
            watchdog = Watchdog(self._deadline, on_cpu=device.name == "cpu" or handle.is_thread)
            worker = _Worker(slot=slot, handle=handle, shard=shard, watchdog=watchdog, fresh=kept is None)
            self._workers.append(worker)
            self._selector.register(handle.channel, selectors.EVENT_READ, worker)
            slot.started = True

    def _lease(self) -> None:
        """Units for workers that run low; the end for all if there is nothing that could come back."""
        workers = [worker for worker in self._workers if not worker.ending]
        for worker in workers:
            while (unit := self._next(worker)) is not None:
                if self._task.bounded and isinstance(worker.handle, WorkerProcess):
                    # A job that is tried alone gets all of the memory.
                    worker.handle.limit(BASE_BYTES + (self._budget if unit.alone else self._task.host_memory or 0))
                self._number += 1
                worker.leases[self._number], unit.unmade = unit, len(unit.jobs)
                worker.handle.work(self._number, unit.jobs, known=unit.known, probe=unit.probe)
        if not self._waiting() and not any(worker.leases for worker in self._workers):
            for worker in workers:
                worker.ending = True
                worker.handle.stop()

    def _next(self, worker: _Worker) -> _Unit | None:
        """The next unit for a worker; suspicious ones only if it has nothing else."""
        leases = worker.leases.values()
        if worker.alone or (leases and sum(unit.unmade for unit in leases) >= self._low_water):
            return None
        probe = self._probe()
        if probe is not None:
            return None if leases else probe
        # Trials come last, when work that is known to be good exists; at once if nothing has succeeded so far.
        early = self._good is None and self._streak >= _PROBE_AFTER and bool(self._trials)
        self._fill(1)
        if self._ahead and not early:
            return self._ahead.popleft()
        if not self._trials or leases:
            return None
        unproven = self._trials[0].deaths and worker.succeeded <= self._trials[0].suspected
        probe = self._known_good() if unproven else None
        return probe or self._trials.popleft()

    # -- listening

    def _receive(self) -> None:
        for key, _ in self._selector.select(_TICK_S):
            worker: _Worker = key.data
            self._take(worker)
            if worker.handle.channel.ended or worker.last:
                self._ended(worker)
        for worker in self._workers:
            worker.handle.channel.flush()

    def _take(self, worker: _Worker) -> None:
        """Take the messages of a worker."""
        for message in worker.handle.channel.arrived():
            if message["kind"] == "committed":
                self._committed(worker, message)
            elif message["kind"] == "made":
                unit = worker.leases.get(message["unit"])
                worker.fresh = worker.fresh and unit is not None and unit.probe
                if unit is not None:
                    unit.unmade = 0
                    if unit.probe:
                        del worker.leases[message["unit"]]
                        self._succeeded(worker)
            elif message["kind"] == "warning":
                self._warn(message["text"] + self._on(worker))
            else:
                self._results.reported(message)
                worker.opened = worker.opened or message["kind"] == "opened"
                worker.last = message if message["kind"] == "ended" else worker.last

    def _committed(self, worker: _Worker, message: Form) -> None:
        """Take what a worker has settled."""
        good = message["done"]
        settled = worker.settle([*good, *(row[0] for row in message["failed"])])
        worker.reported.append(bytes.fromhex(message["keys"]))
        self._results.committed(message, settled)
        if settled:
            self._streak = 0
        if good and message["encoded"] and good[-1] in settled:
            self._good = (good[-1], settled[good[-1]])
            self._succeeded(worker)

    def _succeeded(self, worker: _Worker) -> None:
        self._streak = worker.slot.deaths = 0
        worker.succeeded = time.monotonic()

    def _look(self) -> None:
        """Kill workers that do not move."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        for worker in self._workers:
            board = worker.handle.board
            worker.stuck = worker.stuck or worker.watchdog.stuck(board.beats, board.steps(), elapsed)
            if worker.stuck:
                worker.handle.kill()

    # -- workers that end

    def _ended(self, worker: _Worker) -> None:
        """A worker has ended: in order, with an error, or by a signal."""
        begun = {item: step.stage for step in worker.handle.board.steps() for item in step.items}
        cause, error = self._disconnect(worker), worker.error
        if worker.last and error is None and not worker.leases:
            return
        known = self._recovered(worker)
        self._results.progress.restarts += 1
        match error:
            case DeviceMemoryError():
                raise error
            case DeviceError() if any(one.opened for one in (worker, *self._workers)):
                cause, begun = f"lost its device ({': '.join(filter(None, (error.what, error.why)))})", {}
            case MemoryError():
                cause = "ran out of memory (MemoryError)"
            case BaseException():
                raise error
        self._died(worker, begun, known, cause=worker.stuck or cause)

    def _died(self, worker: _Worker, begun: Mapping[int, int], known: bytes, *, cause: str) -> None:
        """Give out the jobs of a dead worker again; those that it was in the middle of each alone."""
        self._streak += 1
        worker.slot.rest()
        if self._streak >= _MOST_DEATHS:
            raise worker.error if isinstance(worker.error, DeviceError) else self._dead(worker, cause)
        for unit in worker.leases.values():
            if unit.probe:
                continue
            rest = {number: job for number, job in unit.jobs.items() if number not in begun}
            if rest:
                (self._trials if unit.alone else self._ahead).appendleft(replace(unit, jobs=rest, known=known))
            for number in [one for one in unit.jobs if one in begun]:
                one = replace(unit, jobs={number: unit.jobs[number]}, known=known, alone=True)
                if unit.alone and worker.fresh and unit.deaths and worker.succeeded > unit.suspected:
                    self._quarantine(unit.jobs[number], cause, encoding=begun[number] == ENCODING)
                    continue
                if unit.alone and worker.fresh and not unit.deaths:
                    one = replace(one, deaths=1, suspected=time.monotonic())
                self._trials.append(one)
        if worker.leases and not worker.alone:
            self._warn(f"a worker process {cause}{self._on(worker)}; its samples are given out again")

    def _dead(self, worker: _Worker, cause: str) -> WorkerError:
        """The error of too many deaths in a row."""
        names = [job.name for unit in worker.leases.values() if unit.alone for job in unit.jobs.values()]
        why, fix = "so no sample is to blame", ""
        if self._good is None and names:
            why = f"the last one with {names[0]} alone, and there is no other sample to compare with"
            fix = f"remove {names[0]}, or add samples and build again"
        return WorkerError(
            "worker processes keep dying",
            where=worker.slot.device.label,
            why=f"the last one {cause}; {_MOST_DEATHS} died in a row, {why}",
            fix=fix,
        )

    def _quarantine(self, job: Job, cause: str, *, encoding: bool) -> None:
        """Reject a job that ends its workers; ``cause`` says how, with their last line on stderr."""
        detail = f"a worker process {cause} whenever it {'encoded' if encoding else 'prepared'} this sample"
        why = reason(self._kind, "encode" if encoding else "prepare")
        failure = Failure(reason=why, detail=detail, content=job.content)
        self._results.fail(job, self._too_large(job, cause) if NO_MEMORY.search(cause) else failure)

    def _too_large(self, job: Job, cause: str = "") -> Failure:
        needed = job.cost * self._kind.work.cost_bytes
        found = f"a worker {cause}" if cause else f"needs about {needed:,} bytes to be prepared"
        return Failure(
            reason=reason(self._kind, "memory"),
            detail=f"its size is {job.cost:,} and it {found}; --host-memory is {self._limit:,}",
            hint="give more memory with --host-memory, or remove the sample",
            content=job.content,
        )

    def _recovered(self, worker: _Worker) -> bytes:
        """Seal a dead worker's shard; gives the item keys that it committed last, reported or not."""
        from latentcache.store.garbage import recover_shard

        folder = self._paths.shards / f"{worker.shard}{OPEN_SUFFIX}"
        if folder.exists():
            recover_shard(self._paths, folder)
        reported = b"".join(worker.reported)
        known, found = set(split_keys(reported)), list[bytes]()
        for one in self._paths.all_sealed():
            if one.name.partition("-")[0] == worker.shard:
                with reading(one):
                    found += split_keys(np.asarray(load_index(one).keys()).tobytes())
        new = [key for key in found if key not in known]
        self._results.take_keys(b"".join(new), len(new))
        return reported[-_RECENT_KEYS * KEY_BYTES :] + b"".join(new)

    # -- the end

    def _shut_down(self) -> LatentcacheError | None:
        """Have every worker commit its batches, or be killed; gives what went wrong but replaces no earlier error."""
        late: LatentcacheError | None = None
        for worker in self._workers:
            worker.handle.stop()
        began = time.monotonic()
        while self._workers:
            is_late = time.monotonic() - began >= self._stop.patience_s
            if not is_late:
                self._selector.select(_TICK_S)
            for worker in list(self._workers):
                if is_late:
                    worker.handle.kill()
                worker.handle.channel.flush()
                try:
                    self._take(worker)
                    late = worker.error if isinstance(worker.error, StoreError) else late
                except LatentcacheError as error:
                    late = error
                if is_late or worker.handle.channel.ended or worker.last:
                    self._disconnect(worker)
                if is_late and not worker.handle.is_thread:  # a thread may still be writing
                    with suppress(StoreError):  # the next build seals it
                        self._recovered(worker)
        return late

    def _disconnect(self, worker: _Worker) -> str:
        """Disconnect a worker; gives how it ended. One that can go on is kept for the next field."""
        self._workers.remove(worker)
        handle = worker.handle
        self._selector.unregister(handle.channel)
        if not isinstance(handle, WorkerThread) and worker.last:
            if worker.error is None and not worker.leases and not self._task.bounded:
                self._warm.keep(worker.slot.device, handle)
                return ""
            handle.kill()
        handle.channel.close()
        return handle.ended()

    def _on(self, worker: _Worker) -> str:
        return f" on {worker.slot.device.label}" if len(self._slots) > 1 else ""

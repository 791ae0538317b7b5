"""Give units of work to workers, and replace workers that die, hang or fail.

A unit is queued, leased or done. A worker that dies leaves the jobs that it had begun under suspicion: each is tried
again alone, on a worker that has nothing else. A job is rejected only if it failed alone, twice, on fresh workers.
After three deaths in a row a job that has succeeded before is tried; six in a row end the build, and nothing is
published: a dead device or another program's memory never rejects good samples.

Guarantee: every job ends settled, whichever workers die; after a stop request each worker commits its batches in
hand. The build computes nothing here, so it takes signals at once.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from latentcache.errors import DeviceError, DeviceMemoryError, LatentcacheError, StoreError, WorkerError
from latentcache.fields.protocol import Job
from latentcache.pipeline.devices import Device
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.workers.pool import Progress, RunResult, WorkerPool, WorkUnit
from latentcache.pipeline.workers.process import WorkerHandle
from latentcache.pipeline.workers.transport import Message, as_error
from latentcache.pipeline.workers.watchdog import ENCODING, Activity, ActivityBoard, Watchdog, deadline_s

#: Seconds between two looks at the workers.
_TICK_S = 0.1
#: Deaths in a row after which a known-good job is tried, and that end the build.
_PROBE_AFTER, _MOST_DEATHS = 3, 6
#: Deaths alone on fresh workers that reject a job.
_DEATHS = 2


@dataclass(slots=True, eq=False, kw_only=True)
class _Worker:
    """A worker that runs."""

    handle: WorkerHandle
    shard: str
    threads: int
    watchdog: Watchdog = field(init=False)
    board: ActivityBoard | None = None
    leases: dict[int, WorkUnit] = field(default_factory=dict)
    fresh: bool
    """True until it has encoded a unit, of this field or one before."""
    opened: bool = False
    ending: bool = False
    said_end: bool = False
    is_reusable: bool = False
    """True if it has ended in order and its process waits for another field."""
    error: BaseException | None = None
    suspects: list[int] = field(default_factory=list)
    stuck: str = ""
    late: list[Activity] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """True if it tries a suspicious unit."""
        return any(unit.alone or unit.probe for unit in self.leases.values())

    def job(self, number: int) -> Job | None:
        """One of its jobs."""
        return next((unit.jobs[number] for unit in self.leases.values() if number in unit.jobs), None)

    def settle(self, numbers: Sequence[int]) -> dict[int, Job]:
        """Its jobs of these numbers, which are taken out of their units."""
        settled: dict[int, Job] = {}
        wanted = set(numbers)
        for number, unit in list(self.leases.items()):
            found = {one: unit.jobs[one] for one in wanted.intersection(unit.jobs)}
            settled |= found
            if not unit.probe:
                for one in found:
                    del unit.jobs[one]
                if not unit.jobs:
                    del self.leases[number]
        return settled

    def look(self, elapsed: float) -> None:
        """Kill it if it does not move."""
        self.board = self.board or self.handle.board(self.threads)
        if self.board is None or self.stuck:
            return
        steps = self.board.steps()
        self.stuck = self.watchdog.stuck(self.board.beats, steps, elapsed)
        if self.stuck:
            self.late = self.watchdog.late(steps) or steps
            self.handle.kill()

    def begun(self) -> dict[int, int]:
        """Jobs that it was in the middle of when it ended, with the stage of each."""
        if self.suspects:
            return dict.fromkeys(self.suspects, ENCODING)
        board = self.board or self.handle.board(self.threads)
        steps = self.late or ([] if board is None else board.steps())
        return {item: step.stage for step in steps for item in step.items}


@dataclass(slots=True, eq=False)
class _DeviceSlot:
    """The place of one worker: a device."""

    device: Device
    worker: _Worker | None = None
    started: int = 0


class Scheduler:
    """Runs the units of one field: see :func:`run_jobs`."""

    def __init__(
        self,
        pool: WorkerPool,
        jobs: Iterable[Job],
        *,
        stop: StopSignal,
        advanced: Callable[[Progress], None],
        warn: Callable[[str], None],
    ) -> None:
        self._slots = [_DeviceSlot(device) for device in pool.devices]
        self._pool, self._stop, self._deadline = pool, stop, deadline_s()
        self._advanced, self._warn = advanced, warn
        self._fresh, self._exhausted = pool.units(jobs), False
        self._ahead: deque[WorkUnit] = deque()
        """Units to lease before fresh ones."""
        self._trials: deque[WorkUnit] = deque()
        """Jobs under suspicion."""
        self._good: tuple[int, Job] | None = None
        """A job that has succeeded."""
        self._number = self._streak = 0
        self._selector = selectors.DefaultSelector()
        self._looked_at = time.monotonic()

    def run(self) -> None:
        """Do everything, or as much as there is time for before a stop request."""
        try:
            while not self._stop.requested and (self._waiting() or self._workers()):
                self._start()
                self._lease()
                self._receive()
                self._check_hung()
                self._advanced(self._pool.progress)
        finally:
            late = self._shut_down()
            self._selector.close()
            self._advanced(self._pool.progress)
        if late is not None:
            raise late

    # -- giving out

    def _workers(self) -> list[tuple[_DeviceSlot, _Worker]]:
        return [(slot, slot.worker) for slot in self._slots if slot.worker is not None]

    def _fill(self, count: int) -> None:
        """Take fresh units until so many are at hand."""
        while len(self._ahead) < count and not self._exhausted:
            unit = next(self._fresh, None)
            self._exhausted = unit is None
            if unit is not None:
                self._ahead.append(unit)

    def _waiting(self) -> int:
        """Units that no worker has; one for each device is looked for."""
        self._fill(len(self._slots))
        return len(self._ahead) + len(self._trials) + (self._probe() is not None)

    def _probe(self) -> WorkUnit | None:
        """A job that has succeeded before, if it is time to see that workers still work."""
        probing = any(unit.probe for _, worker in self._workers() for unit in worker.leases.values())
        if self._good is None or self._streak < _PROBE_AFTER or probing:
            return None
        return WorkUnit(jobs=dict([self._good]), probe=True)

    def _start(self) -> None:
        """A worker for each free device, while there is work for it."""
        work = self._waiting() - sum(not worker.leases and not worker.ending for _, worker in self._workers())
        for slot in self._slots:
            if work > 0 and slot.worker is None:
                work -= 1
                slot.worker = self._started(slot)

    def _started(self, slot: _DeviceSlot) -> _Worker:
        handle, head, shard = self._pool.start(slot.device, again=slot.started > 0)
        slot.started += 1
        handle.channel.send("open", **head)
        self._selector.register(handle.channel, selectors.EVENT_READ, slot)
        worker = _Worker(handle=handle, shard=shard, threads=self._pool.threads, fresh=not handle.used)
        worker.watchdog = Watchdog(
            self._deadline,
            on_cpu=slot.device.name == "cpu" or handle.is_thread,
            weight=lambda number: self._pool.deadlines(worker.job(number)),
            heartbeat=not handle.is_thread,
        )
        return worker

    def _lease(self) -> None:
        """Units for workers that run low; the end for all if there is nothing that could come back."""
        workers = [worker for _, worker in self._workers() if not worker.ending]
        for worker in workers:
            while (unit := self._next(worker)) is not None:
                self._pool.bound(worker.handle, alone=unit.alone)
                self._number += 1
                worker.leases[self._number], unit.unmade = unit, len(unit.jobs)
                worker.handle.work(self._number, unit.jobs, known=unit.known, probe=unit.probe)
        if not self._waiting() and not any(worker.leases for _, worker in self._workers()):
            for worker in workers:
                worker.ending = True
                worker.handle.channel.send("stop")

    def _next(self, worker: _Worker) -> WorkUnit | None:
        """The next unit for a worker; suspicious ones only if it has nothing else."""
        if worker.alone or (
            worker.leases and sum(unit.unmade for unit in worker.leases.values()) >= self._pool.low_water
        ):
            return None
        idle = not worker.leases
        probe = self._probe()
        if probe is not None:
            return probe if idle else None
        # Trials come last, when work that is known to be good exists; at once if nothing has succeeded so far.
        early = self._good is None and self._streak >= _PROBE_AFTER and bool(self._trials)
        self._fill(1)
        if self._ahead and not early:
            return self._ahead.popleft()
        return self._trials.popleft() if idle and self._trials else None

    # -- listening

    def _receive(self) -> None:
        for key, _ in self._selector.select(_TICK_S):
            slot: _DeviceSlot = key.data
            if slot.worker is None:
                continue
            for message in slot.worker.handle.channel.arrived():
                self._handle(slot, slot.worker, message)
            if slot.worker.handle.channel.ended or slot.worker.is_reusable:
                self._worker_ended(slot, slot.worker)
        for _, worker in self._workers():
            worker.handle.channel.flush()

    def _handle(self, slot: _DeviceSlot, worker: _Worker, message: Message) -> None:
        if message.kind == "committed":
            self._committed(worker, message)
        elif message.kind == "made":
            worker.fresh = False
            unit = worker.leases.get(message["unit"])
            if unit is not None:
                unit.unmade = 0
            if unit is not None and unit.probe:
                del worker.leases[message["unit"]]
                self._streak = 0
        elif message.kind == "warning":
            self._warn(message["text"] + self._on(slot))
        elif message.kind == "opened":
            worker.opened = True
            self._pool.ended(message)
        elif message.kind == "ended":
            if "error" in message.head:
                worker.error, worker.suspects = as_error(message["error"]), message["suspects"]
            else:
                worker.said_end, worker.is_reusable = True, message["is_reusable"]
                self._pool.ended(message)

    def _committed(self, worker: _Worker, message: Message) -> None:
        """Take what a worker has settled."""
        rows = [row[0] for row in (*message["jobs"], *message["failed"])]
        settled = worker.settle([*message["done"], *rows])
        self._pool.committed(worker.shard, message, settled)
        if settled:
            self._streak = 0
        if (message["jobs"] or message["done"]) and message["encoded"]:
            number = message["done"][-1] if message["done"] else message["jobs"][-1][0]
            self._good = (number, settled[number]) if number in settled else self._good

    def _check_hung(self) -> None:
        """Kill workers that do not move."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        for _, worker in self._workers():
            worker.look(elapsed)

    # -- workers that end

    def _worker_ended(self, slot: _DeviceSlot, worker: _Worker) -> None:
        """A worker has ended: in order, with an error, or by a signal."""
        begun = worker.begun()
        cause = self._disconnect(slot, worker)
        known = self._pool.recovered(worker.shard)
        if worker.said_end and not worker.leases:
            return
        self._pool.progress.restarts += 1
        error = worker.error
        out_of_memory = isinstance(error, MemoryError) and not isinstance(error, DeviceError)
        device_lost = isinstance(error, DeviceError) and not isinstance(error, DeviceMemoryError)
        if device_lost and not worker.handle.is_thread and (worker.opened or slot.started > 1):
            cause, begun = f"lost its device ({_short(error)})", {}
        elif out_of_memory:
            cause = "ran out of memory (MemoryError)"
        elif error is not None:
            raise error
        self._died(slot, worker, begun, known, cause=worker.stuck or cause)

    def _died(self, slot: _DeviceSlot, worker: _Worker, begun: dict[int, int], known: bytes, *, cause: str) -> None:
        """Give out the jobs of a dead worker again; those that it was in the middle of each alone."""
        self._streak += 1
        if self._streak >= _MOST_DEATHS:
            dead = WorkerError(
                "worker processes keep dying",
                where=slot.device.label,
                why=f"the last one {cause}; {_MOST_DEATHS} died in a row, so no sample is to blame",
            )
            raise worker.error if isinstance(worker.error, DeviceError) else dead
        for unit in worker.leases.values():
            suspects = {number: job for number, job in unit.jobs.items() if number in begun}
            self._requeue(unit, {n: job for n, job in unit.jobs.items() if n not in suspects}, known)
            if unit.alone and suspects:
                ((number, job),) = suspects.items()
                self._tried(replace(unit, known=known, deaths=unit.deaths + worker.fresh), job, cause, begun[number])
            elif not unit.probe:
                self._trials += [replace(unit, jobs={n: job}, known=known, alone=True) for n, job in suspects.items()]
        if worker.leases and not worker.alone:
            self._warn(f"a worker process {cause}{self._on(slot)}; its samples are given out again")

    def _tried(self, unit: WorkUnit, job: Job, cause: str, stage: int) -> None:
        """A job has ended its worker, alone: reject it if that was a fresh one for the second time."""
        if unit.deaths < _DEATHS:
            self._trials.appendleft(unit)
        else:
            self._pool.failed(job, self._pool.crash(job, cause, encoding=stage == ENCODING))

    def _requeue(self, unit: WorkUnit, jobs: dict[int, Job], known: bytes) -> None:
        """Queue jobs again that were not begun."""
        if jobs and not unit.probe:
            back = replace(unit, jobs=dict(jobs), known=known)
            (self._trials if unit.alone else self._ahead).appendleft(back)

    # -- the end

    def _shut_down(self) -> LatentcacheError | None:
        """Have every worker commit its batches in hand; one that takes too long is killed.

        Returns:
            What went wrong meanwhile: it replaces no error that ends the run.
        """
        late: LatentcacheError | None = None
        for _, worker in self._workers():
            worker.handle.channel.send("stop")
        began = time.monotonic()
        while self._workers() and time.monotonic() - began < self._stop.patience_s:
            self._selector.select(_TICK_S)
            for slot, worker in self._workers():
                late = self._last_messages(slot, worker) or late
                if worker.handle.channel.ended or worker.is_reusable:
                    self._disconnect(slot, worker)
        for slot, worker in self._workers():
            worker.handle.kill()
            late = self._last_messages(slot, worker) or late
            self._disconnect(slot, worker)
            if not worker.handle.is_thread:  # a thread may still be writing
                with suppress(StoreError):  # the next build seals it
                    self._pool.recovered(worker.shard)
        return late

    def _last_messages(self, slot: _DeviceSlot, worker: _Worker) -> LatentcacheError | None:
        """Take the last commits; gives what went wrong with them."""
        worker.handle.channel.flush()
        try:
            for message in worker.handle.channel.arrived():
                self._handle(slot, worker, message)
        except LatentcacheError as error:
            return error
        return worker.error if isinstance(worker.error, StoreError) else None

    def _disconnect(self, slot: _DeviceSlot, worker: _Worker) -> str:
        """Disconnect a worker; gives how it ended."""
        slot.worker = None
        self._selector.unregister(worker.handle.channel)
        if worker.is_reusable and not worker.leases and self._pool.keep(slot.device, worker.handle):
            return ""
        worker.handle.channel.close()
        return worker.handle.ended()

    def _on(self, slot: _DeviceSlot) -> str:
        return f" on {slot.device.label}" if len(self._slots) > 1 else ""


def _short(error: BaseException | None) -> str:
    """What happened and why, without advice."""
    return ": ".join(part for part in (getattr(error, "what", str(error)), getattr(error, "why", "")) if part)


def run_jobs(
    pool: WorkerPool,
    jobs: Iterable[Job],
    *,
    stop: StopSignal,
    progress: Callable[[Progress], None] = lambda progress: None,
    warn: Callable[[str], None] = lambda message: None,
) -> RunResult:
    """Make the items of all jobs; one that was asked to stop returns with everything committed that workers had.

    Args:
        pool: Of this run.
        jobs: In the order of the plan; taken as workers have room. No jobs: nothing is started.
        stop: Looked at all the time.
        progress: Called ten times a second.
        warn: Told of batches that were halved and workers that were replaced.
    """
    scheduler = Scheduler(pool, jobs, stop=stop, advanced=progress, warn=warn)
    before, stop.orderly = stop.orderly, True
    try:
        scheduler.run()
    finally:
        stop.orderly = before
    return pool.result()

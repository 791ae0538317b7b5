"""Give units of work to workers, and replace workers that die, hang or fail.

A unit is queued, leased or done. Units are cut in the order of the plan. They do not depend on the number of workers,
nor do item keys, item bytes and blocks. If a worker dies, each job that it had begun is tried again alone, on an idle
worker. A job is rejected only if it ended two fresh workers alone, and the second one had just encoded a job that is
known to be good. Six deaths in a row end the build, and nothing is published. So a dead device or another program's
memory never rejects good samples. A device whose workers die rests before the next one starts.

A worker that is lost with its machine blames no job, and no loss ends the build. A unit that was in hand at three
losses is leased alone, then in halves. One job that six machines were lost with ends the build.

Guarantee: every job ends settled, whichever workers die; after a stop request each worker commits its batches in
hand. The build computes nothing here, so it takes signals at once.
"""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any, Self

from latentcache.errors import (
    DeviceError,
    DeviceMemoryError,
    InterruptedBuildError,
    LatentcacheError,
    StoreError,
    WorkerError,
)
from latentcache.fields.protocol import Failure, Job
from latentcache.fields.registry import field_kinds
from latentcache.identity.content import KEY_BYTES
from latentcache.pipeline.workers.batching import cut
from latentcache.pipeline.workers.engine import (
    ENCODING,
    Committed,
    Encoded,
    Ended,
    Engine,
    Opened,
    RunResult,
    Stop,
    Task,
    Warned,
    Work,
    Worker,
    key_list,
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds that running batches may still take after a stop request; a container is killed after 10.
PATIENCE_S = 5.0
#: Seconds between two looks at signals and resting devices.
_TICK_S = 0.1
#: Deaths in a row after which a known-good job is tried, and that end the build.
_PROBE_AFTER, _MOST_DEATHS = 3, 6
#: Losses after which a unit is leased alone and in halves, and that end the build with one job.
_HALVED_AFTER, _MOST_LOSSES = 3, 6
#: Seconds that a device rests after its second death in a row, doubled after each further one, and at most.
_REST_S, _MOST_REST_S = 0.25, 60.0
#: Units of entries that a build has where there are enough jobs, and jobs of one of them at least.
_UNITS, _SMALLEST = 64, 8
#: Jobs that the preparing threads of a worker may have in work; more cores than that do not wait for each other.
_THREADS = 32
#: Keys of a dead worker's last reports that are sent with each of its jobs to the next worker.
_RECENT_KEYS = 4096
#: Seconds that killed workers get to end.
_LAST_S = 3.0


class StopSignal:
    """Context manager that turns SIGINT and SIGTERM into a flag; a second signal ends a build without waiting.

    While a build is planning, nothing is open, and the first signal raises at once. Outside the main thread only
    :meth:`request` sets the flag.
    """

    def __init__(self) -> None:
        self.number = 0
        self.patience_s = PATIENCE_S
        """Seconds that running batches may take; none after a second signal."""
        self.orderly = False
        """Set while work is running: a signal only raises the flag then."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True if the build was asked to end."""
        return self.number != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def request(self, number: int = signal.SIGINT) -> None:
        """Ask the build to end, as a signal would."""
        self.patience_s = 0.0 if self.requested else PATIENCE_S
        self.number = number

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A block in which a signal only raises the flag; the build ends when the block does.

        An exception out of a handler could leave a lock of a thread pool held, and the build would hang in it.
        """
        before = self.orderly
        self.orderly = True
        try:
            yield
        finally:
            self.orderly = before
        if self.requested and not before:
            raise self.error()

    def error(self) -> InterruptedBuildError:
        """The error that the build ends with, once it is requested."""
        name = signal.Signals(self.number).name
        return InterruptedBuildError(
            f"interrupted by {name}", why="all committed work is kept", signal_number=self.number
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(number)
        if not self.orderly:
            raise self.error()


@dataclass(slots=True, eq=False, kw_only=True)
class Unit:
    """Jobs that are leased together."""

    jobs: dict[int, Job]
    """By number. A settled job is taken out."""
    known: bytes = b""
    """Item keys (32 bytes each) that a dead worker committed of them."""
    alone: bool = False
    """One job under suspicion, or a part of a unit that was lost: for a worker that has nothing else."""
    losses: int = 0
    """Workers that were lost with it."""
    probe: bool = False
    """A job that has succeeded before; its result is dropped."""
    suspected: float = math.inf
    """Time at which it first ended a fresh worker alone."""
    unmade: int = 0
    """Jobs that its worker has not encoded yet."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Slot:
    """A device, which has one worker at a time."""

    number: int
    label: str
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
    handle: Worker = field(init=False)
    encoded: bool = False
    """True after it has encoded a job that was not known to be good."""
    succeeded: float = -math.inf
    """Time of its last success."""
    leases: dict[int, Unit] = field(default_factory=dict)
    reported: list[bytes] = field(default_factory=list)
    """Item keys of its commits."""
    opened: bool = False
    ending: bool = False

    @property
    def alone(self) -> bool:
        """True if it tries a suspicious unit."""
        return any(unit.alone or unit.probe for unit in self.leases.values())

    def settle(self, numbers: Sequence[int]) -> dict[int, Job]:
        """Its jobs of these numbers, which are taken out of their units."""
        settled: dict[int, Job] = {}
        for lease, unit in list(self.leases.items()):
            if not unit.probe:
                settled |= {number: unit.jobs.pop(number) for number in numbers if number in unit.jobs}
                if not unit.jobs:
                    del self.leases[lease]
        return settled


class Run:
    """Makes the items of the jobs of one field.

    Device, memory and threads of the ``task`` are those of all workers together; ``jobs`` are taken as workers have
    room. ``results`` may be those of an earlier run of the field. ``good`` are jobs whose items are committed: one is
    encoded again if no other job has succeeded. A run that is asked to ``stop`` returns with everything committed
    that workers had.
    """

    def __init__(
        self,
        task: Task,
        jobs: Iterable[Job],
        *,
        total: int,
        total_cost: int,
        results: RunResult | None = None,
        good: Iterable[Job] = (),
        stop: StopSignal,
        engine: Engine,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._kind = field_kinds()[task.field]
        self._results = results or RunResult(task.field, total, total_cost)
        self._stop, self._engine, self._warn = stop, engine, warn
        self._limit = engine.open(task, total_cost)
        self._slots = dict[int, _Slot]()
        """By number, also devices that are gone."""
        self._num_slots = 1
        self._batch = task.batch_size or self._kind.work.batch_items
        self._left = total
        """Jobs of units that are not cut yet."""
        self._workers: list[_Worker] = []
        self._fresh = self._units(jobs, total)
        self._ahead: deque[Unit] = deque()
        """Units to lease before fresh ones."""
        self._trials: deque[Unit] = deque()
        """Jobs under suspicion."""
        self._good: tuple[int, Job] | None = None
        """A job that has succeeded."""
        self._committed_before = iter(good)
        self._number = self._streak = 0
        self._inbox: queue.SimpleQueue[tuple[_Worker, Any]] = queue.SimpleQueue()

    def run(self, advanced: Callable[[RunResult], None] = lambda results: None) -> RunResult:
        """Do everything, or what a stop request leaves time for; ``advanced`` is called ten times a second."""
        try:
            while not self._stop.requested and (self._waiting() or self._workers):
                self._start()
                self._lease()
                self._receive()
                advanced(self._results)
        finally:
            late = self._shut_down()
            advanced(self._results)
        if late is not None:
            raise late
        self._results.finish()
        return self._results

    # -- giving out

    def _units(self, jobs: Iterable[Job], total: int) -> Iterator[Unit]:
        """Jobs as units; a job for which there is not enough memory fails without being read."""
        work = self._kind.work
        limit = max(self._limit // work.cost_bytes, work.unit_cost)
        most = work.unit_jobs
        if self._kind.packing == "entry":
            most = min(most, max(-(-total // (_UNITS * _SMALLEST)) * _SMALLEST, _SMALLEST))

        def fitting() -> Iterator[tuple[int, Job]]:
            for number, job in enumerate(jobs):
                if job.cost > limit:
                    self._results.fail(job, self._too_large(job))
                else:
                    yield number, job

        for unit in cut(fitting(), lambda numbered: numbered[1].cost, most, work.unit_cost):
            self._left -= len(unit)
            yield Unit(jobs=dict(unit))

    def _fill(self, count: int) -> None:
        """Take fresh units until ``count`` are at hand."""
        self._ahead.extend(islice(self._fresh, max(count - len(self._ahead), 0)))

    def _waiting(self) -> int:
        """Units that no worker has; one for each device is looked for."""
        self._fill(self._num_slots)
        return len(self._ahead) + len(self._trials) + (self._probe() is not None)

    def _probe(self) -> Unit | None:
        """A job that is known to be good, if it is time to see that workers still work."""
        probing = any(unit.probe for worker in self._workers for unit in worker.leases.values())
        return None if self._streak < _PROBE_AFTER or probing else self._known_good()

    def _known_good(self) -> Unit | None:
        if self._good is None:
            self._good = next(((-1, job) for job in self._committed_before), None)
        return None if self._good is None else Unit(jobs=dict([self._good]), probe=True)

    def _start(self) -> None:
        """A worker for each free device, while there is work for it."""
        labels = self._engine.slots()
        self._num_slots = max(len(labels), 1)
        idle = sum(not worker.leases and not worker.ending for worker in self._workers)
        now = time.monotonic()
        taken = {worker.slot.number for worker in self._workers}
        slots = [self._slots.setdefault(number, _Slot(number=number, label=labels[number])) for number in labels]
        free = [slot for slot in slots if slot.number not in taken and slot.rests_until <= now]
        for slot in free[: max(self._waiting() - idle, 0)]:
            worker = _Worker(slot=slot)
            worker.handle = self._engine.start(slot.number, partial(self._post, worker))
            self._workers.append(worker)

    def _post(self, worker: _Worker, message: Any) -> None:
        """Take a message, in any thread."""
        self._inbox.put((worker, message))

    def _lease(self) -> None:
        """Units for workers that run low; the end for all if there is nothing that could come back."""
        workers = [worker for worker in self._workers if not worker.ending]
        for worker in workers:
            while (unit := self._next(worker)) is not None:
                self._number += 1
                worker.leases[self._number], unit.unmade = unit, len(unit.jobs)
                work = Work(self._number, unit.jobs, known=unit.known, alone=unit.alone, probe=unit.probe)
                worker.handle.send(work)
        if not self._waiting() and not any(worker.leases for worker in self._workers):
            for worker in workers:
                worker.ending = True
                worker.handle.send(Stop())

    def _next(self, worker: _Worker) -> Unit | None:
        """The next unit for a worker; suspicious ones only if it has nothing else."""
        leases = worker.leases.values()
        # Towards the end workers take less ahead, so slow ones do not keep the others waiting.
        ahead = min(2 * max(self._batch, _THREADS), max(self._left // self._num_slots, self._batch))
        if worker.alone or (leases and sum(unit.unmade for unit in leases) >= ahead):
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
        unproven = worker.succeeded <= self._trials[0].suspected < math.inf
        return (self._known_good() if unproven else None) or self._trials.popleft()

    # -- listening

    def _receive(self) -> None:
        """Take the messages that are there, or one that comes within a tick."""
        for _ in range(max(self._inbox.qsize(), 1)):
            try:
                worker, message = self._inbox.get(timeout=_TICK_S)
            except queue.Empty:
                return
            if isinstance(message, Ended):
                self._ended(worker, message)
            else:
                self._take(worker, message)

    def _take(self, worker: _Worker, message: Any) -> None:
        match message:
            case Committed():
                self._committed(worker, message)
            case Encoded():
                unit = worker.leases.get(message.unit)
                worker.encoded = worker.encoded or unit is None or not unit.probe
                if unit is not None:
                    unit.unmade = 0
                    if unit.probe:
                        del worker.leases[message.unit]
                        self._succeeded(worker)
            case Warned():
                self._warn(message.text + self._on(worker))
            case Opened():
                worker.opened = True
                self._results.opened(message)

    def _committed(self, worker: _Worker, message: Committed) -> None:
        """Take what a worker has settled."""
        settled = worker.settle([*message.done, *(number for number, _ in message.failed)])
        worker.reported.append(message.keys)
        self._results.committed(message, settled)
        if settled:
            self._streak = 0
        good = message.done
        if good and message.encoded and good[-1] in settled:
            self._good = (good[-1], settled[good[-1]])
            self._succeeded(worker)

    def _succeeded(self, worker: _Worker) -> None:
        self._streak = worker.slot.deaths = 0
        worker.succeeded = time.monotonic()

    # -- workers that end

    def _ended(self, worker: _Worker, end: Ended) -> None:
        """A worker has ended: in order, with an error, or by a signal."""
        self._workers.remove(worker)
        self._results.ended(end)
        if not end.died and not worker.leases:
            worker.reported.clear()  # its process may wait for the next field
            return
        known, begun, cause = self._recovered(worker, end), end.begun, end.how
        self._results.restarts += 1
        match end.error:
            case DeviceMemoryError():
                raise end.error
            case DeviceError() if any(running.opened for running in (worker, *self._workers)):
                cause = f"lost its device ({', '.join(filter(None, (end.error.what, end.error.why)))})"
                begun = {}
            case MemoryError():
                end = end._replace(out_of_memory=True)
                cause = "ran out of memory (MemoryError)"
            case BaseException():
                raise end.error
        if end.lost:
            self._lost(worker, known, cause)
        else:
            self._died(worker, end._replace(begun=begun, how=cause), known)

    def _recovered(self, worker: _Worker, end: Ended) -> bytes:
        """Take the item keys that a dead worker committed and did not report; gives its last ones."""
        reported = b"".join(worker.reported)
        known = set(key_list(reported))
        new = [key for key in key_list(end.keys) if key not in known]
        self._results.take_keys(b"".join(new), len(new))
        return reported[-_RECENT_KEYS * KEY_BYTES :] + b"".join(new)

    def _lost(self, worker: _Worker, known: bytes, cause: str) -> None:
        """Give out the units of a lost worker again; in halves if several were lost with them."""
        for unit in worker.leases.values():
            numbers = list(unit.jobs)
            losses = unit.losses + 1
            if unit.probe:
                continue
            if losses >= _MOST_LOSSES:
                name = unit.jobs[numbers[0]].name
                raise WorkerError(
                    "workers are lost again and again",
                    where=worker.slot.label,
                    why=f"the last one {cause}; {losses} were lost with {name}, the last ones with it alone",
                    fix=f"move {name} elsewhere, or use machines with more memory, and build again",
                )
            size = len(numbers)
            alone = unit.alone or losses >= _HALVED_AFTER
            if losses >= _HALVED_AFTER and size > 1:
                size = -(-size // 2)
                losses = _HALVED_AFTER - 1
            for start in range(0, len(numbers), size):
                jobs = {number: unit.jobs[number] for number in numbers[start : start + size]}
                part = replace(unit, jobs=jobs, known=unit.known + known, alone=alone, losses=losses)
                (self._trials if alone else self._ahead).append(part)
        self._warn(f"a worker {cause}{self._on(worker)}; its samples are given out again")

    def _died(self, worker: _Worker, end: Ended, known: bytes) -> None:
        """Give out the jobs of a dead worker again; those that it was in the middle of each alone."""
        self._streak += 1
        worker.slot.rest()
        is_fresh = end.is_new and not worker.encoded
        if self._streak >= _MOST_DEATHS:
            raise end.error if isinstance(end.error, DeviceError) else self._dead(worker, end)
        for unit in worker.leases.values():
            if unit.probe:
                continue
            unit.known += known
            rest = {number: job for number, job in unit.jobs.items() if number not in end.begun}
            if rest:
                (self._trials if unit.alone else self._ahead).appendleft(replace(unit, jobs=rest))
            for number in [number for number in unit.jobs if number in end.begun]:
                suspect = replace(unit, jobs={number: unit.jobs[number]}, alone=True)
                if unit.alone and is_fresh and worker.succeeded > unit.suspected:
                    self._quarantine(unit.jobs[number], end, encoding=end.begun[number] == ENCODING)
                    continue
                if unit.alone and is_fresh:
                    suspect.suspected = min(unit.suspected, time.monotonic())
                self._trials.append(suspect)
        if worker.leases and not worker.alone:
            self._warn(f"a worker process {end.how}{self._on(worker)}; its samples are given out again")

    def _dead(self, worker: _Worker, end: Ended) -> WorkerError:
        """The error of too many deaths in a row."""
        names = [job.name for unit in worker.leases.values() if unit.alone for job in unit.jobs.values()]
        why, fix = "so no sample is to blame", ""
        if self._good is None and names:
            why = f"the last one with {names[0]} alone, and there is no other sample to compare with"
            fix = f"move {names[0]} elsewhere, or add samples and build again"
        return WorkerError(
            "worker processes keep dying",
            where=worker.slot.label,
            why=f"the last one {end.how}; {_MOST_DEATHS} died in a row, {why}",
            fix=fix,
        )

    def _quarantine(self, job: Job, end: Ended, *, encoding: bool) -> None:
        """Reject a job that ends its workers; the detail has their last line on stderr."""
        detail = f"a worker process {end.how} whenever it {'encoded' if encoding else 'prepared'} this sample"
        reason = "encoder-crash" if encoding else "decoder-crash"
        failure = Failure(reason=reason, detail=detail, content=job.content)
        self._results.fail(job, self._too_large(job, end.how) if end.out_of_memory else failure)

    def _too_large(self, job: Job, cause: str = "") -> Failure:
        needed = job.cost * self._kind.work.cost_bytes
        reason = f"a worker {cause}" if cause else f"needs about {needed:,} bytes to be prepared"
        return Failure(
            reason="out-of-memory",
            detail=f"its size is {job.cost:,} and it {reason}; --host-memory is {self._limit:,}",
            hint="give more memory with --host-memory, or leave the sample out",
            content=job.content,
        )

    # -- the end

    def _shut_down(self) -> LatentcacheError | None:
        """Have every worker commit its batches, or be killed; gives what went wrong but replaces no earlier error."""
        late: LatentcacheError | None = None
        for worker in self._workers:
            worker.handle.send(Stop())
        began = time.monotonic()
        killed = math.inf
        while self._workers and time.monotonic() < killed + _LAST_S:
            if killed == math.inf and time.monotonic() - began >= self._stop.patience_s:
                killed = time.monotonic()
                for worker in self._workers:
                    worker.handle.kill()
            try:
                worker, message = self._inbox.get(timeout=_TICK_S)
                if not isinstance(message, Ended):
                    self._take(worker, message)
                    continue
                self._workers.remove(worker)
                self._results.ended(message)
                self._recovered(worker, message)
                if isinstance(message.error, StoreError) and killed == math.inf:
                    late = message.error
            except queue.Empty:
                continue
            except LatentcacheError as error:
                late = error
        return late

    def _on(self, worker: _Worker) -> str:
        return f" on {worker.slot.label}" if self._num_slots > 1 else ""

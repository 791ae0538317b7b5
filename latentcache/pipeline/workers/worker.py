"""One worker: reads, encodes and commits the units it is given; and the process around it.

The process ignores SIGINT and SIGTERM: signals to the whole group are left to the build. If the build is gone, it
commits its finished work and ends within :data:`LAST_S`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import queue
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from latentcache.failpoint import VARIABLE, arm, failpoint
from latentcache.fields.protocol import Failure, Made, Prepared, Producer, ProducerContext
from latentcache.fields.registry import field_kinds, load
from latentcache.pipeline.workers.batching import (
    Batches,
    OpenUnit,
    PendingItem,
    Result,
    TrackedJob,
    Tracker,
    attempt,
    num_bytes,
    read_inputs,
)
from latentcache.pipeline.workers.engine import (
    ENCODING,
    IDLE,
    OPENING,
    PREPARING,
    Beat,
    Committed,
    Encoded,
    Ended,
    Opened,
    Post,
    Step,
    Stop,
    Task,
    Warned,
    Work,
    key_list,
    portable,
)
from latentcache.pipeline.workers.resources import ByteBudget, rare_gc
from latentcache.pipeline.workers.writer import WriterThread
from latentcache.store.catalog import Catalog
from latentcache.store.entry import Item, NewEntry, pack_items
from latentcache.store.paths import CachePaths
from latentcache.store.remote.view import Uploads
from latentcache.store.shard import load_index

#: Seconds after which the loop looks if it was asked to stop.
_TICK_S = 0.05
#: Seconds that the end of a worker waits for jobs that are being prepared; the threads end with the process anyway.
_JOIN_S = 3.0
#: Seconds that a worker process may outlive its build.
LAST_S = 8
#: Seconds between two heartbeats.
BEAT_S = 0.5
#: The thread that encodes; those behind it prepare.
_ENCODER = 0
#: How much preparing threads give way to the thread that encodes, which has no substitute. On two cores beside an
#: encoder of one thread: 0.89 of the encoder's own rate instead of 0.79 (medians of five rounds, better in four).
_NICER = 10

Outcome = Sequence[Prepared] | Failure | BaseException
"""Result of preparing a job."""


class WorkerLoop:
    """A worker at work: a loop that encodes, preparing threads, a writer thread. Each of them may ``post`` a message.

    Messages are those of ``engine``, and :class:`Step` before each step.
    """

    def __init__(self, task: Task, post: Post) -> None:
        self.task, self.post = task, post
        self.kind = field_kinds()[task.field]
        self.recipe = self.kind.recipe.from_json(task.recipe)
        self.producer_class: type[Producer] = load(self.kind.producer)
        self.catalog = Catalog([load_index(Path(folder)) for folder in task.shards]) if task.shards else None
        self.jobs = Tracker(self.kind, self.recipe, task.groups, self.catalog)
        self.writer = WriterThread(
            CachePaths(Path(task.cache)).shards,
            task.shard,
            self._committed,
            owner=task.owner,
            commit_every=task.commit_every,
            sealed=self._sealed if task.url else None,
        )
        self.uploads = Uploads(task.url) if task.url else None
        self._unsent: list[Committed] = []
        """Reports of commits whose shard is not at the URL yet."""
        self.budget = ByteBudget(task.host_memory or 0)
        self.batches = Batches(self.kind, self.recipe.spec, task, self._warn)
        self.stopping = threading.Event()
        self.waits: dict[str, float] = defaultdict(float)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._to_prepare: queue.SimpleQueue[TrackedJob | None] = queue.SimpleQueue()
        self._remaining = 0
        self._units: dict[int, OpenUnit] = {}
        self._flushed = self._opened = False

    def run(self) -> None:
        """Do the work until :meth:`stop` is called. Raises the error that ends it."""
        threads: list[threading.Thread] = []
        producer: Producer | None = None
        try:
            with self._step(_ENCODER, OPENING):
                context = ProducerContext(
                    root=self.task.root,
                    device=self.task.device,
                    groups=self.task.groups,
                    options=self.task.options,
                    warn=self._warn,
                )
                producer = self.producer_class(self.task.producer, self.recipe, context)
                self.batches.producer = producer
            for number in range(self.task.decode_threads or 1):
                arguments = (producer, _ENCODER + 1 + number)
                threads.append(threading.Thread(target=self._prepare_all, args=arguments, daemon=True))
                threads[-1].start()
            self._loop()
        finally:
            self._end(threads, producer)

    # -- called by other threads

    def feed(self, work: Work) -> None:
        """Take a unit; preparing begins whatever the loop is doing."""
        self.jobs.committed.update(key_list(work.known))
        unit = OpenUnit(work.unit, len(work.jobs), probe=work.probe)
        tracked = [TrackedJob(index, job, unit) for index, job in work.jobs.items()]
        self._inbox.put(unit)
        hashed = [job for job in tracked if job.job.content]
        self.jobs.look_up(hashed, [job.job.content for job in hashed])
        if self.producer_class.prepare is Producer.prepare and len(hashed) == len(tracked):
            self._inbox.put(tracked)
        else:
            for job in tracked:
                self._to_prepare.put(job)

    def stop(self) -> None:
        """End the loop at once."""
        self.stopping.set()
        self._inbox.put(None)

    def abandon(self) -> None:
        """Commit what is finished and write nothing more; for a worker in a thread that hangs."""
        self.stopping.set()
        self.budget.close()
        self.writer.finish()
        if self.uploads is not None:
            self.uploads.wait()

    # -- the loop

    def _open(self) -> None:
        """Before the first item that has to be encoded."""
        if not self._opened:
            with self._step(_ENCODER, OPENING):
                self.batches.producer.open()
            self._opened = True
            self.post(Opened(dict(self.batches.producer.noise)))

    def _loop(self) -> None:
        while not self.stopping.is_set():
            message = self._next()
            if isinstance(message, OpenUnit):
                self._units[message.number] = message
                self._remaining += message.unmade
            elif isinstance(message, list):
                self._take_all(message)
            elif message is not None:
                self._remaining -= 1
                self._take(*message)
            elif self._hurry():
                self._encode(self.batches.take())
            last = not self._remaining and not self.batches.waiting
            self._fetch(wait=last)
            idle = last and not self.batches.in_flight
            if idle and not self._flushed:
                self.writer.put(())  # nothing is left to wait for
            self._flushed = idle
            if idle:
                self.writer.check()  # it fails on its own, and no further put() would raise it
                if self.uploads is not None:
                    self.uploads.check()
        self._fetch(wait=True)
        for unit in self._units.values():
            self.writer.put(self._packed(unit), unit.finished)

    def _next(self) -> Any:
        """A unit, a prepared job, or None; without waiting if a batch has to be encoded first."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get_nowait()
        if self._hurry():
            return None
        stage = "encode" if self.batches.in_flight else "prepare" if self._remaining else "idle"
        with self._clock(stage), contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=_TICK_S)
        return None

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.waits[stage] += time.monotonic() - started

    def _hurry(self) -> bool:
        """True if a batch has to go now: no job is left to prepare, or a thread waits for memory that items hold."""
        waiting = self.batches.waiting
        if not waiting or not self._remaining:
            return bool(waiting)
        return self.budget.starving(sum(map(num_bytes, waiting.values())) + num_bytes(self.batches.in_flight))

    def _take(self, tracked: TrackedJob, outcome: Outcome) -> None:
        """Queue the items of a prepared job."""
        if isinstance(outcome, BaseException):
            outcome.add_note(f"preparing {tracked.job.name} failed")
            raise outcome
        if isinstance(outcome, Failure):
            tracked.fail(outcome)
            self._made([tracked])
            return
        tracked.unmade = len(outcome)
        for prepared in outcome:
            self._queue(PendingItem(tracked, prepared))
        if not outcome:
            self._made([tracked])

    def _take_all(self, unit: Sequence[TrackedJob]) -> None:
        """Queue the items of jobs that need no preparing."""
        failpoint("decoding")
        self._remaining -= len(unit)
        for tracked in unit:
            if self.stopping.is_set():
                return
            self._take(tracked, self._prepared(tracked, tracked.job.content, {}))

    def _queue(self, item: PendingItem) -> None:
        """Copy a committed item that was made from exactly the same encoder input, or wait for a batch."""
        if self.catalog is not None and item.prepared.same and not item.owner.unit.probe:
            number = self.catalog.find_same(item.prepared.same, item.key)
            if number >= 0 and (stored := self.catalog.item(number)) is not None:
                self.jobs.copied.add(item.key)
                self._store([(item, Made(array=stored.array, columns=stored.columns))])
                return
        self._open()
        if batch := self.batches.add(item):
            self._encode(batch)

    def _encode(self, items: Sequence[PendingItem]) -> None:
        with self._encoding([item.owner for item in items]):
            failpoint("encoding")
            done = self.batches.submit(items)
        self._store(done)

    def _fetch(self, *, wait: bool) -> None:
        if self.batches.in_flight:
            with self._encoding():
                done = self.batches.collect(wait=wait)
            self._store(done)

    @contextmanager
    def _encoding(self, jobs: Sequence[TrackedJob] = ()) -> Iterator[None]:
        """If the process ends in the block, one of these jobs may be the cause, or of those on the device."""
        every = [*(item.owner for item in self.batches.in_flight), *jobs]
        with self._step(_ENCODER, ENCODING, *(tracked.index for tracked in every)), self._clock("encode"):
            yield

    @contextmanager
    def _step(self, thread: int, stage: int, *jobs: int) -> Iterator[None]:
        """Report the step of this thread while the block runs; after an error it stays, to name its jobs."""
        self.post(Step(thread, stage, jobs))
        yield
        self.post(Step(thread, IDLE))

    # -- results

    def _store(self, results: Sequence[Result]) -> None:
        """Hand encoded items to the writer; small ones when their unit is complete."""
        done: list[TrackedJob] = []
        for item, result in results:
            tracked, prepared = item.owner, item.prepared
            self.budget.release(prepared.num_bytes)
            failure = result if isinstance(result, Failure) else self.kind.check(result.array, self.recipe)
            if failure is not None:
                tracked.fail(failure)
            elif isinstance(result, Made) and not tracked.unit.probe:
                columns = {**result.columns, **prepared.columns}
                stored = Item(key=item.key, array=result.array, same=prepared.same, columns=columns)
                tracked.unit.items.append((prepared.output.item, stored))
            tracked.unmade -= 1
            if not tracked.unmade:
                done.append(tracked)
        self._made(done)

    def _made(self, jobs: Sequence[TrackedJob]) -> None:
        """Jobs are encoded, or have failed. Small items are packed when their unit is complete."""
        entries: list[NewEntry] = []
        settled: list[TrackedJob] = []
        for tracked in jobs:
            unit = tracked.unit
            unit.finished.append(tracked)
            unit.unmade -= 1
            if self.kind.packing == "entry" or not unit.unmade:
                entries += self._packed(unit)
                settled += unit.finished
                unit.finished = []
        if settled:
            with self._clock("write"):
                self.writer.put(entries, settled)
        for number in {tracked.unit.number for tracked in jobs if not tracked.unit.unmade}:
            del self._units[number]
            self.post(Encoded(number))

    def _packed(self, unit: OpenUnit) -> list[NewEntry]:
        """The items of a unit that wait, in the order of the plan."""
        items = [item for _, item in sorted(unit.items, key=lambda numbered: numbered[0])]
        unit.items = []
        return pack_items(items, self.recipe, self.kind) if items else []

    def _committed(self, entries: Sequence[NewEntry], jobs: Sequence[TrackedJob]) -> None:
        """Report a durable commit and the jobs that it settles; called by the writer thread."""
        keys = [key for entry in entries for key in entry.item_keys]
        report = self.jobs.report(keys, jobs, sum(len(entry.value) for entry in entries))
        if self.uploads is None:
            self.post(report)
        else:
            self._unsent.append(report)

    def _sealed(self, folder: Path | None) -> None:
        """Send a sealed shard, and report its commits once it is sent; called by the writer thread."""
        assert self.uploads is not None
        reports = self._unsent
        self._unsent = []
        self.uploads.put(folder, lambda: [self.post(report) for report in reports])

    def _warn(self, message: str) -> None:
        self.post(Warned(message))

    # -- preparing

    def _prepared(
        self, tracked: TrackedJob, content: bytes, data: Mapping[str, bytes]
    ) -> Sequence[Prepared] | Failure:
        """The items of a job that are still to be made, given the content hash of its inputs."""
        outputs = tuple(self.jobs.missing(tracked, content))
        if not outputs:
            return []
        items = self.batches.producer.prepare(
            dataclasses.replace(tracked.job, content=content, outputs=outputs), data
        )
        if not isinstance(items, Failure) and [item.output for item in items] != list(outputs):
            raise RuntimeError(f"{self.kind.name}: {tracked.job.name} was prepared without some of its outputs")
        return items

    def _read(self, tracked: TrackedJob) -> Sequence[Prepared] | Failure:
        """Read and prepare a job."""
        inputs = read_inputs(self.task.root, tracked.job)
        tracked.read = inputs._replace(data={})
        return self._prepared(tracked, inputs.content, inputs.data)

    def _prepare_all(self, producer: Producer, number: int) -> None:
        """One preparing thread; ends at its first error, which the loop raises."""
        if sys.platform == "linux":
            os.nice(_NICER)  # of this thread alone
        if "torch" in sys.modules:
            from latentcache.images.resize import thread_setup

            thread_setup()
        while (tracked := self._to_prepare.get()) is not None and not self.stopping.is_set():
            try:
                outcome: Outcome | None = self._prepare(producer, tracked, number)
            except BaseException as error:  # noqa: BLE001 - a dead thread would hang the build: the loop raises it
                outcome = error
            if outcome is not None:
                self._inbox.put((tracked, outcome))
            if outcome is None or isinstance(outcome, BaseException):
                return

    def _prepare(self, producer: Producer, tracked: TrackedJob, thread: int) -> Sequence[Prepared] | Failure | None:
        """Prepare a job while holding the bytes it needs; None if the worker is ending."""
        needed = producer.host_bytes(tracked.job) or self.kind.work.cost_bytes * tracked.job.cost
        if not self.budget.acquire(needed):
            return None
        with self._step(thread, PREPARING, tracked.index):
            failpoint("decoding")
            outcome = attempt(lambda: self._read(tracked), bounded=self.task.bounded)
        kept = 0 if isinstance(outcome, Failure) else sum(item.num_bytes for item in outcome)
        self.budget.release(needed - kept)
        return outcome

    def _end(self, threads: Sequence[threading.Thread], producer: Producer | None) -> None:
        self.stopping.set()
        self.budget.close()
        for _ in threads:
            self._to_prepare.put(None)
        until = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        try:
            self.writer.finish()
            if self.uploads is not None:
                self.uploads.wait()
        finally:
            if producer is not None:
                producer.close()


class Question(NamedTuple):
    """To a worker process: call ``module:function``."""

    target: str
    device: str
    arguments: Mapping[str, Any]


class Answer(NamedTuple):
    """From a worker process: what the function returned or raised."""

    value: Any = None
    error: BaseException | None = None


def answer(question: Question) -> Answer:
    """Call the function; ``device`` is added if the function takes it."""
    try:
        function = load(question.target)
        arguments = question.arguments
        if "device" in inspect.signature(function).parameters:
            arguments = {"device": question.device, **arguments}
        return Answer(value=function(**arguments))
    except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
        return Answer(error=portable(error))


def run_loop(loop: WorkerLoop) -> None:
    """Do the work of one field and say how it ended."""
    try:
        loop.run()
    except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
        loop.post(Ended(error=portable(error), waits=dict(loop.waits)))
    else:
        loop.post(Ended(waits=dict(loop.waits)))


class _Server:
    """The process: its connection, and the field in work."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._loop: WorkerLoop | None = None
        self._thread: threading.Thread | None = None

    def send(self, message: Any) -> None:
        """Send a message, from any thread; nothing happens if the build is gone."""
        with self._sending, suppress(OSError):
            self._connection.send(message)

    def serve(self) -> None:
        """Take messages until the build is gone; a field is made in a thread of its own."""
        threading.Thread(target=self._watch, name="build-watch", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        with suppress(EOFError, OSError):
            while True:
                self._take(self._connection.recv())
        self._end()

    def _take(self, message: Question | Task | Work | Stop) -> None:
        try:
            match message:
                case Question():
                    self.send(answer(message))
                case Task():
                    self._loop = WorkerLoop(message, self.send)
                    self._thread = threading.Thread(target=run_loop, args=(self._loop,))
                    self._thread.start()
                case Work() if self._loop is not None:
                    self._loop.feed(message)
                case Stop() if self._loop is not None:
                    self._loop.stop()
        except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
            self.send(Ended(error=portable(error)))

    def _beat(self) -> None:
        while True:
            self.send(Beat())
            time.sleep(BEAT_S)

    def _watch(self) -> None:
        """See that the build is gone: a fork of it may hold its end of the connection open."""
        build = os.getppid()
        while os.getppid() == build:
            time.sleep(BEAT_S)
        self._end()

    def _end(self) -> None:
        """Commit finished work and leave."""
        signal.alarm(LAST_S)
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._loop.stop()
            self._loop.budget.close()
            self._thread.join()
        os._exit(0)


def main() -> None:
    """A worker process: ``sys.argv`` has the import path, the connection and the build's process id."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
    arm(os.environ.get(VARIABLE), build=int(sys.argv[3]))
    with rare_gc():  # an import of torch and diffusers takes a fifth longer with them
        _Server(Connection(int(sys.argv[2]))).serve()

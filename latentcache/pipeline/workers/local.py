"""The engine of one machine: workers are processes, or one thread of the build.

A worker process is a fresh interpreter, never a fork: threads and CUDA do not survive one. It is in the process group
of the build, so job control and ``kill`` of the group reach all processes. It inherits its end of the connection and
the lock of the cache. The lock is held until the last worker has ended. Threads of the build send and receive, so the
build never waits for a worker. Another one reads its stderr and keeps the end of it. Cost: 0.3 s of one core for a
process, nothing for a thread.

A worker reports each step (stage and jobs) before it begins. A report is in the system's hands once it is sent, so it
outlives the worker. The watchdog decides by progress, not by clocks. A look counts for one second at most, so a build
that was itself stopped or asleep accuses no worker. Waiting for a disk or for memory is not a step and has no
deadline.

A process that has ended a field in order waits for the next field, or for a question. So torch is imported once.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from latentcache import failpoint
from latentcache.errors import UsageError, WorkerError
from latentcache.fields.protocol import FieldKind
from latentcache.fields.registry import field_kinds
from latentcache.pipeline.workers.engine import (
    IDLE,
    OPENING,
    PREPARING,
    Beat,
    Ended,
    Post,
    Step,
    Stop,
    Task,
    Work,
)
from latentcache.pipeline.workers.resources import (
    BASE_BYTES,
    Device,
    default_budget,
    default_threads,
    default_workers,
    devices_for,
    host_memory,
    limit_memory,
)
from latentcache.pipeline.workers.worker import Answer, Question, WorkerLoop, run_loop
from latentcache.store.paths import OPEN_SUFFIX, CachePaths
from latentcache.store.shard import load_index

#: Seconds without progress after which a worker is killed; a 100-megapixel PNG takes 8 s, loading a model minutes.
DEADLINE_S = 120.0
VARIABLE = "LATENTCACHE_WORKER_DEADLINE"
#: Deadlines that opening an encoder may take; items of a batch that count as one more deadline on an accelerator.
_OPENING, _BATCH = 10, 8
#: Seconds of the time between two looks that count.
_MOST_S = 1.0


def deadline_s() -> float:
    """Seconds without progress: :data:`DEADLINE_S`, or the value of :data:`VARIABLE`."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else DEADLINE_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"{VARIABLE}={text}: not a positive number of seconds", fix=f"unset {VARIABLE}")
    return seconds


class Watchdog:
    """Looks at one worker again and again; ``on_cpu`` a batch takes as long as its items together.

    One thread takes its reports, and another one looks.
    """

    def __init__(self, deadline: float, *, on_cpu: bool) -> None:
        self._deadline, self._on_cpu = deadline, on_cpu
        self._has_beaten, self._is_silent = False, False
        self._silent_s = 0.0
        self._steps: dict[int, tuple[Step, list[float]]] = {}
        """By thread: its step, and the seconds since it began."""

    def report(self, report: Step | Beat) -> None:
        """Take what a worker reports."""
        if isinstance(report, Beat):
            self._has_beaten, self._is_silent = True, False
        elif report.stage == IDLE:
            self._steps.pop(report.thread, None)
        else:
            self._steps[report.thread] = (report, [0.0])

    @property
    def begun(self) -> dict[int, int]:
        """Number -> stage of the jobs that are in work."""
        return {job: step.stage for step, _ in list(self._steps.values()) for job in step.jobs}

    def stuck(self, elapsed: float) -> str:
        """Return the reason to kill the worker, or an empty one. Call it more often than once a second."""
        elapsed = min(elapsed, _MOST_S)
        self._silent_s = self._silent_s + elapsed if self._is_silent else 0.0
        self._is_silent = True
        # Before the first beat it is being started.
        if self._silent_s > self._deadline * (1 if self._has_beaten else _OPENING):
            return f"has shown no sign of life for {self._silent_s:.0f} s"
        late = ""
        for step, age in list(self._steps.values()):
            age[0] += elapsed
            if age[0] > self._allowed(step):
                late = f"has not moved for {age[0]:.0f} s"
        return late

    def _allowed(self, step: Step) -> float:
        if step.stage == OPENING:
            return _OPENING * self._deadline
        count = len(step.jobs)
        return self._deadline * max(count if self._on_cpu or step.stage == PREPARING else 1 + count / _BATCH, 1)


_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from latentcache.pipeline.workers.worker import main; main()"
)
_DEBUG = "LATENTCACHE_DEBUG"
_TAIL_BYTES = 2000
#: Lines on a failed allocation of Rust, C++, the C library and Python. A library that runs out of memory aborts
#: (SIGABRT, as after any fault): no exit status shows it.
_NO_MEMORY = re.compile(
    r"memory allocation of \d+ bytes failed|bad_alloc|MemoryError|[Oo]ut of memory|Cannot allocate memory"
)
_REAP_S, _LAST_S = 10.0, 1.0
#: Seconds between two looks at the workers.
_LOOK_S = 0.1
#: One core for each of several CPU workers.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class _Watched(ABC):
    """A worker that is killed if it does not move."""

    def __init__(self, *, on_cpu: bool) -> None:
        self._watchdog = Watchdog(deadline_s(), on_cpu=on_cpu)
        self._stuck = ""
        self._task: Task | None = None
        self._post: Post | None = None
        """Takes its messages; None while it waits for a field or a question."""

    def look(self, elapsed: float) -> None:
        """Kill it if it did not move for too long; ``elapsed`` seconds ago was the last look."""
        if self._post is not None and not self._stuck:
            self._stuck = self._watchdog.stuck(elapsed)
            if self._stuck:
                self.kill()

    @abstractmethod
    def kill(self) -> None:
        """See :class:`Worker`."""

    def _dead(self, last: Ended, how: str) -> Ended:
        """Its end, after its shard was sealed."""
        no_memory = bool(_NO_MEMORY.search(self._stuck or how))
        end = last._replace(died=True, how=self._stuck or how, begun=self._watchdog.begun, out_of_memory=no_memory)
        if self._task is None:
            return end
        try:
            return end._replace(keys=recovered(self._task))
        except BaseException as error:  # noqa: BLE001 - raised by the scheduler
            return end._replace(error=error)


class WorkerProcess(_Watched):
    """A worker in a process of its own, which inherits the ``lock`` on the cache; ``again``: it replaces another."""

    def __init__(self, device: Device, *, lock: int | None = None, again: bool = False) -> None:
        super().__init__(on_cpu=device.name == "cpu")
        self.device = device
        self._is_new = True
        self.end: Ended | None = None
        """Set when it is gone."""
        self._printed = b""
        self._budget = 0
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._connection, theirs = Pipe()
        # Without the threshold glibc keeps the memory of large images: it raises the limit by itself. At 1 MiB every
        # crop is mapped anew, which takes a quarter of the CPU time of 2 MP images.
        environment = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20)} | os.environ | dict(device.variables)
        if again:
            environment.pop(failpoint.VARIABLE, None)
        options = ("-X", "utf8") if sys.flags.utf8_mode else ()
        words = json.dumps(import_path()), str(theirs.fileno()), str(os.getpid())
        self._process = subprocess.Popen(
            # -P, and the working directory last: a json.py that lies there is not imported.
            [sys.executable, *options, "-P", "-c", _CHILD, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get(_DEBUG) else subprocess.PIPE,
            env=environment,
            pass_fds=(theirs.fileno(), *(() if lock is None else (lock,))),
        )
        theirs.close()
        self.pid = self._process.pid
        targets = (self._read_stderr, self._send_all, self._receive_all)
        self._threads = [threading.Thread(target=target, name=target.__name__, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def open(self, task: Task, post: Post, *, budget: int) -> None:
        """Begin a field; ``budget`` is the memory of all workers, for a job that is tried alone."""
        self._task, self._budget = task, budget
        self._begin(task, post)

    def ask(self, question: Question, post: Post) -> None:
        """Put a question, which has the deadline of opening an encoder."""
        self._watchdog.report(Step(0, OPENING))
        self._begin(question, post)

    def send(self, message: Task | Question | Work | Stop) -> None:
        """See :class:`Worker`."""
        task = self._task
        if isinstance(message, Work) and task is not None and task.bounded:
            # A job that is tried alone gets all of the memory.
            limit_memory(self.pid, BASE_BYTES + (self._budget if message.alone else task.host_memory or 0))
        self._outbox.put(ForkingPickler.dumps(message))

    def kill(self) -> None:
        """End it at once with SIGKILL, which also ends a process that was stopped."""
        self._process.kill()

    def join(self) -> None:
        """Wait for its end."""
        for thread in self._threads:
            thread.join(_LAST_S)

    def _begin(self, message: Task | Question, post: Post) -> None:
        with self._lock:
            self._post = post
            if self.end is not None:  # it died while it waited
                post(self.end)
        self.send(message)

    def _send_all(self) -> None:
        with suppress(OSError):  # it is gone
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _receive_all(self) -> None:
        last = Ended(died=True)
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Ended) and (message.error is not None or (self._task and self._task.bounded)):
                    last = message
                    self.kill()
                else:
                    self._take(message)
        except (EOFError, OSError):
            pass
        except BaseException as error:  # noqa: BLE001 - raised by the scheduler
            last = Ended(error=error)
            self.kill()
        how = self._wait()
        self._outbox.put(None)
        self._connection.close()
        with self._lock:
            last = last._replace(is_new=self._is_new)
            self.end = self._dead(last, how) if last.died or last.error is not None else last
            if self._post is not None:
                self._post(self.end)

    def _take(self, message: Any) -> None:
        if isinstance(message, Step | Beat):
            self._watchdog.report(message)
            return
        post = self._post
        if isinstance(message, Ended | Answer):  # it waits from now on
            self._watchdog.report(Step(0, IDLE))
            self._is_new = self._is_new and isinstance(message, Answer)
            self._post = self._task = None
        if post is not None:
            post(message)

    def _wait(self) -> str:
        """Wait for its end; gives a description for messages."""
        try:
            status = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # it hangs in the system and will never run again
            return "does not end"
        self._threads[0].join(_LAST_S)  # a process that it started may still hold the pipe
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = [line.strip() for line in self._printed.decode("utf-8", "replace").splitlines() if line.strip()]
        line = ([line for line in lines if _NO_MEMORY.search(line)] or lines or [""])[-1]
        return f"{how}: {line}" if line else how

    def _read_stderr(self) -> None:
        if self._process.stderr is not None:
            with self._process.stderr as pipe:
                while chunk := os.read(pipe.fileno(), 1 << 16):
                    self._printed = (self._printed + chunk)[-_TAIL_BYTES:]


class WorkerThread(_Watched):
    """A worker in a thread of the build: starts at once. One that hangs is left alone, and writes nothing more."""

    def __init__(self, task: Task, post: Post) -> None:
        super().__init__(on_cpu=True)
        self._task, self._post = task, post
        self._loop = WorkerLoop(task, self._take)
        threading.Thread(target=run_loop, args=(self._loop,), name="worker", daemon=True).start()

    def send(self, message: Work | Stop) -> None:
        """See :class:`Worker`."""
        if isinstance(message, Work):
            self._loop.feed(message)
        else:
            self._loop.stop()

    def look(self, elapsed: float) -> None:
        """See :class:`_Watched`; this process is alive."""
        self._watchdog.report(Beat())
        super().look(elapsed)

    def kill(self) -> None:
        """Commit finished work and write nothing more."""
        threading.Thread(target=self._abandon, daemon=True).start()

    def _abandon(self) -> None:
        try:
            self._loop.abandon()
            self._take(Ended(died=True))
        except BaseException as error:  # noqa: BLE001 - raised by the scheduler
            self._take(Ended(error=error))

    def _take(self, message: Any) -> None:
        post = self._post
        if isinstance(message, Step):
            self._watchdog.report(message)
        elif isinstance(message, Ended):
            self._post = None
            message = self._dead(message, "ended") if message.died or message.error is not None else message
        if post is not None and not isinstance(message, Step):
            post(message)


class LocalEngine(AbstractContextManager["LocalEngine"]):
    """Workers of this machine, see :class:`Engine`; questions are answered on ``device``.

    ``neighbors`` engines share the memory and the cores of the machine, this one included.
    """

    def __init__(self, device: str = "auto", *, lock_fd: int | None = None, neighbors: int = 1) -> None:
        self.device, self._lock_fd, self._neighbors = device, lock_fd, neighbors
        self._waiting: list[WorkerProcess] = []
        self._answers: dict[str, Any] = {}
        self._watched: list[WorkerProcess | WorkerThread] = []
        self._closed = threading.Event()
        self._devices: list[Device] = []
        self._started: set[int] = set()
        self._processes = self._budget = 0
        self._task: Task
        """The task of one worker, without its device and shard."""
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def open(self, task: Task, cost: int) -> int:
        """See :class:`Engine`."""
        kind = field_kinds()[task.field]
        on_cpu = kind.device == "cpu"
        self._processes = worker_count(task, kind, cost)
        count = max(self._processes, 1)
        self._devices = [Device(label="cpu", name="cpu", variables=_ONE_THREAD)] * count
        if not on_cpu:
            self._devices = devices_for(task.device, needs_torch=task.needs_torch)
        self._started = set()
        self._budget = task.host_memory or default_budget()
        count *= self._neighbors
        threads = task.decode_threads or (1 if on_cpu else default_threads(count))
        self._task = replace(
            task,
            decode_threads=threads,
            host_memory=max(self._budget // count, 1),
            bounded=on_cpu and self._processes > 0,
        )
        # The budget if the memory of workers is limited, else that of the machine.
        return self._budget if on_cpu else max(self._budget, host_memory())

    def slots(self) -> dict[int, str]:
        """See :class:`Engine`."""
        return {number: device.label for number, device in enumerate(self._devices)}

    def start(self, slot: int, post: Post, *, shard: str = "") -> WorkerProcess | WorkerThread:
        """See :class:`Engine`; ``shard`` is the name of the shard to write. A thread is started once only."""
        device = self._devices[slot]
        again = slot in self._started
        self._started.add(slot)
        task = replace(self._task, shard=shard or os.urandom(8).hex(), device=device.name)
        if not self._processes and not again:
            thread = WorkerThread(task, post)
            self._watched.append(thread)
            return thread
        process = self._process(device, again=again)

        def posted(message: Any) -> None:
            if isinstance(message, Ended) and not message.died and not task.bounded:
                self._waiting.append(process)
            post(message)

        process.open(task, posted, budget=self._budget)
        return process

    def ask(self, target: str, /, **arguments: Any) -> Any:
        """See :class:`Engine`. Each question is put once; the process that answers makes fields later."""
        name = f"{target} {sorted(arguments.items())}"
        if name not in self._answers:
            device = self._waiting[0].device if self._waiting else devices_for(self.device, needs_torch=True)[0]
            process = self._process(device)
            replies = queue.SimpleQueue[Any]()
            process.ask(Question(target=target, device=device.name, arguments=arguments), replies.put)
            reply = replies.get()
            if isinstance(reply, Ended):
                raise WorkerError(
                    "a worker process ended before it answered",
                    where=target,
                    why=f"it {reply.how}",
                    fix=f"check memory, disk and device; {VARIABLE}=SECONDS gives it more time [default: 120]",
                )
            self._waiting.insert(0, process)
            if reply.error is not None:
                raise reply.error
            self._answers[name] = reply.value
        return self._answers[name]

    def close(self) -> None:
        """End all processes."""
        self._closed.set()
        processes = [worker for worker in self._watched if isinstance(worker, WorkerProcess)]
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        self._watched.clear()
        self._waiting.clear()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _process(self, device: Device, *, again: bool = False) -> WorkerProcess:
        """A process that waits for this device, else a new one; always a new one to replace another."""
        process = next((process for process in self._waiting if process.device == device and not again), None)
        if process is not None:
            self._waiting.remove(process)
            return process
        process = WorkerProcess(device, lock=self._lock_fd, again=again)
        self._watched.append(process)
        return process

    def _look(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            now = time.monotonic()
            for worker in list(self._watched):
                worker.look(now - looked_at)
            looked_at = now


def worker_count(task: Task, kind: FieldKind, total_cost: int) -> int:
    """Worker processes of a run; 0: a thread of the build, because a process would cost more than it saves."""
    if kind.device == "cpu":
        count = default_workers(total_cost, kind.work.worker_cost) if task.workers is None else task.workers
        return max(count, 1) if task.needs_torch else count
    devices = devices_for(task.device, needs_torch=task.needs_torch)
    in_thread = len(devices) == 1 and not task.needs_torch and "*" not in task.device
    return 0 if in_thread else len(devices)


def recovered(task: Task) -> bytes:
    """Seal a dead worker's shard; gives all item keys that the worker committed."""
    from latentcache.store.catalog import recover_shard
    from latentcache.store.lock import check_owner
    from latentcache.store.remote.view import StoredShards

    paths = CachePaths(Path(task.cache))
    keys = list[bytes]()
    folder = paths.shards / f"{task.shard}{OPEN_SUFFIX}"
    if folder.exists():
        check_owner(paths.building, task.owner)
        recover_shard(paths, folder)
    stored = StoredShards(task.url) if task.url else None
    if stored is not None:
        stored.fill(paths)  # what the worker has sent
    for shard in paths.sealed_shards():
        if shard.name.partition("-")[0] == task.shard:
            if stored is not None:
                stored.send(shard)
            keys.append(load_index(shard).keys().tobytes())
    return b"".join(keys)


def import_path() -> list[str]:
    """``sys.path`` of this process for another one, with the working directory last unless PYTHONPATH names it."""
    here = str(Path.cwd())
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    local = [entry for entry in sys.path if not entry or (os.path.realpath(entry) == here and entry not in named)]
    package = str(Path(failpoint.__file__).resolve().parent.parent)
    return [*(entry for entry in sys.path if entry not in local), package, *local]

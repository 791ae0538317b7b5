"""Start workers: as processes of their own, or as a thread of this process.

A worker process is a fresh interpreter, never a fork: threads and CUDA do not survive one. It is in the process group
of the build, so job control and ``kill`` of the group reach all processes. It inherits its end of the channel, the
file of its activity board and the lock of the cache. The lock is held until the last worker has ended. A thread reads
its stderr and keeps the end of it. Cost: 0.3 s of one core for a process, nothing for a thread.

Guarantee: if the build is gone, the process commits its finished work and ends within :data:`LAST_S`. Signals to the
whole group are left to the build.

Messages of the build: ``ask`` (answered by ``answer``), ``open`` (a field), ``work``, ``stop`` (its end). Messages of
a worker: ``opened``; ``made`` (a unit is encoded: give me more); ``committed``, after the commit; ``warning``;
``ended``, in order or with an error. A process that has ended in order waits for the next ``open``.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from latentcache import failpoint
from latentcache.errors import WorkerError
from latentcache.failpoint import VARIABLE, arm
from latentcache.fields.protocol import Job
from latentcache.fields.registry import load
from latentcache.pipeline.devices import Device, devices_for
from latentcache.pipeline.workers.memory import limit_memory, rare_gc
from latentcache.pipeline.workers.transport import (
    Channel,
    Form,
    as_error,
    channel_pair,
    error_form,
    jobs_form,
    jobs_of,
)
from latentcache.pipeline.workers.watchdog import (
    ENCODER,
    OPENING,
    Activity,
    ActivityBoard,
    Watchdog,
    anonymous_file,
    deadline_s,
)
from latentcache.pipeline.workers.watchdog import VARIABLE as DEADLINE
from latentcache.pipeline.workers.worker import Task, WorkerLoop
from latentcache.value import parsed

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from latentcache.pipeline.workers.process import main; main()"
)
_DEBUG = "LATENTCACHE_DEBUG"
_TAIL_BYTES = 2000
#: Lines on a failed allocation of Rust, C++, the C library and Python. A library that runs out of memory aborts
#: (SIGABRT, as after any fault): no exit status shows it.
NO_MEMORY = re.compile(
    r"memory allocation of \d+ bytes failed|bad_alloc|MemoryError|[Oo]ut of memory|Cannot allocate memory"
)
_REAP_S = 10.0
#: Seconds that a thread gets to end; it may be in the middle of a batch.
_LAST_S = 1.0
#: Seconds that a worker process may outlive its build.
LAST_S = 8
#: Seconds between two heartbeats.
_BEAT_S = 0.5


class WorkerProcess:
    """A worker in a process of its own, which inherits the ``lock`` on the cache; ``again``: it replaces another."""

    is_thread = False
    board: ActivityBoard

    def __init__(self, variables: Mapping[str, str] = {}, *, lock: int | None = None, again: bool = False) -> None:
        self.channel, theirs = channel_pair()
        self.board_file = anonymous_file()
        inherited = (theirs.fileno(), self.board_file.fileno(), *(() if lock is None else (lock,)))
        # Without the threshold glibc keeps the memory of large images: it raises the limit by itself.
        environment = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} | os.environ | dict(variables)
        if again:
            environment.pop(VARIABLE, None)
        options = ("-X", "utf8") if sys.flags.utf8_mode else ()
        numbers = map(str, (theirs.fileno(), self.board_file.fileno(), os.getpid()))
        self._process = subprocess.Popen(
            # -P, and the working directory last: a json.py that lies there is not imported.
            [sys.executable, *options, "-P", "-c", _CHILD, json.dumps(import_path()), *numbers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get(_DEBUG) else subprocess.PIPE,
            env=environment,
            pass_fds=inherited,
        )
        theirs.close()
        self._printed = b""
        """The end of its stderr."""
        self._reader = threading.Thread(target=self._read_stderr, name="stderr", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def open(self, task: Task) -> None:
        """Begin a field."""
        self.board = ActivityBoard(task.decode_threads or 1, self.board_file.fileno())
        self.channel.send("open", task=task)

    def work(self, number: int, jobs: Mapping[int, Job], *, known: bytes, probe: bool) -> None:
        """Give it a unit, and the keys of it that are committed."""
        self.channel.send("work", unit=number, known=known, probe=probe, jobs=jobs_form(jobs))

    def stop(self) -> None:
        """End the field: what is in hand is committed."""
        self.channel.send("stop")

    def limit(self, num_bytes: int) -> None:
        """Bound its memory, if possible."""
        limit_memory(self.pid, num_bytes)

    def kill(self) -> None:
        """End it at once with SIGKILL, which also ends a process that was stopped."""
        self._process.kill()

    def ended(self) -> str:
        """Wait for its end; gives a description for messages."""
        try:
            status = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # it hangs in the system and will never run again
            self._process.kill()
            return "does not end"
        finally:
            self._reader.join(_LAST_S)  # a process that it started may still hold the pipe
            last_line = self._last_line()
            self.board_file.close()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return how + (f": {last_line}" if last_line else "")

    def _read_stderr(self) -> None:
        if self._process.stderr is not None:
            with self._process.stderr as pipe:
                while chunk := os.read(pipe.fileno(), 1 << 16):
                    self._printed = (self._printed + chunk)[-_TAIL_BYTES:]

    def _last_line(self) -> str:
        """The line that it printed on a failed allocation, else the last line."""
        lines = [line.strip() for line in self._printed.decode("utf-8", "replace").splitlines() if line.strip()]
        return ([line for line in lines if NO_MEMORY.search(line)] or lines or [""])[-1]


class WorkerThread:
    """A worker in a thread of this process, as :class:`WorkerProcess`: starts at once, and cannot be killed."""

    is_thread = True
    _loop: WorkerLoop

    def __init__(self) -> None:
        self.channel, theirs = channel_pair()
        self._theirs = Channel(theirs)

    def open(self, task: Task) -> None:
        """Begin a field."""
        self.board = ActivityBoard(task.decode_threads or 1)
        self._loop = WorkerLoop(task, self._theirs, self.board)
        self._thread = threading.Thread(target=run_loop, args=(self._loop,), name="worker", daemon=True)
        self._thread.start()

    def work(self, number: int, jobs: Mapping[int, Job], *, known: bytes, probe: bool) -> None:
        """Give it a unit. Its jobs are no message: a fifth faster for small texts."""
        self._loop.feed(number, dict(jobs), known=known, probe=probe)

    def stop(self) -> None:
        """End the field."""
        self._loop.stop()

    def kill(self) -> None:
        """Commit its finished work and write nothing more."""
        last = threading.Thread(target=self._loop.abandon, daemon=True)
        last.start()
        last.join(_LAST_S)

    def ended(self) -> str:
        """Wait for its end, not for long."""
        self._thread.join(_LAST_S)
        self._theirs.close()
        return "ended"


WorkerHandle = WorkerProcess | WorkerThread


class WarmWorker(AbstractContextManager["WarmWorker"]):
    """Worker processes that wait for work: torch is imported once for all fields.

    One for the first ``device`` answers questions before a build. :class:`Run` takes processes and gives them back.
    """

    def __init__(self, device: str = "auto", *, lock_fd: int | None = None) -> None:
        self._text, self.lock_fd = device, lock_fd
        self._waiting: list[tuple[Device, WorkerProcess]] = []

    def ask(self, target: str, /, **arguments: Any) -> Any:
        """The result of ``module:function(**arguments)`` in JSON; ``device`` is added if the function takes it."""
        if not self._waiting:
            device = devices_for(self._text, needs_torch=True)[0]
            self._waiting.append((device, WorkerProcess(device.variables, lock=self.lock_fd)))
        device, process = self._waiting[0]
        process.channel.send("ask", target=target, device=device.name, arguments=arguments)
        watchdog, step = Watchdog(deadline_s(), on_cpu=True), Activity(ENCODER, 0, OPENING, ())
        board, looked_at, stuck = ActivityBoard(descriptor=process.board_file.fileno()), time.monotonic(), ""
        while not (found := process.channel.arrived()):
            now = time.monotonic()
            stuck, looked_at = watchdog.stuck(board.beats, [step], now - looked_at), now
            if process.channel.ended or stuck:
                process.kill()
                self._waiting.remove((device, process))
                how = process.ended()
                process.channel.close()
                if stuck:
                    where = f"it was asked for {target}"
                    fix = f"check the disk and the device; {DEADLINE}=SECONDS gives it more time"
                    raise WorkerError("a worker process does not answer", where=where, why=f"it {stuck}", fix=fix)
                raise WorkerError("a worker process cannot be started", why=f"it {how}")
            select.select([process.channel], [], [], _BEAT_S)
        if "error" in found[0]:
            raise as_error(found[0]["error"])
        return found[0]["value"]

    def take(self, device: Device) -> WorkerProcess | None:
        """A process for this device, if there is one; the caller's from now on."""
        index = next((index for index, (kept_for, _) in enumerate(self._waiting) if kept_for == device), None)
        return None if index is None else self._waiting.pop(index)[1]

    def keep(self, device: Device, process: WorkerProcess) -> None:
        """Take a process whose work is done."""
        self._waiting.append((device, process))

    def close(self) -> None:
        """End the processes that were not taken over."""
        for _, process in self._waiting:
            process.kill()
            process.ended()
            process.channel.close()
        self._waiting.clear()

    def __exit__(self, *exc: object) -> None:
        self.close()


def import_path() -> list[str]:
    """``sys.path`` of this process for another one, with the working directory last unless PYTHONPATH names it."""
    here, named = str(Path.cwd()), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    local = [one for one in sys.path if not one or (os.path.realpath(one) == here and one not in named)]
    package = str(Path(failpoint.__file__).resolve().parent.parent)
    return [*(one for one in sys.path if one not in local), package, *local]


# in the process


def run_loop(loop: WorkerLoop) -> None:
    """Do the work of one field and send how it ended."""
    try:
        loop.run()
    except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
        loop.channel.send("ended", waits=loop.waits, error=error_form(error))
    else:
        loop.channel.send("ended", waits=loop.waits)


def answer(message: Form) -> dict[str, Any]:
    """The result of a function that a message names."""
    try:
        function, arguments = load(message["target"]), message["arguments"]
        if "device" in inspect.signature(function).parameters:
            arguments = {"device": message["device"], **arguments}
        return {"value": function(**arguments)}
    except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
        return {"error": error_form(error)}


def _serve(channel: Channel, descriptor: int) -> None:
    """Take messages until the build is gone; fields are made in threads of their own."""
    loop: WorkerLoop | None = None
    thread: threading.Thread | None = None

    def build_is_gone() -> None:
        signal.alarm(LAST_S)
        if loop is not None and thread is not None and thread.is_alive():
            loop.stop()
            loop.budget.close()
            thread.join()
        os._exit(0)

    def beat() -> None:
        """Show that this process is alive, and look if the build is: a fork of the build may hold its end open."""
        build, board = os.getppid(), ActivityBoard(descriptor=descriptor)
        while os.getppid() == build:
            board.beat()
            time.sleep(_BEAT_S)
        build_is_gone()

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    while (message := channel.receive()) is not None:
        try:
            if message["kind"] == "ask":
                channel.send("answer", **answer(message))
            elif message["kind"] == "open":
                task = parsed(Task, message["task"])
                loop = WorkerLoop(task, channel, ActivityBoard(task.decode_threads or 1, descriptor))
                thread = threading.Thread(target=run_loop, args=(loop,))
                thread.start()
            elif message["kind"] == "work":
                assert loop is not None  # "open" came before
                jobs = jobs_of(message["jobs"])
                loop.feed(message["unit"], jobs, known=bytes.fromhex(message["known"]), probe=message["probe"])
            elif loop is not None:
                loop.stop()
        except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
            channel.send("ended", error=error_form(error))
    build_is_gone()


def main() -> None:
    """A worker process: ``sys.argv`` has the import path, the channel, the board and the build's process id."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
    arm(os.environ.get(VARIABLE), build=int(sys.argv[4]))
    with rare_gc():  # an import of torch and diffusers takes a fifth longer with them
        _serve(Channel(socket.socket(fileno=int(sys.argv[2]))), int(sys.argv[3]))

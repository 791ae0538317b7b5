"""A worker process, from the inside: takes a field and units of work from the build, and sends messages.

It ignores SIGINT and SIGTERM: signals to the whole group are left to the build. If the build is gone, it commits its
finished work and ends within :data:`LAST_S`.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from latentcache.failpoint import VARIABLE, arm
from latentcache.fields.registry import load
from latentcache.pipeline.workers.engine import Ended, Stop, Task, Work, portable
from latentcache.pipeline.workers.memory import rare_gc
from latentcache.pipeline.workers.watchdog import Beat
from latentcache.pipeline.workers.worker import WorkerLoop

#: Seconds that a worker process may outlive its build.
LAST_S = 8
#: Seconds between two heartbeats.
BEAT_S = 0.5


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
        function, arguments = load(question.target), question.arguments
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

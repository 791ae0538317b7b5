"""A worker process: does the work that the build asks for, one field after the other, until the build is gone.

Guarantee: if the build is gone, the process commits its finished work and ends, within :data:`LAST_S`; signals to the
whole group are left to the build.

Messages of the build: ``ask`` (answered by ``answer``), ``open`` (a field), ``work``, ``stop`` (its end). Messages of
a worker: ``opened``; ``made`` (a unit is encoded: give me more); ``committed``, after the commit; ``warning``;
``ended``, in order or with an error. A process that ``is_reusable`` has closed its model and waits for the next
``open``.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from latentcache.failpoint import VARIABLE, arm
from latentcache.fields.registry import load
from latentcache.pipeline.workers.memory import rare_gc
from latentcache.pipeline.workers.transport import Channel, Message, error_form, jobs_of
from latentcache.pipeline.workers.watchdog import ActivityBoard
from latentcache.pipeline.workers.worker import Task, WorkerLoop

#: Seconds that a worker process may outlive its build.
LAST_S = 8
#: Seconds between two heartbeats.
_BEAT_S = 0.5


def run_loop(loop: WorkerLoop) -> bool:
    """Do the work of one field and tell how it ended; False if the worker is of no further use."""
    try:
        facts = loop.run()
    except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
        facts = {"error": error_form(error)}
    loop.channel.send("ended", **facts)
    return bool(facts.get("is_reusable"))


def answer(message: Message) -> dict[str, Any]:
    """The result of a function that a message names."""
    try:
        function, arguments = load(message["target"]), message["arguments"]
        if "device" in inspect.signature(function).parameters:
            arguments = {"device": message["device"], **arguments}
        return {"value": function(**arguments)}
    except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
        return {"error": error_form(error)}


def _run(loop: WorkerLoop) -> None:
    if not run_loop(loop):
        os._exit(0)  # threads that are still preparing must not hold the process


def _serve(channel: Channel, descriptor: int) -> None:
    """Take messages until the build is gone; fields are made in threads of their own."""
    loop: WorkerLoop | None = None
    thread: threading.Thread | None = None

    def build_is_gone() -> None:
        signal.alarm(LAST_S)
        if loop is None or thread is None or not thread.is_alive():
            os._exit(0)
        loop.stop()
        loop.budget.close()
        thread.join()

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
            if message.kind == "ask":
                channel.send("answer", **answer(message))
            elif message.kind == "open":
                task = Task.from_json(message["task"])
                loop = WorkerLoop(task, channel, ActivityBoard(task.decode_threads or 1, descriptor))
                thread = threading.Thread(target=_run, args=(loop,))
                thread.start()
            elif message.kind == "work":
                assert loop is not None  # "open" came before
                jobs = jobs_of(message["jobs"])
                loop.feed(message["unit"], jobs, known=message.body, probe=message["probe"])
            elif loop is not None:
                loop.stop()
        except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
            channel.send("ended", error=error_form(error))
            os._exit(0)
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
    os._exit(0)

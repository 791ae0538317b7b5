"""Where a worker runs: a process of its own, or a thread of the build with the same messages.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from latentcache.failpoint import VARIABLE, arm
from latentcache.fields.protocol import Job
from latentcache.fields.registry import load
from latentcache.pipeline.workers.memory import rare_gc
from latentcache.pipeline.workers.transport import Channel, Message, error_form, jobs_of
from latentcache.pipeline.workers.watchdog import ActivityBoard
from latentcache.pipeline.workers.worker import Task, WorkerLoop

#: Seconds that a worker process may outlive its build.
LAST_S = 8
#: Seconds between two heartbeats.
_BEAT_S = 0.5


def serve(
    channel: Channel,
    board: int | None,
    loops: list[WorkerLoop],
    *,
    on_loss: Callable[[], None] | None = None,
    jobs: dict[int, Mapping[int, Job]] | None = None,
) -> None:
    """Do the work that the build asks for, one field after the other, until it is gone.

    Args:
        channel: To the build.
        board: File of the activity board; None in the build's own process.
        loops: Gets the loop that runs.
        on_loss: Called when the build is gone, so that the process does not outlive it for long; None in the build's
            own process, where one field is made.
        jobs: Of units by number, in the build's own process; else they are in the messages.
    """
    heartbeat = threading.Thread(target=_send_heartbeats, args=(loops, on_loss), name="heartbeat", daemon=True)
    try:
        while (message := channel.receive()) is not None:
            if message.kind == "ask":
                channel.send("answer", **_answer(message))
                continue
            task = Task.from_json(message["task"])
            loop = WorkerLoop(task, channel, ActivityBoard(task.decode_threads or 1, board))
            loops[:] = [loop]
            threading.Thread(target=_receive, args=(loop, on_loss, jobs), name="listener", daemon=True).start()
            if on_loss is not None and not heartbeat.is_alive():
                heartbeat.start()
            facts = loop.run()
            channel.send("ended", **facts)
            if on_loss is None or not facts["is_reusable"]:
                return
            del loop
    except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
        channel.send("ended", error=error_form(error), suspects=[one for loop in loops for one in loop.suspects])


def _answer(message: Message) -> dict[str, Any]:
    """The result of a function that a message names."""
    try:
        function, arguments = load(message["target"]), message["arguments"]
        if "device" in inspect.signature(function).parameters:
            arguments = {"device": message["device"], **arguments}
        return {"value": function(**arguments)}
    except BaseException as error:  # noqa: BLE001 - sent to the build, which raises it
        return {"error": error_form(error)}


def _receive(loop: WorkerLoop, on_loss: Callable[[], None] | None, jobs: dict[int, Mapping[int, Job]] | None) -> None:
    """Take messages, in a thread of its own."""
    while (message := loop.channel.receive()) is not None:
        if message.kind == "stop":
            loop.stop_requested = True
            loop.stop()
            return  # what comes next is for the main thread; the heartbeat still sees if the build goes
        try:
            loop.feed(message, jobs_of(message["jobs"]) if jobs is None else jobs.pop(message["unit"]))
        except BaseException as error:  # noqa: BLE001 - a dead thread would hang the build: the loop raises it
            loop.fail(error)
    _build_is_gone(loop, on_loss)


def _send_heartbeats(loops: Sequence[WorkerLoop], on_loss: Callable[[], None] | None) -> None:
    """Show that this process is alive, and look if the build is: a fork of the build may hold its end open."""
    build = os.getppid()
    while os.getppid() == build:
        loops[0].board.beat()
        time.sleep(_BEAT_S)
    _build_is_gone(loops[0], on_loss)


def _build_is_gone(loop: WorkerLoop, on_loss: Callable[[], None] | None) -> None:
    loop.stop()
    loop.budget.close()
    if on_loss is not None:
        on_loss()


def main() -> None:
    """A worker process: ``sys.argv`` has the import path, the channel, the board and the build's process id."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
    arm(os.environ.get(VARIABLE), build=int(sys.argv[4]))
    channel = Channel(socket.socket(fileno=int(sys.argv[2])))
    with rare_gc():  # an import of torch and diffusers takes a fifth longer with them
        serve(channel, int(sys.argv[3]), [], on_loss=lambda: signal.alarm(LAST_S))  # type: ignore[arg-type]
    os._exit(0)  # threads that are still preparing must not hold the process

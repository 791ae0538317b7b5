"""One worker of a build: an encoder on one device, decode threads, a writer thread and a shard of its own.

It is told by messages what to make and says by messages what it made; it decides nothing. It runs as a process of
its own, or in a thread of the build with the same messages. Guarantee: when the build is gone, the process commits
what it has and ends, within :data:`LAST_S` at the latest; signals to the whole group are left to the build.

What the build says: ``can-resample`` and ``find-precision`` (asked before there is a recipe), ``start``, ``unit``,
``answer``, ``no-more``, ``stop``. What a worker says: ``found``; ``take`` and ``decoded``, which are answered;
``failed``, ``copied``, ``encoded``, ``refused``; ``opened``, ``warned``; ``committed``, after the commit; ``error``,
or ``ended`` with its clock.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentcache import failpoint
from latentcache.encoders.describe import ModelDescription
from latentcache.encoders.opening import auto_precision, check_encoder, open_encoder, picture_flops
from latentcache.encoders.protocol import Encoder
from latentcache.geometry.sizes import Size
from latentcache.pipeline.batch_size import UNTIMED, BatchSizes, worth_compiling
from latentcache.pipeline.board import Board
from latentcache.pipeline.budget import ByteBudget
from latentcache.pipeline.calibrate import measured_noise
from latentcache.pipeline.channel import Channel, Message
from latentcache.pipeline.decoding import DecodePool, Decoder
from latentcache.pipeline.forms import (
    as_description,
    as_planned,
    as_settings,
    description_form,
    error_form,
    settings_form,
)
from latentcache.pipeline.ledger import RemoteLedger
from latentcache.pipeline.preflight import check_resample
from latentcache.pipeline.resize import resample_self_test
from latentcache.pipeline.run import EncodeRun, MoreWork, NoMoreWork
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.speed import StageClock
from latentcache.pipeline.work import Planned
from latentcache.pipeline.writing import WriterThread
from latentcache.recipe import Recipe
from latentcache.store.catalog import payload_of
from latentcache.store.entry import NewEntry
from latentcache.store.shard import ShardWriter

#: Seconds that a worker process may live after its build.
LAST_S = 8
#: Seconds between two beats of the heart.
BEAT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that a worker has to know before it begins."""

    root: Path
    """The data folder."""
    shards: Path
    """Folder of all shards."""
    shard: str
    """The one to write."""
    recipe: Recipe
    description: ModelDescription
    settings: BuildSettings
    device: str
    budget_bytes: int
    decode_threads: int
    expected: Mapping[Size, int] = field(default_factory=dict)
    """Pieces of each bucket that it gets, about."""

    def form(self) -> Message:
        """As a message."""
        return {
            "root": str(self.root),
            "shards": str(self.shards),
            "shard": self.shard,
            "recipe": self.recipe.as_json(),
            "description": description_form(self.description),
            "settings": settings_form(self.settings),
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "decode_threads": self.decode_threads,
            "expected": [[bucket.height, bucket.width, count] for bucket, count in self.expected.items()],
        }

    @classmethod
    def of(cls, form: Message) -> Job:
        """Inverse of :meth:`form`."""
        plain = ("shard", "device", "budget_bytes", "decode_threads")
        return cls(
            root=Path(form["root"]),
            shards=Path(form["shards"]),
            recipe=Recipe.from_json(form["recipe"]),
            description=as_description(form["description"]),
            settings=as_settings(form["settings"]),
            expected={Size(height, width): count for height, width, count in form["expected"]},
            **{name: form[name] for name in plain},
        )


def serve(channel: Channel, board: int | None, *, on_loss: Callable[[], None] | None = None) -> None:
    """Do what the build asks for, until there is no more or the build is gone.

    Args:
        channel: To the build.
        board: File that the build looks into to see what is being done; None in the build's own process.
        on_loss: Called when the build is gone, so that this does not outlive it for long.
    """
    try:
        message = channel.receive()
        while message is not None and message["kind"] in _EARLY:
            channel.send("found", **_EARLY[message["kind"]](message))
            message = channel.receive()
        if message is None or message["kind"] != "start":
            return
        job = Job.of(message)
        clock = _Shift(job, channel, Board(job.decode_threads, board)).run(on_loss)
    except BaseException as error:  # noqa: BLE001 - handed to the build, which raises it
        channel.send("error", **error_form(error))
    else:
        channel.send("ended", clock=clock.as_json())


def _can_resample(_: Message) -> Message:
    """Whether torch's resize can be used here."""
    return {"works": resample_self_test()}


def _find_precision(message: Message) -> Message:
    """In which precision a new cache is computed on the device of this worker."""
    description = as_description(message["description"])
    found = auto_precision(description, device=message["device"], fold=message["fold"])
    return {"compute_dtype": found.compute_dtype, "why": found.why}


_EARLY = {"can-resample": _can_resample, "find-precision": _find_precision}


class _Shift:
    """A worker at work."""

    def __init__(self, job: Job, channel: Channel, board: Board) -> None:
        self._job, self._channel, self._board = job, channel, board
        self._tables = job.recipe.geometry.tables()
        self._ledger = RemoteLedger(channel)
        decoder = Decoder(
            root=job.root,
            recipe=job.recipe,
            tables=self._tables,
            max_pixels=job.settings.max_pixels,
            ledger=self._ledger,
            budget=ByteBudget(job.budget_bytes),
        )
        self._loop = EncodeRun(
            recipe=job.recipe,
            pool=DecodePool(decoder=decoder, num_threads=job.decode_threads, board=board),
            writer=WriterThread(
                self._shard, self._committed, commit_every=job.settings.commit_every, rolling=job.settings.stream
            ),
            open_encoder=self._opened,
            payload=lambda entry: payload_of(entry, job.shards),
            sizes=sizes_for(job.settings, job.description, job.expected),
            channel=channel,
            board=board,
        )

    def run(self, on_loss: Callable[[], None] | None) -> StageClock:
        """Listen and work; gives what was done in which time."""
        if self._job.description.kind == "diffusers":
            check_resample(self._job.recipe)
        threading.Thread(target=self._listen, args=(on_loss,), name="listener", daemon=True).start()
        if on_loss is not None:
            threading.Thread(target=self._beat, args=(on_loss,), name="heart", daemon=True).start()
        self._loop()
        clock = self._loop.clock
        if not self._loop.stopping.is_set():
            clock.count(lambda: picture_flops(self._job.description, fold=self._job.settings.fold))
        return clock

    def _beat(self, on_loss: Callable[[], None]) -> None:
        """Show that this process is alive, and look whether the build is: a fork of it may hold its end open."""
        build = os.getppid()
        while os.getppid() == build:
            self._board.beat()
            time.sleep(BEAT_S)
        self._loop.stopping.set()
        self._ledger.close()
        on_loss()

    def _listen(self, on_loss: Callable[[], None] | None) -> None:
        """Take orders and answers, in a thread of its own."""
        while (message := self._channel.receive()) is not None:
            if message["kind"] == "answer":
                self._ledger.answered(message)
            elif message["kind"] == "unit":
                self._feed([as_planned(form, self._tables) for form in message["items"]])
            elif message["kind"] == "no-more":
                self._loop.pool.outcomes.put(NoMoreWork())
            elif message["kind"] == "stop":
                self._loop.stopping.set()
        self._loop.stopping.set()
        self._ledger.close()
        if on_loss is not None:
            on_loss()

    def _feed(self, items: Sequence[Planned]) -> None:
        """Decode these too, at once: the loop may be behind by many pictures, and decoders must not wait for it."""
        self._loop.pool.outcomes.put(MoreWork(count=len(items)))
        self._loop.pool.feed(items)

    def _shard(self) -> ShardWriter:
        return ShardWriter(self._job.shards / self._job.shard)

    def _committed(self, entries: Sequence[NewEntry]) -> None:
        size = sum(len(entry.value) for entry in entries)
        self._channel.send("committed", keys=[entry.key.hex() for entry in entries], bytes=size)

    def _opened(self) -> Encoder:
        """The encoder; a real model has encoded a test picture, so that it works and its noise is known."""
        job, noise = self._job, dict[str, Any]()
        encoder = open_encoder(
            job.description,
            device=job.device,
            fold=job.settings.fold,
            compiled=worth_compiling(job.expected) if job.settings.compile == "on" else frozenset(),
            warn=lambda words: self._channel.send("warned", words=words),
        )
        if job.description.kind == "diffusers":
            check_encoder(encoder)
            noise = measured_noise(encoder, {})
        self._channel.send("opened", noise=noise)
        return encoder


def sizes_for(settings: BuildSettings, description: ModelDescription, expected: Mapping[Size, int]) -> BatchSizes:
    """Pictures per call of a worker; timing an encoder that is no model would be of no use."""
    sizes = BatchSizes(settings.batch_size or (None if description.kind == "diffusers" else UNTIMED))
    sizes.expect(expected)
    return sizes


def main() -> None:
    """A worker process: its ends of the channel and the board are open files named on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
    build = int(sys.argv[3])
    failpoint.arm(os.environ.get(failpoint.VARIABLE), build=build)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    serve(channel, int(sys.argv[2]), on_loss=_end_soon)
    os._exit(0)  # threads that are still in a picture must not hold the process


def _end_soon() -> None:
    """The system ends this process after a while, whatever it does then."""
    signal.alarm(LAST_S)

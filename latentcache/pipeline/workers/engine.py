"""What a scheduler and an engine tell each other: the field, its units of work, and the messages of a worker.

An engine owns processes, their memory and their reuse. It watches workers, and it seals the shard of one that died.
The scheduler owns the jobs. Both sides exchange values of this module alone. :class:`RunResult` gathers results in
columns.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import LatentcacheError, UsageError
from latentcache.fields.protocol import Failure, Group, Job
from latentcache.fields.recipe import join_noise
from latentcache.fields.table import STAT_WIDTH
from latentcache.identity.content import HASH_BYTES, KEY_BYTES
from latentcache.store.atomic_io import writing
from latentcache.store.catalog import mixed
from latentcache.value import Value

#: Stages of a step.
IDLE, PREPARING, ENCODING, OPENING = range(4)


class Task(Value):
    """One field's run: what is made, of what, and where it goes."""

    field: str
    """Name of the kind."""
    recipe: Mapping[str, Any]
    """``FieldRecipe.as_json()``."""
    producer: Mapping[str, Any]
    """``Described.producer``."""
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """``Described.provenance``."""
    groups: tuple[Group, ...]
    root: str
    """DATA, absolute."""
    cache: str
    """CACHE, absolute."""
    url: str = ""
    """Where sealed shards are sent, before what they hold is reported; empty: nowhere."""
    scratch: str = ""
    """Folder for shards on other machines until they are sent, as ``--scratch`` names it."""
    locations: tuple[Any, ...] = ()
    """Where a few of the inputs are, to compare the DATA of other machines."""
    shards: tuple[str, ...] = ()
    """Folders of the shards whose items are committed."""
    needs_torch: bool = False
    device: str = "auto"
    workers: int | None = None
    """Processes of a CPU kind; 0: a thread of the build; None: by the cost of the work."""
    batch_size: int | None = None
    decode_threads: int | None = None
    host_memory: int | None = None
    commit_every: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """``ProducerContext.options``."""
    owner: str = ""
    """Random id of the build, as ``BUILDING`` has it."""
    shard: str = ""
    """Name of the shard to write, without suffix. Set for one worker, as are its device, threads and memory."""
    bounded: bool = False
    """True if one worker has limited memory: a job that does not fit ends it and is retried with more."""


class Work(NamedTuple):
    """To a worker: jobs that are leased together."""

    unit: int
    jobs: Mapping[int, Job]
    """By number."""
    known: bytes = b""
    """Item keys that a dead worker committed of them."""
    alone: bool = False
    """One job under suspicion, which gets the memory of all workers."""
    probe: bool = False
    """A job that is known to be good; its result is dropped."""


class Stop(NamedTuple):
    """To a worker: the field ends, finished work is committed."""


class Opened(NamedTuple):
    """From a worker: its encoder is open."""

    noise: Mapping[str, Any]


class Encoded(NamedTuple):
    """From a worker: a unit is encoded, and there is room for another one."""

    unit: int


class Committed(NamedTuple):
    """From a worker, after the commit."""

    keys: bytes
    """Item keys that are new, joined."""
    num_bytes: int
    done: Sequence[int]
    """Numbers of jobs that are settled."""
    failed: Sequence[tuple[int, Failure]]
    read: Sequence[tuple[int, tuple[int, ...], bytes]]
    """(number, stat memos, content hashes) of jobs whose files were read."""
    encoded: int = 0
    copied: int = 0
    skipped: int = 0


class Warned(NamedTuple):
    """From a worker: a sentence for the user."""

    text: str


class Step(NamedTuple):
    """From a worker: a thread of it begins something, and its step before is over."""

    thread: int
    """0 encodes, the others prepare."""
    stage: int
    jobs: tuple[int, ...] = ()
    """Their numbers."""


class Beat(NamedTuple):
    """From a worker, twice a second: its process runs."""


class Ended(NamedTuple):
    """From a worker or its engine: the field is over for this worker."""

    error: BaseException | None = None
    died: bool = False
    """False: in order, with everything committed that it was asked for."""
    how: str = ""
    """How it died, for messages."""
    begun: Mapping[int, int] = {}
    """Number -> stage of each job that it was in the middle of."""
    keys: bytes = b""
    """All item keys that a dead worker committed."""
    out_of_memory: bool = False
    lost: bool = False
    """True if it died with its machine, or cannot be reached: no job is to blame."""
    is_new: bool = False
    """True for a process that had made no field before this one."""
    waits: Mapping[str, float] = {}
    """Seconds per stage of the thread with the encoder."""


Message = Opened | Encoded | Committed | Warned | Ended
Post = Callable[[Any], None]
"""Takes a :data:`Message`, in any thread."""


class Worker(Protocol):
    """One worker with a field."""

    def send(self, message: Work | Stop) -> None:
        """Hand a message over; never waits."""

    def kill(self) -> None:
        """End it at once."""


class Engine(Protocol):
    """Starts workers, and knows the machines that they run on."""

    device: str
    """Device of the workers, as ``--device`` names it."""

    def open(self, task: Task, cost: int) -> int:
        """Prepare for a task of this cost; gives the memory in bytes that one job may take.

        Device, memory and threads of the task are for all workers.
        """
        ...

    def slots(self) -> Mapping[int, str]:
        """Number -> label of each device that there is now; each has one worker at a time."""
        ...

    def start(self, slot: int, post: Post) -> Worker:
        """A worker with the task on a device; its last message is :class:`Ended`."""
        ...

    def ask(self, target: str, /, **arguments: Any) -> Any:
        """The result of ``module:function(**arguments)``; ``device`` is added if the function takes it."""

    def close(self) -> None:
        """End all workers."""


def key_list(joined: bytes) -> list[bytes]:
    """Item keys that were joined."""
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def portable(error: BaseException) -> BaseException:
    """An error that another process can raise without importing a library: others are a RuntimeError with a trace."""
    is_plain_os_error = isinstance(error, OSError) and type(error).__module__ == "builtins"
    if is_plain_os_error or isinstance(error, LatentcacheError | MemoryError):
        return error
    is_plain = type(error) is RuntimeError
    copy = RuntimeError(str(error) if is_plain else f"{type(error).__name__}: {error}")
    copy.add_note("".join(traceback.format_exception(error)))
    return copy


class EventLog(AbstractContextManager["EventLog"]):
    """The file of ``--events``: one line and one ``write`` per durable commit; a line that is cut is taken back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(
                "cannot be written", argument="events", value=path, why=str(error), fix="give another file"
            ) from error

    def commit(self, keys: Sequence[bytes]) -> None:
        """Append one line for keys that are durable."""
        line = (json.dumps({"event": "commit", "keys": [key.hex() for key in keys]}) + "\n").encode("ascii")
        with writing(self._path):
            written = os.write(self._descriptor, line)
            if written < len(line):
                with suppress(OSError):  # a pipe
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes of an event were written")

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)


class ReadColumns(NamedTuple):
    """Columns from reading the inputs of n jobs."""

    sample: NDArray[np.int32] = np.zeros(0, np.int32)
    """(n,) ``Job.sample``."""
    content: NDArray[np.uint8] = np.zeros((0, 0, HASH_BYTES), np.uint8)
    """(n, k, 16) of each file of a job that was reported."""
    stat: NDArray[np.uint64] = np.zeros((0, 0, STAT_WIDTH), np.uint64)
    """(n, k, 6) their stat memos; zeros if there is none."""


class RunResult:
    """Results of one or several runs of a field and outcomes of their jobs, gathered while they go on.

    ``total`` are the items of all jobs, ``cost_total`` is the cost of these jobs.
    """

    def __init__(self, field: str, total: int = 0, cost_total: int = 0, events: EventLog | None = None) -> None:
        self.field, self.total, self.cost_total, self._events = field, total, cost_total, events
        self.done = self.cost_done = 0
        """Items of jobs that are settled, and their cost: committed, found committed, or failed."""
        self.encoded = 0
        """Items that were computed and committed; once the run has ended, distinct ones."""
        self.copied = self.skipped = self.written_bytes = self.restarts = 0
        self.began = 0.0
        """``time.monotonic()`` when the first encoder was open; 0.0: nothing had to be encoded so far."""
        self.encode_s = 0.0
        """Seconds from the first open encoder to the end; 0.0: nothing was encoded."""
        self.failed: list[tuple[int, Failure]] = []
        """``Job.sample`` and why it gives no item."""
        self.waits = Counter[str](prepare=0, encode=0, write=0, idle=0)
        """Seconds, summed over workers, that the thread with the encoder spent: ``prepare`` waiting for inputs to be
        read and decoded, ``encode`` in the encoder, ``write`` waiting for the disk, ``idle`` without work."""
        self.noise: Mapping[str, Any] = {}
        self.read = ReadColumns()
        self._keys = array("Q")
        """Eight bytes of each item key that was reported."""
        self._sample, self._content, self._stat = array("i"), bytearray(), array("Q")

    def committed(self, message: Committed, settled: Mapping[int, Job]) -> None:
        """Take a commit, with the jobs that it settles."""
        self.take_keys(message.keys, message.encoded)
        self.copied += message.copied
        self.skipped += message.skipped
        self.written_bytes += message.num_bytes
        for number, stat, contents in message.read:
            if number in settled:
                self._sample.append(settled[number].sample)
                self._content += contents
                self._stat.extend(stat or [0] * (len(contents) // HASH_BYTES * STAT_WIDTH))
        for number in message.done:
            if number in settled:
                self._done(settled[number])
        for number, failure in message.failed:
            if number in settled:
                self.fail(settled[number], failure)

    def fail(self, job: Job, failure: Failure) -> None:
        """Note a job that gives no item."""
        self.failed.append((job.sample, failure))
        self._done(job)

    def opened(self, message: Opened) -> None:
        """Take note of an open encoder."""
        self.began = self.began or time.monotonic()
        self.noise = join_noise(self.noise, message.noise)

    def ended(self, message: Ended) -> None:
        """Take note of the end of a worker."""
        self.waits.update(message.waits)

    def take_keys(self, keys: bytes, encoded: int) -> None:
        """Note item keys (32 bytes each) that are durable."""
        self.encoded += encoded
        if keys:
            self._keys.frombytes(mixed(np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)).tobytes())
            if self._events is not None:
                self._events.commit(key_list(keys))

    def finish(self) -> None:
        """Put the columns of one run together."""
        self.encoded = max(len(np.unique(self._keys)) - self.copied, 0)
        self.encode_s = time.monotonic() - self.began if self.began else 0.0
        if count := len(self._sample):
            self.read = ReadColumns(
                np.frombuffer(self._sample, np.int32),
                np.frombuffer(self._content, np.uint8).reshape(count, -1, HASH_BYTES),
                np.frombuffer(self._stat, np.uint64).reshape(count, -1, STAT_WIDTH),
            )
            self._sample, self._content, self._stat = array("i"), bytearray(), array("Q")

    def _done(self, job: Job) -> None:
        self.done += len(job.outputs)
        self.cost_done += job.cost

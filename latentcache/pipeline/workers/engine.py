"""What a scheduler and an engine tell each other: the field, its units of work, and the messages of a worker.

An engine owns processes, their memory and their reuse. It watches workers, and it seals the shard of one that died.
The scheduler owns the jobs. Both sides exchange values of this module alone.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from latentcache.errors import LatentcacheError
from latentcache.fields.protocol import Failure, Group, Job
from latentcache.identity.key import KEY_BYTES
from latentcache.value import Value


class Task(Value):
    """One field's run: what is made, of what, and where it goes."""

    field: str
    """Name of the kind."""
    recipe: Mapping[str, Any]
    """``FieldRecipe.as_json()``."""
    producer: Mapping[str, Any]
    """``Described.producer``."""
    groups: tuple[Group, ...]
    root: str
    """DATA, absolute."""
    cache: str
    """CACHE, absolute."""
    lookup: str = ""
    """Folder of ``Catalog.save_lookup``; empty: nothing is committed."""
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
    cost: int = 0
    """Cost of one worker's part of the work."""


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
    waits: Mapping[str, float] = {}
    """Seconds per stage of the thread with the encoder."""


Message = Opened | Encoded | Committed | Warned | Ended
Post = Callable[[Any], None]
"""Takes a :data:`Message`, in any thread."""


class Capacity(NamedTuple):
    """What an engine has for a field."""

    slots: Sequence[str]
    """Labels of its devices; each has one worker at a time."""
    job_bytes: int
    """Memory that one job may take."""
    threads: int
    """Preparing threads of a worker."""


class Worker(Protocol):
    """One worker with a field."""

    is_new: bool
    """True for a process that has encoded nothing yet."""

    def send(self, message: Work | Stop) -> None:
        """Hand a message over; never waits."""

    def kill(self) -> None:
        """End it at once."""


class Engine(Protocol):
    """Starts workers."""

    def capacity(self, task: Task, cost: int) -> Capacity:
        """What there is for a task of this cost. Device, memory and threads of the task are for all workers."""
        ...

    def start(self, slot: int, task: Task, post: Post) -> Worker:
        """A worker for a device by its position; its last message is :class:`Ended`."""
        ...

    def ask(self, target: str, /, **arguments: Any) -> Any:
        """The result of ``module:function(**arguments)``; ``device`` is added if the function takes it."""


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

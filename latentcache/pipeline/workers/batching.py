"""The jobs of one worker: which of their items have to be made, and their batches.

Equal inputs are found before a build. Two that slip through are made twice, and the store keeps one item for their
key. Prepared items of one group are put into batches; a batch that does not fit on the device is halved.

Guarantee: every item that goes in comes out with its array or with a failure. While the device works on one batch the
host makes the next; two are on the device at most. The size of a batch follows from settings and from batches that
did not fit. It never depends on timing, so a run can be repeated.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from latentcache.errors import DeviceMemoryError, EncoderError, UnusableSampleError
from latentcache.failpoint import failpoint
from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.protocol import (
    Failure,
    FieldKind,
    FieldRecipe,
    FieldSpec,
    Group,
    Job,
    Made,
    Output,
    Prepared,
    Producer,
    Results,
)
from latentcache.fields.table import STAT_WIDTH
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.pipeline.workers.engine import Committed, Task, key_list
from latentcache.sources.causes import hint_for
from latentcache.sources.locations import read_image
from latentcache.store.catalog import Catalog

#: Batches that the device has been given and whose results were not fetched, at most.
IN_FLIGHT = 2
T = TypeVar("T")


class Inputs(NamedTuple):
    """The inputs of a job."""

    content: bytes
    """Content hash that the keys are made from."""
    contents: bytes = b""
    """Content hash of each file, 16 bytes each; zeros if it was not read."""
    stat: tuple[int, ...] = ()
    """Stat memo of each file, one after the other."""
    data: Mapping[str, bytes] = {}
    """Bytes of each file by input name; empty if none was read."""


def read_inputs(root: str, job: Job) -> Inputs:
    """Read and hash the files of a job. Texts and records are at hand; if one file is not there, none is read.

    Raises:
        UnusableSampleError: A file cannot be read; ``slug`` is the reason.
    """
    files: dict[str, Any] = {
        name: value
        for name, value in job.inputs.items()
        if value is None or (isinstance(value, Mapping) and "path" in value)
    }
    if not files or None in files.values():
        count = len(files)
        return Inputs(job.content, bytes(HASH_BYTES * count), (0,) * STAT_WIDTH * count)
    data: dict[str, bytes] = {}
    contents = b""
    stat: tuple[int, ...] = ()
    for name, source in files.items():
        try:
            data[name], memo = read_image(root, source)
        except UnusableSampleError as error:
            if data:
                error.what = f"{source['path']}: {error.what}"
            raise
        contents += content_hash(data[name])
        stat += memo
    return Inputs(contents if len(files) == 1 else content_hash(contents), contents, stat, data)


def too_large(error: MemoryError) -> Failure:
    """Return the failure of an item that does not fit alone and so gives no array."""
    detail = (
        (error.why or error.what) if isinstance(error, DeviceMemoryError) else "there is not enough memory for it"
    )
    return Failure(reason="out-of-memory", detail=detail, hint=hint_for("out-of-memory"))


def attempt(make: Callable[[], T], *, bounded: bool = False) -> T | Failure:
    """Return the result of ``make``, or a failure. ``bounded`` raises MemoryError: the job gets all of it then."""
    try:
        return make()
    except UnusableSampleError as error:
        detail = "; ".join(filter(None, (error.what, error.why)))
        return Failure(reason=error.slug, detail=detail, hint=error.fix)
    except MemoryError as error:
        if bounded:
            raise
        return too_large(error)


def cut(values: Iterable[T], cost_of: Callable[[T], int], most: int, most_cost: int) -> Iterator[list[T]]:
    """Values in lists, in order, of limited number and cost; one that costs more is alone."""
    some: list[T] = []
    total = 0
    for value in values:
        cost = cost_of(value)
        if some and (len(some) >= most or total + cost > most_cost):
            yield some
            some = []
            total = 0
        some.append(value)
        total += cost
    if some:
        yield some


@dataclass(slots=True, eq=False)
class OpenUnit:
    """Jobs that a worker was given together; their small items are packed in blocks of their own."""

    number: int
    unmade: int
    """Jobs that are not encoded yet."""
    probe: bool = False
    """True for work whose result is dropped: it shows that the worker works."""
    items: list[tuple[int, Any]] = field(default_factory=list)
    """Items that wait to be packed, with their place in the unit."""
    finished: list[TrackedJob] = field(default_factory=list)
    """Jobs whose items wait to be packed."""


@dataclass(slots=True, eq=False)
class TrackedJob:
    """One job of a worker."""

    index: int
    """Number of the job in the build."""
    job: Job
    unit: OpenUnit
    content: bytes = b""
    """The content hash that the keys are made from."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """Item key by ``Output.item``."""
    there: AbstractSet[bytes] = frozenset()
    """Keys of this job that were committed before this run."""
    unmade: int = 0
    """Outputs that are not encoded."""
    read: Inputs | None = None
    """Its inputs without their data; None if they were not read."""
    failure: Failure | None = None

    def fail(self, failure: Failure) -> None:
        """Note why it gives no item."""
        read = self.read or Inputs(self.job.content)
        hint = failure.hint or hint_for(failure.reason)
        self.failure = replace(failure, hint=hint, content=read.content, stat=read.stat)


class Tracker:
    """Looks up which items are committed. Every method may be called from any thread."""

    def __init__(self, kind: FieldKind, recipe: FieldRecipe, groups: Sequence[Group], lookup: Catalog | None) -> None:
        self._kind, self._recipe, self._groups, self._lookup = kind, recipe, groups, lookup
        self.committed: set[bytes] = set()
        """Keys that this build has committed, as far as this worker was informed."""
        self.copied: set[bytes] = set()
        """Keys of items that are copies of one with an equal ``same`` hash."""

    def look_up(self, jobs: Sequence[TrackedJob], contents: Sequence[bytes]) -> None:
        """Find the item keys of jobs, by the content hash of their inputs, and which of them are committed."""
        outputs = [output for tracked in jobs for output in tracked.job.outputs]
        if not outputs:
            return
        repeated = [content * len(tracked.job.outputs) for tracked, content in zip(jobs, contents, strict=True)]
        keys = self._kind.keys(
            np.frombuffer(b"".join(repeated), dtype=np.uint8).reshape(-1, HASH_BYTES),
            np.array([output.group for output in outputs], dtype=np.int32),
            np.array([output.variant for output in outputs], dtype=np.uint8),
            self._groups,
            self._recipe,
        )
        there = np.zeros(len(keys), dtype=bool) if self._lookup is None else self._lookup.find(keys) >= 0
        split = key_list(keys.tobytes())
        known = {key for key, exists in zip(split, there.tolist(), strict=True) if exists}
        remaining = iter(split)
        for tracked, content in zip(jobs, contents, strict=True):
            tracked.content = content
            tracked.keys = {output.item: next(remaining) for output in tracked.job.outputs}
            tracked.there = known.intersection(tracked.keys.values()) if known else frozenset()

    def missing(self, tracked: TrackedJob, content: bytes) -> list[Output]:
        """Outputs that this job has to make, given the content hash of its inputs."""
        if tracked.content != content:
            self.look_up([tracked], [content])
        done = set() if tracked.unit.probe else tracked.there | self.committed.intersection(tracked.keys.values())
        return [output for output in tracked.job.outputs if tracked.keys[output.item] not in done]

    def report(self, keys: Sequence[bytes], jobs: Sequence[TrackedJob], num_bytes: int) -> Committed:
        """The message on item keys and jobs that are durable."""
        new = [key for key in dict.fromkeys(keys) if key not in self.committed]
        self.committed.update(new)
        reported = [tracked for tracked in jobs if not tracked.unit.probe]
        good = [tracked for tracked in reported if tracked.failure is None]
        failed = [(tracked.index, tracked.failure) for tracked in reported if tracked.failure is not None]
        # A rejected sample keeps the content and the stat of a single file with its reason.
        read = [
            (tracked.index, tracked.read.stat, tracked.read.contents or tracked.read.content)
            for tracked in reported
            if tracked.read is not None and (tracked.failure is None or len(tracked.read.contents) > HASH_BYTES)
        ]
        copied = sum(key in self.copied for key in new)
        return Committed(
            keys=b"".join(new),
            num_bytes=num_bytes,
            done=[tracked.index for tracked in good],
            failed=failed,
            read=read,
            encoded=len(new) - copied,
            copied=copied,
            skipped=sum(
                tracked.keys[output.item] in tracked.there for tracked in good for output in tracked.job.outputs
            ),
        )


class PendingItem(NamedTuple):
    """One item on its way through a worker."""

    owner: TrackedJob
    prepared: Prepared

    @property
    def group(self) -> int:
        """Position of its group."""
        return self.prepared.output.group

    @property
    def key(self) -> bytes:
        """Key of the item."""
        return self.owner.keys[self.prepared.output.item]


Result = tuple[PendingItem, Made | Failure]


class Batches:
    """The items of one worker that wait, by group, and the batches that its encoder has. For the encoding thread."""

    producer: Producer
    """Set before the first item."""

    def __init__(
        self,
        kind: FieldKind,
        spec: FieldSpec,
        task: Task,
        warn: Callable[[str], None],
    ) -> None:
        self._kind, self._groups, self._warn = kind, task.groups, warn
        self._dtype = numpy_dtype(spec.dtype)
        self._bounded = task.bounded
        most = task.batch_size or kind.work.batch_items
        self._most_cost = (task.host_memory or 0) // (2 * kind.work.cost_bytes)
        if task.batch_size is None:
            self._most_cost = min(self._most_cost, kind.work.batch_cost)
        self.waiting: dict[int, list[PendingItem]] = {}
        self._costs = Counter[int]()
        self._limits = defaultdict[int, int](lambda: most)
        """Items of a batch at most, by group."""
        self._in_flight: deque[tuple[list[PendingItem], Results | Future[Results]]] = deque()

    def add(self, item: PendingItem) -> list[PendingItem]:
        """Keep an item for a batch; return the items of its group once their batch is full."""
        group = self._groups[item.group]
        job = item.owner.job
        waiting = self.waiting.setdefault(item.group, [])
        waiting.append(item)
        pixels = math.prod(group.dims)
        cost = pixels if pixels > 1 else job.cost // len(job.outputs)
        self._costs[item.group] += cost
        large = self._costs[item.group] + cost > self._most_cost
        return self.take(item.group) if large or len(waiting) >= self._limits[item.group] else []

    def take(self, group: int | None = None) -> list[PendingItem]:
        """Return and forget the waiting items of a group [default: the group that holds most memory]."""
        if group is None:
            group = max(self.waiting, key=lambda number: num_bytes(self.waiting[number]))
        del self._costs[group]
        return self.waiting.pop(group)

    @property
    def in_flight(self) -> list[PendingItem]:
        """Items whose results were not fetched."""
        return [item for batch, _ in self._in_flight for item in batch]

    def submit(self, items: Sequence[PendingItem]) -> list[Result]:
        """Start to encode items of one group; return the results that are ready, also of earlier items."""
        done: list[Result] = []
        waiting = list(items)
        while waiting:
            batch = waiting[: self._limits[waiting[0].group]]
            while len(self._in_flight) >= IN_FLIGHT:
                done += self._fetch()
            try:
                results = self.producer.encode([item.prepared for item in batch])
            except MemoryError as error:
                if self._bounded and not isinstance(error, DeviceMemoryError):
                    raise  # the worker is replaced, and each job gets all of the memory
                if len(batch) > 1:
                    self._halve(batch[0].group, len(batch))
                elif self._in_flight:
                    done += self.collect(wait=True)  # the item gets the device to itself before it is given up
                else:
                    done.append((waiting.pop(0), too_large(error)))
                continue  # the same items again
            self._in_flight.append((batch, results))
            del waiting[: len(batch)]
        return done + self.collect(wait=False)

    def collect(self, *, wait: bool) -> list[Result]:
        """Return the results that are ready; with ``wait`` all of them."""
        done: list[Result] = []
        while self._in_flight and (wait or _is_done(self._in_flight[0][1])):
            done += self._fetch()
        return done

    def _fetch(self) -> list[Result]:
        """The oldest batch, waited for; encoded again in smaller parts if memory ran out."""
        batch, results = self._in_flight.popleft()
        try:
            results_there = results.result() if isinstance(results, Future) else results
        except DeviceMemoryError as error:
            if len(batch) == 1:
                return [(batch[0], too_large(error))]
            self._halve(batch[0].group, len(batch))
            return self.submit(batch)
        failpoint("result-received")
        done = list(zip(batch, results_there, strict=True))
        self._check(done)
        return done

    def _check(self, results: Sequence[Result]) -> None:
        """Compare shape and type with the field: a difference is a fault of the encoder, not of a sample."""
        for item, result in results:
            if isinstance(result, Failure):
                continue
            expected = self._groups[item.group].shape
            shape = result.array.shape
            same = [side in (-1, other) for side, other in zip(expected, shape, strict=False)]
            if len(shape) != len(expected) or not all(same) or result.array.dtype != self._dtype:
                raise EncoderError(
                    "the encoder gives arrays of another shape or type than the field",
                    where=self._kind.name,
                    why=f"expected {expected} of {self._dtype}, found {shape} of {result.array.dtype}",
                    fix="report this model",
                )

    def _halve(self, group: int, size: int) -> None:
        kept = self._limits[group] = min(self._limits[group], size // 2)
        label = self._groups[group].label
        self._warn(f"out of memory with a batch of {size}{label and f' at {label}'}; the batch size is now {kept}")


def _is_done(results: Results | Future[Results]) -> bool:
    return not isinstance(results, Future) or results.done()


def num_bytes(items: Sequence[PendingItem]) -> int:
    """Host memory that prepared items hold."""
    return sum(item.prepared.num_bytes for item in items)

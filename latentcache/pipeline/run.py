"""Make the items of one field, by workers or, to compare, in this process.

A build that was asked to end returns with everything committed that its workers had in hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from latentcache.fields.protocol import Failure, FieldKind, Job, Made, Output, Producer, ProducerContext
from latentcache.fields.registry import field_kinds, load
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.workers.batching import BatchEncoder, BatchSizes, Candidate, Result, prepare
from latentcache.pipeline.workers.crew import Crew, Progress, RunResult
from latentcache.pipeline.workers.events import EventLog
from latentcache.pipeline.workers.process import WarmWorker
from latentcache.pipeline.workers.scheduler import Scheduler
from latentcache.pipeline.workers.watchdog import deadline_s
from latentcache.pipeline.workers.worker import Task


def run_jobs(
    task: Task,
    jobs: Iterable[Job],
    *,
    total: int,
    total_cost: int,
    items: int | None = None,
    stop: StopSignal,
    events: EventLog | None = None,
    warm: WarmWorker | None = None,
    lock_fd: int | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
    failed: Callable[[Job, Failure], None] = lambda job, failure: None,
    warn: Callable[[str], None] = lambda message: None,
) -> RunResult:
    """Make the items of all jobs.

    Args:
        task: What is made.
        jobs: In the order of the plan; taken as workers have room. No jobs: nothing is started.
        total: Number of jobs.
        total_cost: Sum of their costs.
        items: Number of their items [default: one for each job].
        stop: Looked at all the time.
        events: Told of each durable commit.
        warm: May have a worker ready.
        lock_fd: Lock on the cache, which workers inherit.
        progress: Called ten times a second.
        failed: Told of each job that gives no item, as soon as that is known.
        warn: Told of batches that were halved and workers that were replaced.

    Raises:
        UsageError: The devices or the deadline do not make sense.
        StoreError: The disk is full or fails; what was committed stays.
        EncoderError: The model cannot be used.
        DeviceError: No device is left that works.
        WorkerError: Workers keep dying, and no sample is to blame.
    """
    crew = Crew(task, total=total, total_cost=total_cost, events=events, warm=warm, lock_fd=lock_fd)
    crew.on_failed = failed
    crew.progress.total = total if items is None else items
    work = crew.kind.work
    batch = task.batch_size or work.batch_items
    scheduler = Scheduler(
        devices=crew.devices,
        crew=crew,
        units=crew.units(jobs),
        stop=stop,
        low_water=max(min(2 * max(batch, crew.threads), -(-total // len(crew.devices))), 1),
        deadline=deadline_s(),
        weight=lambda job: job.cost / work.unit_cost if crew.kind.device == "cpu" else 1.0,
        threads=crew.threads,
        advanced=lambda: progress(crew.progress),
        warn=warn,
    )
    before, stop.orderly = stop.orderly, True
    try:
        scheduler.run()
    finally:
        stop.orderly = before
        crew.progress.restarts = scheduler.restarts
    return crew.result(interrupted=stop.requested)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """One item, made again."""

    job: Job
    output: Output | None
    """None if the job as a whole failed."""
    same: bytes
    """Hash of the encoder's input, if the kind has one."""
    columns: Mapping[str, Any]
    made: Made | Failure


def make_again(
    task: Task,
    jobs: Iterable[Job],
    *,
    warn: Callable[[str], None] = lambda message: None,
    opened: Callable[[Producer], None] = lambda producer: None,
) -> Iterator[Remade]:
    """Encode jobs in this process and store nothing. A batch that does not fit is halved, as in a build.

    Args:
        task: How they are made.
        jobs: If a job gives the content hash of its inputs and they have another one, it fails: ``source-changed``.
        warn: Told of batches that were halved.
        opened: Called with the open producer, before the first job.

    Raises:
        EncoderError: The model cannot be used.
        DeviceError: The device failed.
    """
    kind = field_kinds()[task.field]
    recipe = kind.recipe_from_json(task.recipe)
    context = ProducerContext(root=task.root, device=task.device, groups=task.groups, options=task.options, warn=warn)
    producer: Producer | None = None
    sizes = BatchSizes(kind.work, task.groups, task.batch_size)
    waiting: dict[int, list[Candidate]] = {}
    costs: Counter[int] = Counter()
    try:
        for job in jobs:
            if producer is None:
                producer = load(kind.producer)(task.producer, recipe, context)
                producer.open()
                opened(producer)
                batches = BatchEncoder(
                    producer=producer, kind=kind, spec=recipe.spec, groups=task.groups, sizes=sizes, warn=warn
                )
            prepared = _prepared(producer, kind, job)
            if isinstance(prepared, Failure):
                yield Remade(job=job, output=None, same=b"", columns={}, made=prepared)
                continue
            for candidate in prepared:
                group = candidate.group
                waiting.setdefault(group, []).append(candidate)
                costs[group] += sizes.cost(candidate)
                if sizes.full(group, len(waiting[group]), costs[group]):
                    del costs[group]
                    yield from map(_remade, batches.submit(waiting.pop(group)))
        if producer is not None:
            for rest in waiting.values():
                yield from map(_remade, batches.submit(rest))
            yield from map(_remade, batches.collect(wait=True))
    finally:
        if producer is not None:
            producer.close()


def _prepared(producer: Producer, kind: FieldKind, job: Job) -> list[Candidate] | Failure:
    read = prepare(producer, kind, job)
    if isinstance(read, Failure):
        return read
    if job.content and read.content != job.content:
        return Failure(reason="source-changed", detail="its inputs are not those that the cache was made from")
    return [Candidate(index=0, job=job, prepared=one) for one in read.items]


def _remade(result: Result) -> Remade:
    candidate, made = result
    prepared = candidate.prepared
    columns = {**(made.columns if isinstance(made, Made) else {}), **prepared.columns}
    return Remade(job=candidate.job, output=prepared.output, same=prepared.same, columns=columns, made=made)

"""Make the items of one field by workers.

A build that was asked to end returns with everything committed that its workers had in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from latentcache.fields.protocol import Failure, Job
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.workers.crew import Crew, Progress, RunResult
from latentcache.pipeline.workers.events import EventLog
from latentcache.pipeline.workers.process import WarmWorker
from latentcache.pipeline.workers.scheduler import Scheduler
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
    """
    crew = Crew(
        task,
        total=total,
        total_cost=total_cost,
        events=events,
        warm=warm,
        lock_fd=lock_fd,
        items=items,
        failed=failed,
    )
    scheduler = Scheduler(crew, jobs, stop=stop, advanced=progress, warn=warn)
    before, stop.orderly = stop.orderly, True
    try:
        scheduler.run()
    finally:
        stop.orderly = before
    return crew.result(interrupted=stop.requested)

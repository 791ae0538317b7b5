"""Estimate the time and the bytes of a build: a few items of its largest group go through the normal workers.

Nothing is written into the cache; what the probe commits goes to a temporary folder.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.report import BuildPlan
from latentcache.pipeline.workers.process import WarmWorker
from latentcache.pipeline.workers.results import Progress
from latentcache.pipeline.workers.scheduler import Run
from latentcache.value import Value

#: Inputs that a probe reads at most, and seconds of encoding after which no further batch begins.
_INPUTS, _SECONDS = 64, 3.0


class Probe(Value):
    """What the probe of one field measured, and what follows from it."""

    group: str
    """Label of the largest group; empty if the kind has no labels."""
    items: int
    """Items that were encoded."""
    encode_s: float
    open_s: float
    """Seconds until the encoder was open."""
    failed: int
    warnings: tuple[str, ...]
    seconds: float
    """Estimate for all items to make, with opening the encoder."""
    num_bytes: int
    """Estimate of the bytes on disk."""


def probe(plan: BuildPlan, field: str) -> Probe | None:
    """Encode a few items of a field, after a dry run; None if there is nothing to make."""
    assert plan.listing is not None  # of every build
    work, stop, warnings = plan.fields[field], StopSignal(), list[str]()
    if not len(work.todo):
        return None
    jobs = list(islice(work.jobs(plan.listing), _INPUTS))

    def look(progress: Progress) -> None:
        if progress.began and progress.done and time.monotonic() - progress.began > _SECONDS:
            stop.request()

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="latentcache-doctor-") as folder, WarmWorker() as warm:
        Path(folder, "shards").mkdir()
        result = Run(
            replace(plan.tasks[field], cache=folder, lookup="", stream=False),
            jobs,
            total=len(jobs),
            total_cost=sum(job.cost for job in jobs),
            items=sum(len(job.outputs) for job in jobs),
            stop=stop,
            warm=warm,
            warn=warnings.append,
        ).run(look)
    done = result.progress
    open_s = max(done.began - started, 0.0) if done.began else time.monotonic() - started
    times = work.cost / done.cost_done if done.cost_done else 0.0
    return Probe(
        group=next((work.plan.groups[output.group].label for job in jobs for output in job.outputs), ""),
        items=result.encoded,
        encode_s=result.encode_s,
        open_s=open_s,
        failed=len(result.failed),
        warnings=tuple(warnings),
        seconds=open_s + result.encode_s * times,
        num_bytes=int(done.written_bytes * times) if work.recipe.spec.ragged else work.bytes_to_write,
    )

"""Time and bytes of a build, from a few of its items: they are encoded into a temporary folder."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.workers.scheduler import Run
from latentcache.value import Value

if TYPE_CHECKING:
    from latentcache.pipeline.report import BuildPlan
    from latentcache.pipeline.workers.local import LocalEngine
    from latentcache.pipeline.workers.results import Progress, RunResult

#: Inputs of a field that are encoded at most, and seconds after which no further batch begins.
_PROBED, _PROBE_S = 64, 3.0


class Estimate(Value):
    """The cost of one field of a build."""

    field: str
    seconds: float
    """With the time to open the encoder."""
    num_bytes: int
    probed: int = 0
    """Items that were encoded to know it."""
    group: str = ""
    """Bucket of the first of them."""
    encode_s: float = 0.0
    open_s: float = 0.0
    failed: int = 0
    """Inputs that could not be encoded, if none could."""
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """One value of ``estimate``."""
        return {
            "seconds": round(self.seconds, 1),
            "bytes": self.num_bytes,
            "probed": self.probed,
            "failed": self.failed,
        }


def estimate(plan: BuildPlan, name: str, engine: LocalEngine) -> Estimate:
    """Estimate one field by encoding up to 64 of its inputs, the largest group first; opens its encoder once."""
    work = plan.fields[name]
    if not len(work.todo):
        return Estimate(field=name, seconds=0.0, num_bytes=0)
    warnings, started = list[str](), time.monotonic()
    result = _probed(plan, name, engine, warnings)
    done = result.progress
    open_s = max((done.began or time.monotonic()) - started, 0.0)
    times = work.cost / done.cost_done if done.cost_done else 0.0
    return Estimate(
        field=name,
        seconds=open_s + result.encode_s * times,
        num_bytes=int(done.written_bytes * times) if work.recipe.spec.ragged else work.bytes_to_write,
        probed=result.encoded,
        group=work.plan.groups[work.plan.group[work.todo[0]]].label,
        encode_s=result.encode_s,
        open_s=open_s,
        failed=0 if result.encoded else len(result.failed),
        warnings=tuple(warnings),
    )


def _probed(plan: BuildPlan, name: str, engine: LocalEngine, warnings: list[str]) -> RunResult:
    """Encode a few items of a field by the normal workers, into a temporary folder."""
    assert plan.listing is not None  # of every build
    jobs, stop = list(islice(plan.fields[name].jobs(plan.listing), _PROBED)), StopSignal()

    def look(progress: Progress) -> None:
        if progress.began and progress.done and time.monotonic() - progress.began > _PROBE_S:
            stop.request()

    with tempfile.TemporaryDirectory(prefix="latentcache-estimate-") as folder:
        Path(folder, "shards").mkdir()
        return Run(
            replace(plan.tasks[name], cache=folder, lookup="", stream=False),
            jobs,
            total=len(jobs),
            total_cost=sum(job.cost for job in jobs),
            items=sum(len(job.outputs) for job in jobs),
            stop=stop,
            engine=engine,
            warn=warnings.append,
        ).run(look)

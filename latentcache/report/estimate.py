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

if TYPE_CHECKING:
    from latentcache.pipeline.report import BuildPlan
    from latentcache.pipeline.workers.local import LocalEngine
    from latentcache.pipeline.workers.results import RunResult

#: Inputs of a field that are encoded at most, and seconds after which no further batch begins.
_PROBED, _PROBE_S = 64, 3.0


def estimate(plan: BuildPlan, name: str, engine: LocalEngine) -> dict[str, Any]:
    """Estimate the ``seconds`` and ``bytes`` of a field by encoding up to 64 of its inputs, the largest group first.

    The seconds include opening the encoder. ``probed`` inputs were encoded. If none could be, ``failed`` counts them.
    """
    work, started = plan.fields[name], time.monotonic()
    if not len(work.todo):
        return {"seconds": 0.0, "bytes": 0, "probed": 0, "failed": 0}
    result = _probed(plan, name, engine)
    open_s = max((result.began or time.monotonic()) - started, 0.0)
    times = work.cost / result.cost_done if result.cost_done else 0.0
    return {
        "seconds": round(open_s + result.encode_s * times, 1),
        "bytes": int(result.written_bytes * times) if work.recipe.spec.ragged else work.bytes_to_write,
        "probed": result.encoded,
        "failed": 0 if result.encoded else len(result.failed),
    }


def _probed(plan: BuildPlan, name: str, engine: LocalEngine) -> RunResult:
    """Encode a few items of a field by the normal workers, into a temporary folder."""
    assert plan.listing is not None  # of every build
    jobs, stop = list(islice(plan.fields[name].jobs(plan.listing), _PROBED)), StopSignal()

    def look(progress: RunResult) -> None:
        if progress.began and progress.done and time.monotonic() - progress.began > _PROBE_S:
            stop.request()

    with tempfile.TemporaryDirectory(prefix="latentcache-estimate-") as folder:
        Path(folder, "shards").mkdir()
        return Run(
            replace(plan.tasks[name], cache=folder, lookup="", owner=""),
            jobs,
            total=len(jobs),
            total_cost=sum(job.cost for job in jobs),
            stop=stop,
            engine=engine,
        ).run(look)

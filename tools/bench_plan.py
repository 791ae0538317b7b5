"""How long and how much memory it takes to plan an epoch, and to go on in the middle of one.

24 skewed buckets (a Dirichlet draw), batch 16 on 4 ranks. Each size runs in a process of its own, once plain and once
as two data sets of three quarters and one quarter of the entries with equal weights (an epoch of one and a half times
the entries); time is the median of the rounds, memory what one plan holds at its peak. Prints a Markdown table. Cost:
about two minutes.

    python tools/bench_plan.py [--entries 1000000 10000000] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.sizes import Size
from latentcache.plan.batches import BatchPlan, plan_report
from latentcache.plan.cursor import Cursor, Leg, rest_of_epoch
from latentcache.plan.epoch import plan_epoch
from latentcache.plan.weights import Mixture, mixture

_NUM_BUCKETS = 24
_MIB = 1 << 20


def measure(entries: int, rounds: int, *, weighted: bool = False) -> dict[str, Any]:
    """Seconds per plan and per resume with another world size, and MiB held at the peak of a plan."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.ones(_NUM_BUCKETS) * 0.5)
    bucket = rng.choice(_NUM_BUCKETS, p=share, size=entries).astype(np.int32)
    sizes = [Size(64 + 8 * number, 64) for number in range(_NUM_BUCKETS)]
    mix = mixture([entries - entries // 4, entries // 4], [1, 1]) if weighted else None
    plans, resumes, steps = [], [], 0
    for epoch in range(rounds):
        started = time.perf_counter()
        report = plan_report(bucket, sizes, BatchPlan(batch_size=16, world_size=4), mix)
        steps = len(plan_epoch(bucket, report, seed=0, epoch=epoch))
        plans.append(time.perf_counter() - started)
        leg = Leg(batch_size=16, world_size=4, steps=steps // 2)
        cursor = Cursor(seed=0, epoch=epoch, small_buckets="repeat", legs=(leg,))
        started = time.perf_counter()
        rest_of_epoch(bucket, sizes, cursor, BatchPlan(batch_size=16, world_size=3), mix)
        resumes.append(time.perf_counter() - started)
    return {
        "entries": entries,
        "servings": mix.samples if mix else entries,
        "steps": steps,
        "plan_s": statistics.median(plans),
        "resume_s": statistics.median(resumes),
        "peak_mib": _peak_bytes(bucket, sizes, mix) / _MIB,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result as Markdown."""
    lines = [
        "| entries | servings | steps | plan, s | resume on 3 ranks, s | peak, MiB | bytes per serving |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        each = row["peak_mib"] * _MIB / row["servings"]
        counts = f"{row['entries']:,} | {row['servings']:,} | {row['steps']:,}"
        times = f"{row['plan_s']:.2f} | {row['resume_s']:.2f}"
        lines.append(f"| {counts} | {times} | {row['peak_mib']:.0f} | {each:.0f} |")
    return "\n".join(lines)


def in_own_process(entries: int, rounds: int, *, weighted: bool = False) -> dict[str, Any]:
    """:func:`measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--alone", str(entries), "--rounds", str(rounds)]
    command += ["--weighted"] if weighted else []
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--weighted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.alone, options.rounds, weighted=options.weighted)))
        return
    rows = [
        in_own_process(entries, options.rounds, weighted=mix) for entries in options.entries for mix in (False, True)
    ]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def _peak_bytes(bucket: NDArray[np.int32], sizes: Sequence[Size], mix: Mixture | None) -> int:
    """Most that planning one epoch holds at once, beyond the column; numpy tells tracemalloc of its arrays."""
    tracemalloc.start()
    plan_epoch(bucket, plan_report(bucket, sizes, BatchPlan(batch_size=16, world_size=4), mix), seed=0, epoch=0)
    return tracemalloc.get_traced_memory()[1]


if __name__ == "__main__":
    main()

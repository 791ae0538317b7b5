"""``latentcache plan``: how many steps an epoch has, bucket by bucket, and what fills no batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, flags
from latentcache.cli.console import SHOWN, counted, out, table
from latentcache.errors import EmptyPlanError
from latentcache.pipeline.settings import RecipeSettings

if TYPE_CHECKING:
    from latentcache.geometry.sizes import Size
    from latentcache.plan.batches import PlanReport


@flags.with_recipe
def plan(
    path: Annotated[
        Path, typer.Argument(metavar="CACHE|DATA", help="A cache, or a folder of pictures.", readable=False)
    ],
    *,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples per rank and step.")],
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks.")] = 1,
    grad_accum: Annotated[int, typer.Option("--grad-accum", min=1, help="Batches per optimizer step.")] = 1,
    small_buckets: Annotated[
        str, typer.Option("--small-buckets", help="repeat|drop|partial|error: samples that fill no batch.")
    ] = "repeat",
    seed: Annotated[int, typer.Option("--seed", help="Of the order: decides which samples are left over.")] = 0,
    recipe: RecipeSettings,
    as_json: flags.Json = False,
) -> int:
    """Steps per epoch, before anything is trained; recipe flags count for a data folder only."""
    from latentcache.plan.batches import BatchPlan, plan_report, require_steps

    batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets=small_buckets)  # type: ignore[arg-type]
    entries = _entries(path, recipe)
    report = plan_report(entries.bucket, entries.sizes, batches)
    named = _uneven_names(entries, report, seed)
    payload = _payload(path, report, grad_accum) | {"quarantined": entries.quarantined, "seed": seed, **named}
    try:
        require_steps(report)
    except EmptyPlanError as error:
        if not as_json:
            _show(payload)
        console.fail("plan", error, as_json=as_json, payload=payload)
        return error.exit_code
    if as_json:
        console.emit("plan", payload, exit_code=0)
    else:
        _show(payload)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entries:
    """What there is to serve."""

    bucket: Any
    """(N,) positions in ``sizes``."""
    sizes: Sequence[Size]
    names: Sequence[str]
    """(N,) sample of each entry."""
    quarantined: int


def _uneven_names(entries: _Entries, report: PlanReport, seed: int) -> dict[str, list[str]]:
    """The samples that the first epoch repeats, and those that it leaves out; later epochs choose others."""
    from latentcache.plan.epoch import plan_epoch, uneven

    repeated, dropped = uneven(plan_epoch(entries.bucket, report, seed=seed, epoch=0), len(entries.bucket))
    return {
        "repeated_names": [entries.names[row] for row in repeated.tolist()],
        "dropped_names": [entries.names[row] for row in dropped.tolist()],
    }


def _entries(path: Path, settings: RecipeSettings) -> _Entries:
    """From a cache's columns, or from picture headers."""
    from latentcache.store.generation import load_generation
    from latentcache.store.layout import CacheLayout
    from latentcache.store.variants import folded

    layout = CacheLayout(path)
    if layout.current.is_file() or layout.building.is_file():
        generation = folded(load_generation(path))
        all_names = list(generation.samples.names)
        return _Entries(
            bucket=generation.rows.bucket,
            sizes=generation.buckets,
            names=[all_names[sample] for sample in generation.rows.sample.tolist()],
            quarantined=len(generation.refused),
        )
    return _survey(path, settings)


def _survey(path: Path, settings: RecipeSettings) -> _Entries:
    """The same for a data folder, in the order that its cache would have."""
    import numpy as np

    from latentcache.pipeline.recipes import resolve_recipe
    from latentcache.pipeline.settings import MAX_PIXELS
    from latentcache.pipeline.survey import Memory, survey
    from latentcache.sources.resolve import scan
    from latentcache.store.catalog import Catalog

    recipe, _ = resolve_recipe(settings, None, cached_model=None, has_cuda=False)
    data = scan(path, captions=False)
    found = survey(data, recipe, Catalog(()), Memory({}, {}), max_pixels=MAX_PIXELS)
    todo = sorted(found.todo, key=lambda planned: planned.index)
    entries = [(planned.sample.name, placement.bucket) for planned in todo for placement in planned.placements]
    sizes = sorted({size for _, size in entries}, key=lambda size: (-size.area, size.width))
    numbers = {size: number for number, size in enumerate(sizes)}
    return _Entries(
        bucket=np.array([numbers[size] for _, size in entries], dtype=np.int32),
        sizes=sizes,
        names=[name for name, _ in entries],
        quarantined=len(data.refused) + len(found.failed),
    )


def _payload(path: Path, report: PlanReport, grad_accum: int) -> dict[str, Any]:
    batches = report.batches
    return {
        "path": str(path),
        "batch_size": batches.batch_size,
        "world_size": batches.world_size,
        "grad_accum": grad_accum,
        "small_buckets": batches.small_buckets,
        "buckets": [
            {
                "height": bucket.size.height,
                "width": bucket.size.width,
                "samples": bucket.samples,
                "batches": bucket.steps,
                "repeated": bucket.repeated,
                "dropped": bucket.dropped,
                "fill": round(bucket.fill, 4),
            }
            for bucket in report.buckets
        ],
        "batches_per_epoch": report.steps,
        "steps_per_epoch": -(-report.steps // grad_accum),
        "samples_used": report.samples_used,
        "samples_dropped": report.samples_dropped,
        "samples_repeated": report.samples_repeated,
    }


def _show(payload: dict[str, Any]) -> None:
    """The table for people."""
    names = ("samples", "batches", "repeated", "dropped")
    rows: list[tuple[object, ...]] = [("bucket", *names, "fill")]
    for bucket in payload["buckets"]:
        size, fill = f"{bucket['height']}x{bucket['width']}", f"{bucket['fill']:.0%}"
        rows.append((size, *(bucket[name] for name in names), fill))
    for line in table(rows):
        out(line)
    ranks = counted(payload["world_size"], "rank")
    accumulation = f", gradient accumulation {payload['grad_accum']}" if payload["grad_accum"] > 1 else ""
    out(
        f"{counted(payload['steps_per_epoch'], 'step')} per epoch at batch size {payload['batch_size']}"
        f" on {ranks}{accumulation}: {payload['samples_used']} samples used, {payload['samples_repeated']} repeated,"
        f" {payload['samples_dropped']} dropped"
    )
    for what in ("repeated", "dropped"):
        found = payload[f"{what}_names"]
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            out(f"{what} in the first epoch of seed {payload['seed']}: {', '.join(found[:SHOWN])}{more}")
    if payload["quarantined"]:
        out(f"{counted(payload['quarantined'], 'file')} refused and not counted: `latentcache build` names them")

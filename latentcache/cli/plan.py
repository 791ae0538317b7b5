"""``latentcache plan``: how many steps an epoch has, bucket by bucket, and what fills no batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, flags, token_info
from latentcache.cli.console import SHOWN, counted, out, table
from latentcache.errors import EmptyPlanError, UsageError
from latentcache.pipeline.settings import RecipeSettings

if TYPE_CHECKING:
    from latentcache.geometry.sizes import Size
    from latentcache.plan.batches import PlanReport
    from latentcache.plan.weights import Mixture
    from latentcache.recipe import Recipe


Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="CACHE|DATA...", help="A cache, or a folder of pictures; several are one.", readable=False
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Samples per rank and step.")]
WorldSize = Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks.")]
GradAccum = Annotated[int, typer.Option("--grad-accum", min=1, help="Batches per optimizer step.")]
SmallBuckets = Annotated[
    str, typer.Option("--small-buckets", help="repeat|drop|partial|error: samples that fill no batch.")
]
Weight = Annotated[
    list[str] | None,
    typer.Option("--weight", metavar="W", help="Share of the samples, once for each path.", show_default=False),
]
Samples = Annotated[
    int | None,
    typer.Option("--samples", min=1, help="Samples per epoch, shared out by --weight.", show_default=False),
]
MaxRepeat = Annotated[
    list[str] | None,
    typer.Option(
        "--max-repeat",
        metavar="N",
        help="How often an epoch may serve a path over: one for all, or once for each.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the order: decides which samples are left over.")]


@flags.with_recipe
def plan(
    paths: Paths,
    *,
    batch_size: BatchSize,
    world_size: WorldSize = 1,
    grad_accum: GradAccum = 1,
    small_buckets: SmallBuckets = "repeat",
    weight: Weight = None,
    samples: Samples = None,
    max_repeat: MaxRepeat = None,
    seed: Seed = 0,
    recipe: RecipeSettings,
    as_json: flags.Json = False,
) -> int:
    """Steps per epoch, before anything is trained; recipe flags count for a data folder only."""
    from latentcache.plan.batches import BatchPlan, plan_report, require_steps
    from latentcache.plan.epoch import with_names
    from latentcache.plan.fill import refuse_mask

    token_info.refuse_plan(paths)
    batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets=small_buckets)  # type: ignore[arg-type]
    refuse_mask(batches)
    parts = [_entries(path, recipe) for path in paths]
    _require_alike(parts)
    entries = parts[0] if len(parts) == 1 else _together(parts)
    mix = _mixture(paths, parts, weight, samples, max_repeat)
    report = plan_report(entries.bucket, entries.sizes, batches, mix)
    report = with_names(report, entries.bucket, lambda rows: [entries.names[row] for row in rows.tolist()], seed=seed)
    payload = _payload(report, grad_accum) | {"quarantined": entries.quarantined, "seed": seed}
    payload |= {"path": str(paths[0]), "datasets": _datasets(report, paths)}
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
    recipe: Recipe | None
    """Of a cache."""


def _require_alike(parts: Sequence[_Entries]) -> None:
    """Refuse caches whose entries cannot stand in one batch, as ``combine_caches`` does."""
    from latentcache.store.views import require_alike

    recipes = [part.recipe for part in parts if part.recipe is not None]
    for other in recipes[1:]:
        require_alike(recipes[0], other)


def _together(parts: Sequence[_Entries]) -> _Entries:
    """Several as one; sizes that are equal become one bucket."""
    import numpy as np

    sizes = list(dict.fromkeys(size for part in parts for size in part.sizes))
    number = {size: position for position, size in enumerate(sizes)}
    moved = [np.array([number[size] for size in part.sizes], dtype=np.int32) for part in parts]
    return _Entries(
        bucket=np.concatenate([new[part.bucket] for new, part in zip(moved, parts, strict=True)]),
        sizes=sizes,
        names=[name for part in parts for name in part.names],
        quarantined=sum(part.quarantined for part in parts),
        recipe=None,
    )


def _mixture(
    paths: Sequence[Path],
    parts: Sequence[_Entries],
    weights: list[str] | None,
    samples: int | None,
    max_repeat: list[str] | None,
) -> Mixture | None:
    from latentcache.plan.names import name_of, told_apart
    from latentcache.plan.weights import mixture

    if weights:
        limit = max_repeat[0] if max_repeat and len(max_repeat) == 1 else max_repeat or None
        counts, names = [len(part.bucket) for part in parts], told_apart([name_of(path) for path in paths])
        return mixture(counts, weights, samples=samples, names=names, max_repeat=limit)
    for flag, value in (("--samples", samples), ("--max-repeat", " ".join(max_repeat or []) or None)):
        if value is not None:
            raise UsageError(f"{flag} {value} without weights", fix="--weight 1 for each path as well")
    return None


def _datasets(report: PlanReport, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What an epoch takes of each path; empty without weights."""
    return [
        {
            "path": str(path),
            "name": dataset.name,
            "weight": float(dataset.weight),
            "entries": dataset.entries,
            "samples": dataset.samples,
            "least": dataset.least,
            "most": dataset.most,
        }
        for path, dataset in zip(paths, report.datasets, strict=False)
    ]


def _entries(path: Path, settings: RecipeSettings) -> _Entries:
    """From a cache's columns, or from picture headers."""
    from latentcache.store.generation import load_generation
    from latentcache.store.variants import folded

    if _is_cache(path):
        generation = folded(load_generation(path))
        all_names = list(generation.samples.names)
        return _Entries(
            bucket=generation.rows.bucket,
            sizes=generation.buckets,
            names=[all_names[sample] for sample in generation.rows.sample.tolist()],
            quarantined=len(generation.refused),
            recipe=generation.recipe,
        )
    return _survey(path, settings)


def _is_cache(path: Path) -> bool:
    """Whether a build was ever started here; what may not be looked at is left to the scan and its words."""
    from latentcache.store.layout import CacheLayout

    try:
        return CacheLayout(path).is_ours()
    except OSError:
        return False


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
        recipe=None,
    )


def _payload(report: PlanReport, grad_accum: int) -> dict[str, Any]:
    batches = report.batches
    return {
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
        "repeated_names": list(report.repeated_names),
        "dropped_names": list(report.dropped_names),
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
    _show_datasets(payload["datasets"])
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


def _show_datasets(datasets: Sequence[dict[str, Any]]) -> None:
    """A second table, where weights say how often each is served."""
    if not datasets:
        return
    total = sum(dataset["samples"] for dataset in datasets)
    rows: list[tuple[object, ...]] = [("data set", "entries", "samples", "share", "each served")]
    for dataset in datasets:
        least, most = dataset["least"], dataset["most"]
        times = counted(least, "time") if least == most else f"{least} or {most} times"
        rows.append(
            (dataset["path"], dataset["entries"], dataset["samples"], f"{dataset['samples'] / total:.1%}", times)
        )
    for line in table(rows):
        out(line)

"""``latentcache plan``: steps of an epoch by bucket or row length, and samples that fill no batch."""

from __future__ import annotations

import shlex
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as attributes
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latentcache.cli import flags
from latentcache.cli.console import SHOWN, Result, Table, repeats_lines
from latentcache.cli.flags import argument, option
from latentcache.errors import EmptyPlanError, UsageError, count_of
from latentcache.plan.numbers import human_bytes

if TYPE_CHECKING:
    from latentcache.fields.protocol import FieldRecipe
    from latentcache.fields.table import SampleTable
    from latentcache.geometry.sizes import Size
    from latentcache.plan.batching import BatchPlan, PlanReport

HELP = "Count the steps per epoch, by bucket or row length."
EXAMPLES = """\
latentcache plan images.latentcache --batch-size 4
latentcache plan images/ --batch-size 4 --world-size 8 --remainder drop
latentcache plan texts.latentcache --batch-size 8 --pack 4096
"""


def plan(
    path: Path = argument("CACHE|DATA", "A cache or its URL, or DATA as for build."),
    *,
    batch_size: int | None = option(
        None, "--batch-size N", "Samples per rank and step. [default: of --trainer-config]", min=1
    ),
    batch_pixels: int | None = option(
        None,
        "--batch-pixels N",
        "Fill batches up to N pixels per step, all ranks together, instead of --batch-size.",
        min=1,
    ),
    batch_tokens: int | None = option(
        None,
        "--batch-tokens N",
        "Fill batches up to N tokens per step, all ranks together, instead of --batch-size.",
        min=1,
    ),
    multiple_of: int | None = option(
        None, "--multiple-of N", "With a budget: round samples per step down to a multiple. [default: ranks]", min=1
    ),
    world_size: int = option(1, "--world-size N", "Ranks that train together. [default: 1]", min=1),
    grad_accum: int = option(1, "--grad-accum N", "Batches per optimizer step. [default: 1]", min=1),
    remainder: str = option(
        "repeat",
        "--remainder repeat|drop|partial|pad|error",
        "Policy for samples that fill no batch. [default: repeat]",
    ),
    pack: flags.Pack = None,
    pad: flags.Pad = None,
    chunk: flags.Chunk = None,
    overflow: flags.Overflow = None,
    trainer: str | None = option(None, "--for NAME", "Also show this trainer's buckets and steps."),
    suggest: bool = option(False, "--suggest", "With --for: name the settings that lose least."),
    requested: flags.Requested,
    source: flags.Source,
) -> Result:
    """Count the steps of an epoch before training; recipe flags apply to DATA folders only."""
    from latentcache.plan.batching import BatchPlan, require_steps

    if batch_pixels is None and batch_tokens is None:
        batch_size = batch_size or _batch_of(path, requested)
    rows = {name: value for name, value in (("pack", pack), ("pad", pad), ("chunk", chunk)) if value is not None}
    if len(rows) > 1 or (overflow is not None and not rows):
        raise UsageError(
            "--pack, --pad, --chunk: give one of them" if rows else f"--overflow={overflow}: needs --pack or --pad",
            fix=f"latentcache plan {shlex.quote(str(path))} --batch-size {batch_size or 8} --pack {pack or 4096}",
        )
    layout = {**rows, "overflow": overflow} if rows else {}
    batches = BatchPlan(
        batch_size=batch_size,
        batch_pixels=batch_pixels,
        batch_tokens=batch_tokens,
        multiple_of=multiple_of,
        world_size=world_size,
        remainder=remainder,  # type: ignore[arg-type]  # checked there
    )
    if _is_cache(path):
        planned = _of_cache(path, batches, layout, (source or {}).get("repeats") is not False)
    else:
        planned = _of_data(path, batches, requested, source)
        if layout:
            raise _no_documents(path, layout)
    payload = _payload(planned.report, grad_accum) | {"quarantined": planned.rejected, "path": str(path)}
    payload["repeats"] = [{"times": times, "samples": count} for times, count in sorted(planned.repeats.items())]
    if trainer is not None or suggest:
        payload |= _of_trainer(planned, trainer or "", batches, grad_accum, suggest=suggest)
    error: EmptyPlanError | None = None
    try:
        require_steps(planned.report)
    except EmptyPlanError as failure:
        error = failure
    return Result(payload, _lines(payload), error=error)


def _batch_of(path: Path, requested: flags.Requested) -> int:
    """The batch size of the trainer's settings file; without one the option is missing."""
    from latentcache.geometry.like.trainers import trainer_of

    for settings in requested.fields.values():
        config = getattr(settings, "trainer_config", None)
        if config is not None and (size := trainer_of(config, settings.like).settings(config).batch):
            return size
    why, fix = "it is not in a --trainer-config either", f"latentcache plan {shlex.quote(str(path))} --batch-size 8"
    raise UsageError("Missing option '--batch-size'", why=why, fix=fix)


class _Planned(NamedTuple):
    report: PlanReport
    rejected: int
    """Samples."""
    repeats: Mapping[int, int]
    """Samples by how often an epoch serves each."""
    samples: SampleTable
    recipe: FieldRecipe | None
    """Of the field that decides the sizes."""
    sets: Sequence[Mapping[str, Any]]
    """Those of the data set, by the column ``image_set``."""
    settings: Any = None
    """Its settings, as they were given."""


def _is_cache(path: Path) -> bool:
    """True if a build was started here."""
    from latentcache.store.paths import CachePaths

    try:
        return CachePaths(path).is_ours()
    except OSError:
        return False


def _of_cache(path: Path, batches: BatchPlan, rows: Mapping[str, Any], repeats: bool) -> _Planned:
    """The plan of the loader of this cache."""
    from latentcache.loader.cache import open_cache
    from latentcache.pipeline.report import quarantined

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of demo caches and parts
        cache = open_cache(path).read(repeats=repeats)
    (snapshot,) = cache.snapshots
    collates = [field.spec.collate for field in snapshot.fields.values()]
    if rows and collates and "pack" not in collates:
        raise _no_documents(path, rows)
    if not rows and collates and all(collate == "pack" for collate in collates):
        raise UsageError(
            f"{path}: the steps of documents depend on the length of rows",
            where=str(path),
            fix=f"add --pack N, --pad N or --chunk N; `latentcache info {shlex.quote(str(path))}` shows lengths",
        )
    source: Any = cache.rows(**rows) if rows else cache
    report = source.plan(**{part.name: getattr(batches, part.name) for part in attributes(batches)})
    recipe = next((field.recipe for field in snapshot.fields.values()), None)
    sets = snapshot.source.get("sets", ())
    return _Planned(report, quarantined(snapshot.rejected), cache.repeats, snapshot.samples, recipe, sets)


def _no_documents(path: Path, rows: Mapping[str, Any]) -> UsageError:
    flag = next(iter(rows))
    return UsageError(f"--{flag}={rows[flag]}: {path} holds no documents", where=str(path), fix=f"leave out --{flag}")


def _of_data(path: Path, batches: BatchPlan, requested: flags.Requested, source: flags.Source) -> _Planned:
    """The plan that the cache of this folder would have; nothing is written."""
    import numpy as np

    from latentcache.pipeline.build import plan_build
    from latentcache.pipeline.publish import groups_in_use
    from latentcache.pipeline.report import quarantined
    from latentcache.pipeline.settings import BuildSettings
    from latentcache.plan.batching import bucket_of, size_rank
    from latentcache.plan.samples import SampleIndex, plan_report, times_counted

    planned = plan_build(BuildSettings(data=path, source=source, **requested.build))
    field = next(iter(planned.fields.values()))
    if field.recipe.spec.collate == "pack":
        raise _no_lengths(path, requested)
    assert planned.listing is not None  # of every build
    items, samples = field.plan, planned.listing.samples
    first = np.flatnonzero(np.asarray(items.variant) == 0)
    order = first[np.argsort(items.sample[first], kind="stable")]
    served, column = np.unique(items.sample), samples.columns.get("repeats")
    if column is not None:
        order = np.repeat(order, column[items.sample[order]])
    sample = items.sample[order]
    groups, group = groups_in_use(items, items.group[order])
    spec = field.recipe.spec
    buckets = [bucket_of({field.name: group}, {field.name: spec}, {field.name: spec.length}) for group in groups]
    ranked = sorted(range(len(groups)), key=lambda number: size_rank(buckets[number].size))
    index = SampleIndex(
        bucket=np.argsort(ranked).astype(np.int32)[group],
        buckets=tuple(buckets[number] for number in ranked),
        identify=lambda: str(path),
        names_of=lambda rows: samples.names.take(sample[rows]),
    )
    repeats = times_counted(None if column is None else column[served], len(served))
    settings = requested.fields.get(field.name)
    rejected = quarantined(planned.rejected)
    layout = planned.listing.layout
    sets = [image_set.as_json() for image_set in layout.sets] if layout else []
    return _Planned(plan_report(index, batches), rejected, repeats, samples, field.recipe, sets, settings)


def _of_trainer(
    planned: _Planned, trainer: str, batches: BatchPlan, grad_accum: int, *, suggest: bool
) -> dict[str, Any]:
    """What the trainer makes of the same images, at the same resolutions unless its configuration was given."""
    from latentcache.fields.latents import LatentsRecipe, LatentsSettings, geometry_of
    from latentcache.geometry.like.trainers import TRAINERS
    from latentcache.plan.trainers import TrainerRun

    recipe = planned.recipe
    if not isinstance(batches.batch_size, int):
        raise UsageError("--for: trainers have one batch size", fix="--batch-size N in place of the budget")
    if trainer not in TRAINERS:
        raise UsageError(f"--for={trainer}: unknown trainer", fix=f"--for {'|'.join(TRAINERS)}")
    if not isinstance(recipe, LatentsRecipe):
        raise UsageError("--for: DATA are no images", fix="leave --for out")
    settings = replace(planned.settings or LatentsSettings(), like=trainer, model=None)
    geometry = geometry_of(settings.with_trainer()[0], recipe, recipe.encoder.multiple)
    tables = geometry.like_tables()
    if len(tables) > 1 and TRAINERS[trainer].draws_resolution:
        raise UsageError(
            f"--for={trainer}: it draws one of {len(tables)} resolutions for each image and epoch",
            why="its batches differ from epoch to epoch",
            fix="--resolution PIXELS for one of them",
        )
    run = TrainerRun(
        trainer=TRAINERS[trainer],
        tables=tables,
        upscale=geometry.upscale,
        batch=batches.batch_size,
        ranks=batches.world_size,
        accum=grad_accum,
    )
    sizes = _sizes(planned, apart=run.trainer.parts_sets)
    plan = run.plan(sizes)
    best = run.suggestion(sizes) if suggest else None
    suggestion = best and {
        "change": best[0],
        "samples_short": best[1].short,
        "samples_dropped": best[1].dropped,
        "cropped": round(best[1].cropped, 4),
        "steps_per_epoch": best[1].steps,
    }
    settings_of = [table.words for table in tables]
    shown = {"name": trainer, "settings": settings_of, **plan.as_json()}
    return {"trainer": shown, **({"suggestion": suggestion} if suggest else {})}


def _sizes(planned: _Planned, *, apart: bool) -> list[Counter[Size]]:
    """Images by size, each as often as an epoch serves it, of all sets that fill batches together.

    ``apart``: those of other repeats do not, nor do regularization images. Images of unknown size are left out.
    """
    import numpy as np

    from latentcache.geometry.sizes import Size

    columns = planned.samples.columns
    sizes, count = np.asarray(columns["original_size"]).tolist(), len(planned.samples)
    times = np.asarray(columns.get("repeats", np.ones(count, np.int64))).tolist()
    set_of = np.asarray(columns.get("image_set", np.zeros(count, np.int64))).tolist()
    regs = [bool(image_set.get("is_reg")) for image_set in planned.sets] or [False]
    counts = dict[Any, Counter[Size]]()
    for (height, width), repeats, number in zip(sizes, times, set_of, strict=True):
        if height and width:
            together = (repeats, regs[number]) if apart else None
            counts.setdefault(together, Counter())[Size(height, width)] += repeats
    return list(counts.values())


def _no_lengths(path: Path, requested: flags.Requested) -> UsageError:
    build = flags.build_command(path, None, requested, "auto", "")
    cache, common = shlex.quote(f"{path}.latentcache"), f" {requested.common}" if requested.common else ""
    return UsageError(
        f"{path}: the rows of documents are known after tokenization",
        where=str(path),
        fix=f"{build}; latentcache plan {cache}{common} --batch-size 8 --pack 4096",
    )


# output


def _payload(report: PlanReport, grad_accum: int) -> dict[str, Any]:
    batches = report.batches
    per_rank = [bucket.size // batches.world_size for bucket in report.buckets]
    pairs = list(zip(report.buckets, per_rank, strict=True))
    return {
        "batch_size": batches.batch_size,
        "batch_pixels": batches.batch_pixels,
        "batch_tokens": batches.batch_tokens,
        "multiple_of": batches.multiple,
        "world_size": batches.world_size,
        "grad_accum": grad_accum,
        "remainder": batches.remainder,
        "buckets": [
            {
                **(bucket.bucket.dims or {"label": bucket.bucket.label}),
                "samples": bucket.samples,
                "batch_size": size,
                "batch_bytes": size * bucket.bucket.bytes,
                "batches": bucket.steps,
                "repeated": bucket.repeated,
                "copies": bucket.copies,
                "dropped": bucket.dropped,
                "efficiency": round(bucket.efficiency, 4),
            }
            for bucket, size in pairs
        ],
        "largest_batch": {
            "samples": max(per_rank, default=0),
            **{
                name: max((size * getattr(bucket.bucket, name) for bucket, size in pairs), default=0)
                for name in ("pixels", "cells", "tokens", "bytes")
            },
        },
        "samples_per_batch": round(report.samples_per_batch, 4),
        "batches_per_epoch": report.steps,
        "steps_per_epoch": -(-report.steps // grad_accum),
        "samples_used": report.samples_used,
        "samples_dropped": report.samples_dropped,
        "samples_repeated": report.samples_repeated,
        "overfilled": list(report.overfilled),
    }


def _lines(payload: dict[str, Any]) -> Iterator[str | Table]:
    is_budget = payload["batch_size"] is None
    names = ("samples", *(("batch_size",) if is_budget else ()), "batches", "repeated", "dropped")
    sides = [name for name in ("frames", "height", "width") if any(name in bucket for bucket in payload["buckets"])]
    titles = (name.replace("_", " ") for name in names)
    size_title = ("batch bytes",) if is_budget else ()
    rows: list[tuple[object, ...]] = [(" x ".join(sides) or "bucket", *titles, "efficiency", *size_title)]
    for bucket in payload["buckets"]:
        dims = [str(bucket[name]) for name in sides if name in bucket]
        label = "x".join(dims) or bucket.get("length", bucket.get("label")) or "all"
        batch_bytes = (human_bytes(bucket["batch_bytes"]),) if is_budget else ()
        rows.append((label, *(bucket[name] for name in names), f"{bucket['efficiency']:.0%}", *batch_bytes))
    yield Table(rows)
    yield from repeats_lines(payload["repeats"])
    ranks = count_of(payload["world_size"], "ranks")
    accumulation = f", gradient accumulation {payload['grad_accum']}" if payload["grad_accum"] > 1 else ""
    if is_budget:
        largest = {name.replace("cells", "latent cells"): n for name, n in payload["largest_batch"].items() if n}
        largest["samples"] = payload["largest_batch"]["samples"]
        num_bytes = human_bytes(largest.pop("bytes", 0))
        counts = ", ".join(f"{number:,} {name}" for name, number in largest.items())
        yield f"largest batches of a rank: {counts}, {num_bytes}"
    per_step = payload["batch_size"] or next(
        f"{payload[name]:,} {name.removeprefix('batch_')} of all ranks"
        for name in ("batch_pixels", "batch_tokens")
        if payload[name]
    )
    yield (
        f"{count_of(payload['steps_per_epoch'], 'steps')} per epoch at batch size {per_step}"
        f" on {ranks}{accumulation}: {count_of(payload['samples_used'], 'samples')} used per epoch,"
        f" {payload['samples_repeated']} repeated, {payload['samples_dropped']} dropped"
    )
    yield from (f"warning: {sentence}" for sentence in payload["overfilled"][:SHOWN])
    if payload["overfilled"]:
        yield "  fix: --remainder partial or drop, a smaller --batch-size, or fewer buckets"
    yield from _lines_of_trainer(payload)
    if payload["quarantined"]:
        yield f"{count_of(payload['quarantined'], 'rejected samples')} not counted: `latentcache build` lists them"


def _lines_of_trainer(payload: Mapping[str, Any]) -> Iterator[str | Table]:
    """The same images in the trainer: its buckets, its steps, and the suggestion."""
    plan = payload.get("trainer")
    if plan is None:
        return
    yield ""
    yield from (f"{plan['name']} with {words}" for words in plan["settings"])
    rows: list[tuple[object, ...]] = [("height x width", "samples", "batches", "short", "dropped")]
    for bucket in plan["buckets"]:
        size = f"{bucket['height']}x{bucket['width']}"
        rows.append((size, bucket["samples"], bucket["batches"], bucket["short"], bucket["dropped"]))
    yield Table(rows)
    yield (
        f"{plan['name']}: {count_of(plan['steps_per_epoch'], 'steps')} per epoch; small batches lack"
        f" {count_of(plan['samples_short'], 'samples')}, {plan['samples_dropped']} are dropped,"
        f" {plan['cropped']:.1%} of the images is cut off"
    )
    if plan["buckets_too_small"]:
        yield (
            f"warning: {plan['name']} stops at its start: {count_of(plan['buckets_too_small'], 'buckets')} too small"
            " for batch size times ranks times accumulation; repeat images, or change these"
        )
    elif not plan["steps_per_epoch"]:
        yield f"warning: {plan['name']} trains nothing and reports nothing: no bucket fills a batch"
    if plan["unused"]:
        yield f"warning: {count_of(plan['unused'], 'images')} smaller than a bucket: the trainer fails on them"
    if suggestion := payload.get("suggestion"):
        yield (
            f"suggestion: {suggestion['change']}: {count_of(suggestion['steps_per_epoch'], 'steps')}, small batches"
            f" lack {suggestion['samples_short']}, {suggestion['cropped']:.1%} is cut off"
        )
    elif "suggestion" in payload:
        yield "suggestion: none, no single setting loses less"

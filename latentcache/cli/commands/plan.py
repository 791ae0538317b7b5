"""``latentcache plan``: steps of an epoch by bucket or row length, and samples that fill no batch."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as attributes
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import flags
from latentcache.cli.console import SHOWN, Result, repeats_lines, table_lines
from latentcache.cli.flags import argument, option
from latentcache.cli.trainer_plans import Planned, compared, lines_of_comparison, lines_of_trainer, of_trainer
from latentcache.errors import EmptyPlanError, UsageError, count_of
from latentcache.plan.numbers import human_bytes

if TYPE_CHECKING:
    from latentcache.plan.batching import BatchPlan

#: Batch sizes of a comparison at most; each plans its buckets.
_MAX_SIZES = 64


def plan(
    path: Path = argument("CACHE|DATA", "A cache or its URL, or DATA as for build."),
    *,
    batch_size: str | None = option(
        None, "--batch-size N", "Samples per rank and step; 1..N with --compare. [default: of --trainer-config]"
    ),
    batch_pixels: int | None = option(
        None, "--batch-pixels N", "Instead of --batch-size: pixels per step, all ranks together.", min=1
    ),
    batch_tokens: int | None = option(
        None, "--batch-tokens N", "Instead of --batch-size: tokens per step, all ranks together.", min=1
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
    compare: bool = option(False, "--compare", "Compare all trainers with our buckets, as given and planned."),
    epochs: int | None = option(
        None, "--epochs N", "With --compare: epochs for the total steps. [default: 1]", min=1
    ),
    requested: flags.Requested,
    source: flags.Source,
) -> Result:
    """Count the steps per epoch, by bucket or row length.

    Examples:
        latentcache plan images.latentcache --batch-size 4
        latentcache plan images/ --batch-size 4 --world-size 8 --remainder drop
        latentcache plan texts.latentcache --batch-size 8 --pack 4096
    """
    from latentcache.plan.batching import BatchPlan, require_steps
    from latentcache.store.paths import CachePaths

    if epochs is not None and not compare:
        raise UsageError("only with --compare", argument="epochs", value=epochs, fix="add --compare, or leave it out")
    sizes = _batch_sizes(batch_size, compare=compare)
    if batch_size is None and batch_pixels is None and batch_tokens is None:
        sizes = [_batch_of(path, requested)]
    rows = {name: value for name, value in (("pack", pack), ("pad", pad), ("chunk", chunk)) if value is not None}
    if len(rows) > 1 or (overflow is not None and not rows):
        raise UsageError(
            "--pack, --pad, --chunk: give one of them" if rows else f"--overflow={overflow}: needs --pack or --pad",
            fix=f"latentcache plan {shlex.quote(str(path))} --batch-size {batch_size or 8} --pack {pack or 4096}",
        )
    layout = {**rows, "overflow": overflow} if rows else {}
    batches = BatchPlan(
        batch_size=sizes[-1] if sizes else None,
        batch_pixels=batch_pixels,
        batch_tokens=batch_tokens,
        multiple_of=multiple_of,
        world_size=world_size,
        remainder=remainder,  # type: ignore[arg-type]  # checked there
    )
    if CachePaths(path).is_ours():
        planned = _of_cache(path, batches, layout, requested, (source or {}).get("repeats") is not False)
    else:
        planned = _of_data(path, batches, requested, source, compare=compare)
        if layout:
            raise _no_documents(path, layout)
    payload = planned.report.as_json(grad_accum) | {"quarantined": planned.rejected, "path": str(path)}
    payload["repeats"] = [{"times": times, "samples": count} for times, count in sorted(planned.repeats.items())]
    if trainer is not None or suggest:
        payload |= of_trainer(planned, trainer or "", batches, grad_accum, suggest=suggest)
    if compare:
        payload |= compared(planned, sizes, batches, grad_accum, epochs or 1)
    error: EmptyPlanError | None = None
    try:
        require_steps(planned.report)
    except EmptyPlanError as failure:
        error = failure
    return Result(payload, _lines(payload), error=error)


def _batch_sizes(text: str | None, *, compare: bool) -> Sequence[int]:
    """The batch sizes of ``--batch-size``: one, or all of ``1..16`` in a comparison; empty if it is not given."""
    match = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", text or "0")
    numbers = [int(number) for number in match.groups() if number] if match else []
    sizes = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
    if text is not None and (not sizes or not numbers[0] or len(sizes) > (_MAX_SIZES if compare else 1)):
        raise UsageError(
            "must be a whole number from 1" + (f", or a range of up to {_MAX_SIZES}" if compare else ""),
            argument="batch_size",
            value=text,
            fix="--batch-size 1..16" if compare else "--batch-size 8",
        )
    return sizes if text is not None else ()


def _batch_of(path: Path, requested: flags.Requested) -> int:
    """The batch size of the trainer's settings file; without one the option is missing."""
    from latentcache.geometry.like.trainers import trainer_of

    for settings in requested.fields.values():
        config = getattr(settings, "trainer_config", None)
        if config is not None and (size := trainer_of(config, settings.like).settings(config).batch):
            return size
    why = "it is not in a --trainer-config either"
    fix = f"latentcache plan {shlex.quote(str(path))} --batch-size 8"
    raise UsageError("Missing option '--batch-size'", why=why, fix=fix)


def _of_cache(
    path: Path, batches: BatchPlan, rows: Mapping[str, Any], requested: flags.Requested, repeats: bool
) -> Planned:
    """The plan of the loader of this cache."""
    from latentcache.loader.cache import open_cache
    from latentcache.pipeline.publish import quarantined

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
    settings = requested.fields.get(next(iter(snapshot.fields), ""))
    return Planned(report, quarantined(snapshot.rejected), cache.repeats, snapshot.samples, recipe, sets, settings)


def _no_documents(path: Path, rows: Mapping[str, Any]) -> UsageError:
    flag = next(iter(rows))
    return UsageError(f"--{flag}={rows[flag]}: {path} holds no documents", where=str(path), fix=f"leave out --{flag}")


def _of_data(
    path: Path, batches: BatchPlan, requested: flags.Requested, source: flags.Source, *, compare: bool
) -> Planned:
    """The plan that the cache of this folder would have; nothing is written.

    ``compare``: limits of planned buckets do not say that those of the build are planned.
    """
    import numpy as np

    from latentcache.pipeline.build import plan_build
    from latentcache.pipeline.publish import groups_in_use, quarantined
    from latentcache.pipeline.settings import BuildSettings
    from latentcache.plan.batching import bucket_of, size_rank
    from latentcache.plan.samples import SampleIndex, plan_report, times_counted

    build = dict(requested.build)
    if compare:
        build["fields"] = {
            name: replace(settings, max_crop=None, max_buckets=None)
            if getattr(settings, "plan_buckets", 0) is None
            else settings
            for name, settings in requested.fields.items()
        }
    planned = plan_build(BuildSettings(data=path, source=source, **build))
    field = next(iter(planned.fields.values()))
    if field.recipe.spec.collate == "pack":
        command = flags.build_command(path, None, requested, "auto", "")
        cache = shlex.quote(f"{path}.latentcache")
        common = f" {requested.common}" if requested.common else ""
        raise UsageError(
            f"{path}: the rows of documents are known after tokenization",
            where=str(path),
            fix=f"{command}; latentcache plan {cache}{common} --batch-size 8 --pack 4096",
        )
    assert planned.listing is not None  # of every build
    items = field.plan
    samples = planned.listing.samples
    first = np.flatnonzero(np.asarray(items.variant) == 0)
    order = first[np.argsort(items.sample[first], kind="stable")]
    served = np.unique(items.sample)
    column = samples.columns.get("repeats")
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
    return Planned(plan_report(index, batches), rejected, repeats, samples, field.recipe, sets, settings)


# output


def _lines(payload: dict[str, Any]) -> Iterator[str]:
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
    yield from table_lines(rows)
    yield from repeats_lines(payload["repeats"])
    ranks = count_of(payload["world_size"], "ranks")
    accumulation = f", gradient accumulation {payload['grad_accum']}" if payload["grad_accum"] > 1 else ""
    if is_budget:
        largest = {name.replace("cells", "latent cells"): n for name, n in payload["largest_batch"].items() if n}
        largest["samples"] = payload["largest_batch"]["samples"]
        num_bytes = human_bytes(largest.pop("bytes", 0))
        counts = ", ".join(f"{number:,} {name}" for name, number in largest.items())
        yield f"largest batches of a rank: {counts}, {num_bytes}"
    unit = "pixels" if payload["batch_pixels"] else "tokens"
    size = (
        f"with up to {payload[f'batch_{unit}']:,} {unit}" if is_budget else f"at batch size {payload['batch_size']}"
    )
    yield (
        f"{count_of(payload['steps_per_epoch'], 'steps')} per epoch {size}"
        f" on {ranks}{accumulation}: {count_of(payload['samples_used'], 'samples')} used per epoch,"
        f" {payload['samples_repeated']} repeated, {payload['samples_dropped']} dropped"
    )
    yield from (f"warning: {sentence}" for sentence in payload["overfilled"][:SHOWN])
    if payload["overfilled"]:
        yield "  fix: --remainder partial or drop, a smaller --batch-size, or fewer buckets"
    yield from lines_of_trainer(payload)
    yield from lines_of_comparison(payload)
    if payload["quarantined"]:
        yield f"{count_of(payload['quarantined'], 'rejected samples')} not counted: `latentcache build` lists them"

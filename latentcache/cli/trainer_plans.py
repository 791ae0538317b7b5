"""Other trainers in ``latentcache plan``: ``--for`` shows one of them, ``--compare`` all beside our loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from latentcache.cli.console import table_lines
from latentcache.errors import UsageError, count_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from latentcache.fields.protocol import FieldRecipe
    from latentcache.fields.table import SampleTable
    from latentcache.geometry.like.trainer import Trainer
    from latentcache.plan.batching import BatchPlan, PlanReport
    from latentcache.plan.trainers import Clip, TrainerRun


#: Rows of a comparison that are no trainers: the buckets that were given, and those planned for the batch size.
GIVEN, PLANNED = "as given", "planned"


class Planned(NamedTuple):
    """What a plan was made of: the images, and how the build would make latents of them."""

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


def of_trainer(
    planned: Planned, trainer: str, batches: BatchPlan, grad_accum: int, *, suggest: bool
) -> dict[str, Any]:
    """What the trainer makes of the same images, at the same resolutions unless its configuration was given."""
    from latentcache.geometry.like.trainers import TRAINERS

    if trainer not in TRAINERS:
        raise UsageError(f"--for={trainer}: unknown trainer", fix=f"--for {'|'.join(TRAINERS)}")
    _check(planned, batches, "--for")
    run = _run(planned, trainer, batches, grad_accum)
    sizes = _sizes(planned, run.trainer)
    plan = run.plan(sizes)
    best = run.suggestion(sizes) if suggest else None
    suggestion = best and {
        "change": best[0],
        "samples_short": best[1].short,
        "samples_dropped": best[1].dropped,
        "cropped": round(best[1].cropped, 4),
        "steps_per_epoch": best[1].steps,
    }
    shown = {"name": trainer, "settings": [table.words for table in run.tables], **plan.as_json()}
    return {"trainer": shown, **({"suggestion": suggestion} if suggest else {})}


def compared(
    planned: Planned, batch_sizes: Sequence[int], batches: BatchPlan, grad_accum: int, epochs: int
) -> dict[str, Any]:
    """Our buckets, the planned ones and those of every trainer, for the same images.

    The last of ``batch_sizes`` is that of ``batches``; of several, each has the lost samples of every row.
    """
    from latentcache.geometry.like.trainers import TRAINERS

    _check(planned, batches, "--compare")
    rows = list[dict[str, Any]]()
    lost = [dict[str, float]() for _ in batch_sizes]
    for name in (GIVEN, PLANNED, *TRAINERS):
        row: dict[str, Any] = {"name": name}
        try:
            run = _run(planned, name, batches, grad_accum)
            sizes = _sizes(planned, run.trainer)
            plan = run.plan(sizes)
            for size, by_name in zip(batch_sizes, lost, strict=True):
                resized = replace(batches, batch_size=size)
                run = _run(planned, name, resized, grad_accum) if name == PLANNED else replace(run, batch=size)
                plan = run.plan(sizes) if name == PLANNED else run.counted(plan)
                row = {"name": name, **run.compared(plan, epochs), "worst": _names(planned, plan.worst)}
                by_name[name] = row["lost"]
        except UsageError as error:
            row = {"name": name, "why": ": ".join(filter(None, (error.what, error.why)))}
        rows.append(row)
    by_size = [{"batch_size": size, "lost": by_name} for size, by_name in zip(batch_sizes, lost, strict=True)]
    return {"compare": rows, "epochs": epochs, **({"by_batch_size": by_size} if len(batch_sizes) > 1 else {})}


def _check(planned: Planned, batches: BatchPlan, flag: str) -> None:
    """Raise a UsageError unless these are images, and there is one batch size."""
    from latentcache.fields.latents import LatentsRecipe

    if not isinstance(batches.batch_size, int):
        raise UsageError(f"{flag}: trainers have one batch size", fix="--batch-size N instead of the budget")
    if not isinstance(planned.recipe, LatentsRecipe):
        raise UsageError(f"{flag}: DATA are no images", fix=f"leave {flag} out")


def _run(planned: Planned, name: str, batches: BatchPlan, grad_accum: int) -> TrainerRun:
    """A training with the images of a plan; raises UsageError for settings that the trainer does not have."""
    from latentcache.fields.latents import Latents, LatentsRecipe, LatentsSettings, geometry_of
    from latentcache.geometry.like.trainers import TRAINERS
    from latentcache.plan.trainers import OurLoader, TrainerRun

    recipe = planned.recipe
    size = batches.batch_size
    assert isinstance(recipe, LatentsRecipe)
    assert isinstance(size, int)
    geometry = recipe.geometry
    options = planned.settings or LatentsSettings()
    trainer = TRAINERS.get(name) or OurLoader(batches.remainder, geometry.min_pixels)
    if name == PLANNED:
        settings = LatentsSettings(
            like="none",
            plan_buckets=size * batches.world_size,
            max_crop=options.max_crop,
            max_buckets=options.max_buckets,
            replan=True,
        )
        geometry = geometry_of(settings, recipe, recipe.encoder.multiple)
        geometry = Latents().completed(replace(recipe, geometry=geometry), lambda: planned.samples).geometry
    elif name != GIVEN:
        settings = replace(
            options, like=name, model=None, plan_buckets=0, max_crop=None, max_buckets=None, replan=None
        )
        own_file = options.trainer_config is None or geometry.like == name
        settings = settings.with_trainer()[0] if own_file else replace(settings, trainer_config=None)
        geometry = geometry_of(settings, recipe, recipe.encoder.multiple)
    tables = geometry.planned or geometry.tables()
    if len(tables) > 1 and trainer.draws_resolution:
        raise UsageError(
            f"{name} draws one of {len(tables)} resolutions for each image and epoch",
            why="its batches differ from epoch to epoch",
            fix="--resolution PIXELS for one of them",
        )
    return TrainerRun(
        trainer=trainer,
        tables=tables,
        upscale=geometry.upscale,
        batch=size,
        ranks=batches.world_size,
        accum=grad_accum,
        max_crop=100 if geometry.target is None else geometry.target.max_crop,
    )


def _clips(planned: Planned) -> NDArray[np.int64]:
    """(S, 3) length, height and width of every sample's image or clip; length 0: it is a video that is too short."""
    import numpy as np

    from latentcache.fields.clips import clip_frames
    from latentcache.fields.latents import Latents, LatentsRecipe

    assert isinstance(planned.recipe, LatentsRecipe)
    rows = np.arange(len(planned.samples))
    frames, _ = clip_frames(planned.samples, rows, planned.recipe.geometry.clips, Latents.name)
    return np.column_stack([frames, np.asarray(planned.samples.columns["original_size"], dtype=np.int64)])


def _names(planned: Planned, worst: Sequence[tuple[Clip, float]]) -> list[str]:
    """The first image or clip of each size and length."""
    clips = _clips(planned)
    rows = [int((clips == (frames, size.height, size.width)).all(axis=1).argmax()) for (frames, size), _ in worst]
    return [planned.samples.names[row] for row in rows]


def _sizes(planned: Planned, trainer: Trainer) -> list[Counter[Clip]]:
    """Images and clips by size, each as often as an epoch serves it, of all sets that fill batches together.

    Images of unknown size and short videos are left out.
    """
    import numpy as np

    from latentcache.fields.latents import LatentsRecipe
    from latentcache.geometry.sizes import Size

    columns = planned.samples.columns
    count = len(planned.samples)
    times = np.asarray(columns.get("repeats", np.ones(count, np.int64))).tolist()
    set_of = np.asarray(columns.get("image_set", np.zeros(count, np.int64))).tolist()
    regs = [bool(image_set.get("is_reg")) for image_set in planned.sets] or [False]
    assert isinstance(planned.recipe, LatentsRecipe)
    flips = 2 if trainer.adds_flips and planned.recipe.geometry.flip else 1
    counts: dict[Any, Counter[Clip]] = {}
    for (frames, height, width), repeats, number in zip(_clips(planned).tolist(), times, set_of, strict=True):
        if frames and height and width:
            together = (repeats, regs[number]) if trainer.parts_sets else None
            counts.setdefault(together, Counter())[frames, Size(height, width)] += repeats * flips
    return list(counts.values())


def lines_of_trainer(payload: Mapping[str, Any]) -> Iterator[str]:
    """The same images in the trainer: its buckets, its steps, and the suggestion."""
    plan = payload.get("trainer")
    if plan is None:
        return
    yield ""
    yield from (f"{plan['name']} with {words}" for words in plan["settings"])
    frames = any("frames" in bucket for bucket in plan["buckets"])
    sides = ("frames", "height", "width") if frames else ("height", "width")
    rows: list[tuple[object, ...]] = [(" x ".join(sides), "samples", "batches", "short", "dropped")]
    for bucket in plan["buckets"]:
        size = "x".join(str(bucket[side]) for side in sides if side in bucket)
        rows.append((size, bucket["samples"], bucket["batches"], bucket["short"], bucket["dropped"]))
    yield from table_lines(rows)
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


def lines_of_comparison(payload: Mapping[str, Any]) -> Iterator[str]:
    """The rows of a comparison, and the lost samples by batch size."""
    rows = payload.get("compare", ())
    if not rows:
        return
    yield ""
    names = ["used", "dropped", "repeated", "unfilled", "shapes", "steps_per_epoch"]
    names += ["steps"] if payload["epochs"] > 1 else []
    titles = [name.replace("_per_epoch", "" if payload["epochs"] == 1 else "/epoch") for name in names]
    table: list[tuple[object, ...]] = [("buckets", *titles, "cropped", "at most", "cropped most")]
    for row in rows:
        if "why" not in row:
            crops = f"{row['cropped']:.1%}", f"{row['cropped_most']:.1%}", ", ".join(row["worst"][:1]) or "-"
            table.append((row["name"], *(row[name] for name in names), *crops))
    yield from table_lines(table)
    for row in rows:
        if "why" in row:
            yield f"{row['name']}: not compared: {row['why']}"
        elif row["buckets_too_small"]:
            yield f"{row['name']} stops at its start: {count_of(row['buckets_too_small'], 'buckets')} too small"
        elif not row["steps_per_epoch"]:
            yield f"{row['name']} trains nothing: no bucket fills a batch"
        if row.get("cropped_most", 0) > row.get("max_crop", 1):
            limit = f"more than {row['max_crop']:.0%} of an image is cut off"
            yield f"{row['name']}: {limit}: raise --max-crop, or allow more --max-buckets or a longer --max-side"
        if row.get("unused"):
            yield f"{row['name']}: {count_of(row['unused'], 'images')} without a bucket"
    sizes = payload.get("by_batch_size", ())
    if sizes:
        yield ""
        yield "Samples dropped, repeated or lacking, by batch size:"
        columns = [row["name"] for row in rows if "why" not in row]
        lines: list[tuple[object, ...]] = [("batch size", *columns)]
        lines += [(size["batch_size"], *(f"{size['lost'][name]:.1%}" for name in columns)) for size in sizes]
        yield from table_lines(lines)

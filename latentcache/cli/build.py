"""``latentcache build``: the plan, the bar, the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latentcache.cli import build_flags, flags, reports, token_flags
from latentcache.cli.building import carried_out, concluded, results, show_cache, show_refused
from latentcache.cli.console import counted, human_bytes, item, out
from latentcache.pipeline.settings import MAX_PIXELS, BuildSettings, RecipeSettings

if TYPE_CHECKING:
    from latentcache.cli.progress import BuildTalk
    from latentcache.pipeline.report import BuildPlan, BuildReport
    from latentcache.sources.sample import Refusal

#: Encoders that are no models: how fast they are is of no use to anybody.
_STAND_INS = ("demo", "stub")


@token_flags.with_tokens
@flags.with_recipe
def build(
    data: build_flags.Data,
    *,
    out_folder: build_flags.Out = None,
    recipe: RecipeSettings,
    device: build_flags.Device = "auto",
    no_fold: build_flags.NoFold = False,
    compiled: build_flags.Compile = "auto",
    batch_size: build_flags.BatchSize = None,
    decode_threads: build_flags.DecodeThreads = None,
    host_memory: build_flags.HostMemory = None,
    max_pixels: build_flags.MaxPixels = MAX_PIXELS,
    stream: build_flags.Stream = False,
    commit_every: build_flags.CommitEvery = None,
    events: build_flags.Events = None,
    allow_failed: flags.AllowFailed = "0",
    retry_failed: build_flags.RetryFailed = False,
    dry_run: build_flags.DryRun = False,
    report_to: reports.Report = None,
    quiet: build_flags.Quiet = False,
    as_json: flags.Json = False,
) -> int:
    """Encode what is missing and make the cache true for DATA."""
    settings = BuildSettings(
        data=data,
        out=out_folder,
        recipe=recipe,
        device=device,
        fold=not no_fold,
        compile=compiled,
        batch_size=batch_size,
        decode_threads=decode_threads,
        host_memory=host_memory,
        max_pixels=max_pixels,
        commit_every=commit_every,
        stream=stream,
        events=events,
        allow_failed=flags.checked_allowed(allow_failed) or "0",
        retry_failed=retry_failed,
        dry_run=dry_run,
    )
    run = reports.Run(command="build", cache=settings.cache, wanted=report_to)
    report = _built(settings, run, quiet=quiet, as_json=as_json)
    return concluded(report, _payload(report), run, _show, samples=report.samples, as_json=as_json)


def _built(settings: BuildSettings, run: reports.Run, *, quiet: bool, as_json: bool) -> BuildReport:
    from latentcache.cli.progress import BuildTalk
    from latentcache.pipeline.build import build_cache

    return carried_out(
        lambda talk, last_words: build_cache(settings, observer=talk, last_words=last_words),
        run,
        BuildTalk(quiet=quiet),
        _so_far,
        dry_run=settings.dry_run,
        as_json=as_json,
    )


def _so_far(talk: BuildTalk) -> dict[str, Any]:
    """The JSON form of a build that did not end: what is durable, as far as its plan went."""
    plan, progress = talk.plan, talk.progress
    if plan is None:
        return {}
    done = {"encoded": progress.committed if progress else 0, "cached": plan.entries_cached}
    refused = len(plan.refused) + (progress.quarantined if progress else 0)
    return {
        **_about(plan),
        "counts": {"samples": plan.samples, **done, "quarantined": refused},
        "items": [_item("quarantined", refusal) for refusal in plan.refused],
        "written_bytes": progress.payload_bytes if progress else 0,
    }


def _about(plan: BuildPlan) -> dict[str, Any]:
    return {
        "cache": str(plan.cache),
        "data": str(plan.data),
        "recipe_id": plan.recipe.recipe_id.hex(),
        "recipe": plan.recipe.as_json(),
        "plan": {
            "entries_to_make": plan.entries_to_make,
            "entries_cached": plan.entries_cached,
            "bytes_to_write": plan.bytes_to_write,
            "free_bytes": plan.free_bytes,
            "buckets": [{"height": s.height, "width": s.width, "entries": n} for s, n in plan.buckets.items()],
        },
    }


def _payload(report: BuildReport) -> dict[str, Any]:
    """The JSON form."""
    plan = report.plan
    made = {"encoded": report.encoded, "cached": plan.entries_cached if report.dry_run else report.cached}
    return {
        **_about(plan),
        **results(report, _item),
        "counts": {"samples": report.samples, **made, "quarantined": len(report.refused)},
        "fields": {"latents": made},
        "speed": None if report.speed is None else report.speed.as_json(),
    }


def _item(category: str, refusal: Refusal) -> dict[str, str]:
    return item(category, refusal.cause, refusal.name, found=refusal.detail, hint=refusal.hint or "look at the file")


def _show(report: BuildReport, excess: str) -> None:
    """The summary for people; ``excess`` says why the exit status is not 0."""
    show_refused("quarantined", report.refused)
    show_refused("note", report.notes)
    quarantined = f"{len(report.refused)} quarantined{excess}"
    if report.dry_run:
        plan = report.plan
        made = counted(plan.entries_to_make, "entry", "entries")
        out(f"dry run: {made} would be made, {plan.entries_cached} reused, {quarantined}")
        return
    rate = report.encoded / report.elapsed_s if report.elapsed_s else 0.0
    if report.encoded:
        out(
            f"{report.encoded} encoded, {report.cached} reused, {quarantined}"
            f" in {report.elapsed_s:.1f} s ({rate:.1f} img/s, {human_bytes(report.written_bytes)})"
        )
    else:
        out(f"nothing to encode: {counted(report.cached, 'entry', 'entries')} reused, {quarantined}")
    if report.speed is not None and report.plan.recipe.encoder.family not in _STAND_INS:
        out(report.speed.in_words())
    show_cache(report.plan.cache, report.generation, report.encoded + report.cached, "picture")

"""``latentcache build``: the plan, the bar, the summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import flags, reports, token_flags
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
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A folder of pictures.", readable=False)],
    *,
    out_folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="The cache (DATA.latentcache).", show_default=False)
    ] = None,
    recipe: RecipeSettings,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="auto (all CUDA devices, else cpu)|cpu|cuda|cuda:0,cuda:1|cpu*2: a worker for each."
        ),
    ] = "auto",
    no_fold: Annotated[bool, typer.Option("--no-fold", help="Keep the 3D convolutions of video VAEs.")] = False,
    compiled: Annotated[str, typer.Option("--compile", help="auto (off today)|on|off: torch.compile.")] = "auto",
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Pictures per encoder call (found by timing).", show_default=False),
    ] = None,
    decode_threads: Annotated[
        int | None,
        typer.Option(
            "--decode-threads", min=1, help="Of each worker. Default: its share of the cores.", show_default=False
        ),
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            "--host-memory",
            min=1,
            help="Bytes for pictures in work, of all workers together (RAM / 4, at most 4 GiB).",
            show_default=False,
        ),
    ] = None,
    max_pixels: Annotated[int, typer.Option("--max-pixels", min=1, help="Larger pictures are refused.")] = MAX_PIXELS,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Let training begin before the end: open_cache(CACHE, follow=True), open_tokens."
        ),
    ] = False,
    commit_every: Annotated[
        int | None,
        typer.Option("--commit-every", min=1, help="Entries per commit, at most.", show_default=False),
    ] = None,
    events: Annotated[
        Path | None, typer.Option("--events", help="Append a JSON line per durable commit.", show_default=False)
    ] = None,
    allow_failed: flags.AllowFailed = "0",
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Look at refused files again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the plan.")] = False,
    report_to: reports.Report = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No plan, no progress.")] = False,
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

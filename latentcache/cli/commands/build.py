"""``latentcache build`` and ``merge``: the plan, the progress, the summary."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import flags
from latentcache.cli.console import Result, finding_lines, findings
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import BuildProgress, about, shared_entries
from latentcache.errors import StrictError, count_of
from latentcache.plan.numbers import human_bytes

if TYPE_CHECKING:
    from latentcache.pipeline.publish import BuildReport, FieldDone


def build(
    data: Path = argument(
        "DATA", "A folder with images, a trainer's configuration, or records (JSONL, text, parquet)."
    ),
    *,
    out_folder: flags.Out = None,
    requested: flags.Requested,
    source: flags.Source,
    run: flags.Run,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> Result:
    """Create or update the cache for DATA; only new or changed inputs are encoded.

    DATA is a folder with images and their captions, a trainer's configuration that names such folders (dataset.toml,
    concepts.json, multidatabackend.json), or records to tokenize. Records are JSONL, JSON, text, parquet or Arrow:
    one file, or a folder of files. Settings that you do not give follow the cache.

    Examples:
        latentcache build images/ --model ./sdxl --resolution 1024
        latentcache build images/ --model ./sdxl-vae --resolution 512 --resolution 768 --flip
        latentcache build chats.jsonl --tokenizer ./llama --out chats.latentcache
    """
    from latentcache.pipeline.build import build_cache
    from latentcache.pipeline.settings import BuildSettings

    settings = BuildSettings(data=data, out=out_folder, source=source, **run, **requested.build)
    try:
        with closing(BuildProgress(quiet=quiet)) as display:
            return _summary(build_cache(settings, observer=display))
    except StrictError as error:
        items = findings((), error.notes)
        return Result({"items": [finding.as_json() for finding in items]}, finding_lines(items), error=error)


def merge(
    parts: list[Path] = argument("PART...", "Caches that build --part made from the same data, or their URLs."),
    *,
    out_folder: Path = option(..., "--out -o CACHE", "The merged cache, or its URL."),
    field: flags.Kinds = None,
    quiet: flags.Quiet = False,
) -> Result:
    """Merge the parts of a build into one cache.

    Examples:
        latentcache build images/ --model ./sdxl --part 0/2 --out part0
        latentcache build images/ --model ./sdxl --part 1/2 --out part1
        latentcache merge part0 part1 --out images.latentcache
    """
    from latentcache.pipeline.merge import merge_caches

    with closing(BuildProgress(quiet=quiet)) as display:
        return _summary(merge_caches(parts, out_folder, observer=display))


def _summary(report: BuildReport) -> Result:
    """Return the outcome of a build or a merge, as JSON and as text."""
    return Result(_payload(report), _lines(report), exit_code=int(report.too_many_failed))


def _payload(report: BuildReport) -> dict[str, Any]:
    """The JSON form."""
    plan = report.plan
    return {
        **about(plan),
        "counts": report.counts(),
        "fields": {name: _field(name, report) for name in plan.fields},
        "items": [finding.as_json() for finding in findings(report.rejected, report.notes)],
        "written_bytes": report.written_bytes,
        "snapshot": report.snapshot,
        "published": report.published,
        "allow_failed": report.plan.allow_failed,
        "worker_restarts": sum(field.run.restarts for field in report.fields.values()),
        "elapsed_s": round(report.elapsed_s, 3),
    }


def _field(name: str, report: BuildReport) -> dict[str, Any]:
    """One field of the JSON form."""
    planned = report.plan.fields[name]
    done = report.fields[name]
    return {
        "encoded": done.encoded,
        "cached": done.cached,
        "bytes": done.num_bytes,
        "encoder": planned.described.label,
        "recipe_id": planned.recipe.recipe_id.hex(),
        "recipe": planned.recipe.as_json(),
        "numbers": dict(done.numbers),
        "encode_s": round(done.run.encode_s, 3),
        "waits": {stage: round(seconds, 3) for stage, seconds in done.run.waits.items() if done.run.total},
    }


def _lines(report: BuildReport) -> Iterator[str]:
    """The summary as text."""
    from latentcache.pipeline.settings import beside

    yield from finding_lines(findings(report.rejected, report.notes))
    plan = report.plan
    more = f" (more than --allow-failed {plan.allow_failed}: exit status 1)" if report.too_many_failed else ""
    yield from _work(report, f"{report.quarantined} rejected{more}")
    if plan.part:
        yield f"this is part {plan.part} of DATA: join all parts with `latentcache merge PART... --out CACHE`"
    cache = f"cache {plan.cache} (snapshot {report.snapshot})"
    if report.encoded + report.cached:
        yield f"{cache} is complete"
    else:
        yield f"{cache} is empty: no sample could be used"
        yield "  fix: repair the rejected inputs, or give other data, and build again"
    demo = any(field.described.demo for field in plan.fields.values())
    if report.encoded + report.cached and not demo and not plan.part:
        yield f"next: `latentcache report {shlex.quote(str(plan.cache))} -o report.html` shows it on a page"
    if demo:
        out = "" if plan.cache == beside(plan.data) else f" --out {shlex.quote(str(plan.cache))}"
        command = f"latentcache build {shlex.quote(str(plan.data))} --model MODEL{out}"
        yield f"these latents are of the demo encoder, not for training: `{command}` makes those of your model"


def _work(report: BuildReport, rejected: str) -> Iterator[str]:
    shared = shared_entries(report.duplicates)
    if not report.encoded:
        yield f"nothing to encode: {count_of(report.cached, 'entries')} reused{shared}, {rejected}"
        return
    rates = [_rate(field) for field in report.fields.values()]
    only = f"{rates[0]}, " if len(rates) == 1 and rates[0] else ""
    took = f"{report.elapsed_s:.1f} s ({only}{human_bytes(report.written_bytes)} written)"
    yield f"{report.encoded} encoded, {report.cached} reused{shared}, {rejected} in {took}"
    for name, field in report.fields.items():
        span = sum(field.run.waits.values())
        slow = {stage: seconds / span for stage, seconds in field.run.waits.items() if span >= 1}
        waits = ", ".join(f"{stage} {part:.0%}" for stage, part in slow.items() if part >= 0.01)
        numbers = ", ".join(f"{label.replace('_', ' ')} {number:,}" for label, number in field.numbers.items())
        details = [f"{field.encoded} encoded, {field.cached} reused", _rate(field)] if len(report.fields) > 1 else []
        details = [detail for detail in (*details, numbers, f"waits: {waits}" if waits else "") if detail]
        if details:
            yield f"  {name}: {'; '.join(details)}"


def _rate(field: FieldDone) -> str:
    return f"{field.encoded / field.run.encode_s:.1f} entries/s while encoding" if field.run.encode_s else ""

"""``latentcache gc``: unreferenced data of a cache, and its removal on request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from latentcache.cli import flags
from latentcache.cli.console import Result
from latentcache.cli.flags import option
from latentcache.errors import UsageError
from latentcache.plan.numbers import human_bytes
from latentcache.store.paths import url_of

if TYPE_CHECKING:
    from latentcache.verify.collect import CollectReport


def gc(
    cache: flags.CacheOrUrl,
    *,
    apply: bool = option(False, "--apply", "Delete unreferenced data instead of listing it."),
    keep: int | None = option(None, "--keep N", "Snapshots to keep, newest first. [default: 2]", min=1),
    older_than: str | None = option(
        None,
        "--older-than TIME",
        "With a URL: keep younger data, also unreferenced. Builds must be shorter. [default: 7d]",
    ),
    field: flags.Kinds = None,
) -> Result:
    """Delete unreferenced data (dry run unless --apply).

    Examples:
        latentcache gc images.latentcache
        latentcache gc images.latentcache --keep 1 --apply
        latentcache gc s3://bucket/images --older-than 7d --apply
    """
    from latentcache.plan.numbers import duration
    from latentcache.verify.collect import KEEP, collect, collect_url

    url = url_of(cache)
    if (keep if url else older_than) is not None:
        problem = "--keep: only for a folder" if url else "--older-than: only for a URL"
        raise UsageError(problem, fix="use --older-than 7d with a URL, and --keep N with a folder")
    if url:
        report = collect_url(url, older_than_s=duration(older_than or "7d", "older_than"), apply=apply)
    else:
        report = collect(cache, apply=apply, keep=keep or KEEP)
    return Result({"cache": url or str(cache), **report.as_json()}, _lines(report))


def _lines(report: CollectReport) -> Iterator[str]:
    for garbage in report.items:
        named = garbage.snapshot and not garbage.file.startswith("snap")
        why = garbage.reason + (f" for snapshot {garbage.snapshot}" if named else "")
        why += f", {garbage.until}" if garbage.until else ""
        yield f"{garbage.state} {garbage.file} [{why}] {human_bytes(garbage.num_bytes)}"
    kept = human_bytes(report.num_bytes("held"))
    if report.applied:
        yield f"freed {human_bytes(report.num_bytes('removed'))}, kept {kept}"
        return
    free = report.num_bytes("removable")
    yield f"{human_bytes(free)} can be freed, {kept} kept"
    if free:
        yield "fix: run the same command with --apply"

"""``latentcache gc``: unreferenced data of a cache, and its removal on request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from latentcache.cli import flags
from latentcache.cli.console import Result
from latentcache.cli.flags import option
from latentcache.plan.numbers import human_bytes

if TYPE_CHECKING:
    from latentcache.verify.collect import CollectReport

HELP = "Delete unreferenced data (dry run unless --apply)."
EXAMPLES = """\
latentcache gc images.latentcache
latentcache gc images.latentcache --apply
latentcache gc images.latentcache --keep 1 --apply
"""


def gc(
    cache: flags.Cache,
    *,
    apply: bool = option(False, "--apply", "Delete unreferenced data instead of listing it."),
    keep: int = option(2, "--keep N", "Snapshots to keep, newest first. [default: 2]", min=1),
    field: flags.Kinds = None,
) -> Result:
    """Delete old snapshots, unreferenced entries and leftovers (dry run unless --apply)."""
    from latentcache.verify.collect import collect

    report = collect(cache, apply=apply, keep=keep)
    return Result({"cache": str(cache), **report.as_json()}, _lines(report))


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

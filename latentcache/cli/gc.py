"""``latentcache gc``: unreferenced data of a cache, and its removal on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentcache.cli import console, flags
from latentcache.cli.console import human_bytes, out
from latentcache.cli.flags import option

if TYPE_CHECKING:
    from latentcache.verify.collect import CollectReport

HELP = "Delete unreferenced data (dry run unless --apply)."
_FREE = "no kept snapshot needs it"


def gc(
    cache: flags.Cache,
    *,
    apply: bool = option(False, "--apply", "Delete unreferenced data instead of listing it."),
    keep: int = option(2, "--keep N", "Snapshots to keep, newest first. [default: 2]", min=1),
    grace: float = option(
        3600.0, "--grace SECONDS", "Keep data that was referenced within this time. [default: 3600]", min=0
    ),
    damaged: bool = option(False, "--damaged", "Delete the contents of quarantine/ as well."),
    field: flags.Kinds = None,
    as_json: flags.Json = False,
) -> int:
    """Delete old snapshots, unreferenced entries and leftovers (dry run unless --apply)."""
    from latentcache.verify.collect import collect

    report = collect(cache, apply=apply, keep=keep, grace_s=grace, damaged=damaged)
    if as_json:
        payload = report.as_json()
        items = [{**one, "hint": f"it stays {one['until']}" if "until" in one else _FREE} for one in payload["items"]]
        console.emit("gc", {"cache": str(cache), **payload, "items": items}, exit_code=0)
    else:
        _show(report)
    return 0


def _show(report: CollectReport) -> None:
    for garbage in report.items:
        by = "; ".join(f"process {h.pid} on {h.host}" for h in garbage.holders)
        why = f"{garbage.reason}: {by}" if by else garbage.reason
        keeper = (
            f" for snapshot {garbage.snapshot}" if garbage.snapshot and not garbage.file.startswith("snap") else ""
        )
        until = f", {garbage.until}" if garbage.until else ""
        out(f"{garbage.state} {garbage.file} [{why}{keeper}{until}] {human_bytes(garbage.num_bytes)}")
    held = human_bytes(report.num_bytes("held"))
    if report.applied:
        out(f"freed {human_bytes(report.num_bytes('removed'))}, held {held}")
        return
    free = report.num_bytes("removable", "compactable")
    out(f"{human_bytes(free)} can be freed, {held} held")
    if free:
        out("fix: run the same command with --apply")

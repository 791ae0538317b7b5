"""``latentcache gc``: what of a cache nobody needs any more, and its removal on request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, flags
from latentcache.cli.console import human_bytes, item, out

if TYPE_CHECKING:
    from latentcache.verify.collect import CollectReport, Waste

_HINTS = {
    "superseded": "a generation that newer ones have replaced",
    "unreferenced": "no generation that is kept needs it",
    "retired": "its whole entries were copied into another shard, and no generation that is kept needs it",
    "sparse": "less than half of its entries are needed: those are copied into a new shard",
    "left-over": "left by a process that died before it was done",
    "damaged": "it is damaged",
    "pinned": "a reader holds its generation",
    "grace": "it stopped being needed a moment ago, and a reader without a pin may still use it",
    "unfinished-repair": "a repair that has not ended put entries there: run it again, or build",
    "unfinished-build": "a build that has not ended may need it: run the same `latentcache build` again first",
}


def gc(
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="A cache.", readable=False)],
    *,
    apply: Annotated[bool, typer.Option("--apply", help="Remove it; without this only say what would go.")] = False,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=1, help="Generations that stay, the current one among them.")
    ] = 2,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", min=0, help="What was needed less than this long ago stays."),
    ] = 3600.0,
    damaged: Annotated[bool, typer.Option("--damaged", help="What lies in quarantine/ goes, too.")] = False,
    as_json: flags.Json = False,
) -> int:
    """What nobody needs any more: old generations, their shards, leftovers. Shows it; removes it with --apply."""
    from latentcache.verify.collect import collect

    report = collect(cache, apply=apply, keep=keep, grace_s=grace, damaged=damaged)
    if as_json:
        console.emit("gc", _payload(cache, report), exit_code=0)
    else:
        _show(report)
    return 0


def _payload(cache: Path, report: CollectReport) -> dict[str, Any]:
    """The JSON form."""
    states = [waste.state for waste in report.items]
    names = ("removable", "removed", "held", "compactable", "compacted")
    return {
        "cache": str(cache),
        "applied": report.applied,
        "generation": report.generation,
        "counts": {name: states.count(name) for name in names},
        "freed_bytes": report.num_bytes("removed"),
        "removable_bytes": report.num_bytes("removable", "compactable"),
        "held_bytes": report.num_bytes("held"),
        "items": [_item(waste) for waste in report.items],
    }


def _item(waste: Waste) -> dict[str, Any]:
    found: dict[str, Any] = item(waste.state, waste.reason, "", hint=_HINTS[waste.reason], file=waste.file)
    found["bytes"] = waste.num_bytes
    if waste.holders:
        found["holders"] = [holder.as_json() for holder in waste.holders]
    return found


def _show(report: CollectReport) -> None:
    """The same for people."""
    for waste in report.items:
        by = "; ".join(f"process {h.pid} on {h.host} since {h.since}" for h in waste.holders)
        why = f"{waste.reason}: {by}" if by else waste.reason
        out(f"{waste.state} {waste.file} [{why}] {human_bytes(waste.num_bytes)}")
    held = human_bytes(report.num_bytes("held"))
    if report.applied:
        out(f"freed {human_bytes(report.num_bytes('removed'))}, held {held}")
        return
    free = report.num_bytes("removable", "compactable")
    out(f"{human_bytes(free)} can be freed, {held} held")
    if free:
        out("fix: the same command with --apply")

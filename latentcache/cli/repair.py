"""``latentcache verify --repair``: shows what would be taken out of a cache, asks, and says what was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from latentcache.cli.console import SHOWN, counted, human_bytes, say
from latentcache.errors import UsageError

if TYPE_CHECKING:
    from latentcache.recipe import Recipe
    from latentcache.verify.drift import Reencode
    from latentcache.verify.removals import RepairPlan, RepairReport
    from latentcache.verify.selection import Depth


def check_flags(*, repair: bool, yes: bool, drop_stale: bool, whole: bool = True) -> None:
    """Refuse before anything is read what could not be answered in the end.

    Raises:
        UsageError: Flags without ``--repair``, a repair of what is not looked at whole, or nobody there to ask.
    """
    if repair and not whole:
        raise UsageError(
            "--repair goes with none of --sample, --max-duration, --untrusted",
            why="it takes out what a whole check finds",
            fix="latentcache verify CACHE --repair",
        )
    if not repair and (yes or drop_stale):
        flag = "--yes" if yes else "--drop-stale"
        raise UsageError(f"{flag} says nothing without --repair", fix=f"latentcache verify CACHE --repair {flag}")
    if repair and not yes and not sys.stdin.isatty():
        raise UsageError(
            "--repair asks before it removes anything, and there is no terminal to ask on",
            why="standard input is no terminal",
            fix="add --yes",
        )


def repaired(
    cache: Path,
    *,
    data: Path | None,
    requested: Recipe | Callable[[Recipe], Recipe] | None,
    depth: Depth | None = None,
    reencode: Reencode | None = None,
    drop_stale: bool,
    yes: bool,
) -> RepairReport:
    """Plan, ask, repair. Talk goes to stderr."""
    from latentcache.verify.repair import repair_cache

    report = repair_cache(
        cache,
        data=data,
        requested=requested,
        drop_stale=drop_stale,
        depth=depth,
        reencode=reencode,
        confirm=confirm(yes=yes),
    )
    show_result(report)
    return report


def confirm(*, yes: bool) -> Callable[[RepairPlan], bool]:
    """Shows the plan of a repair, and asks where nobody said yes."""

    def shown(plan: RepairPlan) -> bool:
        _show_plan(plan)
        return yes or typer.confirm("Remove them?", err=True)

    return shown


def left_to_do(fix: str) -> str:
    """What of a command that repairs, and may build after that, is left after the repair."""
    check, between, build = fix.partition("; latentcache build ")
    if not (check.startswith("latentcache verify ") and " --repair" in check):
        return fix
    return f"latentcache build {build}" if between else ""


def as_json(report: RepairReport) -> dict[str, Any]:
    """What ``verify --json`` says of a repair."""
    return {
        "done": report.done,
        "removed": len({item.key for item in report.removals}),
        "removed_bytes": sum({item.key: item.num_bytes for item in report.removals}.values()),
        "saved": sum(found.saved for found in report.salvaged),
        "shards": list(report.plan.shards),
        "generation": report.generation or report.plan.report.generation,
        "log": report.log,
    }


def _show_plan(plan: RepairPlan) -> None:
    sizes = {item.key: item.num_bytes for item in plan.removals}
    entries = counted(len(sizes), "entry", "entries")
    say(f"to be removed: {entries}, {human_bytes(sum(sizes.values()))}")
    for item in plan.removals[:SHOWN]:
        say(f"  {item.path} [{item.reason}]")
    if len(plan.removals) > SHOWN:
        say(f"  ... and {len(plan.removals) - SHOWN} more (the log that is written lists all of them)")
    if plan.shards:
        say(f"{counted(len(plan.shards), 'damaged shard')}: what is whole of it is copied into a new one")


def show_result(report: RepairReport) -> None:
    """What came of a repair."""
    if not report.plan.needed:
        say("nothing to repair")
    elif not report.done:
        say("nothing was changed")
    else:
        keys = {item.key for item in report.removals}
        saved = sum(found.saved for found in report.salvaged)
        say(f"{counted(len(keys), 'entry', 'entries')} removed, {saved} saved from damaged shards")
        if report.log:
            say(f"what was removed is listed in {report.log}; a build makes it again")

"""``latentcache verify``: each finding with the expected value, the found value and the command that repairs it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from latentcache.cli import console, flags
from latentcache.cli.console import SHOWN, counted, human_bytes, out, say
from latentcache.cli.flags import argument, option
from latentcache.errors import UsageError

if TYPE_CHECKING:
    from latentcache.store.snapshot import Snapshot
    from latentcache.verify.findings import Finding, VerifyReport
    from latentcache.verify.repair import RepairPlan, RepairReport
    from latentcache.verify.selection import Depth
    from latentcache.verify.verify import Requested as AskedRecipes

HELP = """Check a cache against its sources; exit 1 with stale, missing or damaged samples.

With recipe flags: check if a build with these flags would reuse the entries. Read-only without --repair.
"""


def verify(
    cache: Path = argument("CACHE", "A cache folder."),
    *,
    data: Path | None = option(None, "--data DATA", "DATA, if it moved. [default: as recorded]"),
    full: bool = option(False, "--full", "Read every payload and every source."),
    sample: str | None = option(
        None, "--sample PART", "Read a part only: 1/7 (the first of seven), 5%, 2G (bytes) or 300 (samples)."
    ),
    seed: flags.Seed = 0,
    reencode: int | None = option(
        None, "--reencode N", "Encode N samples again and compare the results (loads the encoder).", min=1
    ),
    device: str = option("auto", "--device DEVICE", "Device of --reencode: auto, cpu, cuda, cuda:N. [default: auto]"),
    repair: bool = option(False, "--repair", "Remove corrupt entries after a full check; a build makes them again."),
    yes: bool = option(False, "--yes", "Repair without confirmation."),
    untrusted: bool = option(
        False, "--untrusted", "Check a cache from elsewhere with limited memory; follow no path in it."
    ),
    requested: flags.Requested,
    allow_failed: str | None = option(
        None, "--allow-failed N|X%", "Rejected inputs tolerated before exit status 1. [default: as the cache]"
    ),
    as_json: flags.Json = False,
) -> int:
    """Check a cache against its sources."""
    from latentcache.plan.numbers import tolerated
    from latentcache.verify.fixes import Commands
    from latentcache.verify.outside import limited_memory
    from latentcache.verify.selection import Depth, parse_selection
    from latentcache.verify.verify import verify_cache

    if allow_failed is not None:
        tolerated(allow_failed, 0)
    _check_flags(shlex.quote(str(cache)), device, reencode, sample, repair=repair, yes=yes, untrusted=untrusted)
    depth = Depth(
        full=full or repair,
        selection=None if sample is None else parse_selection(sample, seed),
        untrusted=untrusted,
        reencode=reencode or 0,
        seed=seed,
    )
    look: dict[str, Any] = {
        "data": data,
        "requested": partial(_recipes, requested=requested, depth=depth, device=device),
        "depth": depth,
        "reencode": _encoder(requested, device) if reencode else None,
        "commands": Commands(
            common=requested.common,
            recipe=requested.words,
            run="" if device == "auto" else f"--device {device}",
            allow_failed=allow_failed,
        ),
    }
    repaired: RepairReport | None = None
    with limited_memory(cache) if untrusted else nullcontext():
        if repair:
            report, repaired = _repaired(cache, look, yes=yes)
        else:
            report = verify_cache(cache, **look)
    exit_code = report.exit_code(tolerated(allow_failed or report.allow_failed, report.samples))
    payload = {"cache": str(cache), **report.as_json(), "repair": repaired.as_json() if repaired else None}
    if as_json:
        console.emit("verify", payload, exit_code=exit_code)
    else:
        _show(report)
    return exit_code


def _check_flags(
    cache: str, device: str, reencode: int | None, sample: str | None, *, repair: bool, yes: bool, untrusted: bool
) -> None:
    """Reject contradicting flags before anything is read."""
    if reencode is not None and untrusted:
        why = "the manifest of an untrusted cache would name the model to load"
        raise UsageError("--reencode: not available with --untrusted", why=why, fix="leave one of them out")
    if reencode is None and device != "auto":
        raise UsageError(f"--device={device}: needs --reencode", fix="add --reencode 300, or leave it out")
    if repair and (sample is not None or untrusted):
        why, fix = "a repair removes the findings of a complete check", f"latentcache verify {cache} --repair"
        raise UsageError("--repair: not available with --sample or --untrusted", why=why, fix=fix)
    if yes and not repair:
        raise UsageError("--yes: needs --repair", fix=f"latentcache verify {cache} --repair --yes")
    if repair and not yes and not sys.stdin.isatty():
        raise UsageError("--repair: no terminal to confirm on", why="stdin is not a terminal", fix="add --yes")


def _repaired(cache: Path, look: Mapping[str, Any], *, yes: bool) -> tuple[VerifyReport, RepairReport]:
    """Check and repair."""
    from latentcache.verify.repair import repair_cache

    repaired = repair_cache(cache, **look, confirm=lambda plan: _confirmed(plan, yes=yes))
    _show_repair(repaired)
    report = repaired.plan.report
    if repaired.done:
        report = replace(report, findings=tuple(replace(one, fix=_after_repair(one.fix)) for one in report.findings))
    return report, repaired


def _encoder(requested: flags.Requested, device: str) -> Any:
    """The encoder of ``--reencode``, loaded by its first use."""
    from latentcache.pipeline.reencode import Reencode

    return Reencode(settings=requested.fields, device=device)


# requested recipes


def _recipes(snapshot: Snapshot, *, requested: flags.Requested, depth: Depth, device: str) -> AskedRecipes:
    """The recipes that the flags ask for: those that a build would use now. Files are read, nothing is loaded."""
    from latentcache.fields.protocol import Cached, DescribeContext
    from latentcache.fields.registry import load
    from latentcache.verify.verify import Requested

    _check_fields(requested, snapshot)
    recipes, provenances, reasons = dict[str, Any](), dict[str, Any](), dict[str, str]()
    compared: set[str] = set()
    context = DescribeContext(device=device, check=True, check_encoder=depth.reencode > 0)
    for name, rows in snapshot.fields.items():
        settings = requested.fields.get(name)
        if rows.kind is None or rows.recipe is None or (depth.untrusted and settings is None):
            continue
        cached = Cached(recipe=rows.recipe, provenance={} if depth.untrusted else rows.provenance)
        described = load(rows.kind.describer)(settings or rows.kind.settings(), cached, context)
        if settings is not None or described.recipe.recipe_id != rows.recipe.recipe_id:
            recipes[name], provenances[name] = described.recipe, described.provenance
        if described.producer:
            compared.add(name)
        elif described.notes:
            reasons[name] = described.notes[0]
    return Requested(recipes=recipes, compared=frozenset(compared), provenances=provenances, reasons=reasons)


def _check_fields(requested: flags.Requested, snapshot: Snapshot) -> None:
    for name in requested.fields:
        if name not in snapshot.fields:
            held = ", ".join(snapshot.fields)
            fix = "leave the flags of this field out, or build it first"
            raise UsageError(f"the cache has no field {name}", why=f"its fields: {held}", fix=fix)


# repair


def _confirmed(plan: RepairPlan, *, yes: bool) -> bool:
    """Show the plan of a repair and ask for confirmation."""
    size = sum(one.num_bytes for one in plan.removals)
    say(f"to be removed: {counted(len(plan.removals), 'entry', 'entries')}, {human_bytes(size)}")
    for one in plan.removals[:SHOWN]:
        say(f"  {one.path or one.key} [{one.reason}]")
    if len(plan.removals) > SHOWN:
        say(f"  ... and {len(plan.removals) - SHOWN} more")
    if plan.shards:
        say(f"{counted(len(plan.shards), 'damaged shard')}: intact entries are copied into a new shard")
    return yes or typer.confirm("Remove them?", err=True)


def _show_repair(report: RepairReport) -> None:
    if not report.plan.needed:
        say("nothing to repair")
    elif not report.done:
        say("nothing was changed")
    else:
        say(f"{counted(len(report.removals), 'entry', 'entries')} removed, {report.saved} saved from damaged shards")


def _after_repair(fix: str) -> str:
    """The part of a command that is left after the repair: the build."""
    check, _, build = fix.partition("; latentcache build ")
    if not (check.startswith("latentcache verify ") and " --repair" in check):
        return fix
    return f"latentcache build {build}" if build else ""


# text


def _show(report: VerifyReport) -> None:
    """Findings as text, most severe first, then counts and fixes."""
    from latentcache.verify.findings import CATEGORIES

    for category in CATEGORIES:
        found = [finding for finding in report.findings if finding.category == category]
        for finding in found[:SHOWN]:
            _show_one(finding)
        if len(found) > SHOWN:
            out(f"... and {len(found) - SHOWN} more {category} (all of them with --json)")
    counts = ", ".join(
        f"{number} {name}"
        for name, number in report.counts.items()
        if name in CATEGORIES and (number or name == "ok")
    )
    read = "headers and timestamps; payloads not read" if report.mode == "fast" else "payloads and sources read"
    out(f"{counts} ({read})")
    for line in _remarks(report):
        out(line)
    for fix in dict.fromkeys(finding.fix for finding in report.findings if finding.fix):
        out(f"fix: {fix}")


def _show_one(finding: Finding) -> None:
    line = f":{finding.line}" if finding.line else ""
    name = f"{finding.path}{line}" if finding.path else finding.file or finding.key
    if finding.count > 1:
        name = f"{counted(finding.count, 'sample')}{f' of {name}' if name else ''}"
    field = f" {finding.field}" if finding.field and finding.category == "quarantined" else ""
    sides = f"expected {finding.expected}, found {finding.found}" if finding.expected else finding.found
    out(f"{finding.category} {name}{field} [{finding.reason}]{': ' + sides if sides else ''}".replace("  ", " "))
    if finding.names:
        shown, more = ", ".join(finding.names), finding.count - len(finding.names)
        out(f"  {shown}{f' and {more} more' if more > 0 else ''}")
    if finding.category == "quarantined" and finding.hint:  # no command repairs it: the fix differs per file
        out(f"  fix: {finding.hint}")


def _remarks(report: VerifyReport) -> Sequence[str]:
    lines = []
    if unreferenced := report.counts.get("unreferenced"):
        lines.append(f"unreferenced: {counted(unreferenced, 'entry', 'entries')} (see `latentcache gc`)")
    if report.not_compared:
        words = (word if word.endswith(")") else f"{word} (not given)" for word in report.not_compared)
        lines.append(f"not compared: {', '.join(words)}")
    if report.part:
        lines.append(f"this is part {report.part} of DATA: samples of other parts were not checked")
    if report.not_looked_at:
        total = report.checked["samples"] + report.not_looked_at
        lines.append(f"not checked: {report.not_looked_at} of {total} samples")
    lines += [report.confidence] if report.confidence else []
    lines += _reencoded(report)
    if report.building:
        lines.append("an unfinished build was found: this is the snapshot before it")
    return lines


def _reencoded(report: VerifyReport) -> list[str]:
    found = report.reencoded
    if found is None:
        return []
    if not found.entries:
        return ["encoded again: nothing (samples with findings are left out)"]
    entries = counted(found.entries, "entry", "entries")
    difference = f"largest difference {found.largest:.2g}, mean {found.mean:.2g}"
    said = [f"encoded again: {counted(found.samples, 'sample')}, {entries}, {difference}"]
    return [*said, found.confidence] if found.confidence else said

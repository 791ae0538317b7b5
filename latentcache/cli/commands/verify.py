"""``latentcache verify`` and ``gc``: findings with the command that repairs them, and data that nothing needs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from latentcache.cli import flags
from latentcache.cli.console import SHOWN, Result, finding_lines, say, word_of
from latentcache.cli.flags import option
from latentcache.errors import UsageError, count_of
from latentcache.plan.numbers import human_bytes
from latentcache.store.paths import url_of

if TYPE_CHECKING:
    from latentcache.verify.collect import CollectReport
    from latentcache.verify.findings import VerifyReport
    from latentcache.verify.verify import Repair

_ALLOWED = "Exit with 0 if at most N files (or X %) are rejected. [default: as the cache]"


def verify(
    cache: flags.CacheOrUrl,
    *,
    data: Path | None = option(None, "--data DATA", "DATA, if it moved. [default: as recorded]"),
    full: bool = option(False, "--full", "Read every payload and every source."),
    sample: str | None = option(None, "--sample N/T", "Read slice N of T only, for example 1/7."),
    seed: flags.Seed = 0,
    reencode: int | None = option(
        None, "--reencode N", "Encode N samples again and compare the results (loads the encoder).", min=1
    ),
    device: str = option("auto", "--device DEVICE", "Device for --reencode: cpu, cuda or cuda:N. [default: auto]"),
    repair: bool = option(False, "--repair", "Remove corrupt entries after a full check; a build makes them again."),
    yes: bool = option(False, "--yes", "Repair without confirmation."),
    untrusted: bool = option(
        False, "--untrusted", "Check a cache from elsewhere with limited memory; follow no path in it."
    ),
    requested: flags.Requested,
    allow_failed: str | None = option(None, "--allow-failed N|X%", _ALLOWED),
) -> Result:
    """Check a cache against its sources; exit 1 with stale, missing or damaged samples.

    With recipe flags: check if a build with these flags would reuse the entries. Read-only without --repair.

    Examples:
        latentcache verify images.latentcache
        latentcache verify images.latentcache --full --repair
        latentcache verify images.latentcache --model ./sdxl
    """
    from latentcache.export.folder import is_export
    from latentcache.plan.numbers import tolerated
    from latentcache.verify.entries import Depth, parse_slice
    from latentcache.verify.findings import Commands
    from latentcache.verify.verify import check_cache, limited_memory

    if is_export(cache):
        return _of_export(cache, data)
    if allow_failed is not None:
        tolerated(allow_failed, 0)
    _check_flags(shlex.quote(str(cache)), device, reencode, sample, repair=repair, yes=yes, untrusted=untrusted)
    depth = Depth(
        full=full or repair,
        slice=None if sample is None else parse_slice(sample),
        untrusted=untrusted,
        reencode=reencode or 0,
        seed=seed,
        device=device,
    )
    options: dict[str, Any] = {
        "depth": depth,
        "data": data,
        "settings": requested.fields,
        "commands": Commands(
            common=requested.common,
            recipe=requested.words,
            run="" if device == "auto" else f"--device {device}",
            allow_failed=allow_failed,
        ),
    }
    with limited_memory(cache) if untrusted else nullcontext():
        repaired = _repaired(cache, options, yes=yes) if repair else None
        report = repaired.report if repaired else check_cache(cache, **options)[0]
    exit_code = report.exit_code(tolerated(allow_failed or report.allow_failed, report.samples))
    payload = {"cache": str(cache), **report.as_json(), "repair": repaired.as_json() if repaired else None}
    return Result(payload, _lines(report), exit_code=exit_code)


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
        why = "a repair removes the findings of a complete check"
        fix = f"latentcache verify {cache} --repair"
        raise UsageError("--repair: not available with --sample or --untrusted", why=why, fix=fix)
    if yes and not repair:
        raise UsageError("--yes: needs --repair", fix=f"latentcache verify {cache} --repair --yes")
    if repair and not yes and not sys.stdin.isatty():
        raise UsageError("--repair: no terminal to confirm on", why="stdin is not a terminal", fix="add --yes")


def _repaired(cache: Path, options: Mapping[str, Any], *, yes: bool) -> Repair:
    """Check and repair; afterwards the build alone is the fix of what was removed."""
    from latentcache.verify.verify import repair_cache

    repair = repair_cache(cache, **options, confirm=lambda plan: _confirmed(plan, yes=yes))
    if not repair.done:
        say("nothing was changed" if repair.needed else "nothing to repair")
        return repair
    say(f"{count_of(len(repair.removals), 'entries')} removed")
    build = "latentcache build "
    findings = tuple(
        replace(finding, fix=build + finding.fix.partition(f"; {build}")[2])
        if finding.category in ("corrupt", "drift")
        else finding
        for finding in repair.report.findings
    )
    return replace(repair, report=replace(repair.report, findings=findings))


def _of_export(out: Path, data: Path | None) -> Result:
    """Compare the files of an export with its sidecar, and with ``--data`` the images with what was exported."""
    from latentcache.export.folder import Folder, verify_export

    findings = list(verify_export(out, data))
    lines = [f"{finding['path']}: {finding['problem']}" for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines.append(f"... and {len(findings) - SHOWN} more")
    lines.append(f"{count_of(len(findings), 'findings')} in the export {out}")
    not_compared = Folder(out).changing
    if not_compared:
        lines.append(f"not compared: {count_of(len(not_compared), 'files')} that the trainer writes to")
    if findings:
        lines.append(
            "fix: run `latentcache build` on DATA if images changed, then the same `latentcache export` again"
        )
    payload = {"out": str(out), "findings": findings, "not_compared": not_compared}
    return Result(payload, lines, exit_code=1 if findings else 0)


# repair


def _confirmed(plan: Repair, *, yes: bool) -> bool:
    """Show the plan of a repair and ask for confirmation."""
    size = sum(removal.num_bytes for removal in plan.removals)
    say(f"to be removed: {count_of(len(plan.removals), 'entries')}, {human_bytes(size)}")
    for removal in plan.removals[:SHOWN]:
        say(f"  {removal.path or removal.key} [{removal.reason}]")
    if len(plan.removals) > SHOWN:
        say(f"  ... and {len(plan.removals) - SHOWN} more")
    if plan.shards:
        say(f"of {count_of(len(plan.shards), 'shards')}; a damaged index is written again")
    return yes or typer.confirm("Remove them?", err=True)


# text


def _lines(report: VerifyReport) -> Iterator[str]:
    """Findings as text, most severe first, then counts and fixes."""
    yield from finding_lines(report.findings)
    counts = ", ".join(
        f"{number} {word_of(name)}"
        for name, number in report.counts.items()
        if name != "unreferenced" and (number or name == "ok")
    )
    read = "quick check; --full reads everything" if report.mode == "fast" else "payloads and sources read"
    yield f"{counts} ({read})"
    yield from _remarks(report)
    yield from (f"fix: {fix}" for fix in dict.fromkeys(finding.fix for finding in report.findings if finding.fix))


def _remarks(report: VerifyReport) -> Iterator[str]:
    if unreferenced := report.counts.get("unreferenced"):
        yield f"unreferenced: {count_of(unreferenced, 'entries')} (see `latentcache gc`)"
    yield from report.not_compared
    if report.part:
        yield f"this is part {report.part} of DATA: samples of other parts were not checked"
    if report.not_looked_at:
        total = report.checked["samples"] + report.not_looked_at
        yield f"not checked: {report.not_looked_at} of {total} samples"
    if report.confidence:
        yield report.confidence
    again = report.reencoded
    if again is not None and not again.entries:
        yield "encoded again: nothing (samples with findings are left out)"
    elif again is not None:
        counts = f"{count_of(again.samples, 'samples')}, {count_of(again.entries, 'entries')}"
        yield f"encoded again: {counts}, largest difference {again.largest:.2g}, mean {again.mean:.2g}"
        if again.confidence:
            yield again.confidence
    if report.building:
        yield "an unfinished build was found: this is the snapshot before it"


# garbage


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
    return Result({"cache": url or str(cache), **report.as_json()}, _garbage_lines(report))


def _garbage_lines(report: CollectReport) -> Iterator[str]:
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

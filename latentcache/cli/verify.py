"""``latentcache verify``: every finding with what was expected, what was found and what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, flags
from latentcache.cli import repair as repairing
from latentcache.cli.console import SHOWN, item, out
from latentcache.pipeline.settings import RecipeSettings

if TYPE_CHECKING:
    from latentcache.recipe import Recipe
    from latentcache.verify.findings import Finding, VerifyReport


@flags.with_recipe
def verify(
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="A cache.", readable=False)],
    *,
    data: Annotated[
        Path | None, typer.Option("--data", help="The data folder, if it moved.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every payload and every source.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Take out what is corrupt, after --full; a build makes it again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Repair without asking.")] = False,
    drop_stale: Annotated[
        bool, typer.Option("--drop-stale", help="Let --repair take out stale entries too.")
    ] = False,
    recipe: RecipeSettings,
    allow_failed: flags.AllowFailed = "0",
    as_json: flags.Json = False,
) -> int:
    """Is the cache still true? With recipe flags: would a build with them reuse it?"""
    from latentcache.verify.run import verify_cache

    flags.parse_allowed(allow_failed, 0)
    repairing.check_flags(repair=repair, yes=yes, drop_stale=drop_stale)
    requested = _requested(cache, recipe) if flags.any_said(recipe) else None
    repaired = None
    if repair:
        repaired = repairing.repaired(cache, data=data, requested=requested, drop_stale=drop_stale, yes=yes)
    report = repaired.plan.report if repaired else verify_cache(cache, data=data, requested=requested, full=full)
    exit_code = report.exit_code(flags.parse_allowed(allow_failed, report.samples))
    findings = [_with_flags(finding, flags.as_words(recipe)) for finding in report.findings]
    if as_json:
        payload = _payload(cache, report, findings) | {"repair": repairing.as_json(repaired) if repaired else None}
        console.emit("verify", payload, exit_code=exit_code)
    else:
        _show(report, findings)
    return exit_code


def _requested(cache: Path, settings: Any) -> Recipe:
    from latentcache.pipeline.recipes import requested_recipe
    from latentcache.store.generation import load_generation

    return requested_recipe(settings, load_generation(cache).recipe)


def _with_flags(finding: Finding, words: str) -> Finding:
    """A build without the flags that were asked for would not mend what they make stale."""
    needs_flags = finding.reason.startswith("recipe:") and words
    return replace(finding, fix=f"{finding.fix} {words}") if needs_flags else finding


def _payload(cache: Path, report: VerifyReport, findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON form."""
    return {
        "cache": str(cache),
        "mode": report.mode,
        "generation": report.generation,
        "counts": report.counts,
        "items": [_item(finding) for finding in findings],
        "building": report.building,
        "elapsed_s": round(report.elapsed_s, 3),
    }


def _item(finding: Finding) -> dict[str, str]:
    more = {name: getattr(finding, name) for name in ("key", "field", "file", "expected", "found", "fix")}
    return item(finding.category, finding.reason, finding.path, hint=finding.hint, **more)


def _show(report: VerifyReport, findings: Sequence[Finding]) -> None:
    """The findings for people, worst first, then the counts and what mends them."""
    from latentcache.verify.findings import CATEGORIES

    for category in CATEGORIES:
        found = [finding for finding in findings if finding.category == category]
        for finding in found[:SHOWN]:
            _show_one(finding)
        if len(found) > SHOWN:
            out(f"... and {len(found) - SHOWN} more {category} (all of them with --json)")
    counts = ", ".join(f"{number} {name}" for name, number in report.counts.items() if number or name == "ok")
    read = "payloads and sources read" if report.mode == "full" else "headers and timestamps; payloads not read"
    out(f"{counts} ({read})")
    if report.building:
        out("a build has been started here and has not ended: this is the generation before it")
    fixes = dict.fromkeys(finding.fix for finding in findings if finding.fix)
    for fix in fixes:
        out(f"fix: {fix}")


def _show_one(finding: Finding) -> None:
    name = finding.path or finding.file or finding.key
    sides = f"expected {finding.expected}, found {finding.found}" if finding.expected else finding.found
    out(f"{finding.category} {f'{name} ' if name else ''}[{finding.reason}]{': ' + sides if sides else ''}")
    if finding.category == "quarantined" and finding.hint:  # no command mends it: what to do is different per file
        out(f"  fix: {finding.hint}")

"""``latentcache verify``: every finding with what was expected, what was found and what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, flags, reports
from latentcache.cli.console import SHOWN, item, out
from latentcache.cli.failures import as_known
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
    recipe: RecipeSettings,
    allow_failed: flags.AllowFailed = None,
    report_to: reports.Report = None,
    as_json: flags.Json = False,
) -> int:
    """Is the cache still true? With recipe flags: would a build with them reuse it?"""
    flags.checked_allowed(allow_failed)
    run = reports.Run(command="verify", cache=cache, wanted=report_to)
    try:
        report, findings = _verified(cache, data, recipe, full=full)
    except BaseException as error:
        known = as_known(error)
        run.leave({"cache": str(cache)}, exit_code=known.exit_code, error=known)
        raise
    allowed = report.allow_failed if allow_failed is None else allow_failed
    exit_code = report.exit_code(flags.parse_allowed(allowed, report.samples))
    payload = _payload(cache, report, findings)
    run.leave(payload, exit_code=exit_code)
    if as_json:
        console.emit("verify", payload, exit_code=exit_code)
    else:
        _show(report, findings)
    return exit_code


def _verified(
    cache: Path, data: Path | None, recipe: RecipeSettings, *, full: bool
) -> tuple[VerifyReport, list[Finding]]:
    from latentcache.verify.run import verify_cache

    requested = _requested(cache, recipe) if flags.any_said(recipe) else None
    report = verify_cache(cache, data=data, requested=requested, full=full)
    return report, [_with_flags(finding, flags.as_words(recipe)) for finding in report.findings]


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
        "recipe_id": report.recipe_id,
        "allow_failed": report.allow_failed,
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

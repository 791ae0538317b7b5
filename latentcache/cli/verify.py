"""``latentcache verify``: every finding with what was expected, what was found and what mends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, export_verify, flags, reports, token_flags, token_verify
from latentcache.cli import reencode as reencoding
from latentcache.cli import repair as repairing
from latentcache.cli.console import SHOWN, item, out
from latentcache.cli.failures import as_known
from latentcache.pipeline.settings import RecipeSettings

if TYPE_CHECKING:
    from latentcache.geometry.placement import Placement
    from latentcache.geometry.sizes import Size
    from latentcache.recipe import Recipe
    from latentcache.verify.findings import Finding, VerifyReport
    from latentcache.verify.repair import RepairReport


@flags.with_recipe
def verify(
    cache: Annotated[
        Path, typer.Argument(metavar="CACHE", help="A cache, or a folder of exported rows.", readable=False)
    ],
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
    tokenizer: token_flags.Tokenizer = None,
    chat_template: token_flags.ChatTemplate = None,
    allow_failed: flags.AllowFailed = None,
    report_to: reports.Report = None,
    as_json: flags.Json = False,
    recipe_file: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            help="Would a build by this recipe (JSON of build, info or a manifest) reuse it?",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="PART",
            help="Read only n/t (the n-th of t slices), x% or N samples.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the samples that are drawn.")] = 0,
    max_duration: Annotated[
        float | None,
        typer.Option("--max-duration", metavar="SECONDS", min=0, help="Stop reading then.", show_default=False),
    ] = None,
    reencode: Annotated[
        int | None,
        typer.Option(
            "--reencode",
            metavar="N",
            min=1,
            help="Encode N samples again and compare (needs the model).",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Of --reencode: auto|cpu|cuda|cuda:N")] = "auto",
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="The cache is from elsewhere: believe nothing, follow nothing.")
    ] = False,
) -> int:
    """Is the cache still true? With recipe flags: would a build with them reuse it?"""
    from latentcache.interop.exported import is_export
    from latentcache.verify.run import verify_cache
    from latentcache.verify.selection import Depth, parse_selection

    if is_export(cache):
        asked_else = (repair, yes, drop_stale, tokenizer, chat_template, recipe_file, sample, reencode, untrusted)
        more = (max_duration, allow_failed, report_to)
        export_verify.check_flags(
            others=any(asked_else) or flags.any_said(recipe) or any(v is not None for v in more)
        )
        return export_verify.verify(cache, cache=data, full=full, as_json=as_json)
    if token_flags.holds_tokens(cache):
        pictures = flags.any_said(recipe) or recipe_file or sample or max_duration is not None or untrusted
        token_verify.check_flags(pictures=bool(pictures), device=device, drop_stale=drop_stale)
        repairing.check_flags(repair=repair, yes=yes, drop_stale=False)
        asked = token_verify.Asked(
            data=data, full=full, reencode=reencode or 0, seed=seed, tokenizer=tokenizer, chat_template=chat_template
        )
        return token_verify.verify(
            cache, asked, repair=repair, yes=yes, allow_failed=allow_failed, report_to=report_to, as_json=as_json
        )
    token_verify.refuse_tokenizer(tokenizer, chat_template)
    reencoding.check_flags(reencode, device=device, untrusted=untrusted)
    flags.checked_allowed(allow_failed)
    whole = sample is None and max_duration is None and not untrusted
    repairing.check_flags(repair=repair, yes=yes, drop_stale=drop_stale, whole=whole)
    requested = _requested(recipe, recipe_file) if recipe_file or flags.any_said(recipe) else None
    run = reports.Run(command="verify", cache=cache, wanted=report_to)
    try:
        depth = Depth(
            full=full or repair,
            selection=None if sample is None else parse_selection(sample, seed),
            max_duration_s=max_duration,
            untrusted=untrusted,
            reencode=reencode or 0,
            seed=seed,
        )
        with reencoding.opened(reencode, recipe, device) as encoder:
            look: dict[str, Any] = {"data": data, "requested": requested, "depth": depth, "reencode": encoder}
            repaired = repairing.repaired(cache, **look, drop_stale=drop_stale, yes=yes) if repair else None
            report = repaired.plan.report if repaired else verify_cache(cache, **look, same_pixels=_same_pixels)
    except BaseException as error:
        known = as_known(error)
        run.leave({"cache": str(cache)}, exit_code=known.exit_code, error=known)
        raise
    words = flags.as_words(recipe)
    return _say(run, report, repaired, words=words, device=device, allowed=allow_failed, as_json=as_json)


def _say(
    run: reports.Run,
    report: VerifyReport,
    repaired: RepairReport | None,
    *,
    words: str,
    device: str,
    allowed: str | None,
    as_json: bool,
) -> int:
    """Leave the report, show what was found, and give the exit status."""
    findings = [_with_flags(finding, words, device) for finding in report.findings]
    if repaired is not None and repaired.done:
        findings = [replace(finding, fix=repairing.left_to_do(finding.fix)) for finding in findings]
    exit_code = report.exit_code(
        flags.parse_allowed(report.allow_failed if allowed is None else allowed, report.samples)
    )
    payload = payload_of(run.cache, report, findings) | {"repair": repairing.as_json(repaired) if repaired else None}
    run.leave(payload, exit_code=exit_code)
    if as_json:
        console.emit("verify", payload, exit_code=exit_code)
    else:
        show(report, findings)
    return exit_code


def _requested(settings: RecipeSettings, file: Path | None) -> Callable[[Recipe], Recipe]:
    """What a build would ask for: the recipe of the file, or of the cache, with what the flags say."""
    from latentcache.pipeline.recipes import read_recipe, requested_recipe

    given = None if file is None else read_recipe(file)

    def asked(cached: Recipe) -> Recipe:
        base = cached if given is None else given
        return requested_recipe(settings, base) if flags.any_said(settings) else base

    return asked


def _same_pixels(data: bytes, recipe: Recipe, size: Size, wanted: Sequence[tuple[Placement, bytes]]) -> bool | None:
    """Decoding, imported when the first file has other bytes."""
    from latentcache.pipeline.compare import same_pixels

    return same_pixels(data, recipe, size, wanted)


def _with_flags(finding: Finding, words: str, device: str) -> Finding:
    """A build without the flags that were asked for would not mend what they make stale, or not find the model."""
    if finding.category == "drift":
        return replace(finding, fix=reencoding.with_flags(finding.fix, words, device))
    needs_flags = finding.reason.startswith("recipe:") and words
    return replace(finding, fix=f"{finding.fix} {words}") if needs_flags else finding


def payload_of(cache: Path, report: VerifyReport, findings: Sequence[Finding]) -> dict[str, Any]:
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
        "checked": dict(report.checked),
        "not_looked_at": report.not_looked_at,
        "confidence": report.confidence,
        "reencode": reencoding.as_json(report.reencoded),
        "recipe_diff": [
            {"field": name, "cached": cached, "requested": asked} for name, cached, asked in report.recipe_diff
        ],
        "elapsed_s": round(report.elapsed_s, 3),
    }


def _item(finding: Finding) -> dict[str, str]:
    more = {name: getattr(finding, name) for name in ("key", "field", "file", "expected", "found", "fix")}
    return item(finding.category, finding.reason, finding.path, hint=finding.hint, **more)


def show(report: VerifyReport, findings: Sequence[Finding], fast: str = "headers and timestamps") -> None:
    """The findings for people, worst first, then counts and what mends them; ``fast``: what a fast check reads."""
    from latentcache.verify.findings import CATEGORIES

    for category in CATEGORIES:
        found = [finding for finding in findings if finding.category == category]
        for finding in found[:SHOWN]:
            _show_one(finding)
        if len(found) > SHOWN:
            out(f"... and {len(found) - SHOWN} more {category} (all of them with --json)")
    counts = ", ".join(f"{number} {name}" for name, number in report.counts.items() if number or name == "ok")
    read = f"{fast}; payloads not read" if report.mode == "fast" else "payloads and sources read"
    out(f"{counts} ({read})")
    if report.unused_corrupt:
        out(f"damaged entries that no sample needs: {report.unused_corrupt}")
    if report.not_looked_at:
        out(f"not looked at: {report.not_looked_at} of {report.checked['samples'] + report.not_looked_at} samples")
    if report.confidence:
        out(report.confidence)
    for line in reencoding.lines(report.reencoded):
        out(line)
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

"""``latentcache verify``: every finding with what was expected, what was found and what mends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import console, export_verify, flags, reports, token_flags, token_verify, verify_flags
from latentcache.cli import reencode as reencoding
from latentcache.cli import repair as repairing
from latentcache.cli.console import SHOWN, item, out
from latentcache.pipeline.settings import RecipeSettings

if TYPE_CHECKING:
    from latentcache.geometry.placement import Placement
    from latentcache.geometry.sizes import Size
    from latentcache.recipe import Recipe
    from latentcache.verify.findings import Finding, VerifyReport
    from latentcache.verify.removals import RepairReport
    from latentcache.verify.selection import Depth, Limits


@flags.with_recipe
def verify(
    cache: verify_flags.Cache,
    *,
    data: verify_flags.Data = None,
    full: verify_flags.Full = False,
    repair: verify_flags.Repair = False,
    yes: verify_flags.Yes = False,
    drop_stale: verify_flags.DropStale = False,
    recipe: RecipeSettings,
    tokenizer: token_flags.Tokenizer = None,
    chat_template: token_flags.ChatTemplate = None,
    allow_failed: flags.AllowFailed = None,
    report_to: reports.Report = None,
    as_json: flags.Json = False,
    recipe_file: verify_flags.RecipeFile = None,
    sample: verify_flags.Sample = None,
    seed: verify_flags.Seed = 0,
    max_duration: verify_flags.MaxDuration = None,
    reencode: verify_flags.Reencode = None,
    device: verify_flags.Device = "auto",
    untrusted: verify_flags.Untrusted = False,
) -> int:
    """Is the cache still true? With recipe flags: would a build with them reuse it?"""
    from latentcache.interop.exported import is_export

    if is_export(cache):
        others = [repair, yes, drop_stale, tokenizer, chat_template, recipe_file, sample, reencode, untrusted]
        others += [flags.any_said(recipe), *(value is not None for value in (max_duration, allow_failed, report_to))]
        export_verify.check_flags(others=any(others))
        return export_verify.verify(cache, cache=data, full=full, as_json=as_json)
    flags.checked_allowed(allow_failed)
    reencoding.check_untrusted(reencode, untrusted=untrusted)
    whole = sample is None and max_duration is None and not untrusted
    # Nobody but --report says where a report on a stranger's cache goes: in it, a link may lead anywhere.
    run = reports.Run(command="verify", cache=cache, wanted=report_to, silent=untrusted and report_to is None)
    with run.told(lambda: {"cache": str(cache)}):
        limits = _foreign(cache) if untrusted else None
    asked = token_verify.Asked(tokenizer=tokenizer, chat_template=chat_template)
    pictures = bool(flags.any_said(recipe) or recipe_file)
    is_of_tokens = _kind(cache, asked, pictures=pictures, device=device, drop_stale=drop_stale, reencode=reencode)
    repairing.check_flags(repair=repair, yes=yes, drop_stale=drop_stale, whole=whole)
    requested = _requested(recipe, recipe_file) if pictures else None
    with run.told(lambda: {"cache": str(cache)}):
        depth = _depth(
            full=full or repair,
            sample=sample,
            seed=seed,
            max_duration=max_duration,
            untrusted=untrusted,
            limits=limits,
            reencode=reencode,
        )
        if is_of_tokens:
            report, repaired = token_verify.looked(cache, data, depth, asked, repair=repair, yes=yes)
        else:
            with reencoding.opened(reencode, recipe, device) as encoder:
                look: dict[str, Any] = {"data": data, "requested": requested, "depth": depth, "reencode": encoder}
                report, repaired = _looked(cache, look, repair=repair, drop_stale=drop_stale, yes=yes)
    said = _Said(words=flags.as_words(recipe), device=device, allowed=allow_failed, is_of_tokens=is_of_tokens)
    return _say(run, report, repaired, said, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What of the command line the answer needs."""

    words: str
    """The recipe flags."""
    device: str
    allowed: str | None
    is_of_tokens: bool


def _kind(
    cache: Path, asked: token_verify.Asked, *, pictures: bool, device: str, drop_stale: bool, reencode: int | None
) -> bool:
    """Whether it is a cache of tokens; flags of the other kind are refused."""
    if token_flags.holds_tokens(cache):
        token_verify.check_flags(pictures=pictures, device=device, drop_stale=drop_stale)
        return True
    token_verify.refuse_tokenizer(asked.tokenizer, asked.chat_template)
    reencoding.check_device(reencode, device=device)
    return False


def _foreign(cache: Path) -> Limits:
    """A look at a stranger's cache before any of its bytes are parsed here."""
    from latentcache.store.layout import CacheLayout
    from latentcache.verify.untrusted import check_foreign

    return check_foreign(CacheLayout(cache))


def _depth(
    *,
    full: bool,
    sample: str | None,
    seed: int,
    max_duration: float | None,
    untrusted: bool,
    limits: Limits | None,
    reencode: int | None,
) -> Depth:
    from latentcache.verify.selection import Depth, parse_selection

    return Depth(
        full=full,
        selection=None if sample is None else parse_selection(sample, seed),
        max_duration_s=max_duration,
        untrusted=untrusted,
        limits=limits,
        reencode=reencode or 0,
        seed=seed,
    )


def _looked(
    cache: Path, look: dict[str, Any], *, repair: bool, drop_stale: bool, yes: bool
) -> tuple[VerifyReport, RepairReport | None]:
    """Look at a cache of pictures, and repair it where that was asked for."""
    from latentcache.verify.run import verify_cache

    if not repair:
        return verify_cache(cache, **look, same_pixels=_same_pixels), None
    repaired = repairing.repaired(cache, **look, drop_stale=drop_stale, yes=yes)
    return repaired.plan.report, repaired


def _say(run: reports.Run, report: VerifyReport, repaired: RepairReport | None, said: _Said, *, as_json: bool) -> int:
    """Leave the report, show what was found, and give the exit status."""
    findings = [_with_flags(finding, said.words, said.device) for finding in report.findings]
    if repaired is not None and repaired.done:
        findings = [replace(finding, fix=repairing.left_to_do(finding.fix)) for finding in findings]
    allowed = report.allow_failed if said.allowed is None else said.allowed
    exit_code = report.exit_code(flags.parse_allowed(allowed, report.samples))
    payload = payload_of(run.cache, report, findings) | {"repair": repairing.as_json(repaired) if repaired else None}
    payload |= {"kind": "tokens"} if said.is_of_tokens else {}
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
        "share": report.share,
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
    if report.share:
        out(f"this is share {report.share} of the records: those of other shares were not looked for")
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
    if finding.category == "quarantined" and finding.field:
        name = f"{name} {finding.field}"
    sides = f"expected {finding.expected}, found {finding.found}" if finding.expected else finding.found
    out(f"{finding.category} {f'{name} ' if name else ''}[{finding.reason}]{': ' + sides if sides else ''}")
    if finding.category == "quarantined" and finding.hint:  # no command mends it: what to do is different per file
        out(f"  fix: {finding.hint}")

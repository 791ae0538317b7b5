"""``latentcache build`` of tokens: the plan, the bar, the summary."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import console, flags, reports
from latentcache.cli.console import SHOWN, counted, human_bytes, item, out, table
from latentcache.cli.failures import as_known
from latentcache.pipeline.token_settings import TokenSettings

if TYPE_CHECKING:
    from latentcache.cli.token_progress import TokenTalk
    from latentcache.pipeline.token_report import TokenPlan, TokenReport
    from latentcache.sources.sample import Refusal

FIELD = "input_ids"


def build(settings: TokenSettings, *, report_to: Path | None, quiet: bool, as_json: bool) -> int:
    """Tokenise what is missing and make the cache true for DATA."""
    flags.checked_allowed(settings.allow_failed)
    run = reports.Run(command="build", cache=settings.cache, wanted=report_to)
    report = _built(settings, run, quiet=quiet, as_json=as_json)
    exit_code = int(len(report.refused) > flags.parse_allowed(report.allow_failed, report.plan.samples))
    payload = _payload(report)
    if not report.dry_run:
        run.leave(payload, exit_code=exit_code)
    if as_json:
        console.emit("build", payload, exit_code=exit_code)
    else:
        _show(report, f" (more than --allow-failed {report.allow_failed}: exit status 1)" if exit_code else "")
    return exit_code


def _built(settings: TokenSettings, run: reports.Run, *, quiet: bool, as_json: bool) -> TokenReport:
    """Build, and talk about it meanwhile. A build that fails or is ended leaves a report of what it did."""
    from latentcache.cli.token_progress import TokenTalk
    from latentcache.pipeline.token_build import build_tokens

    talk = TokenTalk(quiet=quiet)
    last_words = functools.partial(console.last_words, "build", as_json=as_json)
    try:
        return build_tokens(settings, observer=talk, last_words=last_words)
    except BaseException as error:
        known = as_known(error)
        if not settings.dry_run:
            run.leave(_so_far(talk), exit_code=known.exit_code, error=known)
        raise
    finally:
        talk.close()


def _so_far(talk: TokenTalk) -> dict[str, Any]:
    """The JSON form of a build that did not end: what is durable, as far as its plan went."""
    plan, progress = talk.plan, talk.progress
    if plan is None:
        return {}
    done = {"encoded": progress.committed if progress else 0, "cached": plan.reused}
    refused = len(plan.refused) + (progress.refused if progress else 0)
    return {
        **_about(plan),
        "counts": {"samples": plan.samples, **done, "quarantined": refused},
        "items": [_item("quarantined", refusal) for refusal in plan.refused],
        "written_bytes": progress.written_bytes if progress else 0,
    }


def _about(plan: TokenPlan) -> dict[str, Any]:
    return {
        "kind": "tokens",
        "cache": str(plan.cache),
        "data": str(plan.data),
        "tokenizer": plan.tokenizer,
        "recipe_id": plan.recipe.recipe_id.hex(),
        "recipe": plan.recipe.as_json(),
        "plan": {
            "documents_to_make": plan.todo,
            "documents_cached": plan.reused,
            "sources": plan.sources,
            "characters": plan.characters,
            "bytes_to_write": plan.bytes_to_write,
            "free_bytes": plan.free_bytes,
            "workers": plan.workers,
        },
    }


def _payload(report: TokenReport) -> dict[str, Any]:
    """The JSON form."""
    plan = report.plan
    made = {"encoded": report.encoded, "cached": plan.reused if report.dry_run else report.cached}
    return {
        **_about(plan),
        "dry_run": report.dry_run,
        "counts": {"samples": plan.samples, **made, "quarantined": len(report.refused)},
        "fields": {FIELD: made},
        "tokens": dict(report.accounts),
        "items": [_item("quarantined", refusal) for refusal in report.refused]
        + [_item("note", refusal) for refusal in report.notes],
        "written_bytes": report.written_bytes,
        "generation": report.generation,
        "published": report.published,
        "allow_failed": report.allow_failed,
        "elapsed_s": round(report.elapsed_s, 3),
    }


def _item(category: str, refusal: Refusal) -> dict[str, Any]:
    found: dict[str, Any] = item(
        category,
        refusal.cause,
        refusal.name,
        field=refusal.field,
        found=refusal.detail,
        hint=refusal.hint or "look at the file",
    )
    return found | ({"line": refusal.line} if refusal.line else {})


def _show(report: TokenReport, excess: str) -> None:
    """The summary for people; ``excess`` says why the exit status is not 0."""
    _show_files("quarantined", report.refused)
    _show_files("note", report.notes)
    quarantined = f"{len(report.refused)} quarantined{excess}"
    if report.dry_run:
        plan = report.plan
        out(f"dry run: {counted(plan.todo, 'document')} would be tokenised, {plan.reused} reused, {quarantined}")
        return
    if report.encoded:
        rate = report.encoded / report.elapsed_s if report.elapsed_s else 0.0
        size = human_bytes(report.written_bytes)
        speed = f"{report.elapsed_s:.1f} s ({rate:.0f} documents/s, {size})"
        out(f"{report.encoded} tokenised, {report.cached} reused, {quarantined} in {speed}")
    else:
        out(f"nothing to tokenise: {counted(report.cached, 'document')} reused, {quarantined}")
    show_accounts(report.accounts)
    out(f"cache {report.plan.cache} (generation {report.generation}) is complete")


def show_accounts(accounts: Any) -> None:
    """Documents, tokens and lengths for people."""
    if not accounts.get("documents"):
        out("no document: no record could be used")
        return
    share = accounts["trainable"] / accounts["tokens"]
    mean = accounts["tokens"] / accounts["documents"]
    out(
        f"{counted(accounts['documents'], 'document')}, {accounts['tokens']:,} tokens, {share:.1%} with loss; "
        f"{accounts['shortest']} to {accounts['longest']} tokens each, {mean:.0f} on average"
    )
    if accounts["without_loss"]:
        out(f"{counted(accounts['without_loss'], 'document')} without a token that carries loss")
    if accounts["control_strings"]:
        texts = counted(accounts["documents_with_control"], "record")
        out(f"{counted(accounts['control_strings'], 'control string')} in {texts}: taken as plain text")
    rows: list[tuple[object, ...]] = [("tokens up to", "documents", "tokens")]
    rows += [(one["up_to"], one["documents"], f"{one['tokens']:,}") for one in accounts["lengths"]]
    for line in table(rows):
        out(f"  {line}")


def _show_files(kind: str, refusals: Sequence[Refusal]) -> None:
    for refusal in refusals[:SHOWN]:
        line, field = f":{refusal.line}" if refusal.line else "", f" {refusal.field}" if refusal.field else ""
        detail = f": {refusal.detail}" if refusal.detail else ""
        out(f"{kind} {refusal.name}{line}{field} [{refusal.cause}]{detail}")
        if kind == "quarantined" and refusal.hint:
            out(f"  fix: {refusal.hint}")
    if len(refusals) > SHOWN:
        out(f"... and {len(refusals) - SHOWN} more {kind} (all of them with --json)")

"""``latentcache build`` of tokens: the plan, the bar, the summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import flags, reports
from latentcache.cli.building import carried_out, concluded, results, show_cache, show_refused
from latentcache.cli.console import counted, human_bytes, item, out, table
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
    return concluded(report, _payload(report), run, _show, samples=report.plan.samples, as_json=as_json)


def _built(settings: TokenSettings, run: reports.Run, *, quiet: bool, as_json: bool) -> TokenReport:
    from latentcache.cli.token_progress import TokenTalk
    from latentcache.pipeline.token_build import build_tokens

    return carried_out(
        lambda talk, last_words: build_tokens(settings, observer=talk, last_words=last_words),
        run,
        TokenTalk(quiet=quiet),
        _so_far,
        dry_run=settings.dry_run,
        as_json=as_json,
    )


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
        "share": plan.share,
        "cache": str(plan.cache),
        "data": str(plan.data),
        "tokenizer": plan.tokenizer,
        "recipe_id": plan.recipe.recipe_id.hex(),
        "recipe": plan.recipe.as_json(),
        "plan": {
            "documents_to_make": plan.todo,
            "documents_cached": plan.reused,
            "documents_to_take": plan.taken,
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
    cached = plan.reused if report.dry_run else report.cached
    made = {"encoded": report.encoded, "cached": cached}
    return {
        **_about(plan),
        **results(report, _item),
        "counts": {"samples": plan.samples, **made, "quarantined": len(report.refused)},
        "fields": {FIELD: made},
        "taken": report.taken,
        "worker_restarts": report.restarts,
        "tokens": dict(report.accounts),
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
    show_refused("quarantined", report.refused)
    show_refused("note", report.notes)
    quarantined = f"{len(report.refused)} quarantined{excess}"
    if report.dry_run:
        plan = report.plan
        taken = f"{plan.taken} taken over, " if plan.taken else ""
        todo = counted(plan.todo, "document")
        out(f"dry run: {todo} would be tokenised, {taken}{plan.reused} reused, {quarantined}")
        return
    taken = f"{report.taken} taken over, " if report.taken else ""
    if report.encoded or report.taken:
        rate = (report.encoded + report.taken) / report.elapsed_s if report.elapsed_s else 0.0
        size = human_bytes(report.written_bytes)
        speed = f"{report.elapsed_s:.1f} s ({rate:.0f} documents/s, {size})"
        out(f"{report.encoded} tokenised, {taken}{report.cached} reused, {quarantined} in {speed}")
    else:
        out(f"nothing to tokenise: {counted(report.cached, 'document')} reused, {quarantined}")
    show_accounts(report.accounts, split_control=report.plan.recipe.split_control)
    documents = report.encoded + report.cached + report.taken
    if report.plan.share:
        out(f"share {report.plan.share} of the records: another build takes the shares together with --take-from")
    show_cache(report.plan.cache, report.generation, documents, "record")


def show_accounts(accounts: Any, *, split_control: bool) -> None:
    """Documents, tokens and lengths for people; ``split_control`` is the recipe's."""
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
        taken = "plain text" if split_control else "control tokens"
        out(f"{counted(accounts['control_strings'], 'control string')} in {texts}: taken as {taken}")
    rows: list[tuple[object, ...]] = [("tokens up to", "documents", "tokens")]
    rows += [(one["up_to"], one["documents"], f"{one['tokens']:,}") for one in accounts["lengths"]]
    for line in table(rows):
        out(f"  {line}")

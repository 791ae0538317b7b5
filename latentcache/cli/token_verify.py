"""``latentcache verify`` of a token cache: is every record still there, and would the tokenizer do the same again?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import console, flags, reports
from latentcache.cli import repair as repairing
from latentcache.cli.failures import as_known
from latentcache.errors import UsageError

if TYPE_CHECKING:
    from latentcache.encoders.tokenising import TokeniserDescription
    from latentcache.sources.records import Record, RecordScan
    from latentcache.verify.token_sources import Retokenise


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be looked at."""

    data: Path | None
    full: bool
    reencode: int
    seed: int
    tokenizer: str | None
    chat_template: Path | None


def check_flags(*, pictures: bool, device: str, drop_stale: bool) -> None:
    """Refuse what is for pictures.

    Raises:
        UsageError: As said.
    """
    if pictures or device != "auto" or drop_stale:
        raise UsageError(
            "one of these flags is for caches of pictures, and this is one of tokens",
            why="for tokens: --data, --full, --reencode, --seed, --tokenizer, --chat-template, --repair",
            fix="leave the others out",
        )


def refuse_tokenizer(tokenizer: str | None, chat_template: Path | None) -> None:
    """Refuse what is for tokens.

    Raises:
        UsageError: As said.
    """
    if tokenizer is not None or chat_template is not None:
        flag = "--chat-template" if tokenizer is None else "--tokenizer"
        raise UsageError(f"{flag} is for caches of tokens, and this is none", fix=f"leave {flag} out")


def verify(
    cache: Path,
    asked: Asked,
    *,
    repair: bool,
    yes: bool,
    allow_failed: str | None,
    report_to: Path | None,
    as_json: bool,
) -> int:
    """Look, say, and repair where that was asked for."""
    from latentcache.cli.verify import payload_of, show
    from latentcache.verify.token_repair import repair_tokens
    from latentcache.verify.token_run import verify_tokens

    flags.checked_allowed(allow_failed)
    run = reports.Run(command="verify", cache=cache, wanted=report_to)
    repaired = None
    try:
        look = _look(cache, asked)
        if repair:
            repaired = repair_tokens(cache, **look, confirm=repairing.confirm(yes=yes))
            repairing.show_result(repaired)
            report = repaired.plan.report
        else:
            report = verify_tokens(cache, **look)
    except BaseException as error:
        known = as_known(error)
        run.leave({"cache": str(cache)}, exit_code=known.exit_code, error=known)
        raise
    findings = list(report.findings)
    allowed = report.allow_failed if allow_failed is None else allow_failed
    exit_code = report.exit_code(flags.parse_allowed(allowed, report.samples))
    payload = payload_of(cache, report, findings) | {"repair": repairing.as_json(repaired) if repaired else None}
    payload["kind"] = "tokens"
    run.leave(payload, exit_code=exit_code)
    if as_json:
        console.emit("verify", payload, exit_code=exit_code)
    else:
        show(report, findings)
    return exit_code


def _look(cache: Path, asked: Asked) -> dict[str, Any]:
    """What :func:`verify_tokens` is asked."""
    description = _description(cache, asked)
    return {
        "data": asked.data,
        "full": asked.full,
        "reencode": asked.reencode,
        "seed": asked.seed,
        "open_records": _open_records,
        "requested": None if description is None else description.recipe,
        "retokenise": _retokenise(description) if asked.reencode and description is not None else None,
    }


def _open_records(data: Path, options: Mapping[str, Any]) -> RecordScan:
    from latentcache.pipeline.token_inputs import open_records
    from latentcache.pipeline.token_settings import TokenSettings

    datasets, text_lines = tuple(options.get("datasets", ())), bool(options.get("text_lines"))
    return open_records(TokenSettings(data=data, datasets=datasets, text_lines=text_lines))


def _description(cache: Path, asked: Asked) -> TokeniserDescription | None:
    """The tokenizer that was named, or the recorded one where it is still there.

    Raises:
        UsageError: Tokenising again was asked for, and there is no tokenizer.
    """
    from latentcache.pipeline.token_inputs import TokenBefore, completed, describe, is_there
    from latentcache.pipeline.token_settings import TokenSettings
    from latentcache.store.token_generation import load_tokens

    generation = load_tokens(cache)
    made = generation.manifest["provenance"]
    named = asked.tokenizer or str(made["tokenizer"])
    if asked.tokenizer is None and not is_there(named):
        if asked.reencode:
            raise UsageError(
                f"the tokenizer of this cache is gone: {named}",
                why="--reencode tokenises records again",
                fix=f"latentcache verify {cache} --reencode {asked.reencode} --tokenizer PATH",
            )
        return None
    before = TokenBefore(
        generation=generation,
        recipe=generation.recipe,
        tokenizer=str(made["tokenizer"]),
        chat_template=made.get("chat_template"),
    )
    settings = TokenSettings(data=Path(), tokenizer=asked.tokenizer, chat_template=asked.chat_template)
    return describe(completed(settings, before), chat=bool(generation.recipe.chat_template))


def _retokenise(description: TokeniserDescription) -> Retokenise:
    from latentcache.encoders.opening_tokens import open_tokeniser
    from latentcache.sources.sample import Refusal

    tokeniser = open_tokeniser(description)

    def again(records: Sequence[Record]) -> list[Any]:
        results = tokeniser.tokenise(records)
        return [None if isinstance(one, Refusal) else (one.ids, one.runs) for one in results]

    return again

"""``latentcache verify`` of a token cache: is every record still there, and would the tokenizer do the same again?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import repair as repairing
from latentcache.errors import UsageError

if TYPE_CHECKING:
    from latentcache.encoders.tokenising import Tokeniser, TokeniserDescription
    from latentcache.sources.records import Record, RecordScan
    from latentcache.store.token_generation import TokenGeneration
    from latentcache.verify.findings import VerifyReport
    from latentcache.verify.removals import RepairReport
    from latentcache.verify.selection import Depth
    from latentcache.verify.token_run import AskedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The tokenizer that was named."""

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
            why="of pictures are the flags of a recipe, --recipe, --device and --drop-stale",
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


def looked(
    cache: Path, data: Path | None, depth: Depth, asked: Asked, *, repair: bool, yes: bool
) -> tuple[VerifyReport, RepairReport | None]:
    """Look at a token cache, and repair it where that was asked for."""
    from latentcache.verify.token_repair import repair_tokens
    from latentcache.verify.token_run import verify_tokens

    tokenizer = _Tokenizer(cache=cache, asked=asked, depth=depth)
    look: dict[str, Any] = {
        "data": data,
        "depth": depth,
        "open_records": _open_records,
        "requested": tokenizer.recipe,
        "retokenise": tokenizer.tokenise,
    }
    if not repair:
        return verify_tokens(cache, **look), None
    repaired = repair_tokens(cache, **look, confirm=repairing.confirm(yes=yes))
    repairing.show_result(repaired)
    return repaired.plan.report, repaired


@dataclass(slots=True, kw_only=True)
class _Tokenizer:
    """The tokenizer that a cache is held against: described once the cache is open, opened when it has to work."""

    cache: Path
    asked: Asked
    depth: Depth
    description: TokeniserDescription | None = None
    opened: Tokeniser | None = None

    def recipe(self, generation: TokenGeneration) -> AskedTokens | None:
        """What it makes of records, with its parts; None where it is gone, or a stranger would say which."""
        from latentcache.verify.token_run import AskedTokens

        if self.depth.untrusted and self.asked.tokenizer is None:
            return None
        self.description = _description(self.cache, generation, self.asked, self.depth)
        if self.description is None:
            return None
        return AskedTokens(recipe=self.description.recipe, parts=dict(self.description.parts))

    def tokenise(self, records: Sequence[Record]) -> list[Any]:
        """Ids and runs of each record; None for one that it refuses."""
        from latentcache.encoders.opening_tokens import open_tokeniser
        from latentcache.sources.sample import Refusal

        assert self.description is not None
        self.opened = self.opened or open_tokeniser(self.description)
        results = self.opened.tokenise(records)
        return [None if isinstance(one, Refusal) else (one.ids, one.runs) for one in results]


def _open_records(data: Path, options: Mapping[str, Any]) -> RecordScan:
    from latentcache.pipeline.token_inputs import open_records
    from latentcache.pipeline.token_settings import TokenSettings

    datasets, text_lines = tuple(options.get("datasets", ())), bool(options.get("text_lines"))
    share = str(options["share"]) if "share" in options else None
    return open_records(TokenSettings(data=data, datasets=datasets, text_lines=text_lines, share=share))


def _description(cache: Path, generation: TokenGeneration, asked: Asked, depth: Depth) -> TokeniserDescription | None:
    """The tokenizer that was named, or the recorded one where it is still there.

    Raises:
        UsageError: Tokenising again was asked for, and there is no tokenizer.
    """
    from latentcache.pipeline.token_inputs import TokenBefore, completed, describe, is_there
    from latentcache.pipeline.token_settings import TokenSettings

    made = generation.manifest["provenance"]
    named = asked.tokenizer or str(made["tokenizer"])
    if asked.tokenizer is None and not is_there(named):
        if depth.reencode:
            raise UsageError(
                f"the tokenizer of this cache is gone: {named}",
                why="--reencode tokenises records again",
                fix=f"latentcache verify {cache} --reencode {depth.reencode} --tokenizer PATH",
            )
        return None
    before = TokenBefore(
        generation=generation,
        recipe=generation.recipe,
        tokenizer=str(made["tokenizer"]),
        # A stranger names no file of ours.
        chat_template=None if depth.untrusted else made.get("chat_template"),
    )
    settings = TokenSettings(data=Path(), tokenizer=asked.tokenizer, chat_template=asked.chat_template)
    return describe(completed(settings, before), chat=bool(generation.recipe.chat_template))

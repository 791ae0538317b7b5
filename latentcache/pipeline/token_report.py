"""What a build of tokens says: its plan before the work, progress during it, a report after it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from latentcache.pipeline.token_pool import default_workers
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.recipe import DTYPES
from latentcache.sources.sample import Refusal
from latentcache.token_recipe import TokenRecipe

#: Characters a token stands for, about, and bytes that a document costs beside its ids: what a plan says of room.
_CHARACTERS_PER_TOKEN, _DOCUMENT_BYTES = 3, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan:
    """What a build is about to do."""

    cache: Path
    data: Path
    tokenizer: str
    recipe: TokenRecipe
    samples: int
    """Usable and refused records."""
    free_bytes: int
    refused: tuple[Refusal, ...]
    notes: tuple[Refusal, ...]
    share: str = ""
    """``i/n`` of the records, where only these are built; empty for all."""
    sources: int = 0
    """Files of records."""
    reused: int = 0
    """Distinct documents that are committed already."""
    todo: int = 0
    """Distinct records to tokenise."""
    taken: int = 0
    """Distinct documents that are taken from other caches."""
    characters: int = 0
    """In those."""
    bytes_to_write: int = 0
    """About."""
    workers: int = 0
    """Processes that will tokenise; 0 is this one."""


@dataclass(slots=True)
class TokenProgress:
    """Where a build stands."""

    total: int = 0
    """Records to tokenise, and documents to take."""
    done: int = 0
    characters: int = 0
    """Of all records that are done."""
    characters_total: int = 0
    tokens: int = 0
    refused: int = 0
    committed: int = 0
    """Documents that are durable."""
    written_bytes: int = 0
    """Headers and payloads of the blocks that are durable."""
    restarts: int = 0
    """Worker processes that ended and were replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """What a build did."""

    plan: TokenPlan
    dry_run: bool = False
    encoded: int = 0
    """Distinct documents tokenised and committed by this run."""
    cached: int = 0
    """Distinct documents that were there."""
    taken: int = 0
    """Distinct documents that came from other caches."""
    refused: tuple[Refusal, ...] = ()
    notes: tuple[Refusal, ...] = ()
    accounts: Mapping[str, Any] = field(default_factory=dict)
    """As in ``store.token_accounts``."""
    generation: int = 0
    published: bool = False
    """False where the generation before says the same already."""
    elapsed_s: float = 0.0
    written_bytes: int = 0
    restarts: int = 0
    """Worker processes that ended and were replaced."""
    allow_failed: str = "0"


class TokenObserver(Protocol):
    """Told how a build goes. Called from the thread that builds."""

    def planned(self, plan: TokenPlan) -> None:
        """The plan is made; nothing has been tokenised yet."""

    def advanced(self, progress: TokenProgress) -> None:
        """Something moved. Called often: look at the clock before printing."""

    def warned(self, message: str) -> None:
        """Something a user should know, said once."""


class SilentTokens:
    """An observer that says nothing."""

    def planned(self, plan: TokenPlan) -> None:
        """Nothing."""

    def advanced(self, progress: TokenProgress) -> None:
        """Nothing."""

    def warned(self, message: str) -> None:
        """Nothing."""


def token_plan(
    settings: TokenSettings,
    recipe: TokenRecipe,
    *,
    samples: int,
    refused: tuple[Refusal, ...],
    notes: tuple[Refusal, ...],
) -> TokenPlan:
    """The plan of a build that has nothing to tokenise.

    Args:
        settings: What is asked for.
        recipe: What it comes to.
        samples: Usable and refused records.
        refused: Those that are refused.
        notes: What is neither used nor refused.
    """
    cache = settings.cache
    existing = next(path for path in (cache, *cache.resolve().parents) if path.exists())
    return TokenPlan(
        cache=cache,
        data=settings.data,
        tokenizer=str(settings.tokenizer),
        recipe=recipe,
        samples=samples,
        free_bytes=shutil.disk_usage(existing).free,
        refused=refused,
        notes=notes,
        share=str(settings.part or ""),
    )


def with_work(
    plan: TokenPlan, todo: int, characters: int, workers: int | None, *, taken: int = 0, tokens: int = 0
) -> TokenPlan:
    """The plan with what is to be tokenised.

    Args:
        plan: Without it.
        todo: Records.
        characters: In those.
        workers: As asked for; by default as many as are worth their start.
        taken: Documents that are taken from other caches.
        tokens: In those.
    """
    itemsize = DTYPES[plan.recipe.dtype][1]
    chosen = default_workers(characters) if workers is None else workers
    return replace(
        plan,
        todo=todo,
        characters=characters,
        taken=taken,
        workers=chosen if todo else 0,
        bytes_to_write=(characters // _CHARACTERS_PER_TOKEN + tokens) * itemsize + _DOCUMENT_BYTES * (todo + taken),
    )

"""``open_tokens``: a finished token cache, pinned to the generation that was current when it was opened.

Decides which view is made of it. Guarantee: rows are planned once and packed ones are kept in the cache, so every
process has the same; nothing is cut that was not asked for. Cost: measured in docs/log.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import PlanError, UsageError
from latentcache.identity.content import content_hash, json_hash
from latentcache.loader.token_follow import ONE_ROW, FollowedRows, check_followed, coming_name, unknown
from latentcache.loader.token_rows import RowReader
from latentcache.loader.token_view import TokenView
from latentcache.loader.view_settings import PaddingSide, ViewSettings
from latentcache.plan.lengths import checked_lengths
from latentcache.plan.packing import PACKING_RULE
from latentcache.plan.pieces import Idle, Overflow, checked_max_length
from latentcache.plan.row_kinds import block_rows, packed_rows, padded_rows
from latentcache.plan.rows import Corpus, RowPlan
from latentcache.plan.split import in_validation
from latentcache.plan.stored import as_columns, from_columns
from latentcache.store.documents import TokenStore
from latentcache.store.plans import PlanFolder
from latentcache.store.token_reader import TokenReader
from latentcache.token_recipe import TokenRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCache:
    """Documents as tokens. Builds that end later do not change what it serves. Picklable.

    Files are closed when it, its views and their loaders are forgotten, not before: a thread that reads ahead could
    otherwise meet another file under the number of a closed one.
    """

    store: TokenStore
    recipe: TokenRecipe
    fingerprint: str
    """Hex digits that name the recipe, the documents in their order, their lengths and runs."""
    name: str = "tokens"
    generation: int = 0
    share: str = ""
    """``i/n`` where it holds one of n shares of its data, made by one node of several; empty where it holds all."""
    plans: PlanFolder | None = None
    """Where packed plans are kept; nowhere without it."""
    chosen: NDArray[np.int32] | None = None
    """Documents of a part of the cache; all of them where it is not given."""
    pad: int | None = None
    """The id of the filling; by default that of the recipe, else the id that ends a text, else 0."""

    def __len__(self) -> int:
        """Documents."""
        return len(self._corpus.documents)

    @property
    def under_way(self) -> bool:
        """Whether a build is still making its documents (``open_tokens(follow=True)``)."""
        return isinstance(self.store, TokenReader) and self.store.generation.arrivals is not None

    @property
    def tokens(self) -> int:
        """Tokens of all documents.

        Raises:
            UsageError: The build that makes them is under way.
        """
        if self.under_way:
            unknown("how many tokens there are")
        return self._corpus.tokens

    @property
    def pad_id(self) -> int:
        """The id that rows are filled with; its labels are -100 wherever it fills, and only there."""
        known = (self.pad, self.recipe.pad_id, self.recipe.eos_id)
        return next((number for number in known if number is not None), 0)

    @property
    def sources(self) -> dict[str, int]:
        """Documents per source file."""
        documents = self.store.documents
        counts = np.bincount(documents.source[self._corpus.documents], minlength=len(documents.sources))
        return dict(zip(documents.sources, counts.tolist(), strict=False))

    def of_source(self, *names: str) -> TokenCache:
        """The documents of some source files; of a file that several data sets name, those of all of them.

        Raises:
            UsageError: There is no such file.
        """
        known = self.store.documents.sources
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UsageError(f"no source {unknown[0]!r} in {self.name}", fix=f"use one of {', '.join(known)}")
        numbers = [number for number, name in enumerate(known) if name in names]
        part = self._part(np.isin(self.store.documents.source[self._corpus.documents], numbers))
        return replace(part, name=f"{self.name}: {', '.join(names)}")

    def split(self, validation: float) -> tuple[TokenCache, TokenCache]:
        """Training and validation part. A record's content decides, so none ever crosses when data is added.

        Args:
            validation: Part of the documents for validation, from 0 to 1.

        Raises:
            UsageError: ``validation`` is not between 0 and 1.
        """
        held = in_validation(self.store.documents.content[self._corpus.documents], validation)
        return self._part(~held), self._part(held)

    def padded(
        self,
        max_length: int,
        *,
        padding_side: PaddingSide = "right",
        overflow: Overflow | None = None,
        lengths: Sequence[int] | None = None,
        idle: Idle = "drop",
    ) -> TokenView:
        """One document (or piece of one) to a row, in their order.

        Args:
            max_length: Tokens in a row.
            padding_side: Where rows are filled.
            overflow: What becomes of longer documents: ``error``, ``drop``, ``truncate_right``, ``truncate_left`` or
                ``split``. By default ``error`` where only what assistants say carries loss, because a part of a
                conversation is another one; ``split`` for texts, which loses nothing.
            lengths: Allowed lengths of a batch, rising up to ``max_length``. A batch holds rows of one of them.
            idle: What becomes of rows of which nothing would be learned: ``drop`` (said, and counted) or ``error``.

        Raises:
            UsageError: A length or policy that cannot be, or one that is not known while the build is under way.
            PlanError: A policy says ``error`` and there are such documents; file and line are named.
        """
        if padding_side not in ("right", "left"):
            raise UsageError(f"unknown padding_side={padding_side!r}", fix="use right or left")
        policy, max_length = self._overflow(overflow), checked_max_length(max_length)
        allowed = checked_lengths(lengths, max_length)
        facts = self._facts("padded", max_length, overflow=policy, idle=idle, lengths=list(allowed))
        settings = ViewSettings(max_length=max_length, lengths=allowed, pad_id=self.pad_id, padding_side=padding_side)
        if self.under_way:
            check_followed(max_length, policy, idle, None if lengths is None else allowed)
            return self._followed(max_length, policy, settings, facts)
        plan = padded_rows(self._corpus, max_length, overflow=policy, idle=idle)
        return self._view(plan, settings, facts, also=self._also(plan, facts))

    def packed(self, max_length: int, *, overflow: Overflow | None = None, idle: Idle = "drop") -> TokenView:
        """Several documents to a row, as few rows as best-fit-decreasing over all of them finds.

        Documents of a row are kept apart: by ``position_ids``, ``seq_idx`` or ``view.segments(batch)``.

        Args:
            max_length: Tokens in a row.
            overflow: As in :meth:`padded`.
            idle: As in :meth:`padded`.

        Raises:
            UsageError: A length or policy that cannot be, or one that is not known while the build is under way.
            PlanError: A policy says ``error`` and there are such documents; file and line are named.
        """
        self._refuse_under_way("packed")
        policy, max_length = self._overflow(overflow), checked_max_length(max_length)
        facts = self._facts("packed", max_length, overflow=policy, idle=idle, rule=PACKING_RULE)
        plan = self._kept(
            facts, max_length, lambda: packed_rows(self._corpus, max_length, overflow=policy, idle=idle)
        )
        settings = ViewSettings(max_length=max_length, lengths=(max_length,), pad_id=self.pad_id, isolated=True)
        return self._view(plan, settings, facts)

    def blocks(
        self,
        max_length: int,
        *,
        tail: Literal["keep", "drop"] = "keep",
        crossing: bool = True,
        idle: Idle = "drop",
    ) -> TokenView:
        """All documents in their order as one string, cut into rows.

        Args:
            max_length: Tokens in a row.
            tail: Whether what is left at the end is a short row that is filled up, or is dropped and counted.
            crossing: Whether tokens see the documents before theirs in a row, as is usual in pretraining; else
                documents are kept apart as in :meth:`packed`.
            idle: As in :meth:`padded`.

        Raises:
            UsageError: A length or policy that cannot be.
            PlanError: ``idle`` says ``error`` and there are such rows; file and line are named.
        """
        if tail not in ("keep", "drop"):
            raise UsageError(f"unknown tail={tail!r}", fix="use keep or drop")
        self._refuse_under_way("blocks")
        max_length, crossing = checked_max_length(max_length), bool(crossing)
        plan = block_rows(self._corpus, max_length, keep_tail=tail == "keep", crossing=crossing, idle=idle)
        facts = self._facts("blocks", max_length, tail=tail, crossing=crossing, idle=idle)
        lengths = (max_length,)
        settings = ViewSettings(max_length=max_length, lengths=lengths, pad_id=self.pad_id, isolated=not crossing)
        return self._view(plan, settings, facts)

    @property
    def _corpus(self) -> Corpus:
        documents = self.store.documents
        return Corpus(
            length=documents.length,
            span_ends=documents.span_ends,
            spans=documents.spans,
            where=documents.where,
            chosen=self.chosen,
        )

    def _overflow(self, overflow: Overflow | None) -> Overflow:
        return ("error" if self.recipe.loss == "assistant" else "split") if overflow is None else overflow

    def _part(self, kept: NDArray[np.bool_]) -> TokenCache:
        return replace(self, chosen=self._corpus.documents[kept])

    def _facts(self, kind: str, max_length: int, **more: Any) -> dict[str, Any]:
        """What a plan follows from, as JSON values."""
        chosen = "" if self.chosen is None else content_hash(self.chosen.tobytes()).hex()
        return {"documents": self.fingerprint, "chosen": chosen, "kind": kind, "max_length": max_length, **more}

    def _kept(self, facts: dict[str, Any], max_length: int, make: Callable[[], RowPlan]) -> RowPlan:
        """The plan that is kept under these facts, or a new one, which is kept from now on."""
        columns = self.plans.load(facts) if self.plans else None
        if columns is not None:
            return from_columns(columns, max_length)
        plan = make()
        if self.plans:
            self.plans.save(facts, as_columns(plan))
        return plan

    def _refuse_under_way(self, kind: str) -> None:
        if self.under_way:
            unknown(f"how many rows {kind}() makes")

    def _followed(
        self, max_length: int, overflow: Overflow, settings: ViewSettings, facts: dict[str, Any]
    ) -> TokenView:
        """A row for each document, whose tokens are still to come."""
        assert isinstance(self.store, TokenReader)
        rows = FollowedRows(self.store, self._corpus.documents, max_length=max_length, overflow=overflow)
        facts_id, number = json_hash(facts), self.generation
        return TokenView([rows], settings, recipe=self.recipe, identity=facts_id, generation=number, name=self.name)

    def _also(self, plan: RowPlan, facts: dict[str, Any]) -> tuple[bytes, ...]:
        """What followers of the build called these rows, where each document has one."""
        if len(plan) != len(self) or len(facts["lengths"]) > 1 or plan.idle.documents.size:
            return ()
        name = coming_name(self.recipe, self.store.documents)
        policies = (facts["overflow"],) if plan.cut.documents.size else ONE_ROW
        return tuple(
            json_hash({**facts, "documents": name, "overflow": policy, "idle": "error"}) for policy in policies
        )

    def _view(
        self, plan: RowPlan, settings: ViewSettings, facts: dict[str, Any], also: tuple[bytes, ...] = ()
    ) -> TokenView:
        if not len(plan):
            raise PlanError(
                f"there is no row of tokens in {self.name}",
                where=f"{len(self)} documents, {plan.tokens_dropped} tokens left out",
                why=", ".join(f"{name}: {left.tokens}" for name, left in plan.left.items() if left.tokens),
                fix="a larger max_length, another overflow=, or more data",
            )
        if plan.idle.documents.size:
            first = self.store.documents.where(int(plan.idle.documents[0]))
            warnings.warn(
                f"{plan.idle.tokens} tokens of {len(plan.idle.documents)} documents are left out: nothing would be"
                f" learned of them; the first is {first} (view.left lists them, idle='error' refuses them)",
                stacklevel=3,
            )
        reader = RowReader(self.store, self._corpus, plan, dtype=self.recipe.dtype)
        return TokenView(
            [reader],
            settings,
            recipe=self.recipe,
            identity=json_hash(facts),
            also=also,
            generation=self.generation,
            name=self.name,
        )


def documents_fingerprint(store: TokenStore, recipe: TokenRecipe) -> str:
    """32 hex digits that name the recipe, the documents in their order, their lengths and runs."""
    documents = store.documents
    columns = (documents.content, documents.length, documents.span_ends, documents.spans)
    return content_hash(recipe.recipe_id + b"".join(column.tobytes() for column in columns)).hex()

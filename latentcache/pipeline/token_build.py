"""``build_tokens``: the whole story of a token cache on one screen. Survey, plan, tokenise what is missing, publish.

Guarantee: run twice, the second run tokenises nothing; killed at any moment, the next run goes on with all blocks
that were acknowledged, and makes the blocks that an undisturbed one would have made; blocks, their order and all
columns but places do not depend on the number of workers; sources are only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from latentcache.encoders.describe_tokens import check_ends
from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.errors import EmptySourceError, InterruptedBuildError, SourceNotFoundError
from latentcache.pipeline.events import EventLog
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.preflight import check_places, remove_unused
from latentcache.pipeline.token_assemble import TokenDraft, assemble_tokens, manifest_facts, says_the_same
from latentcache.pipeline.token_checks import (
    check_room,
    nothing_changed,
    refused_before,
    tries_again,
)
from latentcache.pipeline.token_inputs import (
    TokenBefore,
    completed,
    describe,
    open_records,
    read_token_before,
)
from latentcache.pipeline.token_known import Known, known_documents
from latentcache.pipeline.token_making import TokenWork, make_documents
from latentcache.pipeline.token_memory import is_chat_data, survey_changed
from latentcache.pipeline.token_planning import Divided, divide, refused_elsewhere
from latentcache.pipeline.token_recovery import known_whole, recover
from latentcache.pipeline.token_report import (
    SilentTokens,
    TokenObserver,
    TokenPlan,
    TokenProgress,
    TokenReport,
    token_plan,
)
from latentcache.pipeline.token_run import TokenRun
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.pipeline.token_survey import TokenSurvey, as_refusals, first_of_each, token_refusal_json
from latentcache.pipeline.token_taking import checked_other, open_other
from latentcache.sources.record_listing import Listing, list_files
from latentcache.sources.records import RecordScan
from latentcache.sources.sample import Refusal
from latentcache.store.catalog import load_catalog
from latentcache.store.coming import withdraw
from latentcache.store.durable import make_folder, remove_durably
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.token_generation import TokenGeneration, publish_tokens
from latentcache.token_recipe import TokenRecipe


@dataclass(slots=True, kw_only=True)
class _Build:
    """One build in progress."""

    settings: TokenSettings
    observer: TokenObserver
    stop: StopSignal
    layout: CacheLayout
    started: float = field(default_factory=time.monotonic)
    progress: TokenProgress = field(default_factory=TokenProgress)
    refused: dict[bytes, Refusal] = field(default_factory=dict)
    """Records that the tokenizer refused, in this run and before, by content hash."""

    def run(self) -> TokenReport:
        """Plan, tokenise, publish."""
        with ExitStack() as locks:
            check_places(self.settings.data, self.layout.root)
            if not self.settings.data.exists():
                raise SourceNotFoundError(
                    f"no such file or folder: {self.settings.data}",
                    where=str(self.settings.data),
                    fix="check the path",
                )
            if not self.settings.dry_run:
                EventLog(self.settings.events).close()  # refused now, not after an hour of planning
                self.take_lock(locks)
            before = read_token_before(self.layout)
            self.settings = completed(self.settings, before)
            listing, seen_ns = list_files(self.settings.data), time.time_ns()
            still = self.stand(before, listing)
            if still is not None:
                return still
            scan = open_records(self.settings)
            description = describe(self.settings, chat=is_chat_data(scan, before.generation))
            return self.build(before, scan, description, listing.as_json(seen_ns))

    def take_lock(self, locks: ExitStack) -> None:
        """Take the cache; a folder made for it goes again when the build is refused before anything is in it."""
        is_new = not self.layout.root.exists()
        make_folder(self.layout.root)
        locks.enter_context(builder_lock(self.layout.lock))
        if is_new:
            locks.callback(remove_unused, self.layout)

    def standing(self, old: TokenGeneration | None, recipe: TokenRecipe) -> TokenGeneration | None:
        """The last generation, where what it knows of unchanged files is what this build would find."""
        same = old is not None and old.recipe.recipe_id == recipe.recipe_id
        return old if same and not self.settings.retry_failed else None

    def stand(self, before: TokenBefore, listing: Listing) -> TokenReport | None:
        """What there is to say where nothing changed since the last build; None where something may have."""
        old = before.generation
        if (
            old is None
            or self.settings.retry_failed
            or tries_again(old)
            or old.allow_failed != self.settings.allow_failed
        ):
            return None
        if not nothing_changed(before, listing, self.settings, self.layout):
            return None
        recipe = describe(self.settings, chat=bool(old.recipe.chat_template)).recipe
        if recipe.as_json() != old.recipe.as_json():
            return None
        refused, notes = (tuple(as_refusals(items)) for items in (old.refused, old.notes))
        distinct = len(first_of_each(old.documents.content))
        samples = len(old.documents) + len(refused)
        plan = token_plan(self.settings, recipe, samples=samples, refused=refused, notes=notes)
        plan = replace(plan, reused=distinct, sources=len(old.sources))
        self.observer.planned(plan)
        if self.stop.requested:
            raise self.stop.error()
        dry = self.settings.dry_run
        return TokenReport(
            plan=plan,
            dry_run=dry,
            cached=0 if dry else distinct,
            refused=refused,
            notes=notes,
            accounts=dict(old.manifest["tokens"]),
            generation=0 if dry else old.number,
            elapsed_s=self.elapsed,
            allow_failed=self.settings.allow_failed,
        )

    def build(
        self, before: TokenBefore, scan: RecordScan, description: TokeniserDescription, listing: dict[str, Any]
    ) -> TokenReport:
        """Survey, plan, tokenise, publish."""
        recipe, old = description.recipe, before.generation
        for note in description.notes:
            self.observer.warned(note)
        for cache in self.settings.take_from:  # refused now, not after an hour of reading
            checked_other(cache, description, self.layout.root)
        work = survey_changed(scan, self.standing(old, recipe))
        if not (len(work.content) or work.refused or (self.settings.part and work.sources)):
            raise EmptySourceError(
                f"no record in {self.settings.data}", where=str(self.settings.data), fix="check the path"
            )
        if work.has_texts:  # beside conversations too: only now is it known
            check_ends(recipe, self.settings.tokenizer or "")
        if not self.settings.dry_run:
            recover(self.layout, before, self.observer.warned)
        known = known_whole(self.layout, before, recipe, None if self.settings.dry_run else self.observer.warned)
        divided = self.divide(work, known, description, old)
        plan = divided.plan
        self.observer.planned(plan)
        if self.settings.dry_run:
            return TokenReport(
                plan=plan, dry_run=True, refused=plan.refused, notes=plan.notes, elapsed_s=self.elapsed
            )
        check_room(plan)
        if plan.todo + plan.taken:
            before_this = old.number if old else 0
            doing = TokenWork(scan=scan, survey=work, todo=divided.todo, taken=divided.taken, before=before_this)
            description = make_documents(doing, plan, self.tokenising(description, plan))
            known = known_documents(load_catalog(self.layout), old, recipe)
        draft = assemble_tokens(work, known, self.refused)
        return self.publish(plan, draft, description, old, before, listing)

    def divide(
        self, work: TokenSurvey, known: Known, description: TokeniserDescription, old: TokenGeneration | None
    ) -> Divided:
        """What is there, what other caches have, and what is to be made."""
        others = [open_other(cache, description, self.layout.root) for cache in self.settings.take_from]
        for note in (note for other in others for note in other.notes):
            self.observer.warned(note)
        if not self.settings.retry_failed:
            self.refused = refused_elsewhere(others, known) | dict(refused_before(old, description.recipe))
        return divide(self.settings, description.recipe, work, known, others, self.refused)

    def tokenising(self, description: TokeniserDescription, plan: TokenPlan) -> TokenRun:
        """What tokenises and commits."""
        self.progress.total, self.progress.characters_total = plan.todo + plan.taken, plan.characters
        return TokenRun(
            description=description,
            layout=self.layout,
            settings=self.settings,
            stop=self.stop,
            progress=self.progress,
            refused=self.refused,
            advanced=self.observer.advanced,
            warned=self.observer.warned,
        )

    def publish(
        self,
        plan: TokenPlan,
        draft: TokenDraft,
        description: TokeniserDescription,
        old: TokenGeneration | None,
        before: TokenBefore,
        listing: dict[str, Any],
    ) -> TokenReport:
        """Write the next generation, unless the current one says the same."""
        facts = manifest_facts(draft, description, self.settings, listing)
        terms = {name: facts[name] for name in ("source", "fingerprint", "tokens", "allow_failed")}
        same = old is not None and not before.damage and says_the_same(draft, description.recipe, old, terms)
        number = old.number if same and old is not None else 0
        if not number:
            number = publish_tokens(
                self.layout,
                recipe=description.recipe,
                documents=draft.documents,
                control=draft.control,
                blocks=draft.blocks,
                sources=draft.sources,
                shards=draft.shards,
                refused=[token_refusal_json(one) for one in draft.refused],
                notes=[token_refusal_json(one) for one in draft.notes],
                facts=facts,
            )
        remove_durably(self.layout.building)
        withdraw(self.layout)
        if self.stop.requested:  # asked to end after the last block: all is done, and the caller hears of its signal
            raise self.stop.error()
        distinct = len(first_of_each(draft.documents.content))
        encoded = plan.todo - self.progress.refused
        return TokenReport(
            plan=plan,
            encoded=encoded,
            cached=distinct - encoded - plan.taken,
            taken=plan.taken,
            refused=draft.refused,
            notes=draft.notes,
            accounts=facts["tokens"],
            generation=number,
            published=not same,
            elapsed_s=self.elapsed,
            written_bytes=self.progress.written_bytes,
            restarts=self.progress.restarts,
            allow_failed=self.settings.allow_failed,
        )

    @property
    def elapsed(self) -> float:
        """Seconds since the build began."""
        return time.monotonic() - self.started


def build_tokens(
    settings: TokenSettings,
    *,
    observer: TokenObserver | None = None,
    last_words: Callable[[InterruptedBuildError], None] | None = None,
) -> TokenReport:
    """Make a token cache true for its data: tokenise what is missing, reuse the rest, publish a generation.

    Args:
        settings: What to build, and from what.
        observer: Told of the plan and of progress; silent where it is not given.
        last_words: Called when a second signal ends the process at once; must not touch streams.

    Raises:
        UsageError: Settings that cannot be, or an output folder inside the data.
        SourceError: The data cannot be used, or holds no record.
        EncoderError: The tokenizer cannot be used.
        CacheLockedError: Another build holds the cache.
        CacheFormatError: The cache holds pictures, or was written by a newer version.
        StoreError: The disk is full or fails.
        WorkerError: A process that tokenised died.
        InterruptedBuildError: SIGINT or SIGTERM; what was acknowledged is committed.
    """
    with StopSignal(last_words) as stop:
        layout = CacheLayout(settings.cache)
        return _Build(settings=settings, observer=observer or SilentTokens(), stop=stop, layout=layout).run()

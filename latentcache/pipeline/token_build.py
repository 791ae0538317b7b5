"""``build_tokens``: the whole story of a token cache on one screen. Survey, plan, tokenise what is missing, publish.

Guarantee: run twice, the second run tokenises nothing; killed at any moment, the next run goes on with all blocks
that were acknowledged, and makes the blocks that an undisturbed one would have made; blocks, their order and all
columns but places do not depend on the number of workers; sources are only read.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.errors import EmptySourceError, InterruptedBuildError, SourceNotFoundError
from latentcache.failpoint import failpoint
from latentcache.pipeline.events import EventLog
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.preflight import check_places, provenance, remove_unused
from latentcache.pipeline.token_assemble import TokenDraft, assemble_tokens, says_the_same
from latentcache.pipeline.token_checks import (
    check_room,
    documents_in,
    is_chat,
    nothing_changed,
    refused_before,
    relative_to,
)
from latentcache.pipeline.token_inputs import (
    TokenBefore,
    completed,
    describe,
    open_records,
    read_token_before,
    token_marker,
)
from latentcache.pipeline.token_known import known_documents
from latentcache.pipeline.token_pool import TokenPool, default_workers, units
from latentcache.pipeline.token_report import SilentTokens, TokenObserver, TokenPlan, TokenProgress, TokenReport
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.pipeline.token_survey import (
    Listing,
    TokenSurvey,
    as_refusals,
    first_of_each,
    list_files,
    record_size,
    refused_rows,
    survey_records,
    todo_of,
    todo_records,
    token_refusal_json,
)
from latentcache.pipeline.token_worker import Result
from latentcache.pipeline.writing import WriterThread
from latentcache.recipe import DTYPES
from latentcache.sources.records import Record, RecordScan
from latentcache.sources.sample import Refusal
from latentcache.store.blocks import BlockFiller, Tokenised
from latentcache.store.catalog import load_catalog
from latentcache.store.durable import make_folder, remove_durably, write_json, writing
from latentcache.store.layout import OPEN_SUFFIX, CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.salvage import mend_shards
from latentcache.store.shard import NewEntry, ShardWriter
from latentcache.store.token_accounts import fingerprint, token_accounts
from latentcache.store.token_generation import TokenGeneration, publish_tokens
from latentcache.token_recipe import TokenRecipe

#: Characters a token stands for, about; only for what a plan says of room.
_CHARACTERS_PER_TOKEN = 3


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
            if not self.settings.dry_run:
                self.recover(before)
            listing, seen_ns = list_files(self.settings.data), time.time_ns()
            still = self.stand(before, listing)
            if still is not None:
                return still
            scan = open_records(self.settings)
            description = describe(self.settings, chat=is_chat(scan))
            return self.build(before, scan, description, listing.as_json(seen_ns))

    def take_lock(self, locks: ExitStack) -> None:
        """Take the cache; a folder made for it goes again when the build is refused before anything is in it."""
        is_new = not self.layout.root.exists()
        make_folder(self.layout.root)
        locks.enter_context(builder_lock(self.layout.lock))
        if is_new:
            locks.callback(remove_unused, self.layout)

    def recover(self, before: TokenBefore) -> None:
        """Take over what a build that died has committed, and what is whole of damaged shards."""
        if before.damage:
            self.observer.warned(f"the manifest was damaged and is made again ({before.damage})")
        make_folder(self.layout.shards)
        for found in mend_shards(self.layout, before.generation):
            saved = f"{found.saved} whole entries of it were saved, what else is needed is made again"
            self.observer.warned(f"shard {found.source} was damaged: {saved}")

    def stand(self, before: TokenBefore, listing: Listing) -> TokenReport | None:
        """What there is to say where nothing changed since the last build; None where something may have."""
        old = before.generation
        if old is None or self.settings.retry_failed or old.allow_failed != self.settings.allow_failed:
            return None
        if not nothing_changed(before, listing, self.settings.data, self.layout):
            return None
        recipe = describe(self.settings, chat=bool(old.recipe.chat_template)).recipe
        if recipe.as_json() != old.recipe.as_json():
            return None
        refused, notes = (tuple(as_refusals(items)) for items in (old.refused, old.notes))
        distinct = len(first_of_each(old.documents.content))
        plan = self.plan(recipe, samples=len(old.documents) + len(refused), refused=refused, notes=notes)
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
        work = survey_records(scan)
        if not len(work.content) and not work.refused:
            raise EmptySourceError(
                f"no record in {self.settings.data}", where=str(self.settings.data), fix="check the path"
            )
        catalog = load_catalog(self.layout)
        known = known_documents(catalog, old, recipe)
        for key in known.damaged:
            self.observer.warned(f"block {key} is damaged: what is needed of it is made again")
        self.refused = dict({} if self.settings.retry_failed else refused_before(old, recipe))
        todo = todo_of(work, known, self.refused)
        again = refused_rows(work, self.refused)
        characters = int(work.size[todo].sum(dtype=np.int64))
        samples = len(work.content) + len(work.refused)
        plan = self.plan(recipe, samples=samples, refused=(*work.refused, *again), notes=work.notes)
        reused = int((known.find(work.content[first_of_each(work.content)]) >= 0).sum())
        plan = replace(plan, reused=reused, sources=len(work.sources))
        plan = self.with_work(plan, int(todo.sum()), characters)
        self.observer.planned(plan)
        if self.settings.dry_run:
            return TokenReport(
                plan=plan, dry_run=True, refused=plan.refused, notes=plan.notes, elapsed_s=self.elapsed
            )
        check_room(plan)
        if plan.todo:
            write_json(self.layout.building, token_marker(recipe, self.settings, plan.samples))
            with writing(self.layout.building):
                failpoint("plan-written")
            self.encode(plan, description, scan, work, todo)
            known = known_documents(load_catalog(self.layout), old, recipe)
        draft = assemble_tokens(work, known, self.refused)
        return self.publish(plan, draft, description, old, before, listing)

    def plan(
        self, recipe: TokenRecipe, *, samples: int, refused: tuple[Refusal, ...], notes: tuple[Refusal, ...]
    ) -> TokenPlan:
        """The plan of a build that has nothing to tokenise."""
        root = self.layout.root
        existing = next(path for path in (root, *root.resolve().parents) if path.exists())
        return TokenPlan(
            cache=root,
            data=self.settings.data,
            tokenizer=str(self.settings.tokenizer),
            recipe=recipe,
            samples=samples,
            free_bytes=shutil.disk_usage(existing).free,
            refused=refused,
            notes=notes,
        )

    def with_work(self, plan: TokenPlan, todo: int, characters: int) -> TokenPlan:
        """The plan with what is to be tokenised."""
        itemsize = DTYPES[plan.recipe.dtype][1]
        workers = default_workers(characters) if self.settings.workers is None else self.settings.workers
        return replace(
            plan,
            todo=todo,
            characters=characters,
            workers=workers if todo else 0,
            bytes_to_write=characters * itemsize // _CHARACTERS_PER_TOKEN + 40 * todo,
        )

    def encode(
        self,
        plan: TokenPlan,
        description: TokeniserDescription,
        scan: RecordScan,
        work: TokenSurvey,
        todo: NDArray[np.bool_],
    ) -> None:
        """Tokenise what is to do, block by block, in the order of the records."""
        self.progress.total, self.progress.characters_total = plan.todo, plan.characters
        filler = BlockFiller(description.recipe)
        self.stop.orderly = True
        with EventLog(self.settings.events) as events, TokenPool(description, plan.workers) as pool:

            def committed(entries: Sequence[NewEntry]) -> None:
                events.commit([entry.key for entry in entries])
                self.progress.written_bytes += sum(len(entry.value) for entry in entries)
                self.progress.committed += sum(documents_in(entry) for entry in entries)

            writer = WriterThread(_new_shard(self.layout), committed, commit_every=self.settings.commit_every)
            for unit, results in pool.results(units(todo_records(scan, work, todo))):
                for record, result in zip(unit, results, strict=True):
                    self.take(record, result, filler, writer)
                self.observer.advanced(self.progress)
                if self.stop.requested:
                    break
            # A block that is not full is not written when the build is to end: the next one begins where this began.
            last = None if self.stop.requested else filler.finish()
            if last is not None:
                writer.put([last])
            writer.finish()
        self.observer.advanced(self.progress)
        if self.stop.requested:
            raise self.stop.error()

    def take(self, record: Record, result: Result, filler: BlockFiller, writer: WriterThread) -> None:
        """One record's document goes into its block, or its refusal to the others."""
        self.progress.done += 1
        self.progress.characters += record_size(record)
        if isinstance(result, Refusal):
            self.refuse(replace(result, content=record.content))
        elif not len(result.ids):
            self.refuse(
                Refusal(
                    name=record.source,
                    line=record.line,
                    content=record.content,
                    cause="no-tokens",
                    detail="the tokenizer makes nothing of it",
                    hint="take the record out, or let every text end with a token (--add-eos)",
                )
            )
        else:
            document = Tokenised(
                content=record.content,
                ids=result.ids,
                runs=result.runs,
                control_strings=result.control_strings,
            )
            self.progress.tokens += len(result.ids)
            full = filler.add(document)
            if full is not None:
                writer.put([full])

    def refuse(self, refusal: Refusal) -> None:
        """One more record that cannot be used."""
        self.progress.refused += 1
        self.refused[refusal.content] = refusal

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
        facts = self.facts(draft, description, listing)
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
        if self.stop.requested:  # asked to end after the last block: all is done, and the caller hears of its signal
            raise self.stop.error()
        distinct = len(first_of_each(draft.documents.content))
        encoded = plan.todo - self.progress.refused
        return TokenReport(
            plan=plan,
            encoded=encoded,
            cached=distinct - encoded,
            refused=draft.refused,
            notes=draft.notes,
            accounts=facts["tokens"],
            generation=number,
            published=not same,
            elapsed_s=self.elapsed,
            written_bytes=self.progress.written_bytes,
            allow_failed=self.settings.allow_failed,
        )

    def facts(self, draft: TokenDraft, description: TokeniserDescription, listing: dict[str, Any]) -> dict[str, Any]:
        """What the manifest says beside the columns."""
        data, cache = self.settings.data.resolve(), self.layout.root.resolve()
        template = self.settings.chat_template
        made = provenance("") | {
            "tokenizer": self.settings.tokenizer,
            "chat_template": None if template is None else str(template.resolve()),
            "parts": dict(description.parts),
            "fast": description.fast,
        }
        return {
            "source": {"root": str(data), "relative": relative_to(data, cache), "listing": listing},
            "fingerprint": fingerprint(description.recipe.recipe_id, draft.documents),
            "tokens": token_accounts(draft.documents, draft.control, len(draft.sources)),
            "provenance": {name: value for name, value in made.items() if name != "model"},
            "allow_failed": self.settings.allow_failed,
        }

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


def _new_shard(layout: CacheLayout) -> Callable[[], ShardWriter]:
    def make() -> ShardWriter:
        return ShardWriter(layout.shards / f"{secrets.token_hex(8)}{OPEN_SUFFIX}")

    return make

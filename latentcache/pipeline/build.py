"""``build_cache``: the whole story on one screen. Scan, plan, encode what is missing, publish.

Guarantee: run twice, the second run encodes nothing; killed at any moment, the next run goes on with all that
was acknowledged; sources are only read. It composes the other modules and computes nothing itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from latentcache.encoders.describe import ModelDescription, cuda_available
from latentcache.errors import InterruptedBuildError
from latentcache.failpoint import failpoint
from latentcache.pipeline.announcing import Announcer, announcement, numbers_of
from latentcache.pipeline.assemble import Draft, assemble, refusal_json, unchanged
from latentcache.pipeline.calibrate import joined_noise, known_noise
from latentcache.pipeline.events import EventLog
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.making import make_entries
from latentcache.pipeline.preflight import (
    Before,
    check_damage,
    check_places,
    check_resample,
    check_space,
    decoders,
    marker,
    read_before,
    remove_unused,
    source_facts,
)
from latentcache.pipeline.recipes import found_precision, resolve_recipe
from latentcache.pipeline.report import BuildPlan, BuildReport, Observer, Silent, build_plan, build_report
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.speed import speed_of
from latentcache.pipeline.staff import Reception, Task
from latentcache.pipeline.standstill import stands_still, still_plan, still_report
from latentcache.pipeline.survey import Memory, Survey, same_decoders, survey
from latentcache.pipeline.work import RunResult
from latentcache.recipe import Recipe
from latentcache.sources.resolve import scan
from latentcache.sources.sample import Refusal, Scan
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.coming import announce, withdraw
from latentcache.store.durable import make_folder, remove_durably, write_json, writing
from latentcache.store.generation import Generation, publish
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.salvage import mend_shards


@dataclass(slots=True, kw_only=True)
class _Build:
    """One build in progress."""

    settings: BuildSettings
    observer: Observer
    stop: StopSignal
    layout: CacheLayout
    reception: Reception
    started: float = field(default_factory=time.monotonic)
    noise: dict[str, Any] = field(default_factory=dict)

    def plan(self, locks: ExitStack) -> tuple[Scan, Recipe, ModelDescription, Before]:
        """Take the lock, then look at everything that can refuse the build, before a picture is decoded."""
        check_places(self.settings.data, self.layout.root)
        if not self.settings.dry_run and os.path.isdir(self.settings.data):  # noqa: PTH112 - it never raises
            EventLog(self.settings.events).close()  # refused now, not after an hour of planning
            self.take_lock(locks)  # for what is no folder nothing is made: the scan says what is wrong with it
        before = read_before(self.layout)
        check_damage(before, model_said=self.settings.recipe.model is not None)
        if before.damage:
            self.observer.warned(f"the manifest was damaged and is made again ({before.damage})")
        found = scan(self.settings.data)
        has_cuda = self.settings.device.startswith("cuda") or (self.settings.device == "auto" and cuda_available())
        recipe, description = resolve_recipe(
            self.settings.recipe,
            before.recipe,
            cached_model=before.model,
            cached_config=before.model_config,
            has_cuda=has_cuda,
            resample_works=self.reception.resample_works,
            auto_compute=found_precision(self.settings, self.reception.find_precision, self.observer.warned),
        )
        self.noise = known_noise(before, recipe, description)
        return found, recipe, description, before

    def take_lock(self, locks: ExitStack) -> None:
        """Take the cache; a folder made for it goes again when the build is refused before anything is in it."""
        is_new = not self.layout.root.exists()
        make_folder(self.layout.root)
        self.reception.lock = locks.enter_context(builder_lock(self.layout.lock))
        if is_new:
            locks.callback(remove_unused, self.layout)

    def run(self) -> BuildReport:
        """Plan, encode, publish."""
        with ExitStack() as locks:
            locks.callback(self.reception.close)
            found, recipe, description, before = self.plan(locks)
            if not self.settings.dry_run:
                self.recover(before)
            still = None if self.settings.retry_failed else stands_still(found, recipe, before, self.layout)
            last = before.generation
            if still is not None and last is not None and self.same_terms(last, refused=bool(still)):
                return self.stand(found, recipe, description, last, still)
            catalog = load_catalog(self.layout)
            for name in catalog.damaged:
                self.observer.warned(f"shard {name} cannot be used: what is needed of it is made again")
            memory = Memory.of(before.generation, recipe, decoders())
            with self.stop.deferred():
                work = survey(
                    found,
                    recipe,
                    catalog,
                    memory,
                    max_pixels=self.settings.max_pixels,
                    retry_failed=self.settings.retry_failed,
                    stopping=lambda: self.stop.requested,
                )
            plan = build_plan(found, work, recipe, catalog, description.label, self.layout.root)
            self.observer.planned(plan)
            if self.settings.dry_run:
                return build_report(plan, started=self.started, dry_run=True, allow_failed=self.settings.allow_failed)
            check_space(plan)
            task = Task(
                settings=self.settings, root=found.root, layout=self.layout, recipe=recipe, description=description
            )
            return self.finish(task, found, before, work, plan, catalog)

    def stand(
        self,
        found: Scan,
        recipe: Recipe,
        description: ModelDescription,
        generation: Generation,
        refused: tuple[Refusal, ...],
    ) -> BuildReport:
        """Say that there is nothing to do."""
        plan = still_plan(found, recipe, generation, refused, description.label, self.layout.root)
        self.observer.planned(plan)
        if self.stop.requested:
            raise self.stop.error()
        return still_report(plan, generation, started=self.started, dry_run=self.settings.dry_run)

    def recover(self, before: Before) -> None:
        """Take over what a build that died has committed, and what is whole of damaged shards."""
        make_folder(self.layout.shards)
        for found in mend_shards(self.layout, before.generation):
            saved = f"{found.saved} whole entries of it were saved, what else is needed is made again"
            self.observer.warned(f"shard {found.source} was damaged: {saved}")

    def make(self, task: Task, found: Scan, before: Before, work: Survey, catalog: Catalog) -> RunResult:
        """Encode what is to do, in sight of those who follow where that was asked for."""
        check_resample(task.recipe, self.reception.resample_works)
        samples = len(found.samples) + len(found.refused)
        write_json(self.layout.building, marker(task.recipe, task.description, samples))
        with writing(self.layout.building):
            failpoint("plan-written")
        with Announcer() as followers:
            if self.settings.stream:
                facts = source_facts(found, task.description, self.layout.root)
                number = before.generation.number if before.generation else 0
                coming = announcement(work, task.recipe, facts, before=number)
                followers.begin(announce(self.layout, coming), numbers_of(work))
            result = make_entries(
                task,
                work,
                reception=self.reception,
                catalog=catalog,
                followers=followers,
                stop=self.stop,
                observer=self.observer,
            )
        self.noise = joined_noise(self.noise, result.noise)
        return result

    def finish(
        self, task: Task, found: Scan, before: Before, work: Survey, plan: BuildPlan, catalog: Catalog
    ) -> BuildReport:
        """Encode what is to do and publish what came of it."""
        recipe, description = task.recipe, task.description
        committed = catalog.keys()
        result = RunResult()
        if work.todo:
            result = self.make(task, found, before, work, catalog)
            catalog = load_catalog(self.layout)
        draft = assemble(found, work, result, recipe, catalog)
        generation = before.generation
        same = unchanged(draft, recipe, generation, str(found.root.resolve())) and not before.damage
        same = same and generation is not None and self.same_terms(generation, refused=bool(draft.refused))
        kept = generation.number if same and generation is not None else 0
        number = kept or self.publish(draft, recipe, description, found)
        remove_durably(self.layout.building)
        withdraw(self.layout)
        if self.stop.requested:  # asked to end after the last batch: all is done, and the caller hears of its signal
            raise self.stop.error()
        return build_report(
            plan,
            started=self.started,
            draft=draft,
            encoded=result.encoded,
            committed=frozenset(committed),
            generation=number,
            published=not same,
            written_bytes=result.written_bytes,
            speed=speed_of(result.clock),
            allow_failed=self.settings.allow_failed,
        )

    def same_terms(self, generation: Generation, *, refused: bool) -> bool:
        """Whether what was refused was refused by the decoders of today, and may be refused as before."""
        judged = not refused or same_decoders(generation, decoders())
        return judged and generation.allow_failed == self.settings.allow_failed

    def publish(self, draft: Draft, recipe: Recipe, description: ModelDescription, found: Scan) -> int:
        """Write the next generation."""
        return publish(
            self.layout,
            recipe=recipe,
            rows=draft.rows,
            samples=draft.samples,
            buckets=draft.buckets,
            shards=draft.shards,
            refused=[refusal_json(item) for item in draft.refused],
            notes=[refusal_json(item) for item in draft.notes],
            facts=source_facts(found, description, self.layout.root, fold=self.settings.fold, noise=self.noise)
            | {"allow_failed": self.settings.allow_failed},
        )


def build_cache(
    settings: BuildSettings,
    *,
    observer: Observer | None = None,
    last_words: Callable[[InterruptedBuildError], None] | None = None,
) -> BuildReport:
    """Make a cache true for a data folder: encode what is missing, reuse the rest, publish a generation.

    Args:
        settings: What to build, and from what.
        observer: Told of the plan and of progress; silent where it is not given.
        last_words: Called when a second signal ends the process at once; must not touch streams.

    Raises:
        UsageError: Settings that cannot be, or an output folder inside the data.
        SourceError: The data folder cannot be used, or holds no picture.
        EncoderError: The model cannot be used.
        CacheLockedError: Another build holds the cache.
        StoreError: The disk is full or fails, or the cache was written by a newer version.
        DeviceError: No device is left that works.
        WorkerError: Worker processes keep dying, and no picture is to blame.
        InterruptedBuildError: SIGINT or SIGTERM; what was acknowledged is committed.
    """
    with StopSignal(last_words) as stop:
        layout = CacheLayout(settings.cache)
        reception = Reception(settings.device)
        build = _Build(
            settings=settings, observer=observer or Silent(), stop=stop, layout=layout, reception=reception
        )
        return build.run()

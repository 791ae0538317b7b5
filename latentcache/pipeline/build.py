"""``build_cache``: scan, describe, compare, encode field by field, publish one snapshot.

Guarantee: a second build of unchanged data encodes and publishes nothing and loads no encoder. A killed build is
continued by the next one. Sources are only read. Everything that can reject a build is checked before anything is
encoded or written.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np

from latentcache.errors import CacheFormatError, UsageError
from latentcache.failpoint import failpoint
from latentcache.fields.protocol import DescribeContext, Described, FieldKind, Job
from latentcache.fields.recipe import join_noise
from latentcache.fields.registry import field_kinds, load
from latentcache.fields.table import Rejected, SampleTable
from latentcache.pipeline import preflight
from latentcache.pipeline.diff import FieldWork, field_work, find_items, rejected_before, with_equal_files
from latentcache.pipeline.preflight import Existing, kind_of, read_existing, write_state
from latentcache.pipeline.publish import BuildPlan, BuildReport, Observer, Silent, publish, quarantined
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.workers.engine import Engine, EventLog, ReadColumns, RunResult, Task
from latentcache.pipeline.workers.local import LocalEngine
from latentcache.pipeline.workers.resources import rare_gc
from latentcache.pipeline.workers.scheduler import Run, StopSignal
from latentcache.sources.known import with_contents, writable
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import Listing, scan
from latentcache.store.atomic_io import make_folder, remove_durably, writing
from latentcache.store.catalog import Catalog, load_catalog, mend_shards
from latentcache.store.lock import check_owner, wait_for_silence
from latentcache.store.paths import CachePaths
from latentcache.store.publish import NewSnapshot, remove_snapshot
from latentcache.store.remote.transfer import push, remembered
from latentcache.store.remote.view import StoredShards

#: Samples that the nodes of a cluster compare.
_COMPARED = 8
#: Settings that are sent to each worker.
_OF_RUNS = ("device", "workers", "batch_size", "decode_threads", "host_memory", "commit_every")
#: Seconds between two notes of progress in the build state, and snapshots of a build that stay while it goes on.
_CLAIM_S, _KEPT = 10.0, 2
#: Reads what the heads of files say of samples: the column :data:`_SIZE`, and others beside it.
_HEADERS, _SIZE = "latentcache.images.headers:fill_sizes", "original_size"


@dataclass(slots=True, kw_only=True)
class _Build:
    """One build in progress: what its steps have found so far."""

    settings: BuildSettings
    observer: Observer = field(default_factory=Silent)
    warned: Callable[[str], None]
    """Takes sentences that the user should read."""
    stop: StopSignal
    paths: CachePaths
    owner: str = field(default_factory=lambda: os.urandom(8).hex())
    started: float = field(default_factory=time.monotonic)
    url: str = ""
    """Where the cache is, if its folder is a view; empty: in the folder."""
    events: EventLog | None = None
    engine: Engine = field(init=False)
    existing: Existing = field(default_factory=Existing)
    options: SourceOptions = field(default_factory=SourceOptions)
    listing: Listing = field(init=False)
    """Its samples get header columns, and the contents that are found."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the fields to build."""
    described: dict[str, Described] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    """Snapshots that this build made."""
    claimed: float = field(default_factory=time.monotonic)
    """When the build state was last written."""

    @property
    def samples(self) -> SampleTable:
        """Sample table of the listing."""
        return self.listing.samples

    def run(self) -> BuildReport:
        """Plan, encode, publish."""
        preflight.check_paths(self.settings.data, self.paths.root)
        self.url = remembered(self.paths)["url"]
        with ExitStack() as stack:
            if self.settings.events is not None:
                self.events = stack.enter_context(EventLog(self.settings.events))
            lock = stack.enter_context(preflight.locked(self.paths))
            self.engine = stack.enter_context(self.new_engine(lock))
            self.look()
            kinds = self.describe_fields()
            catalog = load_catalog(self.paths, open_shards=True)
            works = self.works(kinds, catalog)
            plan = self.plan(works)
            self.observer.planned(plan)
            if self.settings.strict:
                preflight.check_notes(plan.notes, self.settings.data)
            if not self.url:
                preflight.check_space(plan)
            if catalog.damaged or self.paths.open_shards():
                with writing(self.paths.building):
                    wait_for_silence(self.paths.building, self.paths.lock, is_stopped=lambda: self.stop.requested)
                self.claim(plan)
                self.mend()
                catalog = load_catalog(self.paths)
                works = self.works(kinds, catalog)
            return self.make(plan, works, catalog)

    def new_engine(self, lock: int) -> AbstractContextManager[Engine]:
        """The workers of this machine, which inherit the lock, or of a cluster."""
        settings = self.settings
        if settings.engine == "local":
            return LocalEngine(settings.device, lock_fd=lock)
        from latentcache.pipeline.workers.ray import RayEngine

        return RayEngine(settings.address, workers=settings.workers, device=settings.device, warn=self.warned)

    def look(self) -> Listing:
        """Read what the cache holds, and list DATA."""
        self.existing = read_existing(self.settings)
        self.options = self.existing.options(self.settings)
        self.listing = self.scan()
        return self.listing

    def describe_fields(self) -> list[FieldKind]:
        """The fields to build, each with its recipe."""
        preflight.check_source(self.settings.source, self.listing, self.settings.data)
        self.fields = self.requested_fields()
        kinds = self.kinds()
        for kind in kinds:
            self.described[kind.name] = self.describe(kind)
        return kinds

    def scan(self) -> Listing:
        """List DATA; files whose stat memo is trusted are not opened."""
        snapshot = self.existing.snapshot
        if self.existing.damage:
            self.warned(f"the current snapshot is damaged and will be replaced ({self.existing.damage})")
        with self.stop.deferred():
            return scan(
                self.settings.data,
                self.options,
                snapshot.samples if snapshot else None,
                rejected=snapshot.rejected if snapshot else (),
                notes=snapshot.notes if snapshot else (),
                stopping=lambda: self.stop.requested,
                recorded=SourceOptions.from_json(self.existing.state.get("source", {})).folders,
                inputs=self.existing.inputs(self.settings),
            )

    def requested_fields(self) -> dict[str, Any]:
        """Settings of the fields that were named, and of those that a named one brings with it."""
        fields = self.settings.fields
        known = field_kinds()
        stored = self.existing.field_names
        kinds = {name: kind_of(name) for name in ([*known, *fields] if self.settings.related else fields)}
        settings = {name: kind.resolved(fields, self.samples, held=name in stored) for name, kind in kinds.items()}
        usable = [name for name, value in settings.items() if value is not None or fields.get(name, name) is None]
        leads = {*fields, *stored, *(name for name in usable if not kinds[name].follows)}
        wanted = {name for name in usable if name in fields or not leads or kinds[name].follows in {"", *leads}}
        return {name: settings[name] for name in usable if name in wanted}

    def kinds(self) -> list[FieldKind]:
        """The fields to build: those of the snapshot, those that were named, else the first that DATA allows."""
        has = set(self.samples.inputs)
        names = list(dict.fromkeys([*self.existing.field_names, *self.fields]))
        kinds = [kind_of(name) for name in names]
        if not self.existing.field_names and all(self.settings.related and kind.follows for kind in kinds):
            kinds = [kind for kind in field_kinds().values() if has.issuperset(kind.inputs)][:1] + kinds
        kinds.sort(key=lambda kind: bool(kind.follows))
        for kind in kinds:
            lacking = ", ".join(sorted(set(kind.inputs) - has))
            if lacking and kind.name in self.existing.field_names:
                raise CacheFormatError(
                    f"the cache holds {kind.name}, and DATA has no input for it: {lacking}",
                    where=str(self.paths.root),
                    why="a build keeps every field of its cache; a loader serves those of fields=",
                    fix="build this data into another folder with --out",
                    slug="cache-kind",
                )
            if lacking:
                encoder = kind.encoder_setting
                word = getattr(self.fields.get(kind.name), encoder, None) if encoder else None
                raise UsageError(
                    f"for data with {_plural(kind.inputs)}; this data has {_plural(has)}",
                    argument=encoder if word is not None else "fields",
                    value=word if word is not None else kind.name,
                    where=str(self.settings.data),
                    fix="leave it out, or check the path",
                )
        return kinds

    def describe(self, kind: FieldKind) -> Described:
        """Recipe, producer and provenance of a field; files of its encoder are read, nothing is loaded."""
        followed = self.described.get(kind.follows)
        device, ask = self.engine.device, self.engine.ask
        layout = self.listing.layout
        asked = {"resolutions": layout.resolutions} if layout is not None and layout.resolutions else {}
        context = DescribeContext(
            **self.existing.cached(kind),
            samples=self.samples,
            device=device,
            ask=ask,
            asked=asked,
            followed=followed,
        )
        settings = self.fields.get(kind.name) or kind.settings()
        described: Described = load(kind.describer)(settings, context)
        for note in described.notes:
            self.warned(note)
        return described

    def works(self, kinds: list[FieldKind], catalog: Catalog) -> list[FieldWork]:
        """Compare every field with what is committed; fills header columns that are needed."""
        snapshot = self.existing.snapshot
        samples = self.samples
        held = () if snapshot is None or self.settings.retry_failed else snapshot.rejected
        known = {
            kind.name: rejected_before(samples, kind, self.described[kind.name], self.existing.rows(kind.name), held)
            for kind in kinds
        }
        with self.stop.deferred():
            heads = dict[str, Any]()
            if sized := [kind for kind in kinds if _SIZE in kind.sample_columns]:
                heads[sized[0].inputs[0]] = self.fill(sized, known)
            for name in dict.fromkeys(name for kind in kinds for name in kind.inputs):
                root = self.listing.root
                hashed = with_equal_files(
                    self.samples, name, root, heads.get(name), stopping=lambda: self.stop.requested
                )
                self.listing = replace(self.listing, samples=hashed)
        all_samples = cache(partial(self.all_samples, sized))
        for kind in kinds:
            described = self.described[kind.name]
            recipe = kind.completed(described.recipe, all_samples)
            self.described[kind.name] = replace(described, recipe=recipe)
        works = dict[str, FieldWork]()
        unusable = np.zeros(len(self.samples), dtype=np.bool_)
        for kind in sorted(kinds, key=lambda kind: kind not in sized):  # images first
            works[kind.name] = field_work(
                kind,
                self.described[kind.name],
                self.existing.rows(kind.name),
                self.samples,
                catalog,
                known[kind.name],
                unusable=None if kind in sized else unusable,
                unfinished=self.existing.unfinished,
            )
            if not self.existing.part(self.settings):
                works[kind.name].replan = _replanned(works[kind.name], self.samples)
            if kind in sized[:1]:
                unusable |= ~np.asarray(self.samples.columns[_SIZE]).any(axis=1)
                unusable[[row for row, _ in works[kind.name].plan.rejected]] = True
        return [works[name] for name in self.described]

    def all_samples(self, sized: list[FieldKind]) -> SampleTable:
        """The samples of all parts of DATA, with the sizes of their images."""
        if not self.existing.part(self.settings):
            return self.samples
        whole = replace(self, options=replace(self.options, part=None))
        whole.listing = whole.scan()
        whole.fill(sized, {kind.name: {} for kind in sized})
        return whole.samples

    def fill(self, kinds: list[FieldKind], known: Mapping[str, dict[int, Rejected]]) -> Any:
        """Read the headers of the samples without a size; those that cannot be read are rejected by every kind.

        Gives (S,) hashes of the first bytes that were read, 0 for other samples; None: no header was read.
        """
        samples = self.samples
        has_file = np.asarray(samples.inputs[kinds[0].inputs[0]].file) >= 0
        rows = np.flatnonzero(~np.asarray(samples.columns[_SIZE]).any(axis=1) & has_file)
        done = set.intersection(*(set(known[kind.name]) for kind in kinds))
        rows = np.setdiff1d(rows, list(done), assume_unique=True)
        if not len(rows):
            return None
        header_columns, own_heads, rejected = load(_HEADERS)(
            self.listing.root,
            samples,
            rows,
            max_pixels=self.settings.max_pixels,
            stopping=lambda: self.stop.requested,
        )
        columns = dict(samples.columns)
        for name, values in header_columns.items():
            held = columns.get(name)
            columns[name] = (
                np.zeros((len(samples), *values.shape[1:]), values.dtype) if held is None else writable(held)
            )
            columns[name][rows] = values
        for kind in kinds:
            known[kind.name].update({row: replace(rejection, target=kind.name) for row, rejection in rejected})
        self.listing = replace(self.listing, samples=replace(samples, columns=columns))
        heads = np.zeros(len(samples), dtype=np.uint64)
        heads[rows] = own_heads
        return heads

    def plan(self, works: list[FieldWork]) -> BuildPlan:
        """Count what is to do."""
        listing = self.listing
        return BuildPlan(
            cache=self.paths.root,
            data=self.settings.data,
            data_kind=listing.data_kind,
            samples=len(self.samples) + quarantined(listing.rejected),
            fields={work.name: work for work in works},
            rejected=(*listing.rejected, *(rejection for work in works for rejection in work.rejected.values())),
            notes=(*listing.notes, *(note for work in works for note in work.plan.notes)),
            free_bytes=preflight.free_bytes(self.paths.root),
            part=self.existing.part(self.settings),
            no_caption=listing.no_caption,
            allow_failed=self.settings.allow_failed or str(self.existing.state.get("allow_failed", "0")),
            listing=listing,
        )

    def mend(self) -> None:
        """Seal what a killed build left open, and write indexes of damaged shards again."""
        mended, lost = mend_shards(self.paths)
        for name in mended:
            self.warned(f"shard {name} was damaged: its index is written again")
        for name in lost:
            self.warned(f"shard {name} is damaged: its entries are encoded again")

    def claim(self, plan: BuildPlan, progress: RunResult | None = None) -> None:
        """Record the settings of this build, that open shards are its own, and how far it is."""
        make_folder(self.paths.shards)
        done: dict[str, Any] = {"field": "entries", "done": 0, "total": plan.to_make}
        if progress is not None:
            done = {"field": progress.field, "done": progress.done, "total": progress.total}
        more: dict[str, Any] = {"samples": plan.samples, "allow_failed": plan.allow_failed, "owner": self.owner}
        more["host"] = os.uname().nodename
        write_state(self.paths, self.described, self.options, part=plan.part, progress=done, **more)
        self.claimed = time.monotonic()

    def make(self, plan: BuildPlan, works: list[FieldWork], catalog: Catalog) -> BuildReport:
        """Encode what is to do, field by field, and publish."""
        with writing(self.paths.root):  # a build that publishes nothing would leave them for good
            for path in self.paths.leftovers():
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if any(len(work.todo) for work in works):
            self.claim(plan)
            with writing(self.paths.building):
                failpoint("plan-written")
            self.encode(plan, works, catalog)
            catalog = self.look_up(works)
        report = self.publish(plan, works, catalog)
        remove_durably(self.paths.building)
        return report

    def look_up(self, works: list[FieldWork]) -> Catalog:
        """Look up what is committed by now."""
        if self.url:
            StoredShards(self.url).fill(self.paths)
        catalog = load_catalog(self.paths)
        for work in works:
            find_items(work, self.samples, catalog)
        return catalog

    def publish(
        self, plan: BuildPlan, works: list[FieldWork], catalog: Catalog, *, is_part: bool = False
    ) -> BuildReport:
        """Publish everything, or what is there by now; of the snapshots of this build, the last two stay."""
        report = publish(
            self.paths,
            self.base(plan, self.listing.rejected),
            works,
            catalog,
            plan=plan,
            root=self.listing.root,
            current=None if self.existing.damage or self.published else self.existing.snapshot,
            started=self.started,
            is_part=is_part,
        )
        if self.url:
            push(self.paths.root, self.url)
        self.published.append(report.snapshot)
        for number in self.published[:-_KEPT]:
            if remove_snapshot(self.paths, number):
                self.published.remove(number)
        return report

    def encode(self, plan: BuildPlan, works: list[FieldWork], catalog: Catalog) -> None:
        """Run the fields one after the other, the costliest last; gives the samples the contents that were read.

        With ``publish_every`` the last field is built in slices, and a snapshot is published between them.
        """
        order = [work for work in works if len(work.todo)]
        order.sort(key=lambda work: work.cost * work.kind.work.cost_bytes)
        with self.stop.deferred():
            for work in order:
                every = self.settings.publish_every if work is order[-1] else None
                if every is not None:
                    work.shuffle(self.samples)
                work.result = RunResult(work.name, len(work.todo), work.cost, self.events)
                for number, jobs in enumerate(slices(work.jobs(self.listing), every)):
                    if number and not self.stop.requested:
                        catalog = self.look_up(works)
                        self.publish(plan, works, catalog, is_part=True)
                    if not self.stop.requested:
                        self.run_field(plan, work, jobs, catalog)
        self.engine.close()

    def run_field(self, plan: BuildPlan, work: FieldWork, jobs: Iterator[Job], catalog: Catalog) -> None:
        """Encode the items of some jobs of a field."""
        assert work.result is not None
        catalog.forget()  # each worker makes its own tables of keys
        Run(
            replace(self.task(work), shards=catalog.folders, locations=self.locations(work)),
            jobs,
            total=work.inputs,
            total_cost=work.cost,
            results=work.result,
            good=work.good_jobs(self.listing),
            engine=self.engine,
            stop=self.stop,
            warn=self.warned,
        ).run(lambda progress: self.advanced(plan, progress))
        work.noise = join_noise(work.noise, work.result.noise)
        self.listing = replace(self.listing, samples=with_read_contents(self.samples, work.kind, work.result.read))
        work.result.read = ReadColumns()

    def locations(self, work: FieldWork) -> tuple[Any, ...]:
        """Where some of the inputs are, for machines that see DATA at another path or as a copy."""
        if self.settings.engine == "local":
            return ()
        todo = work.todo[np.linspace(0, len(work.todo) - 1, _COMPARED).astype(np.intp)]
        inputs = self.listing.job_inputs(np.unique(work.plan.sample[todo]), work.kind.inputs)
        values = (value for _, of_sample in inputs for value in of_sample.values())
        return tuple(value for value in values if isinstance(value, Mapping) and "path" in value)

    def advanced(self, plan: BuildPlan, progress: RunResult) -> None:
        """Pass progress on; now and then the build state gets it, for who opens the cache meanwhile."""
        self.observer.advanced(progress)
        if time.monotonic() - self.claimed >= _CLAIM_S:
            check_owner(self.paths.building, self.owner)
            self.claim(plan, progress)

    def task(self, work: FieldWork) -> Task:
        """Return the task for the workers of a field."""
        settings = self.settings
        described = work.described
        return Task(
            field=work.kind.name,
            recipe=described.recipe.as_json(),
            producer=described.producer,
            provenance=described.provenance,
            groups=work.plan.groups,
            root=str(self.listing.root),
            cache=str(self.paths.root.resolve()),
            url=self.url,
            scratch=str(settings.scratch or ""),
            owner=self.owner,
            needs_torch=described.needs_torch,
            options={"max_pixels": settings.max_pixels},
            **{name: getattr(settings, name) for name in _OF_RUNS},
        )

    def base(self, plan: BuildPlan, rejected: Iterable[Rejected]) -> NewSnapshot:
        """A snapshot without fields: where DATA is, also as seen from the cache, and how it was read."""
        root = self.settings.data.resolve()
        listing = self.listing
        source: dict[str, Any] = {
            "root": str(root),
            "relative": "" if self.url else os.path.relpath(root, self.paths.root.resolve()),
            "options": listing.options.as_json(),
            "part": plan.part,
            "data_kind": listing.data_kind,
            "inventory": listing.inventory,
        }
        if listing.layout is not None:
            if listing.root.resolve() != (root if root.is_dir() else root.parent):
                source["names"] = os.path.relpath(listing.root.resolve(), root)
            source |= {
                "layout": listing.layout.word,
                "sets": [image_set.as_json() for image_set in listing.layout.sets],
            }
        return NewSnapshot(
            samples=self.samples,
            fields=(),
            shards=(),
            source=source,
            rejected=rejected,
            notes=listing.notes,
            allow_failed=plan.allow_failed,
        )


def _plural(inputs: Iterable[str]) -> str:
    return " and ".join(f"{name}s" for name in sorted(inputs))


def _replanned(work: FieldWork, samples: SampleTable) -> int:
    """Count the items that ``--replan`` would encode again; 0 if the recipe would stay the same."""
    if work.before is None or work.kept is not None:
        return 0
    recipe = work.kind.completed(work.recipe, lambda: samples, again=True)
    if recipe == work.recipe:
        return 0
    plan = work.kind.plan(samples, recipe)
    numbers = {group: number for number, group in enumerate(dict.fromkeys((*work.plan.groups, *plan.groups)))}
    now, then = (
        part.sample.astype(np.int64) * len(numbers) + np.array([numbers[group] for group in part.groups])[part.group]
        for part in (work.plan, plan)
    )
    return int((~np.isin(then, now) & np.isin(plan.sample, work.plan.sample)).sum())


def slices(jobs: Iterator[Job], every: float | None) -> Iterator[Iterator[Job]]:
    """Cut jobs into slices that end when a snapshot is due. Use up each slice before you take the next one."""
    for job in jobs:
        due = time.monotonic() + (math.inf if every is None else every)
        yield chain([job], until(due, jobs))


def until(due: float, jobs: Iterator[Job]) -> Iterator[Job]:
    """Yield jobs until the time is over."""
    while time.monotonic() < due and (job := next(jobs, None)) is not None:
        yield job


def with_read_contents(samples: SampleTable, kind: FieldKind, read: ReadColumns) -> SampleTable:
    """The table with the contents and stats that a run found by reading."""
    if read.content.shape[1] == len(kind.inputs):
        for number, name in enumerate(kind.inputs):
            there = read.stat[:, number].any(axis=1)
            if samples.inputs[name].text is None and there.any():
                jobs: Any = slice(None) if there.all() else there  # a slice copies nothing
                contents = read.content[jobs, number], read.stat[jobs, number]
                samples = with_contents(samples, name, read.sample[jobs], *contents)
    return samples


def build_cache(
    settings: BuildSettings,
    *,
    observer: Observer | None = None,
) -> BuildReport:
    """Create or update the cache for DATA; only new or changed inputs are encoded.

    Args:
        settings: The data, the fields and the options of the build.
        observer: An object with the methods ``planned(plan)``, ``advanced(progress)`` and ``warned(message)``.
            ``plan.to_make`` items are left to encode; ``progress`` has ``field``, ``done`` and ``total``.

    Raises:
        UsageError: Invalid settings, or an output folder inside the data.
        SourceError: DATA cannot be used, or holds no input.
        EncoderError: The model cannot be used.
        CacheLockedError: Another build holds the cache.
        StoreError: The disk is full or fails, or the cache was written by a newer version.
        DeviceError: No device is left that works.
        WorkerError: Worker processes keep dying, and no input causes it.
        InterruptedBuildError: SIGINT or SIGTERM; acknowledged work is committed.
    """
    with rare_gc(), StopSignal() as stop:
        paths = CachePaths(settings.cache)
        observer = observer or Silent()
        return _Build(settings=settings, observer=observer, warned=observer.warned, stop=stop, paths=paths).run()


def plan_build(
    settings: BuildSettings,
    *,
    listed: Callable[[Listing], None] = lambda listing: None,
    warned: Callable[[str], None] = lambda message: None,
    engine: Engine | None = None,
) -> BuildPlan:
    """Make the plan of a build. Takes no lock, encodes and writes nothing.

    Args:
        settings: The data, the fields and the options of the build.
        listed: Called with the contents of DATA, before anything can be wrong with the fields.
        warned: Called with sentences that the user should read.
        engine: Answers questions about the device; its processes stay open.

    Raises:
        LatentcacheError: As :func:`build_cache` before it encodes.
    """
    paths = CachePaths(settings.cache)
    with rare_gc(), StopSignal() as stop, ExitStack() as stack:
        build = _Build(settings=settings, warned=warned, stop=stop, paths=paths)
        build.engine = engine or stack.enter_context(LocalEngine(settings.device))
        preflight.check_paths(settings.data, paths.root)
        listed(build.look())
        kinds = build.describe_fields()
        return build.plan(build.works(kinds, load_catalog(paths, open_shards=True)))

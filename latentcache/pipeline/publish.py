"""The plan of a build, its progress and its report; and the next snapshot, if it differs from the current one.

Guarantee: a sample is in a field with all its items, or the field rejects it with a reason. A build that finds
everything there publishes nothing.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache._version import __version__
from latentcache.errors import UnusableSampleError
from latentcache.fields.protocol import Failure, FieldPlan, Group
from latentcache.fields.table import STAT_WIDTH, Rejected, SampleTable, join_tables
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.pipeline.diff import FieldWork, find_items, usable_items
from latentcache.pipeline.workers.engine import RunResult
from latentcache.plan.numbers import tolerated
from latentcache.sources.causes import rejected
from latentcache.sources.known import racy
from latentcache.sources.locations import is_read_by_workers, locations, read_image
from latentcache.store.catalog import Catalog
from latentcache.store.paths import CachePaths
from latentcache.store.publish import (
    NewSnapshot,
    is_unchanged,
    new_field,
    publish_snapshot,
    shard_numbers,
)
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value

if TYPE_CHECKING:
    from latentcache.sources.scan import Listing

#: Parts of the provenance of a field whose change is worth a snapshot: a check finds a model that was moved.
_COMPARED = ("decoders", "model", "text_encoder", "tokenizer")
_LOST = Failure(reason="entry-lost", detail="its entry was not committed")


class BuildPlan(Value):
    """The work that a build is about to do."""

    cache: Path
    data: Path
    data_kind: str
    samples: int
    """Usable and rejected."""
    fields: Mapping[str, FieldWork]
    rejected: tuple[Rejected, ...]
    notes: tuple[Rejected, ...]
    free_bytes: int
    part: str = ""
    no_caption: int = 0
    allow_failed: str = "0"
    listing: Listing | None = field(default=None, repr=False)
    """Listing of DATA, with header columns and with the contents that are known; None for a merge."""

    @property
    def cached(self) -> int:
        """Items of all fields that are committed already."""
        return sum(field.cached for field in self.fields.values())

    @property
    def to_make(self) -> int:
        """Items of all fields to encode, at most."""
        return sum(field.to_make for field in self.fields.values())

    @property
    def duplicates(self) -> int:
        """Samples whose content an earlier sample has: they share its entry."""
        return max((field.duplicates for field in self.fields.values()), default=0)

    @property
    def bytes_to_write(self) -> int:
        """Bytes on disk, about."""
        return sum(field.bytes_to_write for field in self.fields.values())


class FieldDone(Value):
    """Result of a build for one field."""

    cached: int = 0
    """Distinct needed items that were there, or were copied from an item of equal pixels."""
    duplicates: int = 0
    num_bytes: int = 0
    """Headers and payloads of the entries that the snapshot needs."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the kind counts beside items, such as tokens."""
    run: RunResult
    """Result of the run, which counts nothing if nothing had to be encoded."""

    @property
    def encoded(self) -> int:
        """Distinct items computed and committed by this run."""
        return self.run.encoded


class BuildReport(Value):
    """Result of a build."""

    plan: BuildPlan
    fields: Mapping[str, FieldDone] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[Rejected, ...] = ()
    snapshot: int = 0
    published: bool = False
    """False if the current snapshot already says the same."""
    elapsed_s: float = 0.0

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in self.counts().items() if number) or "no samples"
        return f"BuildReport({self.cache}, snapshot {self.snapshot}: {counts})"

    @property
    def samples(self) -> int:
        """Usable and rejected."""
        return self.plan.samples

    @property
    def duplicates(self) -> int:
        """Items that an earlier sample gives as well, of the field with most."""
        return max((field.duplicates for field in self.fields.values()), default=0)

    @property
    def encoded(self) -> int:
        """Distinct items encoded by this run, over all fields."""
        return sum(field.encoded for field in self.fields.values())

    @property
    def cached(self) -> int:
        """Distinct needed items that were not encoded by this run, over all fields."""
        return sum(field.cached for field in self.fields.values())

    @property
    def written_bytes(self) -> int:
        """Headers and payloads committed by this run."""
        return sum(field.run.written_bytes for field in self.fields.values())

    @property
    def quarantined(self) -> int:
        """Samples that at least one field rejects."""
        return quarantined(self.rejected)

    @property
    def too_many_failed(self) -> bool:
        """True if more samples are quarantined than allowed: exit status 1."""
        return self.quarantined > tolerated(self.plan.allow_failed, self.samples)

    @property
    def cache(self) -> Path:
        """The cache folder."""
        return self.plan.cache

    def counts(self) -> dict[str, int]:
        """``counts`` of the JSON contract."""
        names = ("samples", "encoded", "cached", "duplicates", "quarantined")
        return {name: getattr(self, name) for name in names} | {"no_caption": self.plan.no_caption}


class Observer(Protocol):
    """Called by a build, in the thread that builds."""

    def planned(self, plan: BuildPlan) -> None:
        """Receive the plan; nothing has been encoded yet."""
        return

    def advanced(self, progress: RunResult) -> None:
        """Receive progress of the field in work. Called often: look at the clock before printing."""
        return

    def warned(self, message: str) -> None:
        """Receive one sentence that the user should read."""
        return


class Silent(Observer):
    """An observer that ignores everything."""


def quarantined(rejected: Iterable[Rejected]) -> int:
    """Samples among rejections: several fields may reject one sample."""
    return sum({item.label: item.count for item in rejected}.values())


def field_done(work: FieldWork, stored: FieldRows) -> FieldDone:
    """Count what was done for one field."""
    run = work.result or RunResult(work.name)
    needed = work.committed
    return FieldDone(
        cached=max(0, needed - run.encoded),
        duplicates=int(np.count_nonzero(work.catalog_item >= 0)) - needed,
        num_bytes=int(np.sum(stored.head, dtype=np.int64) + np.sum(stored.bytes, dtype=np.int64)),
        numbers=work.kind.numbers(work.recipe, {**stored.columns, **stored.ragged_columns, "length": stored.length}),
        run=run,
    )


def publish(
    paths: CachePaths,
    base: NewSnapshot,
    works: Sequence[FieldWork],
    catalog: Catalog,
    *,
    plan: BuildPlan,
    root: Path,
    current: Snapshot | None,
    started: float,
    is_part: bool = False,
) -> BuildReport:
    """Publish the results of runs, unless they equal the current snapshot.

    ``base`` has all samples and no fields; its ``rejected`` and ``notes`` are those of the source. ``is_part``: the
    build goes on, so only samples that have every field are published, and what is lacking is not rejected.
    """
    if is_part:
        base = replace(base, building=plan.samples)
        works = [_part_of(work, base.samples, catalog) for work in works]
    catalog.forget()  # the tables of its keys, which nothing looks up any more
    new = _new_snapshot(base, works, catalog, root)
    unchanged = current is not None and is_unchanged(new, current, _COMPARED)
    number = 0 if unchanged else publish_snapshot(paths, new)
    return BuildReport(
        plan=plan,
        fields={rows.name: field_done(work, rows) for work, rows in zip(works, new.fields, strict=True)},
        rejected=tuple(new.rejected),
        notes=tuple(new.notes),
        snapshot=number or (current.number if current is not None else 0),
        published=number > 0,
        elapsed_s=time.monotonic() - started,
    )


def _new_snapshot(base: NewSnapshot, works: Sequence[FieldWork], catalog: Catalog, root: Path) -> NewSnapshot:
    """Put the next snapshot together, and add missing rejections to the works."""
    samples = base.samples
    is_waiting = np.zeros(len(base.samples), dtype=np.bool_)
    for work in works if base.building else ():
        lacking = work.plan.sample[(work.catalog_item < 0) & (work.plan.variant < work.recipe.spec.first_prompt)]
        failed = [row for row, _ in work.result.failed] if work.result else []
        is_waiting[np.setdiff1d(lacking, [*failed, *work.rejected])] = True
    items = [_publishable_items(work, samples, root, is_waiting) for work in works]
    kept, numbers = samples_in_use(samples, works, items)
    fields = tuple(_field(work, chosen, numbers, catalog) for work, chosen in zip(works, items, strict=True))
    rejections = [
        replace(item, stat=tuple(np.asarray(_without_young_stats([item.stat]))[0].tolist())) if item.stat else item
        for item in (*base.rejected, *(item for work in works for item in work.rejected.values()))
    ]
    stat = _without_young_stats(kept.files.stat)
    return replace(
        base,
        samples=kept if stat is kept.files.stat else replace(kept, files=replace(kept.files, stat=stat)),
        fields=fields,
        shards=catalog.shards,
        rejected=sorted(
            rejections, key=lambda item: (item.name.encode("utf-8", "surrogateescape"), item.line, item.target)
        ),
        notes=[
            *(note for note in base.notes if not note.target),
            *(note for work in works for note in work.plan.notes),
            *(note for parts in zip(fields, works, items, strict=True) for note in _notes(samples, *parts)),
        ],
        demo=any(work.described.demo for work in works),
    )


def _part_of(work: FieldWork, samples: SampleTable, catalog: Catalog) -> FieldWork:
    """A copy of the work for a snapshot that has some of its samples."""
    part = replace(work, kept=None, plan=replace(work.plan, sample=work.plan.sample.copy()))
    if work.kept is not None:
        find_items(part, samples, catalog)
    return part


def _publishable_items(
    work: FieldWork, samples: SampleTable, root: Path, is_waiting: NDArray[np.bool_]
) -> NDArray[np.integer]:
    """Positions of the items to publish; samples that lack one are rejected, or wait (S,) for it."""
    plan = work.plan
    lost = work.catalog_item < 0
    first = work.recipe.spec.first_prompt
    lacking = np.empty(0, dtype=np.intp)
    prompts = plan.variant >= first
    any_lost = bool(lost.any())
    if any_lost:
        failed = dict(work.result.failed) if work.result else {}
        if (lost & prompts).any() and not is_waiting.any():
            row = int(plan.sample[0])
            detail = f"a prompt beside the captions could not be encoded: {failed.get(row, _LOST).detail}"
            note = rejected(samples.names[row], "prompt-not-stored", detail)
            work.plan = replace(plan, notes=(*plan.notes, replace(note, target=work.name)))
        lacking = np.flatnonzero(np.bincount(plan.sample[lost & ~prompts]))
        content = work.kind.content(samples)
        causes = {failure.content or content[row].tobytes(): failure for row, failure in failed.items()}
        causes.pop(bytes(HASH_BYTES), None)
        for row in set(lacking[~is_waiting[lacking]].tolist()).difference(work.rejected):
            failure = failed.get(row) or causes.get(content[row].tobytes()) or _LOST
            work.rejected[row] = rejection(samples, work, row, failure)
    work.rejected = {row: _with_content(item, samples, work, row, root) for row, item in work.rejected.items()}
    if not any_lost and not is_waiting.any():
        return np.arange(len(lost), dtype=np.int32)
    usable = ~is_waiting
    usable[lacking] = False
    return usable_items(plan, usable, first, ~lost)


def rejection(samples: SampleTable, work: FieldWork, row: int, failure: Failure) -> Rejected:
    """Return the rejection of a sample by a field, with its reason."""
    name, line = samples.where(row)
    about = {**vars(failure), "content": failure.content if any(failure.content) else b""}
    return Rejected(**about, name=name, line=line, target=work.name)


def _with_content(item: Rejected, samples: SampleTable, work: FieldWork, row: int, root: Path) -> Rejected:
    """A rejection with the content and stat that it was made for: it holds until the bytes change."""
    names = work.kind.inputs
    if any(samples.inputs[name].file[row] < 0 for name in names):
        return replace(item, stat=())
    sources = [_content_of(samples, name, row, root) for name in names]
    if len(names) == 1:
        return replace(item, content=item.content or sources[0][0], stat=item.stat or sources[0][1])
    contents = [content for content, _ in sources]
    content = item.content or (content_hash(b"".join(contents)) if all(contents) else b"")
    return replace(item, content=content, stat=())  # a memo of one file says nothing of the others


def _content_of(samples: SampleTable, name: str, row: int, root: Path) -> tuple[bytes, tuple[int, ...]]:
    """Content of an input, read if it is not known, and stat of its file; no content if it changed since the scan."""
    column = samples.inputs[name]
    seen = tuple(np.asarray(samples.files.stat[int(column.file[row])]).tolist())
    content = np.asarray(column.content[row]).tobytes()
    if any(content) or not is_read_by_workers(samples, name):
        return content if any(content) else b"", seen
    try:
        data, memo = read_image(root, locations(samples, [row], name)[0])
    except UnusableSampleError:
        return b"", seen
    stat: tuple[int, ...] = memo
    return (content_hash(data), stat) if stat[:5] == seen[:5] else (b"", seen)


def _field(work: FieldWork, items: NDArray[np.integer], numbers: NDArray[np.int32], catalog: Catalog) -> FieldRows:
    """Rows of one field, in the order of samples, then groups, then variants; ``numbers``: new ones of samples."""
    every = slice(None) if len(items) == len(work.catalog_item) else items
    plan = work.plan
    sample = numbers[plan.sample[every]]
    provenance = {
        **work.described.provenance,
        "label": work.described.label,
        "latentcache": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    before = work.kept
    timing = _timing(work) or (before.provenance.get("timing") if before is not None else None)
    if timing:
        provenance["timing"] = timing
    if before is not None:
        same_shards = before.shards == catalog.shards[: len(before.shards)]
        return replace(
            before,
            shard=before.shard if same_shards else shard_numbers(catalog, before)[np.asarray(before.shard)],
            sample=before.sample if np.array_equal(before.sample, sample) else sample,
            provenance=provenance,
            noise=work.noise,
        )
    groups, group = groups_in_use(plan, plan.group[every])
    return new_field(
        catalog,
        kind=work.kind,
        recipe=work.recipe,
        groups=groups,
        sample=sample,
        group=group,
        variant=plan.variant[every],
        items=work.catalog_item[every],
        provenance=provenance,
        noise=work.noise,
    )


def _timing(work: FieldWork) -> dict[str, Any]:
    """What the run of a field took, in seconds; empty if it encoded nothing."""
    result = work.result
    if result is None or not result.encoded or not result.began:
        return {}
    stages = {stage: round(seconds, 1) for stage, seconds in result.waits.items()}
    return {"encoded": result.encoded, "seconds": round(time.monotonic() - result.began, 3), "stages": stages}


def _notes(samples: SampleTable, new: FieldRows, work: FieldWork, items: NDArray[np.integer]) -> Iterator[Rejected]:
    """Yield the remarks of the kind on its items, each with the first sample that it holds for."""
    for reason, detail, rows in work.kind.remarks(new.columns):
        numbers = np.unique(work.plan.sample[items[rows]])
        sample = int(numbers[0])
        column = samples.inputs[work.kind.inputs[0]]
        name = samples.files.names[int(column.file[sample])]
        line = 0 if column.line is None else column.line[sample]
        note = rejected(name, reason, f"{detail} (samples: {len(numbers)})", count=len(numbers))
        yield replace(note, line=int(line), target=new.name)


def groups_in_use(plan: FieldPlan, group: NDArray[np.int32]) -> tuple[tuple[Group, ...], NDArray[np.int32]]:
    """The groups that some items need, and ``group`` as positions in these."""
    used = np.bincount(group, minlength=len(plan.groups)) > 0
    return tuple(plan.groups[number] for number in np.flatnonzero(used)), (np.cumsum(used, dtype=np.int32) - 1)[group]


def samples_in_use(
    samples: SampleTable, works: Sequence[FieldWork], items: Sequence[NDArray[np.integer]]
) -> tuple[SampleTable, NDArray[np.int32]]:
    """The table of the samples of these items, and the row (S,) of each sample in it, or -1."""
    used = np.zeros(len(samples), dtype=np.bool_)
    for work, chosen in zip(works, items, strict=True):
        used[work.plan.sample[chosen]] = True
    numbers = np.where(used, np.cumsum(used, dtype=np.int32) - 1, -1).astype(np.int32)
    if used.all():
        return samples, numbers
    same_files = [np.arange(len(samples.files))]
    return join_tables([samples], same_files, samples.files, np.flatnonzero(used)), numbers


def _without_young_stats(stat: Any) -> Any:
    """Stat memos with 0 as time of hashing for files that just changed: each build would store another time."""
    memos = np.ascontiguousarray(stat, dtype=np.uint64).reshape(-1, STAT_WIDTH)
    young = racy(memos) & (memos[:, -1] != 0)
    if not young.any():
        return stat
    memos = memos.copy()
    memos[young, -1] = 0
    return memos

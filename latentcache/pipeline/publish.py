"""From what a run found to the next snapshot, and whether it says anything new.

Guarantee: a sample is in a field with all its items, or the field rejects it with a reason; a build that finds
everything there publishes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.protocol import Failure, FieldPlan, Group, join_noise
from latentcache.fields.table import STAT_WIDTH, Files, Rejected, SampleTable, join_tables, stat_numbers
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.pipeline.diff import FieldWork, usable_items
from latentcache.pipeline.preflight import provenance
from latentcache.pipeline.report import BuildPlan, BuildReport, field_done
from latentcache.pipeline.workers.results import RunResult
from latentcache.sources.archives.members import is_read_by_workers, places, read_image
from latentcache.sources.causes import rejected
from latentcache.sources.known import racy
from latentcache.store.catalog import Catalog
from latentcache.store.paths import CachePaths
from latentcache.store.publish import NewSnapshot, new_field, publish_snapshot, shard_numbers
from latentcache.store.snapshot import FieldColumns, Snapshot

#: Manifest keys of a field's provenance that decide whether an input can be used.
_DECODERS = "decoders"
_LOST = Failure(reason="entry-lost", detail="its entry was not committed")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One field after its run."""

    work: FieldWork
    result: RunResult | None = None
    seconds: float = 0.0
    rejected: dict[int, Rejected] = field(default_factory=dict)
    """By row of the sample table: before the run and by it."""
    noise: Mapping[str, Any] = field(default_factory=dict)
    """Of encoders, beside that of the snapshot and the run."""


def publishable_items(outcome: Outcome, samples: SampleTable, root: Path) -> NDArray[np.integer]:
    """Positions of the items to publish; samples that lack one are rejected in ``outcome``."""
    work = outcome.work
    plan, place = work.plan, work.place
    first = work.described.recipe.spec.first_prompt
    lost, prompts = place < 0, plan.variant >= first
    found, lacking, any_lost = dict(work.rejected), np.empty(0, dtype=np.intp), bool(lost.any())
    if any_lost:
        if (lost & prompts).any():
            work.plan = replace(plan, notes=(*plan.notes, _without_prompt(samples, outcome)))
        lacking = np.flatnonzero(np.bincount(plan.sample[lost & ~prompts]))
        failed = dict(outcome.result.failed) if outcome.result else {}
        content = work.kind.content(samples)
        causes = {failure.content or content[row].tobytes(): failure for row, failure in failed.items()}
        causes.pop(bytes(HASH_BYTES), None)
        for row in set(lacking.tolist()).difference(found):
            failure = failed.get(row) or causes.get(content[row].tobytes()) or _LOST
            found[row] = rejection(samples, work, row, failure)
    outcome.rejected = {row: _with_content(one, samples, work, row, root) for row, one in found.items()}
    if not any_lost:
        return np.arange(len(place), dtype=np.int32)
    usable = np.ones(len(samples), dtype=np.bool_)
    usable[lacking] = False
    return usable_items(plan, usable, first, ~lost)


def _without_prompt(samples: SampleTable, outcome: Outcome) -> Rejected:
    """The note that a prompt of a field could not be made."""
    row = int(outcome.work.plan.sample[0])
    failure = dict(outcome.result.failed).get(row, _LOST) if outcome.result else _LOST
    return Rejected(
        name=samples.names[row],
        reason="prompt-not-stored",
        detail=f"a prompt beside the captions could not be encoded: {failure.detail}",
        hint=failure.hint or "run the same command again",
        target=outcome.work.kind.name,
    )


def rejection(samples: SampleTable, work: FieldWork, row: int, failure: Failure) -> Rejected:
    """Why a field rejects a sample."""
    name, line = samples.where(row)
    return Rejected(
        name=name,
        reason=failure.reason,
        detail=failure.detail,
        hint=failure.hint,
        line=line,
        field=failure.field,
        content=failure.content if any(failure.content) else b"",
        stat=failure.stat,
        target=work.kind.name,
    )


def _with_content(one: Rejected, samples: SampleTable, work: FieldWork, row: int, root: Path) -> Rejected:
    """A rejection with the content and stat that it was made for: it holds until the bytes change."""
    own = work.kind.inputs[0]
    column = samples.inputs[own]
    if len(work.kind.inputs) > 1 or column.file[row] < 0:
        return replace(one, stat=())  # a memo of one file says nothing of the others
    seen = tuple(np.asarray(samples.files.stat[int(column.file[row])]).tolist())
    content = one.content or np.asarray(column.content[row]).tobytes()
    if any(content) or not is_read_by_workers(samples, own):
        return replace(one, content=content if any(content) else b"", stat=one.stat or seen)
    try:
        data, memo = read_image(root, places(samples, [row], own)[0])
    except UnusableSampleError:
        return replace(one, stat=seen)
    stat = stat_numbers(memo)
    is_same = stat[:5] == seen[:5]  # else it changed since the scan
    return replace(one, content=content_hash(data) if is_same else b"", stat=stat if is_same else seen)


def publish(
    paths: CachePaths,
    base: NewSnapshot,
    outcomes: Sequence[Outcome],
    catalog: Catalog,
    *,
    plan: BuildPlan,
    root: Path,
    current: Snapshot | None,
    started: float,
) -> BuildReport:
    """Publish what a run made, unless it tells what the current snapshot does. Errors as publishing has.

    Args:
        paths: Of the cache.
        base: With all samples, without fields; ``rejected`` and ``notes`` are those of the source.
        outcomes: Of all fields.
        catalog: Every committed item, loaded after the run.
        plan: For the report.
        root: Of the data.
        current: The snapshot that readers see.
        started: When the build began.
    """
    new = new_snapshot(base, outcomes, catalog, root=root)
    catalog.forget()

    def is_unchanged(manifest: Mapping[str, Any]) -> bool:
        return current is not None and _comparable(manifest) == _comparable(current.manifest)

    number = publish_snapshot(paths, new, current, is_unchanged)
    return BuildReport(
        plan=plan,
        fields={one.name: field_done(outcome, one) for outcome, one in zip(outcomes, new.fields, strict=True)},
        rejected=tuple(new.rejected),
        notes=tuple(new.notes),
        snapshot=number or (current.number if current is not None else 0),
        published=number > 0,
        elapsed_s=time.monotonic() - started,
    )


def new_snapshot(base: NewSnapshot, outcomes: Sequence[Outcome], catalog: Catalog, *, root: Path) -> NewSnapshot:
    """Draw up the next snapshot; settles the outcomes. Arguments as :func:`publish` has."""
    samples = base.samples
    items = [publishable_items(outcome, samples, root) for outcome in outcomes]
    used = np.zeros(len(samples), dtype=np.bool_)
    for outcome, chosen in zip(outcomes, items, strict=True):
        used[outcome.work.plan.sample[chosen]] = True
    numbers = None if used.all() else np.cumsum(used, dtype=np.int32) - 1
    fields = tuple(_field(outcome, chosen, numbers, catalog) for outcome, chosen in zip(outcomes, items, strict=True))
    rejected = [*base.rejected, *(one for outcome in outcomes for one in outcome.rejected.values())]
    kept = samples if numbers is None else select_samples(samples, np.flatnonzero(used))
    stat = _without_young_stats(kept.files.stat)
    return replace(
        base,
        samples=kept if stat is kept.files.stat else replace(kept, files=replace(kept.files, stat=stat)),
        fields=fields,
        shards=catalog.shards,
        rejected=sorted(map(_rejection_without_young_stat, rejected), key=_order),
        notes=[
            *(note for note in base.notes if not note.target),
            *(note for outcome in outcomes for note in outcome.work.plan.notes),
            *(note for one in zip(fields, outcomes, items, strict=True) for note in _notes(samples, *one)),
        ],
        demo=any(outcome.work.described.demo for outcome in outcomes),
    )


def _field(
    outcome: Outcome, items: NDArray[np.integer], numbers: NDArray[np.int32] | None, catalog: Catalog
) -> FieldColumns:
    """Rows of one field, in the order of samples, then groups, then variants; ``numbers``: new ones of samples."""
    work = outcome.work
    every = slice(None) if len(items) == len(work.place) else items
    plan, recipe, before = work.plan, work.described.recipe, work.kept
    noise = join_noise(before.noise if before is not None else {}, outcome.noise)
    sample = plan.sample[every] if numbers is None else numbers[plan.sample[every]]
    if before is not None and work.unchanged:
        same_shards = before.shards == catalog.shards[: len(before.shards)]
        return replace(
            before,
            shard=before.shard if same_shards else shard_numbers(catalog, before)[np.asarray(before.shard)],
            sample=before.sample if np.array_equal(before.sample, sample) else sample,
            provenance=provenance(work.described),
            noise=noise,
        )
    groups, group = groups_in_use(plan, plan.group[every])
    return new_field(
        catalog,
        kind=work.kind,
        recipe=recipe,
        groups=groups,
        sample=sample,
        group=group,
        variant=plan.variant[every],
        place=work.place[every],
        provenance=provenance(work.described),
        noise=join_noise(noise, outcome.result.noise) if outcome.result else noise,
        known=before,
    )


def _notes(
    samples: SampleTable, new: FieldColumns, outcome: Outcome, items: NDArray[np.integer]
) -> Iterator[Rejected]:
    """What the kind has to say of its items, each with the first sample that it holds for."""
    for reason, detail, rows in outcome.work.kind.remarks(new.columns):
        found = np.unique(outcome.work.plan.sample[items[rows]])
        sample, count = int(found[0]), len(found)
        column = samples.inputs[outcome.work.kind.inputs[0]]
        note = rejected(
            str(samples.files.names[int(column.file[sample])]),
            reason,
            f"{detail} (samples: {count})",
            count=count,
        )
        yield replace(note, line=0 if column.line is None else int(column.line[sample]), target=new.name)


def groups_in_use(plan: FieldPlan, group: NDArray[np.int32]) -> tuple[tuple[Group, ...], NDArray[np.int32]]:
    """The groups that some items need, and ``group`` as positions in these."""
    used = np.bincount(group, minlength=len(plan.groups)) > 0
    return tuple(plan.groups[number] for number in np.flatnonzero(used)), (np.cumsum(used, dtype=np.int32) - 1)[group]


def select_samples(samples: SampleTable, rows: NDArray[np.intp]) -> SampleTable:
    """The table of some samples. Whole files of the others go; files of records and tables stay."""
    gone = np.zeros(len(samples.files), dtype=np.bool_)
    for one in samples.inputs.values():
        whole = np.asarray(one.file) if one.line is None else np.where(np.asarray(one.line) > 0, -1, one.file)
        gone[whole[whole >= 0]] = True
    for one in samples.inputs.values():
        kept = np.asarray(one.file)[rows]
        gone[kept[kept >= 0]] = False
    rest, files = np.flatnonzero(~gone), samples.files
    chosen = Files(
        names=files.names.select(rest),
        stat=np.asarray(files.stat)[rest],
        content=np.asarray(files.content)[rest],
        reading=None if files.reading is None else np.asarray(files.reading)[rest],
    )
    return join_tables([samples], [np.cumsum(~gone, dtype=np.int64) - 1], chosen, rows)


def _comparable(manifest: Mapping[str, Any]) -> Any:
    """What makes a snapshot another one: not its time, and not on which machine entries were made."""
    named = ("complete", "allow_failed", "shards", "inputs", "columns", "rejected")
    fields = [
        (name, {**one, "provenance": one["provenance"].get(_DECODERS), "noise": None})
        for name, one in manifest["fields"].items()
    ]
    found = {name: manifest[name] for name in named} | {"fields": fields}
    return json.loads(json.dumps(found | {"source": {**manifest["source"], "relative": ""}}))


def _without_young_stats(stat: Any) -> Any:
    """Stat memos, with 0 as the moment of hashing where it is too early to trust them: every build has another."""
    memos = np.ascontiguousarray(stat, dtype=np.uint64).reshape(-1, STAT_WIDTH)
    young = racy(memos) & (memos[:, -1] != 0)
    if not young.any():
        return stat
    memos = memos.copy()
    memos[young, -1] = 0
    return memos


def _rejection_without_young_stat(one: Rejected) -> Rejected:
    return replace(one, stat=tuple(np.asarray(_without_young_stats([one.stat]))[0].tolist())) if one.stat else one


def _order(one: Rejected) -> tuple[bytes, int, str]:
    return one.name.encode("utf-8", "surrogateescape"), one.line, one.target

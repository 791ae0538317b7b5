"""The difference between what a field needs and what is committed, in columns.

Decides which inputs are read. Items whose key is committed are cached. Items of equal keys are made once. Inputs that
an earlier build rejected are skipped until their bytes change. Cost: numpy columns only. A Python object exists per
input that is to be read, and only while it is handed to a worker.

Unread images that agree in size and in their first bytes are hashed before, so that a plan counts entries and not
images. This costs one short read of each image whose size another image has. Rows of parquet files are left out:
their sizes are known only after decompression, so finding equal rows would read all data twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.dtypes import DTYPES
from latentcache.fields.protocol import Described, FieldKind, FieldPlan, FieldRecipe, Job, Output
from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES, RECIPE_BYTES
from latentcache.plan.documents import spread
from latentcache.plan.shuffle import shuffled
from latentcache.sources.known import match_names, with_hashes
from latentcache.sources.locations import Location, is_read_by_workers, open_image, read_each, read_head, sizes
from latentcache.store.catalog import Catalog

if TYPE_CHECKING:
    from latentcache.pipeline.workers.engine import RunResult
    from latentcache.sources.scan import Listing
    from latentcache.store.snapshot import FieldRows

#: Bytes that an item takes beside its payload: an entry's part of an LMDB page, head, index and columns; in a block.
_ENTRY_BYTES, _PACKED_BYTES = 2700, 100
#: Cost (characters) that one element of a ragged item stands for.
_COST_PER_ELEMENT = 3
#: Rows that are keyed, looked up or named at a time.
SLICE = 1 << 17
_JOBS = 1 << 10
#: Neighbors of one group in a shuffled order, so that batches are full.
_RUN = 16
#: Reasons of failures that every build tries again: they depend on flags, the machine or the time.
AGAIN = frozenset(("too-many-pixels", "out-of-memory", "entry-lost", "permission", "io-error",
                   "changing", "not-found", "needs-pyav"))  # fmt: skip
#: Spreads sizes over all bits.
_PRIME = np.uint64(0x9E37_79B9_7F4A_7C15)
_UNREAD = bytes(HASH_BYTES)


@dataclass(slots=True, kw_only=True)
class FieldWork:
    """One field of a build with its P items, counted by distinct keys. An unread input counts as new."""

    kind: FieldKind
    described: Described
    before: FieldRows | None
    """The field in the current snapshot."""
    plan: FieldPlan
    """Without keys and costs, and without items of rejected samples."""
    kept: FieldRows | None
    """``before``, if it has exactly these items: it is taken over."""
    catalog_item: NDArray[np.int32]
    """(P,) number of each item in the catalog, or its row in ``kept``; -1: not committed, or unread."""
    rejected: dict[int, Rejected]
    """By row of the sample table."""
    todo: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    """(T,) items to make, in the order of their jobs."""
    costs: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """(T,) their costs."""
    duplicates: int = 0
    """Items that an earlier sample gives as well: they share its entry."""
    assumed: int = 0
    """Items of unread inputs that are committed already, without a snapshot that names them."""
    result: RunResult | None = None
    """Result of its run; None: there was nothing to do, or no run yet."""
    replan: int = 0
    """Items that ``--replan`` would encode again."""
    noise: Mapping[str, Any] = field(default_factory=dict)
    """Joined noise of encoders: of the items in ``before``, of a run, of parts."""

    @property
    def name(self) -> str:
        """Name of the field."""
        return self.kind.name

    @property
    def recipe(self) -> FieldRecipe:
        """Recipe of the field."""
        return self.described.recipe

    @property
    def about(self) -> dict[str, str]:
        """Lines on its recipe: label -> text."""
        return dict(self.kind.describe(self.recipe, self.described.provenance))

    @property
    def committed(self) -> int:
        """Distinct items that are committed."""
        if self.kept is not None and self.kept.packing != "block":
            return self.kept.entries
        if self.kept is not None:  # several rows may have one item
            item = np.asarray(self.kept.entry).astype(np.int64) << 32 | np.asarray(self.kept.start)
            return len(item) if (item[1:] > item[:-1]).all() else len(np.unique(item))
        seen = np.zeros(int(self.catalog_item.max(initial=-1)) + 2, dtype=np.bool_)
        seen[self.catalog_item] = True  # the last one: -1
        return int(np.count_nonzero(seen[:-1]))

    @property
    def items(self) -> int:
        """All that are needed."""
        return len(self.catalog_item) - self.duplicates

    @property
    def cached(self) -> int:
        """Items that are committed already, also by a build that was killed."""
        return self.items - len(self.todo) + self.assumed

    @property
    def to_make(self) -> int:
        """Items to encode, at most."""
        return self.items - self.cached

    @property
    def cost(self) -> int:
        """Cost of all items to make."""
        return int(self.costs.sum())

    @property
    def inputs(self) -> int:
        """Distinct inputs to read."""
        return int(np.count_nonzero(np.diff(self.plan.sample[self.todo]))) + bool(len(self.todo))

    @property
    def bytes_to_write(self) -> int:
        """Bytes on disk of the items to make, about."""
        sizes = np.array([np.prod(group.shape) for group in self.plan.groups], dtype=np.int64)
        is_ragged = self.recipe.spec.ragged
        count = self.cost // _COST_PER_ELEMENT if is_ragged else int(sizes[self.plan.group[self.todo]].sum())
        beside = _PACKED_BYTES if self.kind.packing == "block" else _ENTRY_BYTES
        return count * DTYPES[self.recipe.spec.dtype][1] + beside * len(self.todo)

    @property
    def replan_seconds(self) -> float | None:
        """Seconds that :attr:`replan` takes at the rate of the last run; None: no run is known."""
        timing = self.before.provenance.get("timing") if self.before is not None else None
        return self.replan * timing["seconds"] / timing["encoded"] if timing else None

    @property
    def groups(self) -> tuple[tuple[str, int], ...]:
        """(label, needed items) of the groups in use."""
        counts = np.bincount(self.plan.group, minlength=len(self.plan.groups)).tolist()
        return tuple((group.label, count) for group, count in zip(self.plan.groups, counts, strict=True) if count)

    @property
    def changed(self) -> tuple[tuple[str, Any, Any], ...]:
        """Settings in which the recipe differs from the snapshot's."""
        if self.before is None or self.before.recipe is None:
            return ()
        both = self.before.provenance, self.described.provenance
        differences = self.before.recipe.differences(self.recipe, both)
        labels = self.before.provenance.get("label") or self.described.label, self.described.label
        is_other = differences and os.path.realpath(labels[0]) != os.path.realpath(labels[1])
        return (*([("encoder", *labels)] if is_other else ()), *differences)

    @property
    def replaced(self) -> int:
        """Entries of the snapshot that were made with another recipe."""
        before = self.before
        return 0 if before is None or before.recipe_id == self.recipe.recipe_id else before.entries

    def shuffle(self, samples: SampleTable) -> None:
        """Bring jobs of every group to the front: an early snapshot has every bucket. Records keep their order."""
        if samples.inputs[self.kind.inputs[0]].line is not None:
            return
        sample = self.plan.sample[self.todo]
        starts = np.flatnonzero(np.diff(sample, prepend=-1))
        counts = np.diff(starts, append=len(sample))
        jobs = shuffled(len(starts), 0, 0, stream=0)
        group = self.plan.group[self.todo[starts]]
        jobs = jobs[np.argsort(group[jobs], kind="stable")]
        is_first = np.diff(group[jobs], prepend=-1) != 0
        position = np.arange(len(jobs)) - np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        run = np.cumsum(position % _RUN == 0) - 1
        draw = shuffled(int(run[-1]) + 1, 0, 0, stream=1)[run]
        jobs = jobs[np.lexsort((draw, position >= _RUN))]
        items = spread(starts[jobs], counts[jobs])
        self.todo = self.todo[items]
        self.costs = self.costs[items]

    def good_jobs(self, listing: Listing) -> Iterator[Job]:
        """One job of the plan whose items are committed; nothing is read before it is asked for."""
        item = np.flatnonzero(self.catalog_item >= 0)[:1]
        cost = self.costs.max(initial=1)
        yield from replace(self, todo=item, costs=np.full(len(item), cost, dtype=np.int64)).jobs(listing)

    def jobs(self, listing: Listing) -> Iterator[Job]:
        """The jobs of the items to make, one at a time."""
        samples = listing.samples
        sample = self.plan.sample[self.todo]
        bounds = np.append(np.flatnonzero(np.diff(sample, prepend=-1)), len(sample))
        starts, ends = bounds[:-1], bounds[1:]
        rows = sample[starts]
        del sample  # this frame stays while workers encode
        content = self.kind.content(samples)
        wanted = self.kind.sample_columns
        columns_now = {name: samples.columns[name] for name in wanted if name in samples.columns}
        inputs = listing.job_inputs(rows, self.kind.inputs)
        for first in range(0, len(rows), _JOBS):
            chosen = rows[first : first + _JOBS]
            span = slice(starts[first], ends[first + len(chosen) - 1])
            hashes = np.ascontiguousarray(content[chosen]).view(f"V{HASH_BYTES}")[:, 0].tolist()
            columns = [np.asarray(column[chosen]).tolist() for column in columns_now.values()]
            sums = np.add.reduceat(self.costs[span], starts[first : first + _JOBS] - span.start)
            items = self.todo[span]
            item_parts = zip(
                items.tolist(), self.plan.group[items].tolist(), self.plan.variant[items].tolist(), strict=True
            )
            outputs = (Output(item=item, group=group, variant=variant) for item, group, variant in item_parts)
            for (row, *values), name, known, count, cost in zip(
                zip(chosen.tolist(), *columns, strict=True),
                samples.names.take(chosen),
                hashes,
                (ends - starts)[first : first + _JOBS].tolist(),
                np.maximum(sums, 1).tolist(),
                strict=True,
            ):
                yield Job(
                    sample=row,
                    name=name,
                    inputs=next(inputs)[1],
                    content=b"" if known == _UNREAD else known,
                    sample_columns=dict(zip(columns_now, values, strict=True)),
                    outputs=tuple(islice(outputs, count)),
                    cost=cost,
                )


def field_work(
    kind: FieldKind,
    described: Described,
    before: FieldRows | None,
    samples: SampleTable,
    catalog: Catalog,
    rejected: Mapping[int, Rejected],
    *,
    unusable: NDArray[np.bool_] | None = None,
    unfinished: bool = False,
) -> FieldWork:
    """Compare what a field needs with what is committed.

    ``unusable`` (S,): samples whose image is rejected, so that their caption is not encoded either; ``unfinished``:
    items of unread inputs may be committed, too.
    """
    plan = kind.plan(samples, described.recipe)
    failed = dict(rejected)
    for row, rejection in plan.rejected:
        failed.setdefault(row, replace(rejection, target=kind.name))
    if failed or unusable is not None:
        usable = np.ones(len(samples), dtype=np.bool_) if unusable is None else ~unusable
        usable[np.fromiter(failed, dtype=np.intp, count=len(failed))] = False
        rows = usable_items(plan, usable, described.recipe.spec.first_prompt)
        plan = replace(plan, **{name: getattr(plan, name)[rows] for name in ("sample", "group", "variant", "cost")})
    same = before if before is not None and before.recipe_id == described.recipe.recipe_id else None
    kept = None
    if same is not None and catalog.is_whole(same.shards):
        numbers = None if samples.names is same.samples.names else match_names(samples.names, same.samples.names)
        kept = same if same.holds(plan, samples, numbers) else None
    content = kind.content(samples)
    work = FieldWork(
        kind=kind,
        described=described,
        before=before,
        plan=plan,
        kept=kept,
        catalog_item=np.arange(len(plan.sample), dtype=np.int32),
        rejected=failed,
        noise={} if same is None else same.noise,
    )
    find_items(work, samples, catalog)
    catalog_item = work.catalog_item
    missing = np.flatnonzero(catalog_item < 0)
    missing = missing[_is_known(content[plan.sample[missing]])]
    repeated = missing[_repeats(plan.keys(kind, content, described.recipe, missing))]
    wanted = catalog_item < 0
    wanted[repeated] = False
    work.todo = _ordered(np.flatnonzero(wanted), plan, samples, kind)
    work.costs = plan.cost[work.todo]
    committed = work.committed
    work.duplicates = len(repeated) + int(np.count_nonzero(catalog_item >= 0)) - committed
    if unfinished and (unread := int(np.count_nonzero(wanted)) + len(repeated) - len(missing)):
        # Committed items of this recipe that no known input accounts for.
        free = catalog.count(kind.kind, described.recipe.recipe_id[:RECIPE_BYTES]) - committed
        work.assumed = min(free, unread)
    work.plan = replace(plan, cost=plan.cost[:0].copy())
    return work


def usable_items(
    plan: FieldPlan, usable: NDArray[np.bool_], first_prompt: int, committed: NDArray[np.bool_] | bool = True
) -> NDArray[np.intp]:
    """Positions of the items of usable samples (S,); ``committed`` prompts (P,) move to the first usable one."""
    prompts = plan.variant >= first_prompt
    kept = usable[plan.sample] & (~prompts | committed)
    moved = prompts & ~kept & committed
    if not moved.any() or not kept.any():
        return np.flatnonzero(kept)
    plan.sample[moved] = plan.sample[np.argmax(kept)]
    rows = np.flatnonzero(kept | moved)
    return rows[np.argsort(plan.sample[rows], kind="stable")]


def find_items(work: FieldWork, samples: SampleTable, catalog: Catalog) -> None:
    """Look up the items of known content, unless the field is taken over."""
    if work.kept is not None:
        return
    plan = work.plan
    content = work.kind.content(samples)
    work.catalog_item = np.full(len(plan.sample), -1, dtype=np.int32)
    for start in range(0, len(work.catalog_item) if len(catalog.shards) else 0, SLICE):
        some = np.arange(start, min(start + SLICE, len(work.catalog_item)))
        some = some[_is_known(content[plan.sample[some]])]
        if len(some):
            work.catalog_item[some] = catalog.find(plan.keys(work.kind, content, work.recipe, some))


def rejected_before(
    samples: SampleTable,
    kind: FieldKind,
    described: Described,
    before: FieldRows | None,
    rejected: Sequence[Rejected],
) -> dict[int, Rejected]:
    """By row, the old rejections that hold: recipe, versions of the decoders and content are the same."""
    held = [rejection for rejection in rejected if rejection.target == kind.name and rejection.reason not in AGAIN]
    by_content = {rejection.content: rejection for rejection in held if rejection.content}
    if not by_content or before is None or before.recipe is None:
        return {}
    same = before.recipe.as_json() == described.recipe.as_json()
    if not same or before.provenance.get("decoders") != described.provenance.get("decoders"):
        return {}
    content = np.ascontiguousarray(kind.content(samples))
    heads = np.frombuffer(b"".join(by_content), dtype=np.uint64)[::2]
    rows = np.flatnonzero(np.isin(content.view(np.uint64)[:, 0], heads)).tolist()
    again = {row: by_content[content[row].tobytes()] for row in rows if content[row].tobytes() in by_content}
    where = {row: samples.where(row) for row in again}
    return {row: replace(rejection, name=where[row][0], line=where[row][1]) for row, rejection in again.items()}


def _is_known(content: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """(n,) True for contents (n, 16) that are not zeros."""
    halves = np.ascontiguousarray(content).view(np.uint64)
    return np.asarray(halves[:, 0] | halves[:, 1] != 0)


def _repeats(keys: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Positions of keys that an earlier position has too."""
    words = np.ascontiguousarray(keys).view(np.uint64)
    marks = words[:, 1] ^ words[:, 0]
    order = np.argsort(marks, kind="stable")
    near = np.flatnonzero(marks[order[1:]] == marks[order[:-1]])
    same = (words[order[near + 1]] == words[order[near]]).all(axis=1)
    repeated: NDArray[np.intp] = order[near[same] + 1]
    return repeated


def _ordered(items: NDArray[np.intp], plan: FieldPlan, samples: SampleTable, kind: FieldKind) -> NDArray[np.intp]:
    """Items in the order of their jobs: by the sample's first group, records as in their files."""
    sample = plan.sample[items]
    order = np.argsort(sample, kind="stable")
    items = items[order]
    sample = sample[order]
    if samples.inputs[kind.inputs[0]].line is not None or not len(items):
        return items
    new = np.diff(sample, prepend=-1) != 0
    group = plan.group[items[new]][np.cumsum(new) - 1]
    return items[np.argsort(group, kind="stable")]


def with_equal_files(
    samples: SampleTable,
    name: str,
    root: Path,
    heads: NDArray[np.uint64] | None = None,
    *,
    stopping: Callable[[], bool] = bool,
) -> SampleTable:
    """The table with the contents of unread images that are equal to another one, as far as their heads show.

    ``heads``: (S,) hashes of their first bytes, 0 where it is not known.
    """
    if not is_read_by_workers(samples, name):
        return samples

    held = samples.inputs[name]
    size = sizes(samples, np.arange(len(samples)), name)
    unread: NDArray[np.bool_] = np.asarray(~np.asarray(held.content).any(axis=1))
    rows = np.flatnonzero((np.asarray(held.file) >= 0) & (size > 0))
    rows = rows[_shared(size[rows], unread[rows])]

    def head(location: Location) -> int:
        with open_image(root, location) as file:
            return read_head(file)[0]

    # An unreadable image gets its reason from the worker that encodes it.
    marks = np.zeros(len(rows), dtype=np.uint64) if heads is None else heads[rows]
    unknown = np.flatnonzero(marks == 0)
    for at, answer in read_each(head, samples, rows[unknown], name, stopping):
        marks[unknown[at]] = answer if isinstance(answer, int) else 0
    rows = rows[marks > 0]
    marks = marks[marks > 0]
    rows = rows[_shared(size[rows] * _PRIME ^ marks, unread[rows])]
    return with_hashes(root, samples, name, rows[unread[rows]], stopping)[0]


def _shared(marks: NDArray[np.uint64], unread: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Positions of marks that occur more than once, at least once unread."""
    near = np.flatnonzero(np.isin(marks, marks[unread]))
    _, which, counts = np.unique(marks[near], return_inverse=True, return_counts=True)
    shared: NDArray[np.intp] = near[counts[which.reshape(-1)] > 1]
    return shared

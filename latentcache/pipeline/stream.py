"""Streaming builds: readers may train while the cache is being made.

The pending snapshot names every sample and item before anything is encoded. Inputs are hashed first, so all keys are
known. A failed item keeps its position and becomes a line of the pending snapshot. Images are encoded in the order in
which a loader asks for them in epoch 0. Records are encoded in the order of their files, which are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.protocol import Failure, FieldPlan, Job
from latentcache.fields.table import SampleTable
from latentcache.pipeline.diff import FieldWork
from latentcache.pipeline.publish import groups_in_use, rejection, samples_in_use
from latentcache.plan.batching import BatchPlan, Bucket, size_rank
from latentcache.plan.samples import SampleIndex, plan_epoch
from latentcache.store.paths import CachePaths
from latentcache.store.pending import pending_field, publish_pending, reject_pending
from latentcache.store.publish import NewSnapshot
from latentcache.store.snapshot import FieldRows


class Streaming:
    """The pending snapshot of a build, published when this object is made; ``base`` has all samples, no fields."""

    def __init__(
        self, base: NewSnapshot, paths: CachePaths, works: Sequence[FieldWork], *, seed: int, batch: int
    ) -> None:
        samples = self._samples = base.samples
        self._paths = paths
        contents = [np.asarray(work.kind.content(samples)) for work in works]
        items = [np.flatnonzero(own[work.plan.sample].any(axis=1)) for work, own in zip(works, contents, strict=True)]
        table, self._numbers = samples_in_use(samples, works, items)
        fields = tuple(self._field(*one) for one in zip(works, items, contents, strict=True))
        demo = any(work.described.demo for work in works)
        publish_pending(paths, replace(base, samples=table, fields=fields, demo=demo))
        self._rank = loader_order(works, samples, seed, batch)

    def ordered(self, work: FieldWork) -> FieldWork:
        """The work with its jobs in the order of the loader. Work of records stays in the order of their files."""
        if self._samples.inputs[work.kind.inputs[0]].line is not None:
            return work
        order = np.argsort(self._rank[work.plan.sample[work.todo]], kind="stable")
        return replace(work, todo=work.todo[order], costs=work.costs[order])

    def failed(self, work: FieldWork, job: Job, failure: Failure) -> None:
        """Append the samples that will not come: those of this content."""
        content = np.asarray(work.kind.content(self._samples))
        rows = np.flatnonzero((content == content[job.sample]).all(axis=1) & (self._numbers >= 0)).tolist()
        lines = [(row, rejection(self._samples, work, row, failure)) for row in rows]
        reject_pending(self._paths, [(int(self._numbers[row]), work.name, one) for row, one in lines])

    def _field(self, work: FieldWork, items: NDArray[np.intp], content: NDArray[np.uint8]) -> FieldRows:
        """All items of a field, by key."""
        plan = work.plan
        groups, used = groups_in_use(plan, plan.group[items])
        return pending_field(
            work.kind,
            work.recipe,
            groups=groups,
            sample=self._numbers[plan.sample[items]],
            group=used,
            variant=plan.variant[items],
            key=work.kind.plan_keys(plan, content, work.recipe, items),
            provenance=work.described.provenance,
        )


def loader_order(works: Sequence[FieldWork], samples: SampleTable, seed: int, batch: int) -> NDArray[np.int64]:
    """(S,) when epoch 0 of a loader first asks for each sample; S where it does not."""
    rank = np.full(len(samples), len(samples), dtype=np.int64)
    firsts = [np.flatnonzero(one.recipe.spec.variant_of(one.plan.variant) == 0) for one in works]
    first, plan = max(zip(firsts, (one.plan for one in works), strict=True), key=lambda pair: len(pair[0]))
    first = first[np.argsort(plan.sample[first], kind="stable")]
    for work in works:
        first = first[np.isin(plan.sample[first], work.plan.sample)]
    if not len(first):
        return rank
    index = sample_index(plan, first)
    served = plan.sample[first[plan_epoch(index, BatchPlan(batch_size=batch), seed=seed, epoch=0).rows]]
    rank[served[::-1]] = np.arange(len(served))[::-1]
    return rank


def sample_index(plan: FieldPlan, items: NDArray[np.intp], **more: Any) -> SampleIndex:
    """Planned items as the samples of a loader, in its buckets; ``more`` are further arguments of the index."""
    groups, used = groups_in_use(plan, plan.group[items])
    sizes = [(1, 1, 1) if -1 in group.shape else group.dims for group in groups]  # ragged groups share one
    order = sorted(range(len(groups)), key=lambda number: size_rank(sizes[number]))
    buckets = tuple(Bucket(label=groups[number].label, size=sizes[number]) for number in order)
    return SampleIndex(
        bucket=np.argsort(order).astype(np.int32)[used], buckets=buckets, **{"identify": lambda: "", **more}
    )

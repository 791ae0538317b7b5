"""Samples and their order in an epoch, positions in training, and how training goes on: all as arithmetic.

Guarantee: the same inputs give the same plan everywhere. Every step has one bucket, the same on all ranks. The order
depends on (seed, epoch) and the samples, not on worker counts or library versions. Rank ``r`` of ``W`` takes rows
``r, r + W, ...`` of a step. So two layouts with equal rows per step have equal global batches. Cost: a shuffle of N
numbers and a sort of N 16-bit ones.

After a resume only delivered batches count. With the same rows per step the rest of an epoch is exactly the rest of
its plan, however ranks divide a step. With other sizes the samples that are left are laid out as an epoch of their
own. Nothing is repeated or dropped that the old sizes would have needed to fill their steps. A state is a few plain
values, the same on every rank; a state of other samples raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index as as_index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptyPlanError, PlanError, UsageError, count_of
from latentcache.identity.content import content_hash
from latentcache.plan.batching import (
    MAX_COPIES,
    BatchPlan,
    Bucket,
    BucketPlan,
    PlanReport,
    count_steps,
    require_steps,
    rows_of_last_steps,
)
from latentcache.plan.documents import Ints, spread
from latentcache.plan.mixing import Mixture, occurrences
from latentcache.plan.shuffle import by_bucket, shuffled
from latentcache.value import Value

STATE_VERSION = 1
_ANOTHER = "resume with another checkpoint, or start the epoch again with set_epoch"
Leg = tuple[BatchPlan, int]
"""Sizes of batches, and the steps of an epoch that were served with these."""
_NAMED = 3


class Blocks(Value, eq=False):
    """A shuffle of shards, then of the samples in each window: an epoch reads one window after the other."""

    shard: Ints
    """(N,) number of the shard that each sample is in."""
    samples: int
    """Samples of a window."""

    def order(self, drawn: Ints, seed: int | None, epoch: int) -> NDArray[np.int64]:
        """(K,) positions in ``drawn`` (K,), which are samples, in the order of an epoch."""
        shard = self.shard[drawn]
        position = np.empty(int(self.shard.max(initial=0)) + 1, dtype=np.int32)
        position[shuffled(len(position), seed, epoch, stream=4)] = np.arange(len(position), dtype=np.int32)
        by_shard = np.argsort(position[shard], kind="stable")
        mixed = shuffled(len(drawn), seed, epoch, stream=0)
        return by_shard[mixed[np.argsort(mixed // self.samples, kind="stable")]]

    @property
    def identity(self) -> list[int | str]:
        """What a checkpoint must agree with."""
        return [self.samples, content_hash(self.shard.astype(np.int32).tobytes()).hex()]


class SampleIndex(Value, eq=False):
    """The N samples (or rows of tokens) that a loader serves: all that a plan needs to know of them."""

    bucket: NDArray[np.int32]
    """(N,) bucket of each, as a position in :attr:`buckets`."""
    buckets: tuple[Bucket, ...]
    identify: Callable[[], str]
    """Gives :attr:`identity`."""
    mixture: Mixture | None = None
    parts: tuple[tuple[str, int], ...] = ()
    """Name and samples of each part, whose samples are together in this order."""
    names_of: Callable[[Ints], Sequence[str]] | None = None
    """Names of samples, for messages."""
    snapshot: int = 0
    """Number of the snapshot, for messages."""
    blocks: Blocks | None = None
    """None: all samples of an epoch are shuffled together."""

    @cached_property
    def identity(self) -> str:
        """The name of these samples and buckets, which a checkpoint must agree with."""
        return self.identify()

    def apart(self, batches: BatchPlan) -> SampleIndex:
        """These samples with buckets for each source alone, if every source has a batch size; else the same samples.

        Bucket ``number`` of source ``source`` has the position ``number + source * len(buckets)``.

        Raises:
            UsageError: There are other numbers of batch sizes and sources.
        """
        sizes = batches.batch_size
        mixture = self.mixture
        if not isinstance(sizes, tuple):
            return self
        sources = self.parts if mixture is None else [(source.name, source.entries) for source in mixture]
        if len(sizes) != len(sources):
            problem = f"{len(sizes)} values for {count_of(len(sources), 'sources')}"
            raise UsageError(problem, argument="batch_size", value=list(sizes), fix="give one number for each source")
        buckets = list[Bucket]()
        owner = np.repeat(np.arange(len(sources)), [entries for _, entries in sources])
        for number, (name, _) in enumerate(sources):
            buckets += [replace(bucket, label=f"{bucket} of {name}", source=number) for bucket in self.buckets]
        bucket = (self.bucket + owner * len(self.buckets)).astype(np.int32)
        return replace(self, bucket=bucket, buckets=tuple(buckets))


@dataclass(frozen=True, slots=True, eq=False)
class BatchIndex:
    """Everything that a worker has to know of one batch."""

    epoch: int
    step: int
    """Step of the epoch, from 0."""
    rows: Ints
    """(B,) samples, or rows of tokens."""
    bucket: int
    is_pad: NDArray[np.bool_] | None = None
    """(B,) padding rows; None: there are none."""
    seed: int = 0
    again: Ints | None = None
    """(B,) how often the epoch served each row before; None: never."""


class EpochPlan(Value, eq=False):
    """Every batch of one epoch, or of the rest of one."""

    rows: Ints
    """(K,) samples, step after step."""
    starts: NDArray[np.int64]
    """(steps + 1,) where each step begins in :attr:`rows`."""
    world_size: int
    is_pad: NDArray[np.bool_] | None = None
    """(K,) padding rows: a real row again, which has no loss and counts as nothing."""
    bucket: NDArray[np.int32]
    """(steps,) bucket of each step."""
    seed: int | None
    epoch: int
    before: int = 0
    """Steps of the epoch before these."""
    again: Ints | None = None
    """(K,) how often the epoch served each row before, with weights."""
    window: Ints | None = None
    """(steps,) the window of each step, rising; None: there is one."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, step: int, rank: int = 0) -> BatchIndex:
        """The samples of one rank in one step."""
        part = slice(int(self.starts[step]) + rank, int(self.starts[step + 1]), self.world_size)
        is_pad = None if self.is_pad is None else self.is_pad[part]
        again = None if self.again is None else self.again[part]
        return BatchIndex(
            self.epoch, self.before + step, self.rows[part], int(self.bucket[step]), is_pad, self.seed or 0, again
        )

    def real(self) -> Ints:
        """(n,) the samples that count, without padding."""
        return self.rows if self.is_pad is None else self.rows[~self.is_pad]

    def part(self, first: int, last: int) -> EpochPlan:
        """Some steps."""
        rows = slice(int(self.starts[first]), int(self.starts[last]))
        return replace(
            self,
            rows=self.rows[rows],
            starts=self.starts[first : last + 1] - rows.start,
            is_pad=None if self.is_pad is None else self.is_pad[rows],
            again=None if self.again is None else self.again[rows],
            bucket=self.bucket[first:last],
            window=None if self.window is None else self.window[first:last],
        )


def plan_report(index: SampleIndex, batches: BatchPlan) -> PlanReport:
    """Count the steps and samples of an epoch, bucket by bucket."""
    index = index.apart(batches)
    report = count_steps(index.bucket, index.buckets, batches, index.mixture)
    overfilled = sorted((plan for plan in report.buckets if plan.copies > MAX_COPIES), key=lambda plan: -plan.copies)
    return replace(report, overfilled=tuple(_overfilled(index, plan) for plan in overfilled))


def _overfilled(index: SampleIndex, plan: BucketPlan) -> str:
    """Say that a bucket is mostly repeats, and name its first samples."""
    held = np.flatnonzero(index.bucket == plan.number)[:_NAMED]
    more = ", ..." if plan.samples > _NAMED else ""
    named = f" ({', '.join(index.names_of(held))}{more})" if index.names_of is not None else ""
    return (
        f"bucket {plan.bucket} has {count_of(plan.samples, 'samples')}{named} and repeats"
        f" {'them' if plan.samples > 1 else 'it'} {plan.copies} times in an epoch to fill a batch"
    )


def times_counted(times: NDArray[np.integer] | None, samples: int) -> dict[int, int]:
    """Count samples by occurrences in an epoch: ``{1: 90, 10: 5}``; without ``times`` (n,) each is served once."""
    if times is None:
        return {1: samples}
    counts = np.bincount(times)
    return {number: int(counts[number]) for number in np.flatnonzero(counts).tolist()}


def plan_epoch(
    index: SampleIndex, batches: BatchPlan, *, seed: int | None, epoch: int, served: Ints | None = None
) -> EpochPlan:
    """Lay out one epoch, or what is left of one that served some samples (n,) before.

    Without a seed: bucket by bucket, samples in the order of the index.
    """
    num_buckets = len(index.buckets)
    index = index.apart(batches)
    count = len(index.bucket)
    mixture = index.mixture
    drawn = spare = None
    if mixture is not None or served is not None:
        times = np.ones(count, dtype=np.int64)
        if mixture is not None:
            times = occurrences(index.bucket, mixture, seed=seed, epoch=epoch)
        if served is not None:
            times = np.maximum(times - np.bincount(served, minlength=count), 0)
        elif batches.remainder != "pad":  # fill a step before anything is repeated, also where nothing is due
            spare = np.flatnonzero(times == 0).astype(np.int32)
        drawn = np.repeat(np.arange(count, dtype=np.int32), times)
    if index.blocks is None:
        order = shuffled(count if drawn is None else len(drawn), seed, epoch, stream=0)
    else:
        order = index.blocks.order(np.arange(count) if drawn is None else drawn, seed, epoch).astype(np.int32)
    order = order if drawn is None else drawn[order]
    if served is not None:
        report = count_steps(index.bucket[order], index.buckets, batches)
    else:
        report = count_steps(index.bucket, index.buckets, batches, mixture)
    if spare is not None:
        order = np.concatenate([order, spare[shuffled(len(spare), seed or 0, epoch, stream=3)]])
    bucket = index.bucket[order]
    held = np.bincount(bucket, minlength=len(index.buckets))
    positions: Ints = by_bucket(bucket, len(held)) if len(held) > 1 else np.arange(len(order))
    cuts = np.cumsum(held)[:-1]
    parts = np.split(order[positions], cuts)
    begins = None
    if index.blocks is not None:
        begins = _begins(report, np.split(positions, cuts))
    plan = _in_steps(report, [parts[plan.number] for plan in report.buckets], seed, epoch, begins)
    if begins is not None and index.blocks is not None:
        plan = replace(plan, window=np.sort(begins) // index.blocks.samples)
    if len(index.buckets) > num_buckets:
        plan = replace(plan, bucket=plan.bucket % num_buckets)
    return plan if mixture is None else replace(plan, again=_again(plan, served, count))


def _again(plan: EpochPlan, served: Ints | None, count: int) -> Ints:
    """(K,) 0 when the epoch serves a sample first, 1 the second time; ``served`` (n,) came before the plan."""
    real = np.arange(len(plan.rows)) if plan.is_pad is None else np.flatnonzero(~plan.is_pad)
    rows = plan.real()
    again = np.zeros(len(plan.rows), dtype=np.uint32)
    order = np.argsort(rows, kind="stable")
    times = np.bincount(rows, minlength=count)
    before = 0 if served is None else np.bincount(served, minlength=count)
    again[real[order]] = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times - before, times)
    return again


def _begins(report: PlanReport, positions: Sequence[Ints]) -> Ints:
    """(steps,) where each step begins in an epoch's order, bucket by bucket; ``positions`` are those of samples."""
    begins: list[Ints] = [np.empty(0, dtype=np.int64)]
    for plan in report.buckets:
        of_bucket = positions[plan.number]
        begins.append(of_bucket[(np.arange(plan.steps) * plan.size).clip(max=len(of_bucket) - 1)])
    return np.concatenate(begins)


def _in_steps(
    report: PlanReport, parts: Sequence[Ints], seed: int | None, epoch: int, begins: Ints | None = None
) -> EpochPlan:
    """The rows of each bucket, repeated from the front, cut or padded to fill its steps.

    The steps are shuffled, or in the order of where they begin (steps,).
    """
    batches, plans = report.batches, report.buckets
    filled = [_filled(rows, plan) for rows, plan in zip(parts, plans, strict=True) if plan.steps]
    rows = np.concatenate([np.empty(0, dtype=np.int32), *(of_bucket for of_bucket, _ in filled)])
    is_pad = np.concatenate([np.empty(0, dtype=np.bool_), *(of_bucket for _, of_bucket in filled)])
    counts = np.array([plan.steps for plan in plans], dtype=np.int64)
    bucket = np.repeat(np.array([plan.number for plan in plans], dtype=np.int32), counts)
    sizes = np.repeat(np.array([plan.size for plan in plans], dtype=np.int64), counts)
    sizes[(np.cumsum(counts) - 1)[counts > 0]] = [plan.last for plan in plans if plan.steps]
    order = shuffled(len(bucket), seed, epoch, stream=1) if begins is None else np.argsort(begins, kind="stable")
    starts = np.concatenate(([0], np.cumsum(sizes[order])))
    if len(sizes) and (sizes == sizes[0]).all():  # a fifth of the time of the general way
        rows = rows.reshape(len(sizes), -1)[order].reshape(-1)
        is_pad = is_pad.reshape(len(sizes), -1)[order].reshape(-1)
    else:
        positions = spread((np.cumsum(sizes) - sizes)[order], sizes[order])
        rows = rows[positions]
        is_pad = is_pad[positions]
    padded = is_pad if is_pad.any() else None
    return EpochPlan(rows=rows, starts=starts, world_size=batches.world_size, is_pad=padded, bucket=bucket[order],
                     seed=seed, epoch=epoch)  # fmt: skip


def _filled(rows: Ints, plan: BucketPlan) -> tuple[Ints, NDArray[np.bool_]]:
    """The rows that the steps of one bucket serve, and which are padding; the last two steps share real rows."""
    total = plan.served + plan.padded
    size = plan.size
    filled = np.resize(rows, total)
    is_pad = np.zeros(total, dtype=np.bool_)
    last = rows_of_last_steps(len(rows), size) if plan.padded else ()
    start, taken = total - size * len(last), len(rows) - sum(last)
    for real in last:
        filled[start : start + real] = rows[taken : taken + real]
        filled[start + real : start + size] = np.resize(rows, size - real)
        is_pad[start + real : start + size] = True
        start, taken = start + size, taken + real
    return filled, is_pad


def rest_of_epoch(index: SampleIndex, legs: Sequence[Leg], *, seed: int | None, epoch: int) -> EpochPlan:
    """The rest of an epoch, in steps of the sizes of the last leg; all legs have one policy."""
    plan = None
    begin = 0
    served = np.empty(0, dtype=np.int32)
    layout: tuple[object, ...] = ()
    for batches, steps in legs:
        if plan is None:
            plan = plan_epoch(index, batches, seed=seed, epoch=epoch)
        elif batches.layout != layout and begin < len(plan):
            served = np.concatenate([served, plan.part(0, begin).real()])
            plan = plan_epoch(index, batches, seed=seed, epoch=epoch, served=served)
            begin = 0
            if not len(plan) and batches.remainder == "drop":  # else all that was due is served
                raise EmptyPlanError(
                    f"the rest of epoch {epoch} fills no batch of size {batches.words}",
                    why=f"remainder='drop' leaves out samples that fill no step of {batches.world_size} ranks",
                    fix=f"resume with a smaller batch_size, or go on with the next epoch: set_epoch({epoch + 1})",
                )
        plan = replace(plan, world_size=batches.world_size)
        layout = batches.layout
        begin = begin + steps
        if begin > len(plan):
            raise PlanError(
                "this checkpoint's position counts more batches than its epoch has",
                why=f"{steps} steps of {batches.words} x {batches.world_size} ranks, of {len(plan) - begin + steps}",
                fix=_ANOTHER,
                slug="resume-mismatch",
            )
    assert plan is not None  # there is a leg
    return replace(plan.part(begin, len(plan)), before=sum(steps for _, steps in legs))


@dataclass(slots=True)
class Position:
    """Position of one iteration. The next one has its own, so one that goes on beside it counts for nothing."""

    seed: int | None
    epoch: int = 0
    earlier: tuple[Leg, ...] = ()
    """Steps of this epoch that were delivered with other sizes."""
    delivered: int = 0
    """Steps of this epoch that were delivered with the sizes in use."""
    is_loaded: bool = False
    """True until an iteration goes on from here."""


class Epochs:
    """All epochs of the samples of an index; EmptyPlanError if they have no step."""

    def __init__(self, index: SampleIndex, batches: BatchPlan) -> None:
        self._index = index
        self.report = require_steps(plan_report(index, batches))

    def begin(self, position: Position) -> tuple[Position, EpochPlan]:
        """The position of a new iteration, and what it serves: the rest of a loaded epoch, else the whole epoch."""
        begun = replace(position, is_loaded=False)
        if not position.is_loaded:
            begun = Position(position.seed, position.epoch)
        return begun, self._rest(begun)

    def remaining(self, position: Position) -> int:
        """Batches of one rank that are left of the epoch."""
        return len(self._rest(position)) if position.earlier else self.report.steps - position.delivered

    def state(self, position: Position) -> dict[str, Any]:
        """For a checkpoint: plain values, the same on every rank."""
        head = {"version": STATE_VERSION, "seed": position.seed, "epoch": position.epoch}
        legs = [[_size_state(batches), batches.world_size, steps] for batches, steps in self._legs(position)]
        return {**head, "legs": legs, "snapshot": self._index.snapshot, **self._identity()}

    def load(self, state: Mapping[str, Any]) -> Position:
        """The position of a checkpoint; batch size and number of ranks may differ from those of the checkpoint.

        A checkpoint at the end of an epoch gives the beginning of the next one.
        """
        try:
            if state["version"] != STATE_VERSION:
                raise ValueError(f"version {state['version']!r}; this version of latentcache reads {STATE_VERSION}")
            seed = None if state["seed"] is None else as_index(state["seed"])
            epoch = as_index(state["epoch"])
            remainder = self.report.batches.remainder
            legs = list[Leg]()
            for size, world_size, steps in state["legs"]:
                sizes = size if isinstance(size, dict) else {"batch_size": size}
                batches = BatchPlan(**sizes, world_size=as_index(world_size), remainder=remainder)
                legs.append((batches, as_index(steps)))
            if epoch < 0 or not legs or min(steps for _, steps in legs) < 0:
                raise ValueError(f"epoch {epoch} with the legs {legs}")
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                "this checkpoint's position cannot be read",
                why=f"{type(error).__name__}: {error}",
                fix=_ANOTHER,
                slug="resume-version",
            ) from error
        for name, now in self._identity().items():
            if state.get(name) != now:
                raise PlanError(
                    "this checkpoint belongs to another cache, to other contents of it, or to other settings",
                    where=f"snapshot {state.get('snapshot')} then, {self._index.snapshot} now",
                    why=f"{name}: expected {state.get(name)}, found {now}",
                    fix="resume with the settings and the snapshot of the checkpoint:"
                    f" open_cache(..., snapshot={state.get('snapshot')}), or start the epoch again with set_epoch",
                    slug="resume-mismatch",
                )
        batches = self.report.batches
        delivered = 0
        earlier = tuple(leg for leg in legs if leg[1])
        if earlier and earlier[-1][0] == batches:
            *before, (_, delivered) = earlier
            earlier = tuple(before)
        position = Position(seed, epoch, earlier, delivered, is_loaded=True)
        if earlier or self.remaining(position) < 0:
            self._rest(position)  # raises an error if the state does not fit
        return position if self.remaining(position) else Position(seed, epoch + 1)

    def _legs(self, position: Position) -> tuple[Leg, ...]:
        """Return the legs of an epoch that were delivered; the last leg has the sizes in use."""
        return (*position.earlier, (self.report.batches, position.delivered))

    def _rest(self, position: Position) -> EpochPlan:
        return rest_of_epoch(self._index, self._legs(position), seed=position.seed, epoch=position.epoch)

    def _identity(self) -> dict[str, Any]:
        """Return the values that a checkpoint must agree with."""
        sources = self.report.sources
        blocks = self._index.blocks
        return {
            "plan_id": self._index.identity,
            "remainder": self.report.batches.remainder,
            "weights": [[source.entries, source.samples] for source in sources] or None,
            "shuffle_block": None if blocks is None else blocks.identity,
        }


def _size_state(batches: BatchPlan) -> Any:
    """The size of a batch as plain values: a number, a list of numbers, or a budget with its argument's name."""
    if batches.batch_size is not None:
        return list(batches.batch_size) if isinstance(batches.batch_size, tuple) else batches.batch_size
    unit, budget = batches.budget
    return {f"batch_{unit}": budget, "multiple_of": batches.multiple_of}

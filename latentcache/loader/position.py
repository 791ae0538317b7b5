"""Where a loader stands: what was delivered, what is left, and the checkpoint that says so.

Guarantee: only delivered batches count, never those read ahead; the state is a few plain values, the same on
every rank; a state of another cache, or of other entries, is refused by name and not silently misapplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptyPlanError, PlanError
from latentcache.loader.blank import warn_of_blank
from latentcache.loader.entries import Entries
from latentcache.plan.batches import PlanReport
from latentcache.plan.cursor import (
    MIXED_VERSION,
    Cursor,
    Leg,
    Walk,
    require_served,
    rest_of_epoch,
    unreadable,
    walked,
)
from latentcache.plan.epoch import EpochPlan
from latentcache.plan.fill import named, real
from latentcache.plan.lengths import Drawn
from latentcache.plan.weights import Mixture


class Position:
    """The place of one loader in one epoch.

    Args:
        entries: What is served.
        report: The steps of an epoch.
        seed: Of the order.
        generation: Number of the generation, for messages.
    """

    def __init__(self, entries: Entries, report: PlanReport, *, seed: int, generation: int) -> None:
        self._entries, self._report, self._generation = entries, report, generation
        self._passing = 0
        self._cursor = self._start(seed, 0)
        self._loaded = False
        self._whole: tuple[int, EpochPlan] | None = None
        self._named: tuple[str, ...] = ()

    @property
    def entries(self) -> Entries:
        """What is served."""
        return self._entries

    @property
    def seed(self) -> int:
        """Of the order; that of the checkpoint after :meth:`load`."""
        return self._counted.seed  # what was delivered does not change it, and every batch asks

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._counted.epoch

    @property
    def passing(self) -> int:
        """Names the pass whose batches count: another one after :meth:`begin`, another epoch and :meth:`load`."""
        return self._passing

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the one it is in already keeps its place (a trainer that resumes says it)."""
        if epoch != self._cursor.epoch:
            self._cursor, self._loaded = self._start(self._cursor.seed, epoch), False
            self._passing += 1

    def begin(self) -> EpochPlan:
        """What the next pass serves: the rest of a loaded epoch, once; else the whole epoch again.

        A loaded epoch that is complete is served again too, so that a pass never yields nothing.

        Raises:
            EmptyPlanError: Samples are left of the loaded epoch, and they fill no batch of this size.
        """
        if not self._loaded or self._all_served():
            self._cursor = self._start(self._cursor.seed, self._cursor.epoch)
        self._loaded = False
        self._passing += 1
        rest = self._rest()
        if (batches := self._report.batches).small_buckets == "mask":
            warn_of_blank(rest, batches.batch_size)
        done = tuple(leg for leg in self._cursor.legs if leg.steps)
        last_fits = done and replace(done[-1], steps=0) == self._leg(0)
        self._cursor = replace(self._cursor, legs=done if last_fits else (*done, self._leg(0)))
        return rest

    def whole(self) -> EpochPlan:
        """The whole epoch, whatever was served of it."""
        if self._whole is None or self._whole[0] != self.epoch:
            self._whole = self.epoch, self._planned(self._start(self._cursor.seed, self.epoch))
        return self._whole[1]

    @property
    def steps(self) -> int:
        """Steps of this epoch that were delivered."""
        return self._cursor.steps

    def delivered(self, epoch: int) -> NDArray[np.integer]:
        """Rows that were served in an epoch, on all ranks: all of an epoch before this one, none of one after it."""
        cursor = self._cursor if epoch == self.epoch else self._start(self.seed, epoch)
        if epoch < self.epoch:
            return self._entries.rows(self._planned(cursor).rows)
        drawn = self._drawn(cursor)
        served = self._walked(cursor, drawn).served
        return self._entries.rows(served if drawn is None else named(served, drawn.entry))

    def remaining(self) -> int:
        """Batches of this rank that are left of the epoch."""
        *before, last = self._cursor.legs
        if not before and replace(last, steps=0) == self._leg(0):
            return self._report.steps - last.steps  # without planning it
        return len(self._rest())

    def advance(self, batches: int = 1, of: int | None = None) -> None:
        """So many batches were delivered.

        Args:
            batches: Their number.
            of: The pass that delivered them, by :attr:`passing` after it began; one that is over counts nothing.
        """
        if of is None or of == self._passing:
            self._delivered += batches  # no more than this while a training step waits

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values, the same on every rank."""
        state = {**self._cursor.as_json(), "generation": self._generation, "plan_id": self._identities()[0]}
        if self._entries.nested:
            state["upward"] = True
        mixture = self._report.mixture
        return {**state, "version": MIXED_VERSION, "datasets": mixture.as_json()} if mixture else state

    def load(self, state: Mapping[str, Any]) -> None:
        """Go where a checkpoint says; the batch size and the number of ranks may be others than they were.

        Raises:
            PlanError: Other entries than those the checkpoint counted, another policy, other weights of data sets, a
                newer checkpoint, or one that cannot be.
        """
        cursor = Cursor.from_json(state)
        if "lengths_for" in state:
            raise unreadable("it was made by a version that laid the lengths of rows out once for all epochs")
        if self._entries.nested and len(cursor.legs) > 1 and not state.get("upward"):
            raise unreadable("it went on at other sizes in a version that served each length for itself then")
        given, known = str(state.get("plan_id")), self._identities()
        self._refuse_other("entries", given, given if given in known else known[0], state)
        policy = self._report.batches.small_buckets
        self._refuse_other("small_buckets", cursor.small_buckets, policy, state, "another policy for short buckets")
        mixture = self._report.mixture
        then, now = _said(state.get("datasets")), _said(mixture.as_json() if mixture else None)
        self._refuse_other("servings", then, now, state, "other weights or names of its data sets")
        legs = tuple(leg for leg in cursor.legs if leg.steps) or (self._leg(0),)  # as it is saved again
        cursor = replace(cursor, legs=legs)
        self._require_steps(cursor)
        self._cursor, self._loaded, self._whole = cursor, True, None
        self._passing += 1

    @property
    def _cursor(self) -> Cursor:
        """The place, with what was delivered since it was last asked for."""
        if self._delivered:
            *before, last = self._counted.legs
            legs = (*before, replace(last, steps=last.steps + self._delivered))
            self._cursor = replace(self._counted, legs=legs)
        return self._counted

    @_cursor.setter
    def _cursor(self, cursor: Cursor) -> None:
        self._counted, self._delivered = cursor, 0

    def _start(self, seed: int, epoch: int) -> Cursor:
        policy = self._report.batches.small_buckets
        return Cursor(seed=seed, epoch=epoch, small_buckets=policy, legs=(self._leg(0),))

    def _leg(self, steps: int) -> Leg:
        batches = self._report.batches
        return Leg(batch_size=batches.batch_size, world_size=batches.world_size, steps=steps)

    def _rest(self) -> EpochPlan:
        return self._planned(self._cursor)

    def _planned(self, cursor: Cursor) -> EpochPlan:
        """What a cursor has before it."""
        entries, batches, drawn = self._entries, self._report.batches, self._drawn(cursor)
        bucket, mixture = self._laid_out(drawn)
        plan = rest_of_epoch(bucket, entries.sizes, cursor, batches, mixture, upward=entries.nested)
        return entries.laid(plan, drawn)

    def _walked(self, cursor: Cursor, drawn: Drawn | None) -> Walk:
        """What a cursor has behind it and before it, also what fills no batch of this size."""
        bucket, mixture = self._laid_out(drawn)
        entries, batches = self._entries, self._report.batches
        return walked(bucket, entries.sizes, cursor, batches, mixture, upward=entries.nested)

    def _laid_out(self, drawn: Drawn | None) -> tuple[NDArray[np.integer], Mixture | None]:
        """The bucket of each entry, and how often it is served; or of each serving of an epoch."""
        return (self._entries.bucket, self._report.mixture) if drawn is None else (drawn.bucket, None)

    def _drawn(self, cursor: Cursor) -> Drawn | None:
        begun = cursor.legs[0]
        return self._entries.drawn(cursor.seed, cursor.epoch, begun.batch_size * begun.world_size)

    def _left(self, cursor: Cursor) -> NDArray[np.integer]:
        """Bucket of each sample that a cursor has before it, also of those that fill no batch of this size."""
        drawn = self._drawn(cursor)
        left: NDArray[np.integer] = self._laid_out(drawn)[0][real(self._walked(cursor, drawn).left.rows)]
        return np.zeros_like(left) if self._entries.nested else left

    def _require_steps(self, cursor: Cursor) -> None:
        """Refuse a cursor that is beyond its epoch; planned only where other sizes were used."""
        first, *more = cursor.legs
        if not more and replace(first, steps=0) == self._leg(0):
            require_served(first, self._report.steps)
        else:
            self._left(cursor)

    def _all_served(self) -> bool:
        """Whether a loaded epoch is complete.

        Raises:
            EmptyPlanError: It is not, and its rest holds no batch: to begin again would serve samples twice.
        """
        if self.remaining():
            return False
        if not len(left := self._left(self._cursor)):
            return True
        batches = self._report.batches
        most = int(np.bincount(left).max()) // batches.world_size
        smaller = f"resume with batch_size={most}, or " if most else ""
        raise EmptyPlanError(
            f"what is left of epoch {self.epoch} fills no batch of size {batches.batch_size}"
            f" on {batches.world_size} rank{'s' * (batches.world_size > 1)}",
            where=f"{len(left)} sample{'s' * (len(left) != 1)} that the epoch still owes",
            why=f"small_buckets={batches.small_buckets!r} leaves out what fills no step of"
            f" {batches.global_batch_size} samples of one bucket",
            fix=f"{smaller}go on with the next epoch: set_epoch({self.epoch + 1})",
        )

    def _identities(self) -> tuple[str, ...]:
        """Of the entries, taken once, for a checkpoint in every step."""
        self._named = self._named or self._entries.identities()
        return self._named

    def _refuse_other(
        self, name: str, expected: str, found: str, state: Mapping[str, Any], settings: str = ""
    ) -> None:
        if expected != found:
            what = (
                f"was made with {settings}"
                if settings
                else "belongs to another cache, or to other contents of this one"
            )
            kept = "settings" if settings else "cache"
            raise PlanError(
                f"this checkpoint {what}",
                where=f"generation {state.get('generation')} then, {self._generation} now",
                why=f"{name}: expected {expected}, found {found}",
                fix=f"resume with the {kept} it was made with, or start the epoch again with set_epoch",
                slug="resume-mismatch",
            )


def _said(datasets: Any) -> str:
    """Data sets of a mixture in words; refused where they are none."""
    if datasets is None:
        return "no weights"
    try:
        return ", ".join(f"{samples} samples of {entries} entries of {name}" for name, entries, samples in datasets)
    except (TypeError, ValueError) as error:
        raise unreadable(f"datasets: {error}") from error

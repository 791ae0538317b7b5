"""Where a loader stands: what was delivered, what is left, and the checkpoint that says so.

Guarantee: only delivered batches count, never those read ahead; the state is a few plain values, the same on
every rank; a state of another cache, or of other entries, is refused by name and not silently misapplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from latentcache.errors import PlanError
from latentcache.identity.content import content_hash
from latentcache.plan.batches import PlanReport
from latentcache.plan.cursor import Cursor, Leg, rest_of_epoch
from latentcache.plan.epoch import EpochPlan, plan_epoch
from latentcache.store.generation import Generation, Rows


class Position:
    """The place of one loader in one epoch."""

    def __init__(self, generation: Generation, report: PlanReport, *, seed: int) -> None:
        self._generation, self._report = generation, report
        self._cursor = self._start(seed, 0)
        self._loaded = False
        self._whole: tuple[int, EpochPlan] | None = None
        self._named = ""

    @property
    def seed(self) -> int:
        """Of the order; that of the checkpoint after :meth:`load`."""
        return self._cursor.seed

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the one it is in already keeps its place (a trainer that resumes says it)."""
        if epoch != self._cursor.epoch:
            self._cursor, self._loaded = self._start(self._cursor.seed, epoch), False

    def begin(self) -> EpochPlan:
        """What the next pass serves: the rest of a loaded epoch, once; else the whole epoch again.

        A loaded epoch that is complete is served again too, so that a pass never yields nothing.
        """
        loaded, self._loaded = self._loaded, False
        if not loaded or not self.remaining():
            self._cursor = self._start(self._cursor.seed, self._cursor.epoch)
        rest = self._rest()
        done = tuple(leg for leg in self._cursor.legs if leg.steps)
        last_fits = done and replace(done[-1], steps=0) == self._leg(0)
        self._cursor = replace(self._cursor, legs=done if last_fits else (*done, self._leg(0)))
        return rest

    def whole(self) -> EpochPlan:
        """The whole epoch, whatever was served of it."""
        if self._whole is None or self._whole[0] != self.epoch:
            rows = self._generation.rows
            plan = plan_epoch(rows.bucket, self._report, seed=self._cursor.seed, epoch=self.epoch)
            self._whole = self.epoch, plan
        return self._whole[1]

    def remaining(self) -> int:
        """Batches of this rank that are left of the epoch."""
        *before, last = self._cursor.legs
        if not before and replace(last, steps=0) == self._leg(0):
            return self._report.steps - last.steps  # without planning it
        return len(self._rest())

    def advance(self, batches: int = 1) -> None:
        """So many batches were delivered."""
        self._delivered += batches  # no more than this while a training step waits

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values, the same on every rank."""
        state = {**self._cursor.as_json(), "generation": self._generation.number, "plan_id": self._plan_id()}
        mixture = self._report.mixture
        return {**state, "datasets": mixture.as_json()} if mixture else state

    def load(self, state: Mapping[str, Any]) -> None:
        """Go where a checkpoint says; the batch size and the number of ranks may be others than they were.

        Raises:
            PlanError: Other entries than those the checkpoint counted, another policy, other weights of data sets, or
                a newer checkpoint.
        """
        cursor = Cursor.from_json(state)
        if state.get("plan_id") != _by_names(self._generation):  # saved while the build was under way
            self._refuse_other("entries", str(state.get("plan_id")), self._plan_id(), state)
        policy = self._report.batches.small_buckets
        self._refuse_other("small_buckets", cursor.small_buckets, policy, state, "another policy for short buckets")
        mixture = self._report.mixture
        then, now = _said(state.get("datasets")), _said(mixture.as_json() if mixture else None)
        self._refuse_other("servings", then, now, state, "other weights of its data sets")
        self._cursor, self._loaded, self._whole = cursor, True, None

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
        rows, buckets = self._generation.rows, self._generation.buckets
        return rest_of_epoch(rows.bucket, buckets, self._cursor, self._report.batches, self._report.mixture)

    def _plan_id(self) -> str:
        """Names the entries and their buckets: what a position counts. Taken once, for a checkpoint in every step."""
        if not self._named:
            rows, coming = self._generation.rows, self._generation.arrivals is not None
            self._named = _by_names(self._generation) if coming else _by_keys(rows)
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
                where=f"generation {state.get('generation')} then, {self._generation.number} now",
                why=f"{name}: expected {expected}, found {found}",
                fix=f"resume with the {kept} it was made with, or start the epoch again with set_epoch",
                slug="resume-mismatch",
            )


def _by_keys(rows: Rows) -> str:
    return content_hash(rows.key.tobytes() + rows.bucket.tobytes()).hex()


def _by_names(generation: Generation) -> str:
    """What stands for the keys of a cache whose build is under way: the samples of its rows, and their buckets."""
    names, rows = generation.samples.names, generation.rows
    facts = names.data.tobytes() + names.ends.tobytes() + rows.sample.tobytes() + rows.bucket.tobytes()
    return "coming:" + content_hash(facts).hex()


def _said(datasets: Any) -> str:
    """Data sets of a mixture in words."""
    if datasets is None:
        return "no weights"
    return ", ".join(f"{samples} samples of {entries} entries" for entries, samples in datasets)

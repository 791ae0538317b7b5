"""The plan of a build before the work, its progress, and a report after it.

The report holds numbers and names; the command line turns them into text and into the JSON of the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from latentcache.fields.table import Rejected
from latentcache.pipeline.diff import FieldWork
from latentcache.pipeline.workers.engine import RunResult
from latentcache.plan.numbers import tolerated
from latentcache.value import Value

if TYPE_CHECKING:
    from latentcache.sources.scan import Listing
    from latentcache.store.snapshot import FieldRows


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
    run, needed = work.result or RunResult(work.name), work.committed
    return FieldDone(
        cached=max(0, needed - run.encoded),
        duplicates=int(np.count_nonzero(work.catalog_item >= 0)) - needed,
        num_bytes=int(np.sum(stored.head, dtype=np.int64) + np.sum(stored.bytes, dtype=np.int64)),
        numbers=work.kind.numbers(work.recipe, {**stored.columns, **stored.ragged_columns, "length": stored.length}),
        run=run,
    )

"""What a build says: its plan before the work, progress during it, and a report after it.

The report carries facts, not sentences; the command line turns them into text or into the JSON of the contract.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from latentcache.geometry.sizes import Size, latent_size
from latentcache.pipeline.assemble import Draft
from latentcache.pipeline.speed import Speed
from latentcache.pipeline.survey import Survey, keys_of
from latentcache.pipeline.work import Planned, Progress
from latentcache.recipe import DTYPES, Recipe
from latentcache.sources.sample import Refusal, Scan
from latentcache.store.catalog import Catalog
from latentcache.store.entry import HEADER_BYTES

#: LMDB stores values in pages of this many bytes.
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build is about to do."""

    cache: Path
    data: Path
    model: str
    recipe: Recipe
    samples: int
    """Usable and refused."""
    buckets: dict[Size, int]
    """Entries per bucket."""
    entries_cached: int
    entries_to_make: int
    """At most: a file that is new by name may turn out to be known by its content."""
    files_to_read: int
    bytes_to_write: int
    free_bytes: int
    refused: tuple[Refusal, ...]
    notes: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What a build did."""

    plan: BuildPlan
    dry_run: bool = False
    samples: int = 0
    encoded: int = 0
    """Entries computed and committed by this run."""
    cached: int = 0
    """Needed entries that were there, or took over the latents of equal pixels."""
    refused: tuple[Refusal, ...] = ()
    notes: tuple[Refusal, ...] = ()
    generation: int = 0
    published: bool = False
    """False where the generation before says the same already."""
    elapsed_s: float = 0.0
    written_bytes: int = 0
    """Headers and payloads committed by this run."""
    buckets: dict[Size, int] = field(default_factory=dict)
    allow_failed: str = "0"
    """What may be quarantined, as this build was told."""
    speed: Speed | None = None
    """None where nothing was encoded."""


class Observer(Protocol):
    """Told how a build goes. Called from the thread that builds."""

    def planned(self, plan: BuildPlan) -> None:
        """The plan is made; nothing has been decoded yet."""

    def advanced(self, progress: Progress) -> None:
        """Something moved. Called often: look at the clock before printing."""

    def warned(self, message: str) -> None:
        """Something a user should know, said once."""


class Silent:
    """An observer that says nothing."""

    def planned(self, plan: BuildPlan) -> None:
        """Nothing."""

    def advanced(self, progress: Progress) -> None:
        """Nothing."""

    def warned(self, message: str) -> None:
        """Nothing."""


def build_plan(found: Scan, work: Survey, recipe: Recipe, catalog: Catalog, model: str, cache: Path) -> BuildPlan:
    """Count what is to do."""
    pictures = (*work.known, *work.todo)
    buckets = Counter(p.bucket for planned in pictures for p in planned.placements * recipe.variants)
    missing = [bucket for planned in work.todo for bucket in _missing(planned, recipe, catalog)]
    refused = (*found.refused, *(failed.refusal for failed in work.failed))
    existing = next(path for path in (cache, *cache.resolve().parents) if path.exists())
    return BuildPlan(
        cache=cache,
        data=found.root,
        model=model,
        recipe=recipe,
        samples=len(found.samples) + len(found.refused),
        buckets=dict(sorted(buckets.items(), key=lambda item: (-item[0].area, item[0].width))),
        entries_cached=sum(buckets.values()) - len(missing),
        entries_to_make=len(missing),
        files_to_read=len(work.todo),
        bytes_to_write=sum(entry_bytes(recipe, bucket) for bucket in missing),
        free_bytes=shutil.disk_usage(existing).free,
        refused=refused,
        notes=found.notes,
    )


def build_report(
    plan: BuildPlan,
    *,
    started: float,
    dry_run: bool = False,
    draft: Draft | None = None,
    encoded: set[bytes] | None = None,
    committed: frozenset[bytes] = frozenset(),
    generation: int = 0,
    published: bool = False,
    written_bytes: int = 0,
    allow_failed: str = "0",
    speed: Speed | None = None,
) -> BuildReport:
    """What a build did, from its plan and the generation it drew up."""
    elapsed = time.monotonic() - started
    if draft is None:
        return BuildReport(
            plan=plan,
            dry_run=dry_run,
            samples=plan.samples,
            refused=plan.refused,
            notes=plan.notes,
            elapsed_s=elapsed,
            allow_failed=allow_failed,
        )
    made = encoded or set()
    counts = Counter(draft.rows.bucket.tolist())
    return BuildReport(
        plan=plan,
        samples=len(draft.samples.names) + len(draft.refused),
        encoded=len(made - committed),
        cached=len(draft.keys - made),
        refused=draft.refused,
        notes=draft.notes,
        generation=generation,
        published=published,
        elapsed_s=elapsed,
        allow_failed=allow_failed,
        written_bytes=written_bytes,
        speed=speed,
        buckets={size: counts[number] for number, size in enumerate(draft.buckets)},
    )


def entry_bytes(recipe: Recipe, bucket: Size) -> int:
    """Bytes on disk of one entry in this bucket: header and payload in whole pages, and its index rows."""
    cells = latent_size(bucket, recipe.encoder.factor)
    payload = recipe.encoder.stored_channels * cells.area * DTYPES[recipe.encoder.storage_dtype][1]
    return math.ceil((16 + HEADER_BYTES + payload) / _PAGE_BYTES) * _PAGE_BYTES + 600


def _missing(planned: Planned, recipe: Recipe, catalog: Catalog) -> list[Size]:
    """Buckets of a picture whose entry is not committed, as far as is known before it is read."""
    content, placements = planned.content or planned.expected, planned.placements * recipe.variants
    if not content:
        return [placement.bucket for placement in placements]
    keys = keys_of(content, planned.placements, recipe)
    return [p.bucket for p, key in zip(placements, keys, strict=True) if key not in catalog]

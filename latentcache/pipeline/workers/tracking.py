"""The jobs of one worker: their item keys, and which outputs have to be made.

Equal inputs are found before a build; two that slip through are made twice, and the store keeps one item for their
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from latentcache.fields.protocol import Failure, FieldKind, FieldRecipe, Group, Job, Output, Read
from latentcache.identity.content import HASH_BYTES
from latentcache.pipeline.workers.transport import split_keys
from latentcache.store.catalog import Catalog


@dataclass(slots=True, eq=False)
class Unit:
    """Jobs that a worker was given together; their small items are packed in blocks of their own."""

    number: int
    unmade: int
    """Jobs that are not encoded yet."""
    probe: bool = False
    """True for work whose result is dropped: it shows that the worker works."""
    items: list[tuple[int, Any]] = field(default_factory=list)
    """Items that wait to be packed, with their place in the unit."""
    made: list[TrackedJob] = field(default_factory=list)
    """Jobs whose items wait to be packed."""


@dataclass(slots=True, eq=False)
class TrackedJob:
    """One job of a worker."""

    index: int
    """Number of the job in the build."""
    job: Job
    unit: Unit
    missing: Sequence[Output] | None = None
    """Outputs that this job makes; None until they are known."""
    content: bytes = b""
    """The content hash that the keys are made from."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """Item key by ``Output.item``."""
    there: AbstractSet[bytes] = frozenset()
    """Those that were committed before this run."""
    unmade: int = 0
    """Outputs that are not encoded."""
    read: Read | None = None
    """What reading its inputs gave; None if it was made together with others."""
    failure: Failure | None = None

    def fail(self, failure: Failure) -> None:
        """Note why it gives no item."""
        read = self.read or Read(content=self.job.content)
        self.failure = replace(failure, content=failure.content or read.content, stat=failure.stat or read.stat)


class Tracker:
    """Looks up which items are committed. Every method may be called from any thread."""

    def __init__(self, kind: FieldKind, recipe: FieldRecipe, groups: Sequence[Group], lookup: Catalog | None) -> None:
        self._kind, self._recipe, self._groups, self._lookup = kind, recipe, groups, lookup
        self.committed: set[bytes] = set()
        """Keys that this build has committed, as far as this worker was told."""
        self.copied: set[bytes] = set()
        """Keys of items that are copies of one with an equal ``same`` hash."""

    def look_up(self, jobs: Sequence[TrackedJob], contents: Sequence[bytes]) -> None:
        """Find the item keys of jobs, by the content hash of their inputs, and which of them are committed."""
        outputs = [output for tracked in jobs for output in tracked.job.outputs]
        if not outputs:
            return
        repeated = [content * len(tracked.job.outputs) for tracked, content in zip(jobs, contents, strict=True)]
        keys = self._kind.keys(
            np.frombuffer(b"".join(repeated), dtype=np.uint8).reshape(-1, HASH_BYTES),
            np.array([output.group for output in outputs], dtype=np.int32),
            np.array([output.variant for output in outputs], dtype=np.uint8),
            self._groups,
            self._recipe,
        )
        there = np.zeros(len(keys), dtype=bool) if self._lookup is None else self._lookup.find(keys) >= 0
        split = split_keys(keys.tobytes())
        known, each = {key for key, exists in zip(split, there.tolist(), strict=True) if exists}, iter(split)
        for tracked, content in zip(jobs, contents, strict=True):
            tracked.content = content
            tracked.keys = {output.item: next(each) for output in tracked.job.outputs}
            tracked.there = known.intersection(tracked.keys.values()) if known else frozenset()

    def missing(self, tracked: TrackedJob, content: bytes) -> Sequence[Output]:
        """Outputs that this job has to make, given the content hash of its inputs."""
        if tracked.content != content:
            self.look_up([tracked], [content])
        done = set() if tracked.unit.probe else tracked.there | self.committed.intersection(tracked.keys.values())
        tracked.missing = [one for one in tracked.job.outputs if tracked.keys[one.item] not in done]
        return tracked.missing

    def report(self, keys: Sequence[bytes], jobs: Sequence[TrackedJob]) -> tuple[bytes, dict[str, Any]]:
        """The body and the head of a ``committed`` message, for item keys and jobs that are durable.

        Returns:
            The keys that are new, and ``jobs``: rows (number, contents, stat, facts); ``done``: numbers of jobs that
            were not read by themselves; ``failed``: rows (number, failure); counts of ``encoded``, ``copied`` and
            ``skipped`` items.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self.committed]
        self.committed.update(new)
        told = [one for one in jobs if not one.unit.probe]
        good = [one for one in told if one.failure is None]
        read = [(one.index, one.read) for one in good if one.read is not None]
        copied = sum(key in self.copied for key in new)
        return b"".join(new), {
            "jobs": [
                [number, (of.contents or of.content).hex(), list(map(int, of.stat)), of.facts] for number, of in read
            ],
            "done": [one.index for one in good if one.read is None],
            "failed": [[one.index, one.failure] for one in told if one.failure is not None],
            "encoded": len(new) - copied,
            "copied": copied,
            "skipped": sum(one.keys[output.item] in one.there for one in good for output in one.job.outputs),
        }

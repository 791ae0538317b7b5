"""What a repair takes out of a cache, of pictures or of tokens: the plan, what came of it, and the log of it.

Decides which shards are damaged: those that a finding lies in, also one about an entry that no sample needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime

from latentcache.store.durable import write_atomically
from latentcache.store.layout import CacheLayout
from latentcache.store.salvage import Salvaged
from latentcache.store.token_generation import AnyGeneration
from latentcache.verify.findings import Finding, VerifyReport

#: Reasons of ``corrupt`` that condemn a shard and not yet its entries: those are looked at one by one.
OF_SHARDS = frozenset({"shard", "pages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One entry that is taken out of the generation."""

    row: int
    path: str
    key: str
    reason: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """What a repair would do."""

    report: VerifyReport
    """What the verification found."""
    removals: tuple[Removal, ...]
    """Entries to be taken out; those of damaged shards that turn out not to be whole come on top."""
    shards: tuple[str, ...]
    """Damaged shards: what is whole of them is copied into new ones."""
    wrong: Mapping[str, Set[bytes]] = field(default_factory=dict)
    """Shard -> keys of entries that are whole by their checksum and must not be kept."""

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.removals or self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair did."""

    plan: RepairPlan
    done: bool = False
    generation: int = 0
    """The new generation, 0 where nothing was done."""
    complete: bool = True
    removals: tuple[Removal, ...] = ()
    salvaged: tuple[Salvaged, ...] = ()
    log: str = ""
    """Name of the file in the cache that lists what was removed."""


def corrupt_of(report: VerifyReport) -> list[Finding]:
    """What must go: everything corrupt or drifted, of samples and of nobody."""
    return [f for f in (*report.damage, *report.findings) if f.category in ("corrupt", "drift")]


def damaged_shards(
    layout: CacheLayout, generation: AnyGeneration, corrupt: Sequence[Finding], also: Set[str] = frozenset()
) -> tuple[str, ...]:
    """Shards that these findings lie in, or named ``also``: the generation's, then others that are in use."""
    named = {finding.file.split("/")[1] for finding in corrupt if finding.file.startswith("shards/")} | also
    others = [folder.name for folder in layout.sealed_shards() if folder.name not in generation.shards]
    return tuple(name for name in (*generation.shards, *others) if name in named)


def write_log(layout: CacheLayout, generation: int, removals: Sequence[Removal]) -> str:
    """One line for each entry, durable before anything is taken out; its name, or nothing where there is none."""
    if not removals:
        return ""
    about = {"generation": generation}
    lines = [
        {"key": item.key, "path": item.path, "reason": item.reason, "bytes": item.num_bytes} | about
        for item in removals
    ]
    path = layout.root / f"repair-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S.%fZ')}.jsonl"
    write_atomically(path, "".join(f"{json.dumps(line)}\n" for line in lines).encode("ascii"))
    return path.name

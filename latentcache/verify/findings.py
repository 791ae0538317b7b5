"""What a check can find, and what it means: categories, counts, and whether anything must be done."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from latentcache.recipe import Recipe, differences

CATEGORIES = (
    "corrupt",
    "unverifiable",
    "drift",
    "stale",
    "missing",
    "quarantined",
    "orphan",
    "touched",
    "provenance",
    "ok",
)
"""In order of precedence: a sample is in the first that fits."""
PROBLEMS = frozenset({"corrupt", "unverifiable", "drift", "stale", "missing"})
"""Categories that make a cache unfit for training as it is."""

_HINTS = {
    "corrupt": "the stored bytes are not what was written",
    "unverifiable": "it could not be read, so nothing is known about it",
    "drift": "the encoder gives other latents for it now",
    "stale": "the entry is whole, and made from something that is no longer so",
    "missing": "the cache has no entry for it",
    "quarantined": "the build refused this file; it is left out",
    "orphan": "no sample needs this entry any more; it does no harm",
    "touched": "the file was written or moved, and its bytes are the same",
    "provenance": "shown for information: it moves latents by less than one pixel step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing a check found."""

    category: str
    reason: str
    path: str = ""
    """Sample name, relative to the data folder."""
    key: str = ""
    """Entry key in hex."""
    field: str = ""
    """Which tensor of the sample the key belongs to."""
    file: str = ""
    """Relative to the cache: where the damage lies."""
    expected: str = ""
    found: str = ""
    hint: str = ""
    fix: str = ""

    @property
    def is_unused(self) -> bool:
        """Whether it is about an entry that no sample needs, and says that it is damaged."""
        return self.category == "corrupt" and self.reason.startswith("unused")

    def with_defaults(self, fix: str) -> Finding:
        """With the category's hint, and ``fix`` where something has to be done and nothing else is said."""
        mend = self.fix or (fix if self.category in PROBLEMS or self.category == "orphan" else "")
        return replace(self, hint=self.hint or _HINTS[self.category], fix=mend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What is still noise, in std."""

    largest: float
    mean: float

    def __str__(self) -> str:
        return f"at most {self.largest:.2g} std, {self.mean:.2g} on average"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reencoded:
    """What encoding again came to."""

    samples: int = 0
    """Encoded again, all their entries."""
    entries: int = 0
    asked: int = 0
    seed: int = 0
    drifted: int = 0
    """Entries."""
    device: str = ""
    largest: float = 0.0
    """Largest difference of all, in std."""
    mean: float = 0.0
    """Largest mean difference of an entry, in std."""
    tolerance: Tolerance
    confidence: str = ""
    """What clean samples say of all; empty where one was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found."""

    mode: str
    generation: int
    findings: tuple[Finding, ...]
    """Everything but ``ok``."""
    counts: dict[str, int]
    """One number per category."""
    samples: int
    building: bool
    """Whether a build has been started here that has not ended."""
    elapsed_s: float
    damage: tuple[Finding, ...] = ()
    """Every finding about a stored entry, also those that a worse one of the same sample hides."""
    not_looked_at: int = 0
    """Samples that were not chosen, or for which there was no time: neither fine nor a finding."""
    checked: Mapping[str, int] = field(default_factory=dict)
    """How much was looked at: ``headers``, ``payload_bytes``, ``sources_stat``, ..."""
    recipe_diff: tuple[tuple[str, Any, Any], ...] = ()
    """Fields in which the cache differs from what was asked for: name, in the cache, asked for."""
    confidence: str = ""
    """What the samples that were drawn say of all."""
    reencoded: Reencoded | None = None
    """What encoding again came to, where it was asked for."""
    recipe_id: str = ""
    """Of the generation, in hex."""
    allow_failed: str = "0"
    """What the build was told to put up with: a number of quarantined files, or a share such as ``2%``."""
    share: str = ""
    """``i/n`` where the cache holds one of n shares of its data: what is in the others is not missing here."""

    @property
    def unused_corrupt(self) -> int:
        """How many of the corrupt are entries that no sample needs."""
        return sum(finding.is_unused for finding in self.findings)

    def exit_code(self, allowed_failed: int = 0) -> int:
        """0 when the cache can be trained on, and built from, as it is, else 1."""
        problems = any(self.counts[name] for name in PROBLEMS)
        return int(problems or self.counts["quarantined"] > allowed_failed)


def count(findings: Iterable[Finding], num_ok: int) -> dict[str, int]:
    """One number per category: how many findings have it, and how many samples have none."""
    counts = dict.fromkeys(CATEGORIES, 0)
    for finding in findings:
        counts[finding.category] += 1
    counts["ok"] = num_ok
    return counts


def spoken(value: Any) -> str:
    """A value of a recipe as people write it: lists with commas, sizes as 64x96; anything else as in JSON."""
    if isinstance(value, list | tuple):
        parts = ("x".join(map(str, part)) if isinstance(part, list | tuple) else spoken(part) for part in value)
        return ", ".join(parts) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {spoken(part)}" for name, part in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def worst(findings: Sequence[Finding]) -> Finding | None:
    """The finding that decides a sample's category."""
    return min(findings, key=lambda finding: CATEGORIES.index(finding.category), default=None)


def recipe_findings(cached: Recipe, requested: Recipe | None) -> list[tuple[str, dict[str, str]]]:
    """One entry per field that differs: reason, and both sides. What was asked for comes before what it replaces."""
    if requested is None:
        return []
    rows = sorted(differences(cached, requested), key=lambda row: row[2] in (None, [], ()))
    return [(f"recipe:{name}", {"expected": spoken(theirs), "found": spoken(mine)}) for name, mine, theirs in rows]


def mender(cache: Path, data: Path, reencode: str = "", allow_failed: str = "0") -> Callable[[Finding], str]:
    """Gives the command that mends a finding. A build looks at no payload, so damaged ones are taken out before it.

    Args:
        cache: The cache.
        data: Its data folder.
        reencode: The flags that encode the same samples again.
        allow_failed: What the last build was told; a build that is not told it allows nothing.
    """
    folder = shlex.quote(str(cache))
    build = f"latentcache build {shlex.quote(str(data))} --out {folder}"
    if allow_failed != "0":
        build += f" --allow-failed {shlex.quote(allow_failed)}"

    def command(finding: Finding) -> str:
        if finding.category == "unverifiable" and finding.reason == "shard":
            return f"latentcache verify {folder} --full"
        if finding.category == "unverifiable" and finding.reason == "not-encoded":
            return f"latentcache verify {folder}{reencode} --device cpu"
        if finding.category == "unverifiable":
            return f"chmod -R u+rX {folder if finding.file else shlex.quote(str(data))}"
        if finding.category == "orphan":
            return f"latentcache gc {folder} --apply"
        if finding.category == "drift":
            return f"latentcache verify {folder}{reencode} --repair --yes; {build}"
        if finding.is_unused:
            return f"latentcache verify {folder} --repair --yes"
        if finding.category != "corrupt" or finding.reason == "shard":
            return build
        return f"latentcache verify {folder} --repair --yes; {build}"

    return command

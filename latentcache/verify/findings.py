"""What a check can find, and what it means: categories, counts, and whether anything must be done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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

    def with_defaults(self, fix: str) -> Finding:
        """With the category's hint, and ``fix`` where something has to be done and nothing else is said."""
        mend = self.fix or (fix if self.category in PROBLEMS or self.category == "orphan" else "")
        return replace(self, hint=self.hint or _HINTS[self.category], fix=mend)


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
    recipe_id: str = ""
    """Of the generation, in hex."""
    allow_failed: str = "0"
    """What the build was told to put up with: a number of quarantined files, or a share such as ``2%``."""

    def exit_code(self, allowed_failed: int = 0) -> int:
        """0 when the cache can be trained on as it is, else 1."""
        problems = any(self.counts[name] for name in PROBLEMS)
        return int(problems or self.counts["quarantined"] > allowed_failed)


def count(findings: Iterable[Finding], num_ok: int) -> dict[str, int]:
    """One number per category."""
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

"""From what was seen to the report, the same for pictures and tokens: one category for each sample, counts, a claim.

Guarantee: each sample is in the first category that fits it; what was not looked at whole is in none, unless what was
seen of it must be mended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import AnyGeneration
from latentcache.verify.deep import Deep
from latentcache.verify.entries import Checked
from latentcache.verify.findings import PROBLEMS, Finding, Reencoded, VerifyReport, count, mender, worst
from latentcache.verify.selection import Deadline, Depth
from latentcache.verify.subjects import every, samples_with, stated

_Sources = TypeVar("_Sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a look came to. S samples: pictures or documents."""

    generation: AnyGeneration
    data: Path | None
    """Where sources were looked for."""
    chosen: NDArray[np.bool_] | None
    """(S,); None for all."""
    looked: NDArray[np.bool_]
    """(S,) of which all is known that was asked for."""
    own: Mapping[int, Finding]
    """What each sample comes to that is not fine."""
    entries: Checked
    deep: Deep
    others: Sequence[Finding]
    """About no sample of the generation and no entry."""
    checked: Mapping[str, int]
    """How much of the sources was looked at."""
    recipe_diff: tuple[tuple[str, Any, Any], ...]
    reencoded: Reencoded | None = None
    claim: str = ""
    """What making some samples again says, in place of what reading them says."""


def side_by_side(read: Callable[[], Deep], look: Callable[[], _Sources], deadline: Deadline) -> tuple[Deep, _Sources]:
    """Payloads and sources at once: payloads are read by a process of their own, sources by this one."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            sources = look()
            return reading.result(), sources
        except BaseException:
            deadline.cancel()
            raise


def looked_at(
    generation: AnyGeneration,
    chosen: NDArray[np.bool_] | None,
    deep: Deep,
    unasked: Sequence[int] | NDArray[np.intp],
) -> NDArray[np.bool_]:
    """(S,) the samples of which all is known that was asked for; ``unasked`` are those without a look at a source."""
    looked = every(generation, chosen)
    if deep.read is not None:
        looked &= ~samples_with(generation, ~deep.read)
    looked[np.asarray(unasked, dtype=np.intp)] = False
    return looked


def decide(
    numbers: Iterable[tuple[int, str]],
    looked: NDArray[np.bool_],
    findings: Callable[[int, str], Sequence[Finding]],
) -> dict[int, Finding]:
    """What each sample comes to that is not fine; of one not looked at whole, only what must be mended.

    Args:
        numbers: Samples about which something was found, with their names.
        looked: (S,) whether all is known of each.
        findings: All that was found about one.
    """
    decided: dict[int, Finding] = {}
    for number, name in numbers:
        finding = worst(findings(number, name))
        if finding is not None and (looked[number] or finding.category in PROBLEMS):
            decided[number] = finding
    return decided


def verdict(cache: Path, depth: Depth, seen: Seen, started: float) -> VerifyReport:
    """The report.

    Args:
        cache: The cache folder.
        depth: What was asked for.
        seen: What was found.
        started: When the look began, of the monotonic clock.
    """
    generation, looked = seen.generation, seen.looked.copy()
    looked[list(seen.own)] = True
    damaged = {finding.key for finding in seen.entries.loose if finding.is_unused}
    loose = [f for f in seen.entries.loose if f.category != "orphan" or not f.key or f.key not in damaged]
    findings = [*seen.own.values(), *seen.others, *loose]
    flags = f" --reencode {depth.reencode} --seed {depth.seed}"
    data = seen.data if seen.data is not None else Path("DATA")
    fix = mender(cache, data, flags, generation.allow_failed)
    total, num_looked = len(looked), int(looked.sum())
    clean = not any(finding.category in PROBLEMS for finding in (*seen.own.values(), *loose))
    return VerifyReport(
        mode=depth.mode,
        generation=generation.number,
        findings=tuple(finding.with_defaults(fix(finding)) for finding in findings),
        counts=count(findings, num_looked - len(seen.own)),
        samples=total + len(generation.refused),
        building=CacheLayout(cache).building.exists(),
        elapsed_s=time.monotonic() - started,
        not_looked_at=total - num_looked,
        recipe_diff=seen.recipe_diff,
        checked={
            "samples": num_looked,
            "headers": seen.entries.headers,
            "payloads": seen.deep.payloads,
            "payload_bytes": seen.deep.payload_bytes,
            **seen.checked,
        },
        recipe_id=generation.recipe.recipe_id.hex(),
        allow_failed=generation.allow_failed,
        share=generation.share,
        damage=tuple(chain.from_iterable(seen.entries.damage.values())),
        reencoded=seen.reencoded,
        confidence=(seen.claim or stated(generation, depth, seen.chosen, looked)) if clean else "",
    )

"""``verify_cache``: is this cache still true? Reads the cache and its sources, changes neither.

``fast`` reads manifest, columns and shard indexes, and stats every source, hashing those whose stat differs.
``full`` reads every payload and every source as well, in a process of its own; ``sample`` does so for some.
None of them needs torch, a model or a GPU; only encoding again does, and who asks for that brings the encoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.recipe import Recipe, differences
from latentcache.sources.resolve import Listing
from latentcache.store.generation import Generation, open_generation
from latentcache.store.installed import installed_version
from latentcache.store.layout import CacheLayout
from latentcache.verify.deep import Deep, read_payloads
from latentcache.verify.drift import Encoding, Reencode, fine_samples, with_model
from latentcache.verify.entries import Checked, check_entries
from latentcache.verify.files import SamePixels
from latentcache.verify.findings import Finding, Reencoded, VerifyReport, recipe_findings
from latentcache.verify.opening import find_data, limits_of, open_held
from latentcache.verify.selection import Deadline, Depth
from latentcache.verify.sources import SourcesChecked, check_sources
from latentcache.verify.subjects import chosen_by
from latentcache.verify.verdict import Seen, decide, looked_at, side_by_side, verdict


def verify_cache(
    cache: Path,
    *,
    data: Path | None = None,
    requested: Recipe | Callable[[Recipe], Recipe] | None = None,
    full: bool = False,
    depth: Depth | None = None,
    same_pixels: SamePixels | None = None,
    reencode: Reencode | None = None,
) -> VerifyReport:
    """Check a cache against its sources and against itself.

    Args:
        cache: The cache folder.
        data: The data folder, where it is not the recorded one.
        requested: A recipe that a trainer is about to ask for, or what makes it of the recipe of the cache; every
            sample is stale where it differs.
        full: Read every payload and every source; short for a ``depth`` that says so.
        depth: How much to look at.
        same_pixels: Tells a metadata edit from a change of pixels; without it other bytes are only other bytes.
        reencode: Encodes what ``depth.reencode`` asks for.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The manifest or a column is damaged, so nothing can be said of single samples.
        SourceNotFoundError: The data folder is gone; say where it is with ``data``.
        EncoderError: The model that is to encode again is not at hand, or cannot be used.
        DeviceError: Its device failed, or is not there.
    """
    depth = depth or Depth(full=full)
    look = _Look(cache=cache, depth=depth, requested=requested, same_pixels=same_pixels, reencode=reencode)
    return look(data)


@dataclass(slots=True, kw_only=True)
class _Look:
    """One verification."""

    cache: Path
    depth: Depth
    requested: Recipe | Callable[[Recipe], Recipe] | None
    same_pixels: SamePixels | None
    reencode: Reencode | None
    started: float = field(default_factory=time.monotonic)

    def __call__(self, data: Path | None) -> VerifyReport:
        """Look, and put together what was seen."""
        deadline = Deadline(self.depth.max_duration_s)
        layout = CacheLayout(self.cache)
        limits = limits_of(layout, self.depth)
        generation = open_held(self.cache, open_generation)
        asked = self.requested(generation.recipe) if callable(self.requested) else self.requested
        if self.reencode is not None:
            asked = with_model(generation, asked, self.reencode)
        root = find_data(self.cache, generation, self.depth, data)
        chosen, rows = chosen_by(generation, self.depth.selection)
        entries = check_entries(layout, generation, chosen=rows)
        found = None if root is None else Listing(root)
        deep, sources = side_by_side(
            lambda: read_payloads(
                layout, generation, entries, chosen=rows, depth=self.depth, deadline=deadline, limits=limits
            ),
            lambda: self._sources(generation, found, chosen, deadline),
            deadline,
        )
        again = self._again(layout, generation, asked, found, chosen, entries, sources, deep, deadline)
        looked = looked_at(generation, chosen, deep, sources.unasked)
        seen = Seen(
            generation=generation,
            data=None if found is None else found.root,
            chosen=chosen,
            looked=looked,
            own=self._by_sample(generation, asked, chosen, looked, entries, sources),
            entries=entries,
            deep=deep,
            others=[*sources.others, *_provenance(generation)],
            checked={
                "sources_stat": sources.stats,
                "sources_hashed": sources.hashed,
                "reencoded": again.samples if again is not None else 0,
            },
            recipe_diff=tuple(differences(generation.recipe, asked)) if asked is not None else (),
            reencoded=again,
        )
        return verdict(self.cache, self.depth, seen, self.started)

    def _sources(
        self, generation: Generation, found: Listing | None, chosen: NDArray[np.bool_] | None, deadline: Deadline
    ) -> SourcesChecked:
        """Sources, where there is a folder to look into."""
        if found is None:
            return SourcesChecked(by_sample={})
        return check_sources(
            generation,
            found,
            full=self.depth.reads,
            chosen=chosen,
            deadline=deadline,
            same_pixels=self.same_pixels,
        )

    def _again(
        self,
        layout: CacheLayout,
        generation: Generation,
        asked: Recipe | None,
        found: Listing | None,
        chosen: NDArray[np.bool_] | None,
        entries: Checked,
        sources: SourcesChecked,
        deep: Deep,
        deadline: Deadline,
    ) -> Reencoded | None:
        """Encode some samples again, where that was asked for."""
        if self.reencode is None or found is None:
            return None
        encoding = Encoding(
            layout=layout,
            generation=generation,
            root=found.root,
            checked=entries,
            sources=sources,
            reencode=self.reencode,
        )
        looked = looked_at(generation, chosen, deep, sources.unasked)
        fine = fine_samples(looked, entries, sources, same_recipe=asked in (None, generation.recipe))
        return encoding(fine, self.depth.reencode, self.depth.seed, deadline)

    def _by_sample(
        self,
        generation: Generation,
        asked: Recipe | None,
        chosen: NDArray[np.bool_] | None,
        looked: NDArray[np.bool_],
        entries: Checked,
        sources: SourcesChecked,
    ) -> dict[int, Finding]:
        """What each sample comes to that is not fine."""
        recipe = recipe_findings(generation.recipe, asked)[:1]

        def findings(number: int, name: str) -> list[Finding]:
            of_entry, of_source = entries.damage.get(number, ()), sources.by_sample.get(number)
            of_recipe = [Finding(category="stale", reason=reason, path=name, **sides) for reason, sides in recipe]
            return [*of_entry, *([of_source] if of_source else ()), *of_recipe]

        numbers: Sequence[int] = sorted({*entries.damage, *sources.by_sample})
        if recipe:
            numbers = range(len(looked)) if chosen is None else np.flatnonzero(chosen).tolist()
        return decide(zip(numbers, generation.samples.names.take(numbers), strict=True), looked, findings)


def _provenance(generation: Generation) -> list[Finding]:
    """Library versions that differ from those of the build."""
    recorded = generation.manifest["provenance"].get("libraries", {})
    findings = []
    for name, old in recorded.items():
        now = installed_version(name)
        if now != old:
            findings.append(Finding(category="provenance", reason=name, expected=str(old), found=now))
    return findings

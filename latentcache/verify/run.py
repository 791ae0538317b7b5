"""``verify_cache``: is this cache still true? Reads the cache and its sources, changes neither.

``fast`` reads manifest, columns and shard indexes, and stats every source, hashing those whose stat differs.
``full`` reads every payload and every source as well, in a process of its own; ``sample`` does so for some.
None of them needs torch, a model or a GPU; only encoding again does, and who asks for that brings the encoder.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, SourceNotFoundError
from latentcache.recipe import Recipe, differences
from latentcache.sources.resolve import Listing
from latentcache.store.column_files import parts
from latentcache.store.generation import Generation, open_generation
from latentcache.store.installed import installed_version
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import pinned
from latentcache.verify.child import Limits
from latentcache.verify.deep import Deep, read_payloads
from latentcache.verify.drift import Encoding, Reencode, fine_samples, with_model
from latentcache.verify.entries import Checked, check_entries
from latentcache.verify.files import SamePixels
from latentcache.verify.findings import (
    PROBLEMS,
    Finding,
    Reencoded,
    VerifyReport,
    count,
    mender,
    recipe_findings,
    worst,
)
from latentcache.verify.portions import of_rows
from latentcache.verify.selection import Deadline, Depth, confidence
from latentcache.verify.sources import SourcesChecked, check_sources
from latentcache.verify.untrusted import check_foreign


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
        limits = check_foreign(layout) if self.depth.untrusted else None
        generation = _load(self.cache)
        asked = self.requested(generation.recipe) if callable(self.requested) else self.requested
        if self.reencode is not None:
            asked = with_model(generation, asked, self.reencode)
        # A stranger does not say which folder of ours is looked at.
        root = None if self.depth.untrusted and data is None else data or find_data(self.cache, generation)
        names = generation.samples.names
        chosen = rows = None
        if self.depth.selection is not None:
            chosen = self.depth.selection.choose(names, len(names))
            rows = of_rows(generation, chosen)
        entries = check_entries(layout, generation, chosen=rows)
        found = None if root is None else Listing(root)
        with ThreadPoolExecutor(1) as pool:  # payloads are read by a process: sources meanwhile
            reading = pool.submit(self._read, layout, generation, entries, rows, deadline, limits)
            try:
                sources = self._sources(generation, found, chosen, deadline)
                deep = reading.result()
            except BaseException:
                deadline.cancel()
                raise
        again = None
        if self.reencode is not None and found is not None:
            looked, same_recipe = _looked(generation, chosen, sources, deep), asked in (None, generation.recipe)
            encoding = Encoding(
                layout=layout,
                generation=generation,
                root=found.root,
                checked=entries,
                sources=sources,
                reencode=self.reencode,
            )
            fine = fine_samples(looked, entries, sources, same_recipe=same_recipe)
            again = encoding(fine, self.depth.reencode, self.depth.seed, deadline)
        return self._report(layout, generation, asked, found, chosen, entries, sources, deep, again)

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

    def _read(
        self,
        layout: CacheLayout,
        generation: Generation,
        entries: Checked,
        rows: NDArray[np.bool_] | None,
        deadline: Deadline,
        limits: Limits | None,
    ) -> Deep:
        """Payloads, where they are asked for."""
        if not self.depth.reads:
            return Deep(read=None)
        return read_payloads(
            layout,
            generation,
            entries,
            chosen=rows,
            selection=self.depth.selection,
            deadline=deadline,
            isolate=self.depth.isolate,
            limits=limits,
        )

    def _report(
        self,
        layout: CacheLayout,
        generation: Generation,
        asked: Recipe | None,
        found: Listing | None,
        chosen: NDArray[np.bool_] | None,
        entries: Checked,
        sources: SourcesChecked,
        deep: Deep,
        again: Reencoded | None,
    ) -> VerifyReport:
        looked = _looked(generation, chosen, sources, deep)
        own = self._by_sample(generation, asked, chosen, looked, entries, sources)
        looked[list(own)] = True
        damaged = {finding.key for finding in entries.loose if finding.is_unused}
        loose = [f for f in entries.loose if f.category != "orphan" or not f.key or f.key not in damaged]
        findings = [*own.values(), *sources.others, *loose, *_provenance(generation)]
        flags = f" --reencode {self.depth.reencode} --seed {self.depth.seed}"
        fix = mender(self.cache, found.root if found is not None else Path("DATA"), flags)
        total, seen = len(looked), int(looked.sum())
        problems = any(finding.category in PROBLEMS for finding in own.values())
        drawn = self.depth.selection is not None or self.depth.max_duration_s is not None
        return VerifyReport(
            mode=self.depth.mode,
            generation=generation.number,
            findings=tuple(finding.with_defaults(fix(finding)) for finding in findings),
            counts=count(findings, seen - len(own)),
            samples=total + len(generation.refused),
            building=layout.building.exists(),
            elapsed_s=time.monotonic() - self.started,
            not_looked_at=total - seen,
            recipe_diff=tuple(differences(generation.recipe, asked)) if asked is not None else (),
            checked={
                "samples": seen,
                "headers": entries.headers,
                "payloads": deep.payloads,
                "payload_bytes": deep.payload_bytes,
                "sources_stat": sources.stats,
                "sources_hashed": sources.hashed,
                "reencoded": again.samples if again is not None else 0,
            },
            recipe_id=generation.recipe.recipe_id.hex(),
            allow_failed=generation.allow_failed,
            damage=tuple(chain.from_iterable(entries.damage.values())),
            reencoded=again,
            confidence=confidence(seen, total) if self.depth.reads and drawn and seen and not problems else "",
        )

    def _by_sample(
        self,
        generation: Generation,
        asked: Recipe | None,
        chosen: NDArray[np.bool_] | None,
        looked: NDArray[np.bool_],
        entries: Checked,
        sources: SourcesChecked,
    ) -> dict[int, Finding]:
        """What each sample comes to that is not fine; of one not looked at whole, only what must be mended."""
        recipe = recipe_findings(generation.recipe, asked)[:1]
        names, every = generation.samples.names, range(len(looked))
        numbers: Sequence[int] = sorted({*entries.damage, *sources.by_sample})
        if recipe:
            numbers = every if chosen is None else np.flatnonzero(chosen).tolist()
        decided: dict[int, Finding] = {}
        for number, name in zip(numbers, names.take(numbers), strict=True):
            of_entry, of_source = entries.damage.get(number, ()), sources.by_sample.get(number)
            own = [*of_entry, *([of_source] if of_source else ())]
            own += [Finding(category="stale", reason=reason, path=name, **sides) for reason, sides in recipe]
            finding = worst(own)
            if finding is not None and (looked[number] or finding.category in PROBLEMS):
                decided[number] = finding
        return decided


def _looked(
    generation: Generation, chosen: NDArray[np.bool_] | None, sources: SourcesChecked, deep: Deep
) -> NDArray[np.bool_]:
    """(S,) the samples of which all is known that was asked for."""
    looked = np.ones(len(generation.samples.names), dtype=np.bool_) if chosen is None else chosen.copy()
    for part in parts(0 if deep.read is None else len(deep.read)):
        assert deep.read is not None
        looked[generation.rows.sample[part][~deep.read[part]]] = False
    looked[sources.unasked] = False
    return looked


def find_data(cache: Path, generation: Generation) -> Path:
    """The recorded data folder, or where it would be had cache and data moved together.

    Raises:
        SourceNotFoundError: Neither is there.
    """
    source = generation.manifest["source"]
    places = [Path(source["root"]), Path(cache, source["relative"])]
    for place in places:
        if place.is_dir():
            return place
    raise SourceNotFoundError(
        f"the data folder of this cache is gone: {places[0]}",
        where=str(places[0]),
        why="no such folder" if places[1].resolve() == places[0] else f"it is not at {places[1].resolve()} either",
        fix=f"say where it is: latentcache verify {shlex.quote(str(cache))} --data DATA",
    )


def _load(cache: Path) -> Generation:
    """The current generation; damage to it comes with a way out, because a build does not get past it either."""
    try:
        return pinned(cache, open_generation)
    except CacheDamagedError as error:
        if error.fix == error.default_fix:
            current = shlex.quote(str(cache / "CURRENT"))
            error.fix = f"rm {current}, then the `latentcache build` command that made the cache: entries are kept"
        raise


def _provenance(generation: Generation) -> list[Finding]:
    """Library versions that differ from those of the build."""
    recorded = generation.manifest["provenance"].get("libraries", {})
    findings = []
    for name, old in recorded.items():
        now = installed_version(name)
        if now != old:
            findings.append(Finding(category="provenance", reason=name, expected=str(old), found=now))
    return findings

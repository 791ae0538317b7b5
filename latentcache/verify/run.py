"""``verify_cache``: is this cache still true? Reads the cache and its sources, changes neither.

``fast`` reads manifest, columns and shard indexes, and stats every source, hashing those whose stat differs.
``full`` reads every payload and every source as well. Neither needs torch, a model or a GPU.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from latentcache.errors import CacheDamagedError, EmptySourceError, SourceNotFoundError
from latentcache.recipe import Recipe, differences
from latentcache.sources.resolve import scan
from latentcache.sources.sample import Scan
from latentcache.store.generation import Generation, load_generation
from latentcache.store.layout import CacheLayout
from latentcache.verify.entries import check_entries
from latentcache.verify.findings import Finding, VerifyReport, count, spoken, worst
from latentcache.verify.sources import check_sources


def verify_cache(
    cache: Path, *, data: Path | None = None, requested: Recipe | None = None, full: bool = False
) -> VerifyReport:
    """Check a cache against its sources and against itself.

    Args:
        cache: The cache folder.
        data: The data folder, where it is not the recorded one.
        requested: A recipe that a trainer is about to ask for; every sample is stale where it differs.
        full: Read every payload and every source.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The manifest or a column is damaged, so nothing can be said of single samples.
        SourceNotFoundError: The data folder is gone; say where it is with ``data``.
    """
    started = time.monotonic()
    layout = CacheLayout(cache)
    generation = _load(cache)
    found = _scan(data or find_data(cache, generation))
    by_sample, others = check_sources(generation, found, full=full)
    damage, loose = check_entries(layout, generation, full=full)
    recipe = _recipe_findings(generation, requested)
    findings: list[Finding] = []
    for number, name in enumerate(generation.samples.names):
        own = [*damage.get(number, ()), *([by_sample[number]] if number in by_sample else ())]
        own += [Finding(category="stale", reason=reason, path=name, **sides) for reason, sides in recipe[:1]]
        decided = worst(own)
        if decided is not None:
            findings.append(decided)
    num_ok = len(generation.samples.names) - len(findings)
    findings += [*others, *loose, *_provenance(generation)]
    fix = _mend(cache, found.root)
    return VerifyReport(
        mode="full" if full else "fast",
        generation=generation.number,
        findings=tuple(finding.with_defaults(fix(finding)) for finding in findings),
        counts=count(findings, num_ok),
        samples=len(generation.samples.names) + len(generation.refused),
        building=layout.building.exists(),
        elapsed_s=time.monotonic() - started,
        recipe_id=generation.recipe.recipe_id.hex(),
        allow_failed=generation.allow_failed,
    )


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
        return load_generation(cache)
    except CacheDamagedError as error:
        if error.fix == error.default_fix:
            current = shlex.quote(str(cache / "CURRENT"))
            error.fix = f"rm {current}, then the `latentcache build` command that made the cache: entries are kept"
        raise


def _scan(data: Path) -> Scan:
    """The data folder as it is; an empty one is a scan without samples, not an error."""
    try:
        return scan(data)
    except EmptySourceError:
        return Scan(root=data, samples=())


def _recipe_findings(generation: Generation, requested: Recipe | None) -> list[tuple[str, dict[str, str]]]:
    """One entry per field that differs: reason, and both sides. What was asked for comes before what it replaces."""
    if requested is None:
        return []
    rows = sorted(differences(generation.recipe, requested), key=lambda row: row[2] in (None, [], ()))
    return [(f"recipe:{name}", {"expected": spoken(theirs), "found": spoken(mine)}) for name, mine, theirs in rows]


def _mend(cache: Path, data: Path) -> Callable[[Finding], str]:
    """The command that mends a finding. A shard with damaged payloads is set aside: a build does not look at them."""
    folder = shlex.quote(str(cache))
    build = f"latentcache build {shlex.quote(str(data))} --out {folder}"

    def command(finding: Finding) -> str:
        if finding.category == "unverifiable":
            return f"chmod -R u+rX {folder if finding.file else shlex.quote(str(data))}"
        if finding.category != "corrupt" or finding.reason == "shard":
            return build
        shard = "/".join(finding.file.split("/")[:2])
        return f"mkdir -p {folder}/quarantine && mv {folder}/{shard} {folder}/quarantine/ && {build}"

    return command


def _provenance(generation: Generation) -> list[Finding]:
    """Library versions that differ from those of the build."""
    recorded = generation.manifest["provenance"].get("libraries", {})
    findings = []
    for name, old in recorded.items():
        now = _version(name)
        if now != old:
            findings.append(Finding(category="provenance", reason=name, expected=str(old), found=now))
    return findings


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"

"""Is an exported folder still what its cache holds? The facts beside the rows, and the check against them.

Decides by the fingerprint of the cache (recipe, documents in their order, lengths and runs): a generation that holds
the same documents, as after a collection, leaves the rows as they are. Guarantee: nothing is written, and neither
pyarrow nor torch is imported. Cost: one look at each file; with ``full`` every byte of them is read.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import CacheDamagedError, CacheNotFoundError
from latentcache.identity.content import checksum_of
from latentcache.store.durable import read_json
from latentcache.store.token_generation import TokenGeneration, load_tokens
from latentcache.token_recipe import TokenRecipe, token_differences
from latentcache.verify.findings import Finding, VerifyReport, count, spoken

#: The file of facts in an exported folder.
FACTS = "latentcache.json"
#: How the export was asked for: flag, name in the facts, what need not be said.
_ASKED = (
    ("to", "format", "hf-disk"),
    ("length", "max_length", None),
    ("view", "view", None),
    ("for", "trainer", None),
    ("overflow", "overflow", None),
    ("padding-side", "padding_side", "right"),
    ("validation", "validation", 0),
)
#: Format -> facts without which it cannot be made again.
_NEEDED = {
    "hf-disk": {"max_length", "view", "trainer"},
    "mds": {"max_length", "view"},
    "megatron": set[str](),
    "datatrove": set[str](),
}
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What became of an export."""

    report: VerifyReport
    """One sample for each data file."""
    cache: Path
    """The cache it was held against."""
    facts: Mapping[str, Any]


def is_export(folder: Path) -> bool:
    """Whether a folder was written by ``latentcache export``."""
    return (folder / FACTS).is_file() and not (folder / "CURRENT").exists()


def check_export(folder: Path, *, cache: Path | None = None, full: bool = False) -> ExportReport:
    """Hold an exported folder against its files and against the cache it was made from.

    Args:
        folder: What ``latentcache export`` made.
        cache: Where the cache is now, if it moved.
        full: Read every data file and compare its checksum, instead of its size.

    Raises:
        CacheDamagedError: The facts cannot be read.
        CacheNotFoundError: The cache is not where it was.
        CacheFormatError: The cache is of another kind, or of a newer version.
    """
    begun, facts = time.monotonic(), _facts(folder)
    found = cache or _cache(folder, facts)
    generation = load_tokens(found)
    fix = f"rm -r {shlex.quote(str(folder))}; {export_command(found, folder, facts)}"
    stale = list(_changes(facts, generation))
    findings: list[Finding] = []
    for name in facts["files"]:
        damage = _damage(folder, name, facts, full=full)
        worst = damage or (Finding(category="stale", file=name, **stale[0]) if stale else None)
        findings += [worst.with_defaults(fix)] if worst else []
    report = VerifyReport(
        mode="full" if full else "fast",
        generation=int(facts.get("generation", 0)),
        findings=tuple(findings),
        counts=count(findings, len(facts["files"]) - len(findings)),
        samples=len(facts["files"]),
        building=False,
        elapsed_s=time.monotonic() - begun,
        checked={"files": len(facts["files"]), "payload_bytes": _bytes_of(folder, facts) if full else 0},
        recipe_diff=tuple(_recipe_changes(facts, generation)),
        recipe_id=str(facts["recipe_id"]),
    )
    return ExportReport(report=report, cache=found, facts=facts)


def file_checksum(file: Path) -> str:
    """xxh3-64 of a file's bytes, in hex."""
    with file.open("rb") as source:
        return f"{checksum_of(iter(lambda: source.read(_PIECE_BYTES), b'')):016x}"


def export_command(cache: Path, folder: Path, facts: Mapping[str, Any]) -> str:
    """The command that makes such a folder again."""
    words = ["latentcache", "export", str(cache), str(folder)]
    for flag, name, default in _ASKED:
        value = facts.get(name, default)
        words += [] if value == default else [f"--{flag}", str(value)]
    return shlex.join(words)


def _facts(folder: Path) -> dict[str, Any]:
    """Raises CacheDamagedError where they are not what was written."""
    try:
        facts = read_json(folder / FACTS)
        if any(not isinstance(facts[name], str) for name in ("cache", "fingerprint", "recipe_id")):
            raise KeyError("one of cache, fingerprint and recipe_id is no text")
        form = facts.get("format", "hf-disk")  # folders of earlier releases do not say
        if form not in _NEEDED:
            raise KeyError(f"this version knows no format {form!r}")
        missing = sorted(_NEEDED[form] - set(facts))
        if missing or not isinstance(facts["files"], dict):
            raise KeyError(*missing or ("files is no object",))
    except (CacheDamagedError, KeyError) as error:
        raise CacheDamagedError(
            f"{FACTS} of an exported folder cannot be read",
            where=str(folder / FACTS),
            why=str(error),
            fix=f"rm -r {shlex.quote(str(folder))}, and export again",
        ) from error
    return facts


def _cache(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Where it was, or where it lies as seen from the folder when both moved together."""
    places = [Path(facts["cache"]), folder.resolve() / str(facts.get("cache_from_here", ""))]
    for place in places:
        if (place / "CURRENT").exists():
            return place
    raise CacheNotFoundError(
        f"the cache that {folder} was made from is not at {facts['cache']}",
        where=str(facts["cache"]),
        why="whether the rows are still true can only be told from it",
        fix=f"latentcache verify {shlex.quote(str(folder))} --data CACHE",
    )


def _changes(facts: Mapping[str, Any], now: TokenGeneration) -> Iterator[dict[str, str]]:
    """Why the rows are older than the cache: reason and both sides; nothing where they are not."""
    if facts["fingerprint"] == now.fingerprint:
        return
    for name, was, is_now in _recipe_changes(facts, now):
        yield {"reason": f"recipe:{name}", "expected": spoken(is_now), "found": spoken(was)}
    yield {
        "reason": "cache-changed",
        "expected": f"generation {now.number}, {now.fingerprint[:8]}, {len(now.documents)} documents",
        "found": f"generation {facts.get('generation', '?')}, {facts['fingerprint'][:8]}, "
        f"{facts.get('documents', '?')} documents",
    }


def _recipe_changes(facts: Mapping[str, Any], now: TokenGeneration) -> list[tuple[str, Any, Any]]:
    """Field, in the export, in the cache."""
    if "recipe" not in facts:
        return []
    return token_differences(TokenRecipe.from_json(facts["recipe"]), now.recipe)


def _damage(folder: Path, name: str, facts: Mapping[str, Any], *, full: bool) -> Finding | None:
    """What is wrong with one data file."""
    file = folder / name
    try:
        size = file.stat().st_size
        wanted = facts.get("bytes", {}).get(name, size)  # folders of earlier releases do not say
        if size != wanted:
            return _corrupt(name, f"{wanted} bytes", f"{size} bytes")
        found = file_checksum(file) if full else facts["files"][name]
    except FileNotFoundError:
        return Finding(category="missing", reason="file-lost", file=name, hint="a data file of the export is gone")
    except OSError as error:
        return Finding(category="unverifiable", reason="unreadable", file=name, found=str(error))
    return None if found == facts["files"][name] else _corrupt(name, str(facts["files"][name]), found)


def _corrupt(name: str, expected: str, found: str) -> Finding:
    return Finding(category="corrupt", reason="file-changed", file=name, expected=expected, found=found)


def _bytes_of(folder: Path, facts: Mapping[str, Any]) -> int:
    return sum(file.stat().st_size for file in (folder / name for name in facts["files"]) if file.is_file())

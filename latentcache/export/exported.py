"""Check an exported folder against its files and against its cache.

The fingerprint of the cache decides (recipe, documents in their order, lengths, loss spans): a newer snapshot with
the same documents leaves the rows valid. Guarantee: nothing is written, no file outside the folder is read for the
metadata, and neither pyarrow nor torch is imported. Cost: one look at each file; ``full`` reads every byte.
"""

from __future__ import annotations

import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from latentcache.errors import CacheDamagedError, CacheNotFoundError, StaleCacheError
from latentcache.fields.registry import field_kind
from latentcache.identity.content import checksum_of
from latentcache.store.atomic_io import read_json
from latentcache.store.snapshot import FieldRows, Snapshot, open_snapshot
from latentcache.verify.findings import CATEGORIES, Finding, RecipeChange, VerifyReport

#: The file of metadata in an exported folder, and the version of its keys.
METADATA, SCHEMA = "latentcache.json", 2
#: Flags of the export: flag, name in the metadata, default.
_FLAGS = (
    ("to", "format", "hf-disk"),
    ("for", "trainer", None),
    ("overflow", "overflow", None),
    ("padding-side", "padding_side", "right"),
    ("validation", "validation", 0),
)
#: Format -> metadata that a new export needs.
_NEEDED = {
    "hf-disk": {"length", "layout", "trainer"},
    "mds": {"length", "layout"},
    "megatron": set[str](),
    "datatrove": set[str](),
}
_TEXTS = ("cache", "fingerprint", "recipe_id", "format", "field")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Result of the check of an export."""

    report: VerifyReport
    """One sample per data file."""
    cache: Path
    """The cache that it was compared with."""
    facts: Mapping[str, Any]


def check_export(folder: Path, *, cache: Path | None = None, full: bool = False) -> ExportReport:
    """Compare an exported folder with its files and with its cache.

    Args:
        folder: The exported folder.
        cache: The cache, if it moved.
        full: Read every data file and compare checksums instead of sizes.
    """
    begun, facts = time.monotonic(), _metadata(folder)
    found = cache or _cache(folder, facts)
    snapshot = open_snapshot(found)
    fix = f"rm -r {shlex.quote(str(folder))}; {export_command(found, folder, facts)}"
    changes = tuple(_recipe_changes(facts, snapshot))
    stale = next(_reasons(facts, snapshot, changes), None)
    findings: list[Finding] = []
    for name in facts["files"]:
        damage = _damage(folder, name, facts, full=full)
        if damage is not None or stale is not None:
            findings.append(Finding(**(damage or {"category": "stale", "file": name, **(stale or {})}), fix=fix))
    counts = dict.fromkeys((*CATEGORIES, "unreferenced"), 0)
    for finding in findings:
        counts[finding.category] += 1
    counts["ok"] = len(facts["files"]) - len(findings)
    report = VerifyReport(
        mode="full" if full else "fast",
        snapshot=int(facts.get("snapshot", 0)),
        counts=counts,
        findings=tuple(findings),
        samples=len(facts["files"]),
        checked={"files": len(facts["files"]), "payload_bytes": sum(facts["bytes"].values()) if full else 0},
        recipe_diff=changes,
        recipe_ids={facts["field"]: facts["recipe_id"]},
        elapsed_s=time.monotonic() - begun,
    )
    return ExportReport(report=report, cache=found, facts=facts)


def file_checksum(file: Path) -> str:
    """xxh3-64 of a file's bytes, in hex."""
    with file.open("rb") as source:
        return f"{checksum_of(iter(lambda: source.read(_PIECE_BYTES), b'')):016x}"


def export_command(cache: Path, folder: Path, facts: Mapping[str, Any]) -> str:
    """The command that makes the same export."""
    words = ["latentcache", "export", str(cache), str(folder)]
    if "layout" in facts:
        words += [f"--{facts['layout']}", str(facts["length"])]
    for flag, name, default in _FLAGS:
        value = facts.get(name, default)
        words += [] if value == default else [f"--{flag}", str(value)]
    return shlex.join(words)


def _metadata(folder: Path) -> dict[str, Any]:
    """Raises CacheDamagedError if a value is missing, of a wrong type, or names a file outside the folder."""
    try:
        facts = read_json(folder / METADATA)
        wrong = [name for name in _TEXTS if not isinstance(facts[name], str)]
        if facts["format"] not in _NEEDED:
            raise KeyError(f"unknown format {facts['format']!r}")
        missing = sorted(_NEEDED[facts["format"]] - set(facts))
        wrong += [name for name in ("files", "bytes") if not isinstance(facts[name], dict)]
        if missing or wrong:
            raise KeyError(", ".join(missing or wrong))
        outside = [name for name in facts["files"] if not _is_inside(folder, name)]
        if outside or set(facts["files"]) != set(facts["bytes"]):
            raise KeyError(f"files: {outside[0]!r} is not a file below this folder" if outside else "bytes")
    except (CacheDamagedError, KeyError) as error:
        raise CacheDamagedError(
            f"{METADATA} of an exported folder cannot be read",
            where=str(folder / METADATA),
            why=str(error),
            fix=f"rm -r {shlex.quote(str(folder))}, and export again",
        ) from error
    return facts


def _is_inside(folder: Path, name: str) -> bool:
    """True if a name is relative, has no ``..``, and no part of it is a symbolic link."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    steps = [folder.joinpath(*path.parts[: n + 1]) for n in range(len(path.parts))]
    return not any(step.is_symlink() for step in steps)


def _cache(folder: Path, facts: Mapping[str, Any]) -> Path:
    """The cache at its recorded place, or relative to the folder if both moved together."""
    places = [Path(facts["cache"]), folder.resolve() / str(facts.get("cache_from_here", ""))]
    for place in places:
        if (place / "CURRENT").exists():
            return place
    raise CacheNotFoundError(
        f"the cache of {folder} is not at {facts['cache']}",
        where=str(facts["cache"]),
        why="exported rows are compared with their cache",
        fix=f"latentcache verify {shlex.quote(str(folder))} --data CACHE",
    )


def _field(facts: Mapping[str, Any], snapshot: Snapshot) -> FieldRows:
    try:
        return snapshot.fields[facts["field"]]
    except KeyError:
        what = f"the cache has no field {facts['field']}"
        raise StaleCacheError(what, why=f"its fields: {', '.join(snapshot.fields)}", fix="export again") from None


def _reasons(
    facts: Mapping[str, Any], snapshot: Snapshot, changes: tuple[RecipeChange, ...]
) -> Iterator[dict[str, Any]]:
    """Why the rows are older than the cache: reason, expected, found; nothing if they are not."""
    if facts["fingerprint"] == snapshot.fingerprint:
        return
    for change in changes:
        sides = {"expected": _text(change.requested), "found": _text(change.cached)}
        yield {"reason": f"recipe:{change.field}.{change.setting}", **sides}
    documents = len(_field(facts, snapshot))
    yield {
        "reason": "cache-changed",
        "expected": f"snapshot {snapshot.number}, {snapshot.fingerprint[:8]}, {documents} documents",
        "found": f"snapshot {facts.get('snapshot', '?')}, {facts['fingerprint'][:8]}, "
        f"{facts.get('documents', '?')} documents",
    }


def _recipe_changes(facts: Mapping[str, Any], snapshot: Snapshot) -> Iterator[RecipeChange]:
    rows, kind = _field(facts, snapshot), field_kind(facts["field"])
    if kind is None or rows.recipe is None or "recipe" not in facts:
        return
    was = kind.recipe_from_json(facts["recipe"])
    for name, before, now in kind.differences(was, rows.recipe):
        yield RecipeChange(field=facts["field"], setting=name, cached=before, requested=now)


def _text(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "none"}.get(value, str(value))
        if not isinstance(value, list)
        else str(value)
    )


def _damage(folder: Path, name: str, facts: Mapping[str, Any], *, full: bool) -> dict[str, Any] | None:
    """The fault of one data file."""
    file = folder / name
    try:
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode):
            return {"category": "corrupt", "reason": "file-changed", "file": name, "found": "not a regular file"}
        if found.st_size != facts["bytes"][name]:
            return _corrupt(name, f"{facts['bytes'][name]} bytes", f"{found.st_size} bytes")
        checksum = file_checksum(file) if full else facts["files"][name]
    except FileNotFoundError:
        hint = "a data file of the export is gone"
        return {"category": "missing", "reason": "file-lost", "file": name, "hint": hint}
    except OSError as error:
        return {"category": "unverifiable", "reason": "unreadable", "file": name, "found": str(error)}
    return None if checksum == facts["files"][name] else _corrupt(name, str(facts["files"][name]), checksum)


def _corrupt(name: str, expected: str, found: str) -> dict[str, str]:
    return {"category": "corrupt", "reason": "file-changed", "file": name, "expected": expected, "found": found}

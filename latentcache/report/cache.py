"""The contents of a cache, finished or not.

Cost: one pass over the columns of the rows; payloads are read for a list of entries alone.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import CacheFormatError, RecipeError, count_of
from latentcache.fields.dtypes import DTYPES
from latentcache.fields.registry import field_kind, field_kinds
from latentcache.pipeline.preflight import read_state
from latentcache.plan.numbers import clock
from latentcache.plan.samples import times_counted
from latentcache.store.catalog import load_catalog, stored_entries
from latentcache.store.lock import builder_name
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import FieldRows, Snapshot, current_or_none
from latentcache.verify.collect import disk_bytes
from latentcache.verify.findings import Finding

#: What the thread with the encoder does in each stage of a run.
_STAGES = {"encode": "encoding", "prepare": "waiting for inputs", "write": "waiting for the disk", "idle": "idle"}


def describe_cache(cache: Path, *, entries: bool = False) -> dict[str, Any]:
    """Describe a cache as keys of ``info``; ``entries`` lists every entry and reads every payload.

    Raises:
        StoreError: There is no cache, or it cannot be read.
    """
    paths = CachePaths(cache)
    snapshot = current_or_none(cache)
    stored = load_catalog(paths, open_shards=True)
    is_building = paths.building.exists()
    state: Mapping[str, Any] = read_state(paths) if is_building else {}
    samples, quarantined = _counts(snapshot) if snapshot else (int(state.get("samples", 0)), 0)
    about: dict[str, Any] = {
        "cache": str(cache),
        "complete": snapshot is not None and snapshot.complete and not is_building,
        "snapshot": snapshot.number if snapshot else 0,
        "counts": {"samples": samples, "entries": len(stored), "quarantined": quarantined},
        "bytes": disk_bytes(cache),
        "part": snapshot.part if snapshot else str(state.get("part", "")),
        "builder": builder_name(paths.lock),
    }
    if snapshot:
        about |= _finished(snapshot)
        about["fields"] = {name: _field(rows) for name, rows in snapshot.fields.items()}
    else:
        about["fields"] = dict(_begun(state))
    if entries:
        about["entries"] = list(_entries(list(stored_entries(stored)), snapshot))
    return about


def _counts(snapshot: Snapshot) -> tuple[int, int]:
    """Count samples and rejected samples; one that several fields reject counts once."""
    rejected = {sample.label: sample.count for sample in snapshot.rejected}
    names = snapshot.samples.names if rejected and len(snapshot.fields) > 1 else ()
    outside = sum(rejected[label] for label in rejected.keys() - set(names))
    return len(snapshot.samples) + outside, sum(rejected.values())


def _finished(snapshot: Snapshot) -> dict[str, Any]:
    """Describe the snapshot of a finished build."""
    column = snapshot.samples.columns.get("repeats")
    repeats = times_counted(None if column is None else np.asarray(column), len(snapshot.samples))
    captions = None if snapshot.empty_by_choice else snapshot.samples.inputs.get("caption")
    count, first = captions.text.empty() if captions is not None and captions.text is not None else (0, -1)
    return {
        "created": snapshot.manifest.get("created", ""),
        "demo": snapshot.demo,
        "allow_failed": snapshot.allow_failed,
        "fingerprint": snapshot.fingerprint,
        "source": dict(snapshot.source),
        "left_out": list(snapshot.manifest.get("left_out", ())),
        "repeats": [{"times": times, "samples": number} for times, number in repeats.items()],
        "no_caption": {"count": count, "first": snapshot.samples.names[first] if count else ""},
        "notes": [Finding.of_rejected("note", note).as_json() for note in snapshot.notes if note.target],
    }


def _field(rows: FieldRows) -> dict[str, Any]:
    """Describe a field of a snapshot; a kind that is not installed has no ``about`` and no ``numbers``."""
    counts = np.bincount(np.asarray(rows.group), minlength=len(rows.groups)).tolist()
    about: dict[str, Any] = {
        "installed": rows.kind is not None,
        "recipe": dict(rows.recipe_json),
        "provenance": dict(rows.provenance),
        "recipe_id": rows.recipe_id.hex(),
        "dtype": rows.spec.dtype,
        "items": len(rows),
        "entries": rows.entries,
        "bytes": int(np.asarray(rows.bytes).sum(dtype=np.int64)),
        "groups": [
            {"label": group.label, "shape": list(group.shape), "items": count}
            for group, count in zip(rows.groups, counts, strict=True)
        ],
        "built": built(rows.provenance.get("timing", {})),
        **_saved(rows),
    }
    if rows.kind is not None and rows.recipe is not None:
        columns = {**rows.columns, **rows.ragged_columns, "length": rows.length}
        about["about"] = dict(rows.kind.describe(rows.recipe, rows.provenance))
        about["numbers"] = dict(rows.kind.numbers(rows.recipe, columns))
    if rows.spec.ragged:
        length = np.asarray(rows.length)
        low, high = (int(length.min()), int(length.max())) if len(length) else (0, 0)
        about["lengths"] = {"total": int(length.sum(dtype=np.int64)), "shortest": low, "longest": high}
    return about


def built(timing: Mapping[str, Any]) -> str:
    """Say how long a field's last run took, and how its workers spent the time; empty if it is not known."""
    if not timing:
        return ""
    stages = timing["stages"]
    total = max(sum(timing["stages"].values()), 1e-9)
    order = sorted((stage for stage in stages if stages[stage]), key=lambda stage: -stages[stage])
    shares = ", ".join(f"{stages[stage] / total:.0%} {_STAGES[stage]}" for stage in order)
    rate = timing["encoded"] / max(timing["seconds"], 0.1)
    text = f"{count_of(timing['encoded'], 'items')} in {clock(timing['seconds'])}, {rate:.1f} a second"
    return f"{text}; {shares}" if shares else text


def _saved(rows: FieldRows) -> dict[str, Any]:
    """Count items that share the bytes of an equal one, and the bytes that this and unstored padding save."""
    position = np.asarray(rows.entry).astype(np.int64) << 32 | np.asarray(rows.start)
    is_shared = np.ones(len(rows), dtype=np.bool_)
    is_shared[np.unique(position, return_index=True)[1]] = False
    values = np.array([abs(int(np.prod(group.shape))) for group in rows.groups], dtype=np.int64)
    num_bytes = (values * DTYPES[rows.spec.dtype][1])[np.asarray(rows.group)]
    length = np.asarray(rows.length).astype(np.int64)
    padding = (rows.spec.length - length) * num_bytes * bool(rows.spec.length)
    if rows.spec.ragged:
        num_bytes = num_bytes * length
    return {
        "shared": {"items": int(is_shared.sum()), "bytes": int(num_bytes[is_shared].sum())},
        "trimmed_bytes": int(padding[~is_shared].sum()),
    }


def _begun(state: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of a first build that has not ended."""
    for name, begun in state.get("fields", {}).items():
        if isinstance(begun, Mapping) and "recipe" in begun:
            kind = field_kind(name)
            recipe = begun["recipe"]
            provenance = begun.get("provenance", {})
            about: dict[str, Any] = {"installed": kind is not None, "recipe": recipe, "provenance": provenance}
            with contextlib.suppress(RecipeError):
                if kind is not None:
                    about["about"] = dict(kind.describe(kind.recipe.from_json(recipe), provenance))
            yield name, about


def _entries(stored: Sequence[Any], snapshot: Snapshot | None) -> Iterator[dict[str, Any]]:
    """Yield every committed item with the samples that need it."""
    names: dict[bytes, list[str]] = {}
    kinds = {kind.kind: name for name, kind in field_kinds().items()}
    all_names = list(snapshot.samples.names) if snapshot else []
    for name, rows in snapshot.fields.items() if snapshot else ():
        kinds[rows.kind_byte] = name
        with contextlib.suppress(CacheFormatError):  # keys of packed items are made by their kind
            for key, sample in zip(rows.row_keys(), np.asarray(rows.sample).tolist(), strict=True):
                names.setdefault(key.tobytes(), []).append(all_names[sample])
    for entry in stored:
        paths = names.get(entry.key, [])
        yield {
            "key": entry.key.hex(),
            "field": kinds.get(entry.key[0], str(entry.key[0])),
            "shape": list(entry.shape),
            "dtype": entry.dtype,
            "checksum": f"{entry.checksum:016x}" if entry.intact else None,
            "paths": paths,
            "paths_b64": [base64.b64encode(os.fsencode(name)).decode("ascii") for name in paths],
        }

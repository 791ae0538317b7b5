"""What changed between two caches, or two snapshots of one: recipes, samples, buckets and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.settings import flat_settings
from latentcache.report.crops import crops_of
from latentcache.store.snapshot import Snapshot, open_leased
from latentcache.verify.findings import shown_text

_NAMED = 12


def cache_of(path: Path) -> Path:
    """The cache that a path names: itself, or the one of a snapshot's folder."""
    return path.parent.parent if path.parent.name == "snapshots" and path.name.isdecimal() else path


def snapshot_at(path: Path) -> Snapshot:
    """The current snapshot of a cache, or the one whose folder is given: ``CACHE/snapshots/000002``."""
    cache = cache_of(path)
    return open_leased(cache, None if cache == path else int(path.name))


def compare_facts(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Differences of two snapshots, and the inputs that both hold (overlap of training and validation).

    Raises:
        UsageError: They hold different kinds of data.
    """
    kinds = [str(snapshot.source.get("data_kind", "")) for snapshot in (before, after)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{kinds[0]} and {kinds[1]} cannot be compared", fix="give two caches of the same kind of data"
        )
    return {
        "sides": [_side(snapshot) for snapshot in (before, after)],
        "recipes": list(_recipes(before, after)),
        **_samples(before, after),
        "buckets": _buckets(before, after),
    }


def _side(snapshot: Snapshot) -> dict[str, Any]:
    crops = crops_of(snapshot)
    rejected = sum(sample.count for sample in snapshot.rejected)
    held = sum(int(np.asarray(rows.bytes).sum(dtype=np.int64)) for rows in snapshot.fields.values())
    numbers = {"samples": len(snapshot.samples), "rejected": rejected, "payload_bytes": held}
    return {
        "path": shown_text(str(snapshot.paths.root)),
        "snapshot": snapshot.number,
        "created": snapshot.manifest.get("created", ""),
        "fields": list(snapshot.fields),
        "mean_loss": float(crops.loss.mean()) if crops is not None else None,
        "enlarged": int((crops.enlarged > 1.001).sum()) if crops is not None else None,
        **numbers,
    }


def _recipes(before: Snapshot, after: Snapshot) -> Sequence[dict[str, Any]]:
    """Settings that differ, field by field; a field that one side lacks is one line."""
    changes = list[dict[str, Any]]()
    for name in dict.fromkeys([*before.fields, *after.fields]):
        sides = [snapshot.fields.get(name) for snapshot in (before, after)]
        if None in sides:
            texts = ["absent" if side is None else "present" for side in sides]
            changes.append({"field": name, "setting": "field", "before": texts[0], "after": texts[1]})
            continue
        first, second = (flat_settings(side.recipe_json) for side in sides if side is not None)
        for setting in dict.fromkeys([*first, *second]):
            values = [first.get(setting), second.get(setting)]
            if values[0] != values[1]:
                texts = [shown_text(str(value))[:120] for value in values]
                changes.append({"field": name, "setting": setting, "before": texts[0], "after": texts[1]})
    return changes


def _samples(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Samples by name, and by the content of their first input."""
    sides = [
        dict(zip(snapshot.samples.names, range(len(snapshot.samples)), strict=True)) for snapshot in (before, after)
    ]
    contents = [_contents(snapshot) for snapshot in (before, after)]
    shared = [name for name in sides[1] if name in sides[0]]
    changed = [name for name in shared if contents[0][sides[0][name]] != contents[1][sides[1][name]]]
    added = [name for name in sides[1] if name not in sides[0]]
    removed = [name for name in sides[0] if name not in sides[1]]
    same = np.isin(contents[1], contents[0]) & (contents[1] != b"")
    groups = {"added": added, "removed": removed, "changed": changed}
    names = {
        name: {"count": len(some), "names": list(map(shown_text, some[:_NAMED]))} for name, some in groups.items()
    }
    return {**names, "shared_content": int(same.sum())}


def _contents(snapshot: Snapshot) -> NDArray[np.bytes_]:
    """(S,) content hashes as hex; empty if unknown."""
    held = np.ascontiguousarray(snapshot.samples.first_input.content)
    return np.array([row.hex() if any(row) else "" for row in map(bytes, held)], dtype="S32")


def _buckets(before: Snapshot, after: Snapshot) -> list[dict[str, Any]]:
    """Items by bucket on both sides, of the first field that has buckets."""
    counts = [_items_by_bucket(snapshot) for snapshot in (before, after)]
    labels = dict.fromkeys([*counts[0], *counts[1]])
    return [{"label": label, "before": counts[0].get(label, 0), "after": counts[1].get(label, 0)} for label in labels]


def _items_by_bucket(snapshot: Snapshot) -> dict[str, int]:
    for rows in snapshot.fields.values():
        if any(group.label for group in rows.groups):
            numbers = np.bincount(np.asarray(rows.group), minlength=len(rows.groups)).tolist()
            return {group.label: number for group, number in zip(rows.groups, numbers, strict=True)}
    return {}

"""``latentcache info``: the contents of a cache, finished or not."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import console, flags
from latentcache.cli.console import counted, human_bytes, out, rejected_item
from latentcache.cli.contents import (
    begun_contents,
    field_contents,
    sample_repeats,
    show_captions,
    show_field,
    show_repeats,
    without_caption,
)
from latentcache.cli.flags import option
from latentcache.errors import CacheFormatError, LatentcacheError

if TYPE_CHECKING:
    from latentcache.store.snapshot import FieldRows, Snapshot

HELP = "Show the contents of a cache."


def info(
    cache: flags.Cache,
    *,
    entries: bool = option(False, "--entries", "List every entry; reads every payload."),
    field: flags.Kinds = None,
    as_json: flags.Json = False,
) -> int:
    """Show the contents of a cache."""
    from latentcache.store.garbage import disk_bytes, stored_catalog, stored_entries
    from latentcache.store.paths import CachePaths
    from latentcache.store.snapshot import current_or_none

    paths, snapshot = CachePaths(cache), current_or_none(cache)
    stored = stored_catalog(cache)
    state = _build_state(paths.building)
    payload: dict[str, Any] = {
        "cache": str(cache),
        "complete": snapshot is not None and snapshot.complete and not paths.building.exists(),
        "snapshot": snapshot.number if snapshot else 0,
        "counts": {
            "samples": len(snapshot.samples) + _outside_table(snapshot) if snapshot else int(state.get("samples", 0)),
            "entries": len(stored),
            "quarantined": len(_rejected(snapshot)) if snapshot else 0,
        },
        "bytes": disk_bytes(cache),
        **(_facts(snapshot) if snapshot else _begun(state)),
    }
    if entries:
        payload["entries"] = _entries(list(stored_entries(cache)), snapshot)
    if as_json:
        console.emit("info", payload, exit_code=0)
    else:
        _show(payload)
    return 0


def _rejected(snapshot: Snapshot) -> set[str]:
    """Names of rejected samples; a sample that several fields reject counts once."""
    return {f"{one.name}:{one.line}" if one.line else one.name for one in snapshot.rejected}


def _outside_table(snapshot: Snapshot) -> int:
    """Rejected samples that no field of the cache holds."""
    rejected = _rejected(snapshot)
    if rejected and len(snapshot.fields) > 1:
        rejected.difference_update(snapshot.samples.names)
    return len(rejected)


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "created": snapshot.manifest.get("created", ""),
        "demo": snapshot.demo,
        "source": dict(snapshot.source),
        "part": snapshot.part,
        "allow_failed": snapshot.allow_failed,
        "fingerprint": snapshot.fingerprint,
        "repeats": sample_repeats(snapshot),
        "no_caption": without_caption(snapshot),
        "notes": [rejected_item("note", one) for one in snapshot.notes if one.target],
        "fields": {name: field_contents(rows) for name, rows in snapshot.fields.items()},
    }


def _build_state(building: Path) -> dict[str, Any]:
    """The state of a build that has not ended; empty if there is none."""
    from latentcache.store.atomic_io import read_json

    try:
        return dict(read_json(building)) if building.exists() else {}
    except LatentcacheError:
        return {}


def _begun(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a first build that has not ended."""
    from latentcache.pipeline.settings import WHOLE

    fields = {}
    for name, field in dict(state.get("fields") or {}).items():
        if isinstance(field, Mapping) and "recipe" in field:
            fields[name] = begun_contents(name, field["recipe"], field.get("provenance", {}))
    part = str(state.get("part") or "")
    return {"part": "" if part == WHOLE else part, "fields": fields}


def _item_keys(rows: FieldRows) -> Any:
    """(n, 32) item keys; none of packed items whose kind is not installed, because the kind makes them."""
    try:
        return rows.row_keys()
    except CacheFormatError:
        return ()


def _entries(stored: Sequence[Any], snapshot: Snapshot | None) -> list[dict[str, Any]]:
    """Every committed item with the samples that need it."""
    names: dict[bytes, list[str]] = {}
    kinds: dict[int, str] = {}
    for name, rows in snapshot.fields.items() if snapshot else ():
        kinds[rows.kind_byte] = name
        _name_items(rows, snapshot, names)
    return [_entry(one, kinds, names.get(one.key, [])) for one in stored]


def _name_items(rows: FieldRows, snapshot: Snapshot | None, names: dict[bytes, list[str]]) -> None:
    assert snapshot is not None
    import numpy as np

    all_names = list(snapshot.samples.names)
    for key, sample in zip(_item_keys(rows), np.asarray(rows.sample).tolist(), strict=False):
        names.setdefault(key.tobytes(), []).append(all_names[sample])


def _entry(stored: Any, kinds: Mapping[int, str], names: list[str]) -> dict[str, Any]:
    from latentcache.fields.registry import field_kinds

    installed = {kind.kind: name for name, kind in field_kinds().items()}
    field = kinds.get(stored.key[0]) or installed.get(stored.key[0]) or str(stored.key[0])
    return {
        "key": stored.key.hex(),
        "field": field,
        "shape": list(stored.shape),
        "dtype": stored.dtype,
        "checksum": f"{stored.checksum:016x}" if stored.intact else None,
        "paths": names,
        "paths_b64": [base64.b64encode(os.fsencode(name)).decode("ascii") for name in names],
    }


# text


def _show(payload: Mapping[str, Any]) -> None:
    counts = payload["counts"]
    state = "complete" if payload["complete"] else "not complete: run the same `latentcache build` again to continue"
    out(f"{payload['cache']}  snapshot {payload['snapshot'] or 'none yet'}, {state}")
    held = f"{counted(counts['samples'], 'sample')}, {counted(counts['entries'], 'entry', 'entries')}"
    out(f"{held}, {counts['quarantined']} quarantined, {human_bytes(payload['bytes'])}")
    if payload.get("part"):
        out(f"part {payload['part']} of DATA: join all parts with `latentcache merge PART... --out CACHE`")
    if "created" in payload:
        source = payload["source"]
        out(f"made {payload['created']} from {source.get('data') or source.get('root', '')}")
    if "no_caption" in payload:
        show_captions(payload["no_caption"], sum(one["samples"] for one in payload["repeats"]))
        show_repeats(payload["repeats"])
    for note in payload.get("notes", ()):
        out(f"note: {note['reason']}: {note['found']}")
    for name, field in payload["fields"].items():
        show_field(name, field, demo=bool(payload.get("demo")))
    for entry in payload.get("entries", ()):
        shape = "x".join(map(str, entry["shape"]))
        about = f"{entry['field']} {entry['dtype']} {shape}  {entry['checksum'] or 'DAMAGED'}"
        out(f"{entry['key']}  {about}  {' '.join(entry['paths'])}")

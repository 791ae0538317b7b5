"""``latentcache info``: the contents of a cache, finished or not.

Cost: one pass over the columns of the rows; payloads are read for ``--entries`` alone.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from latentcache.cli import flags
from latentcache.cli.console import Result, findings, repeats_lines, table
from latentcache.cli.flags import option
from latentcache.errors import CacheFormatError, RecipeError, count_of
from latentcache.report.units import human_bytes

if TYPE_CHECKING:
    from latentcache.store.snapshot import FieldRows, Snapshot

HELP = "Show the contents of a cache."


def info(
    cache: flags.Cache,
    *,
    entries: bool = option(False, "--entries", "List every entry; reads every payload."),
    field: flags.Kinds = None,
) -> Result:
    """Show the contents of a cache."""
    from latentcache.store.garbage import disk_bytes, stored_catalog, stored_entries
    from latentcache.store.paths import CachePaths
    from latentcache.store.snapshot import current_or_none

    paths, snapshot = CachePaths(cache), current_or_none(cache)
    stored = stored_catalog(cache)
    state: Mapping[str, Any] = {}
    if paths.building.exists():
        from latentcache.pipeline.existing import read_state

        state = read_state(paths)
    payload: dict[str, Any] = {
        "cache": str(cache),
        "complete": snapshot is not None and snapshot.complete and not paths.building.exists(),
        "snapshot": snapshot.number if snapshot else 0,
        "counts": {"samples": int(state.get("samples", 0)), "entries": len(stored), "quarantined": 0},
        "bytes": disk_bytes(cache),
    }
    if snapshot:
        payload["counts"] |= _counts(snapshot)
    payload |= _of_snapshot(snapshot) if snapshot else _begun(state)
    if entries:
        payload["entries"] = _entries(list(stored_entries(stored)), snapshot)
    return Result(payload, _lines(payload))


def _counts(snapshot: Snapshot) -> dict[str, int]:
    """Samples, those among them that no field could use too; a sample that several fields reject counts once."""
    rejected = {item.label: item.count for item in snapshot.rejected}
    names = snapshot.samples.names if rejected and len(snapshot.fields) > 1 else ()
    outside = sum(rejected[label] for label in rejected.keys() - set(names))
    return {"samples": len(snapshot.samples) + outside, "quarantined": sum(rejected.values())}


def _of_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    import numpy as np

    from latentcache.plan.samples import times_counted

    column = snapshot.samples.columns.get("repeats")
    repeats = times_counted(None if column is None else np.asarray(column), len(snapshot.samples))
    captions = None if snapshot.empty_by_choice else snapshot.samples.inputs.get("caption")
    count, first = captions.text.empty() if captions is not None and captions.text is not None else (0, -1)
    return {
        "created": snapshot.manifest.get("created", ""),
        "demo": snapshot.demo,
        "source": dict(snapshot.source),
        "part": snapshot.part,
        "allow_failed": snapshot.allow_failed,
        "fingerprint": snapshot.fingerprint,
        "repeats": [{"times": times, "samples": number} for times, number in repeats.items()],
        "no_caption": {"count": count, "first": snapshot.samples.names[first] if count else ""},
        "notes": [one.as_json() for one in findings((), snapshot.notes) if one.target],
        "fields": {name: _field(rows) for name, rows in snapshot.fields.items()},
    }


def _field(rows: FieldRows) -> dict[str, Any]:
    import numpy as np

    counts = np.bincount(np.asarray(rows.group), minlength=len(rows.groups)).tolist()
    found: dict[str, Any] = {
        "installed": rows.kind is not None,
        "recipe_id": rows.recipe_id.hex(),
        "recipe": dict(rows.recipe_json),
        "provenance": dict(rows.provenance),
        "dtype": rows.spec.dtype,
        "items": len(rows),
        "entries": rows.entries,
        "bytes": int(np.asarray(rows.bytes).sum(dtype=np.int64)),
        **_saved(rows),
        "groups": [
            {"label": group.label, "shape": list(group.shape), "items": count}
            for group, count in zip(rows.groups, counts, strict=True)
        ],
    }
    if rows.kind is not None and rows.recipe is not None:
        columns = {**rows.columns, **rows.ragged_columns, "length": rows.length}
        found["about"] = dict(rows.kind.describe(rows.recipe, rows.provenance))
        found["numbers"] = dict(rows.kind.numbers(rows.recipe, columns))
    if rows.spec.ragged:
        lengths = np.asarray(rows.length)
        low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
        found["lengths"] = {"total": int(lengths.sum(dtype=np.int64)), "shortest": low, "longest": high}
    return found


def _saved(rows: FieldRows) -> dict[str, Any]:
    """Items that share the bytes of an equal one, the bytes that this saves, and those of padding left out."""
    import numpy as np

    from latentcache.fields.dtypes import DTYPES

    place = np.asarray(rows.entry).astype(np.int64) << 32 | np.asarray(rows.start)
    again = np.ones(len(rows), dtype=np.bool_)
    again[np.unique(place, return_index=True)[1]] = False
    size = (
        np.array([abs(int(np.prod(group.shape))) for group in rows.groups], dtype=np.int64)
        * DTYPES[rows.spec.dtype][1]
    )
    unit, length = size[np.asarray(rows.group)], np.asarray(rows.length).astype(np.int64)
    each = unit * length if rows.spec.ragged else unit
    trimmed = ((rows.spec.length - length) * unit)[~again] if rows.spec.length else np.zeros(0)
    shared = {"items": int(again.sum()), "bytes": int(each[again].sum())}
    return {"shared": shared, "trimmed_bytes": int(trimmed.sum())}


def _begun(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a first build that has not ended."""
    from latentcache.fields.registry import field_kind

    fields = {}
    for name, field in state.get("fields", {}).items():
        if isinstance(field, Mapping) and "recipe" in field:
            kind, recipe, provenance = field_kind(name), field["recipe"], field.get("provenance", {})
            fields[name] = {"installed": kind is not None, "recipe": recipe, "provenance": provenance}
            with contextlib.suppress(RecipeError):
                about = {} if kind is None else dict(kind.describe(kind.recipe_from_json(recipe), provenance))
                fields[name] |= {"about": about}
    return {"part": state.get("part", ""), "fields": fields}


def _entries(stored: Sequence[Any], snapshot: Snapshot | None) -> list[dict[str, Any]]:
    """Every committed item with the samples that need it."""
    import numpy as np

    from latentcache.fields.registry import field_kinds

    names: dict[bytes, list[str]] = {}
    kinds = {kind.kind: name for name, kind in field_kinds().items()}
    all_names = list(snapshot.samples.names) if snapshot else []
    for name, rows in snapshot.fields.items() if snapshot else ():
        kinds[rows.kind_byte] = name
        with contextlib.suppress(CacheFormatError):  # keys of packed items are made by their kind
            for key, sample in zip(rows.row_keys(), np.asarray(rows.sample).tolist(), strict=True):
                names.setdefault(key.tobytes(), []).append(all_names[sample])
    return [
        {
            "key": one.key.hex(),
            "field": kinds.get(one.key[0], str(one.key[0])),
            "shape": list(one.shape),
            "dtype": one.dtype,
            "checksum": f"{one.checksum:016x}" if one.intact else None,
            "paths": names.get(one.key, []),
            "paths_b64": [base64.b64encode(os.fsencode(name)).decode("ascii") for name in names.get(one.key, [])],
        }
        for one in stored
    ]


# text


def _lines(payload: Mapping[str, Any]) -> Iterator[str]:
    counts = payload["counts"]
    state = "complete" if payload["complete"] else "not complete: run the same `latentcache build` again to continue"
    yield f"{payload['cache']}  snapshot {payload['snapshot'] or 'none yet'}, {state}"
    held = f"{count_of(counts['samples'], 'samples')}, {count_of(counts['entries'], 'entries')}"
    yield f"{held}, {counts['quarantined']} quarantined, {human_bytes(payload['bytes'])}"
    if payload["part"]:
        yield f"part {payload['part']} of DATA: join all parts with `latentcache merge PART... --out CACHE`"
    if "created" in payload:
        source, without = payload["source"], payload["no_caption"]
        yield f"made {payload['created']} from {source.get('data') or source.get('root', '')}"
        if without["count"] == sum(one["samples"] for one in payload["repeats"]) > 0:
            yield "captions: none"
        elif without["count"]:
            yield f"captions: {count_of(without['count'], 'samples')} without one, the first is {without['first']}"
        yield from repeats_lines(payload["repeats"])
        yield from (f"note: {note['reason']}: {note['found']}" for note in payload["notes"])
    for name, field in payload["fields"].items():
        yield from _field_lines(name, field, demo=bool(payload.get("demo")))
        if groups := [(one["label"], one["items"]) for one in field.get("groups", ()) if one["label"]]:
            yield from table([("bucket", "items"), *groups])
    for entry in payload.get("entries", ()):
        shape = "x".join(map(str, entry["shape"]))
        about = f"{entry['field']} {entry['dtype']} {shape}  {entry['checksum'] or 'DAMAGED'}"
        yield f"{entry['key']}  {about}  {' '.join(entry['paths'])}"


def _field_lines(name: str, field: Mapping[str, Any], *, demo: bool) -> Iterator[str]:
    recipe = f" (recipe {field['recipe_id'][:8]})" if "recipe_id" in field else ""
    size = f": {count_of(field['items'], 'items')}, {human_bytes(field['bytes'])}" if "items" in field else ""
    state = "" if field["installed"] else ", kind not installed"
    yield f"{name}{recipe}{size}{state}{'  (demo: not for training)' if demo else ''}"
    for label, text in field.get("about", {}).items():
        yield f"  {label:9} {text}"
    shared, trimmed = field.get("shared", {"items": 0}), field.get("trimmed_bytes", 0)
    if shared["items"]:
        items, saved = count_of(shared["items"], "items"), human_bytes(shared["bytes"])
        yield f"  shared    {items} of equal inputs, {saved} saved"
    if trimmed:
        yield f"  trimmed   padding is not stored, {human_bytes(trimmed)} saved"
    if numbers := field.get("numbers"):
        yield "  " + ", ".join(f"{label.replace('_', ' ')} {number:,}" for label, number in numbers.items())
    if (lengths := field.get("lengths")) and field["items"]:
        mean = lengths["total"] / field["items"]
        yield f"  length {lengths['shortest']} to {lengths['longest']}, mean {mean:.0f}, total {lengths['total']:,}"

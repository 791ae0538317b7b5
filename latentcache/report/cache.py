"""The contents of a cache, finished or not.

Cost: one pass over the columns of the rows; payloads are read for a list of entries alone.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import CacheFormatError, RecipeError
from latentcache.fields.dtypes import DTYPES
from latentcache.fields.registry import field_kind, field_kinds
from latentcache.pipeline.existing import read_state
from latentcache.plan.samples import times_counted
from latentcache.store.garbage import disk_bytes, stored_catalog, stored_entries
from latentcache.store.lock import builder_name
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import FieldRows, Snapshot, current_or_none
from latentcache.value import Value
from latentcache.verify.findings import Finding


class Stored(Value):
    """The rows of one field in a snapshot."""

    recipe_id: str
    dtype: str
    items: int
    entries: int
    num_bytes: int
    """Bytes of the payloads."""
    shared_items: int
    """Items with the bytes of an equal one."""
    shared_bytes: int
    trimmed_bytes: int
    """Bytes of padding that is not stored."""
    groups: tuple[Mapping[str, Any], ...]
    """``label``, ``shape`` and ``items`` of each group."""
    numbers: Mapping[str, float] | None = None
    """Numbers that the kind counts beside items; None: the kind is not installed."""
    lengths: Mapping[str, int] | None = None
    """``total``, ``shortest`` and ``longest``; None: all items have one length."""

    def as_json(self) -> dict[str, Any]:
        """Keys of a field of ``info``."""
        shown = {name: getattr(self, name) for name in ("recipe_id", "dtype", "items", "entries", "trimmed_bytes")}
        shown |= {"bytes": self.num_bytes, "groups": [dict(group) for group in self.groups]}
        shown["shared"] = {"items": self.shared_items, "bytes": self.shared_bytes}
        more = {"numbers": self.numbers, "lengths": self.lengths}
        return shown | {name: dict(value) for name, value in more.items() if value is not None}


class FieldReport(Value):
    """One field of a cache."""

    installed: bool
    recipe: Mapping[str, Any]
    provenance: Mapping[str, Any]
    about: Mapping[str, str] | None = None
    """Lines on the recipe: label -> text; None: the kind is not installed, or cannot read it."""
    stored: Stored | None = None
    """None: the first build has not ended."""

    def as_json(self) -> dict[str, Any]:
        """One value of ``fields``."""
        shown = {"installed": self.installed, "recipe": dict(self.recipe), "provenance": dict(self.provenance)}
        shown |= {} if self.about is None else {"about": dict(self.about)}
        return shown | ({} if self.stored is None else self.stored.as_json())


class Finished(Value):
    """What the snapshot of a finished build says."""

    created: str
    demo: bool
    source: Mapping[str, Any]
    allow_failed: str
    fingerprint: str
    repeats: Mapping[int, int]
    """Occurrences in an epoch -> samples."""
    no_caption: int
    first_without_caption: str
    notes: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """Keys of ``info``."""
        names = ("created", "demo", "allow_failed", "fingerprint")
        return {
            **{name: getattr(self, name) for name in names},
            "source": dict(self.source),
            "repeats": [{"times": times, "samples": number} for times, number in self.repeats.items()],
            "no_caption": {"count": self.no_caption, "first": self.first_without_caption},
            "notes": [note.as_json() for note in self.notes],
        }


class CacheReport(Value):
    """The contents of a cache."""

    cache: Path
    complete: bool
    snapshot: int
    """0 before the first build has finished."""
    samples: int
    entries: int
    quarantined: int
    num_bytes: int
    """On disk."""
    part: str
    fields: Mapping[str, FieldReport]
    finished: Finished | None = None
    builder: str = ""
    """The build that runs now: its process, host and start."""
    listed: tuple[Mapping[str, Any], ...] | None = field(default=None, repr=False)
    """Every entry, if asked for."""

    def as_json(self) -> dict[str, Any]:
        """Keys of ``info``."""
        shown: dict[str, Any] = {"cache": str(self.cache), "complete": self.complete, "snapshot": self.snapshot}
        shown["counts"] = {name: getattr(self, name) for name in ("samples", "entries", "quarantined")}
        shown |= {"bytes": self.num_bytes, "part": self.part, "builder": self.builder}
        shown |= {} if self.finished is None else self.finished.as_json()
        shown["fields"] = {name: one.as_json() for name, one in self.fields.items()}
        return shown | ({} if self.listed is None else {"entries": [dict(entry) for entry in self.listed]})


def describe_cache(cache: Path, *, entries: bool = False) -> CacheReport:
    """Describe a cache; ``entries`` lists every entry and reads every payload.

    Raises:
        StoreError: There is no cache, or it cannot be read.
    """
    paths, snapshot, stored = CachePaths(cache), current_or_none(cache), stored_catalog(cache)
    is_building = paths.building.exists()
    state: Mapping[str, Any] = read_state(paths) if is_building else {}
    samples, quarantined = _counts(snapshot) if snapshot else (int(state.get("samples", 0)), 0)
    return CacheReport(
        cache=cache,
        complete=snapshot is not None and snapshot.complete and not is_building,
        snapshot=snapshot.number if snapshot else 0,
        samples=samples,
        entries=len(stored),
        quarantined=quarantined,
        num_bytes=disk_bytes(cache),
        part=snapshot.part if snapshot else str(state.get("part", "")),
        fields={name: _field(rows) for name, rows in snapshot.fields.items()} if snapshot else dict(_begun(state)),
        finished=_finished(snapshot) if snapshot else None,
        builder=builder_name(paths.lock),
        listed=tuple(_entries(list(stored_entries(stored)), snapshot)) if entries else None,
    )


def _counts(snapshot: Snapshot) -> tuple[int, int]:
    """Samples and rejected ones; one that several fields reject counts once."""
    rejected = {sample.label: sample.count for sample in snapshot.rejected}
    names = snapshot.samples.names if rejected and len(snapshot.fields) > 1 else ()
    outside = sum(rejected[label] for label in rejected.keys() - set(names))
    return len(snapshot.samples) + outside, sum(rejected.values())


def _finished(snapshot: Snapshot) -> Finished:
    column = snapshot.samples.columns.get("repeats")
    captions = None if snapshot.empty_by_choice else snapshot.samples.inputs.get("caption")
    count, first = captions.text.empty() if captions is not None and captions.text is not None else (0, -1)
    return Finished(
        created=snapshot.manifest.get("created", ""),
        demo=snapshot.demo,
        source=dict(snapshot.source),
        allow_failed=snapshot.allow_failed,
        fingerprint=snapshot.fingerprint,
        repeats=times_counted(None if column is None else np.asarray(column), len(snapshot.samples)),
        no_caption=count,
        first_without_caption=snapshot.samples.names[first] if count else "",
        notes=tuple(Finding.of_rejected("note", note) for note in snapshot.notes if note.target),
    )


def _field(rows: FieldRows) -> FieldReport:
    counts = np.bincount(np.asarray(rows.group), minlength=len(rows.groups)).tolist()
    numbers, about, lengths = None, None, None
    if rows.kind is not None and rows.recipe is not None:
        columns = {**rows.columns, **rows.ragged_columns, "length": rows.length}
        about = dict(rows.kind.describe(rows.recipe, rows.provenance))
        numbers = dict(rows.kind.numbers(rows.recipe, columns))
    if rows.spec.ragged:
        length = np.asarray(rows.length)
        low, high = (int(length.min()), int(length.max())) if len(length) else (0, 0)
        lengths = {"total": int(length.sum(dtype=np.int64)), "shortest": low, "longest": high}
    stored = Stored(
        recipe_id=rows.recipe_id.hex(),
        dtype=rows.spec.dtype,
        items=len(rows),
        entries=rows.entries,
        num_bytes=int(np.asarray(rows.bytes).sum(dtype=np.int64)),
        groups=tuple(
            {"label": group.label, "shape": list(group.shape), "items": count}
            for group, count in zip(rows.groups, counts, strict=True)
        ),
        numbers=numbers,
        lengths=lengths,
        **_saved(rows),
    )
    installed = rows.kind is not None
    parts: dict[str, Any] = {"recipe": dict(rows.recipe_json), "provenance": dict(rows.provenance)}
    return FieldReport(installed=installed, about=about, stored=stored, **parts)


def _saved(rows: FieldRows) -> dict[str, int]:
    """Items that share the bytes of an equal one, the bytes that this saves, and those of padding left out."""
    place = np.asarray(rows.entry).astype(np.int64) << 32 | np.asarray(rows.start)
    again = np.ones(len(rows), dtype=np.bool_)
    again[np.unique(place, return_index=True)[1]] = False
    sizes = np.array([abs(int(np.prod(group.shape))) for group in rows.groups], dtype=np.int64)
    unit = (sizes * DTYPES[rows.spec.dtype][1])[np.asarray(rows.group)]
    length = np.asarray(rows.length).astype(np.int64)
    each = unit * length if rows.spec.ragged else unit
    trimmed = ((rows.spec.length - length) * unit)[~again] if rows.spec.length else np.zeros(0)
    shared = {"shared_items": int(again.sum()), "shared_bytes": int(each[again].sum())}
    return {**shared, "trimmed_bytes": int(trimmed.sum())}


def _begun(state: Mapping[str, Any]) -> Iterator[tuple[str, FieldReport]]:
    """The fields of a first build that has not ended."""
    for name, begun in state.get("fields", {}).items():
        if isinstance(begun, Mapping) and "recipe" in begun:
            kind, recipe, provenance = field_kind(name), begun["recipe"], begun.get("provenance", {})
            about = None
            with contextlib.suppress(RecipeError):
                about = None if kind is None else dict(kind.describe(kind.recipe.from_json(recipe), provenance))
            yield name, FieldReport(installed=kind is not None, recipe=recipe, provenance=provenance, about=about)


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

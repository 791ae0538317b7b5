"""Put a snapshot together and publish it: written whole, then ``CURRENT`` is switched. docs/format/snapshot.md.

A crash leaves the old snapshot or the new one. Entries are shared between snapshots and never rewritten; what a kind
says of its items (crops, loss spans) is taken from the last snapshot or from the heads of the entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.fields.protocol import FieldKind, FieldRecipe, Group
from latentcache.fields.table import Input, Rejected, SampleTable
from latentcache.identity.content import checksum
from latentcache.identity.key import split_keys
from latentcache.store.atomic_io import Buffer, json_bytes, make_folder, sync_folder, write_atomically, writing
from latentcache.store.catalog import Catalog, CatalogRows
from latentcache.store.columns import encoded_columns
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import (
    COLUMNS,
    ENTRY_TYPES,
    FORMAT_VERSION,
    MANIFEST,
    REJECTED,
    ROW_TYPES,
    FieldColumns,
    FieldRows,
    Snapshot,
    own_checksum,
)
from latentcache.value import Value

#: What the manifest says beside what a build gives.
_OWN_NAMES = frozenset(
    {"format", "snapshot", "complete", "created", "demo", "allow_failed", "fingerprint", "source", "shards", "counts"}
    | {"columns", "rejected", "inputs", "fields", "checksum"}
)


class NewSnapshot(Value):
    """A snapshot that is to be published."""

    samples: SampleTable
    fields: tuple[FieldColumns, ...]
    shards: Sequence[str]
    source: Mapping[str, Any]
    """``root``, ``data_kind``, options and ``part``: any JSON."""
    rejected: Iterable[Rejected] = ()
    notes: Iterable[Rejected] = ()
    complete: bool = True
    """False if a repair removed entries that no build has made again."""
    allow_failed: str = "0"
    demo: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More names of the manifest."""


def kept_rows(one: FieldColumns, rows: NDArray[np.bool_]) -> FieldColumns:
    """A field with the rows that stay (R,), and with the entries that these need."""
    needed, entry = np.unique(np.asarray(one.entry)[rows], return_inverse=True)
    changed: dict[str, Any] = {name: np.asarray(getattr(one, name))[needed] for name in ("key", *ENTRY_TYPES)}
    changed |= {name: np.asarray(getattr(one, name))[rows] for name in ROW_TYPES}
    changed |= {"entry": entry.astype(np.int32), "columns": {k: np.asarray(v)[rows] for k, v in one.columns.items()}}
    return replace(one, **changed, ragged_columns={k: _kept_values(*v, rows) for k, v in one.ragged_columns.items()})


def field_columns(kind: FieldKind, recipe: FieldRecipe, **columns: Any) -> FieldColumns:
    """A field with these columns; also ``groups``, ``provenance`` and ``noise``."""
    return FieldColumns(
        name=kind.name,
        kind_byte=kind.kind,
        packing=kind.packing,
        recipe_json=recipe.as_json(),
        recipe_id=recipe.recipe_id,
        spec=recipe.spec,
        **columns,
    )


def new_field(
    catalog: Catalog,
    *,
    kind: FieldKind,
    recipe: FieldRecipe,
    groups: Sequence[Group],
    sample: NDArray[np.integer],
    group: NDArray[np.integer],
    variant: NDArray[np.integer],
    place: NDArray[np.integer],
    provenance: Mapping[str, Any] | None = None,
    noise: Mapping[str, Any] | None = None,
    known: FieldRows | None = None,
) -> FieldColumns:
    """The field of a snapshot whose items are at these places of the catalog; its shards are those of the catalog.

    Args:
        catalog: With all items.
        kind: Of the field.
        recipe: Of the field.
        groups: That ``group`` points into.
        sample: (R,) row of the sample table.
        group: (R,)
        variant: (R,)
        place: (R,) all of them in the catalog.
        provenance: For the manifest.
        noise: For the manifest.
        known: The field in the current snapshot, if it has the same recipe: own columns that need not be read again.
    """
    place = np.asarray(place)
    if (np.diff(sample) <= 0).any():
        order = np.lexsort((variant, group, sample))
        sample, group, variant, place = sample[order], group[order], variant[order], place[order]
    rows = catalog.places(place)
    entry, first = _distinct(rows)
    distinct = len(first) == len(entry)
    some = rows if distinct else CatalogRows(**{one.name: getattr(rows, one.name)[first] for one in fields(rows)})
    columns, ragged = _OwnColumns(kind, len(place)).collect(catalog, place, rows, known)
    return field_columns(
        kind,
        recipe,
        groups=tuple(groups),
        provenance=provenance or {},
        noise=noise or {},
        key=catalog.entry_keys(some),
        **{name: getattr(some, name) for name in ENTRY_TYPES},
        sample=sample,
        entry=entry,
        group=group,
        variant=variant,
        start=rows.start,
        length=rows.length,
        columns=columns,
        ragged_columns=ragged,
    )


def _distinct(rows: CatalogRows) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """(R,) number of the entry of each row, in the order in which entries appear, and (E,) the first row of each."""
    bases = np.cumsum([0, *(int(rows.entry[rows.shard == one].max()) + 1 for one in np.unique(rows.shard))])
    number = bases[np.searchsorted(np.unique(rows.shard), rows.shard)] + rows.entry
    first_row = np.empty(int(bases[-1]), dtype=np.int32)
    first_row[number[::-1]] = np.arange(len(number) - 1, -1, -1, dtype=np.int32)  # of two writes the last one stays
    first = first_row[number]
    is_first = first == np.arange(len(number), dtype=np.int32)
    rank = np.cumsum(is_first, dtype=np.int32) - np.int32(1)
    return rank[first], np.flatnonzero(is_first)


class _OwnColumns:
    """Gathers the own columns of R rows from a known snapshot and from the heads of entries."""

    def __init__(self, kind: FieldKind, rows: int) -> None:
        self.kind, self.rows = kind, rows
        self.plain = {name: np.zeros((rows, *shape), dtype=dtype) for name, (dtype, shape) in kind.columns.items()}
        self.counts = {name: np.zeros(rows, dtype=np.int64) for name in kind.ragged_columns}
        self.parts: dict[str, list[tuple[Any, NDArray[Any]]]] = {name: [] for name in kind.ragged_columns}

    def collect(
        self, catalog: Catalog, place: NDArray[np.integer], rows: Any, known: FieldRows | None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, tuple[NDArray[np.int64], NDArray[Any]]]]:
        """Plain and ragged columns of all rows."""
        if not self.plain and not self.counts:
            return {}, {}
        old = np.full(self.rows, -1, dtype=np.int64) if known is None else _known_rows(catalog, rows, known)
        have = np.flatnonzero(old >= 0)
        if known is not None and len(have):
            self._fill(have, old[have], known.columns, known.ragged_columns)
        rest = np.flatnonzero(old < 0)
        for at, position, header in catalog.headers(place[rest]):
            self._fill(rest[at], position, header.columns, header.ragged_columns)
        return self.plain, {name: self._joined(name) for name in self.counts}

    def _fill(
        self,
        rows: NDArray[np.intp],
        source: NDArray[np.int64],
        columns: Mapping[str, Any],
        ragged: Mapping[str, tuple[Any, Any]],
    ) -> None:
        """Take rows from the columns of a snapshot or of one entry; what these lack is zeros or nothing."""
        for name, values in self.plain.items():
            if name in columns:
                values[rows] = columns[name][source]
        for name, counts in self.counts.items():
            if name in ragged:
                ends, values = (np.asarray(one) for one in ragged[name])
                stop = ends[source]
                counts[rows] = stop - np.where(source > 0, ends[source - 1], 0)
                self.parts[name].append((rows, values[_ranges(stop - counts[rows], counts[rows])]))

    def _joined(self, name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
        dtype, shape = self.kind.ragged_columns[name]
        ends = np.cumsum(self.counts[name], dtype=np.int64)
        values = np.zeros((int(ends[-1]) if len(ends) else 0, *shape), dtype=dtype)
        for rows, some in self.parts[name]:
            count = self.counts[name][rows]
            values[_ranges(ends[rows] - count, count)] = some
        return ends, values


def publish_snapshot(
    paths: CachePaths,
    new: NewSnapshot,
    current: Snapshot | None = None,
    told: Callable[[Mapping[str, Any]], bool] = lambda manifest: False,
) -> int:
    """Write the next snapshot and switch ``CURRENT`` to it; the caller holds the builder lock.

    Args:
        paths: The cache.
        new: The snapshot.
        current: One whose columns it may have taken over; then these are not encoded to see that nothing is new.
        told: Is shown the manifest first; True if it tells nothing new.

    Returns:
        Its number; 0 if nothing was published.
    """
    number = max(paths.snapshots(), default=0) + 1
    if current is not None and _has_columns_of(new, current) and told(_contents(new, number, current)[0]):
        return 0
    manifest, files = _contents(new, number)
    if told(manifest):
        return 0
    _write(paths.snapshot(number), manifest, files)
    with writing(paths.snapshot(number)):
        sync_folder(paths.snapshots_folder)
    write_atomically(paths.current, f"{number:06d}\n".encode("ascii"))
    return number


def write_snapshot(folder: Path, new: NewSnapshot) -> None:
    """Write all files of a snapshot without a number. Errors as :func:`publish_snapshot`."""
    _write(folder, *_contents(new, 0))


def _write(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, Sequence[Buffer]]) -> None:
    make_folder(folder)
    for name, parts in files.items():
        write_atomically(folder / name, parts)
    write_atomically(folder / MANIFEST, json_bytes({**manifest, "checksum": own_checksum(manifest)}))


def _has_columns_of(new: NewSnapshot, current: Snapshot) -> bool:
    """True if samples and fields are those objects that were read from a snapshot."""
    names = ("key", *ENTRY_TYPES, *ROW_TYPES, "columns", "ragged_columns")
    return new.samples is current.samples and all(
        one.name in current.fields
        and all(getattr(one, name) is getattr(current.fields[one.name], name) for name in names)
        for one in new.fields
    )


def _contents(
    new: NewSnapshot, number: int, columns_of: Snapshot | None = None
) -> tuple[dict[str, Any], dict[str, Sequence[Buffer]]]:
    """The manifest, without its checksum, and the other files; no columns if they are those of a snapshot."""
    shards, new_fields = _needed_shards(new)
    if columns_of is None:
        columns = _sample_columns(new.samples)
        for one in new_fields:
            columns |= {f"fields/{one.name}/{name}": values for name, values in _field_columns(one).items()}
        parts, signature = encoded_columns(columns)
        print_of, about = fingerprint(new.samples, new_fields), {"file": COLUMNS, "checksum": f"{signature:016x}"}
    else:
        parts, print_of, about = [], columns_of.fingerprint, columns_of.manifest["columns"]
    lines = [rejected_line("rejected", one) for one in new.rejected]
    rejected = len(lines)
    lines += [rejected_line("note", one) for one in new.notes]
    listed = b"".join(lines)
    manifest = {
        "format": {"name": "latentcache", "version": FORMAT_VERSION},
        "snapshot": number,
        "complete": new.complete,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "demo": new.demo,
        "allow_failed": new.allow_failed,
        "fingerprint": print_of,
        "source": dict(new.source),
        "shards": list(shards),
        "counts": {
            "samples": len(new.samples),
            "entries": sum(len(one.offset) for one in new_fields),
            "quarantined": rejected,
        },
        "inputs": {name: sorted(_input_columns(one)) for name, one in new.samples.inputs.items()},
        "columns": about,
        "rejected": {"file": REJECTED, "checksum": f"{checksum(listed):016x}"},
        "fields": {one.name: _described(one) for one in new_fields},
        **new.facts,
    }
    return manifest, {COLUMNS: parts, REJECTED: [listed]}


def republish(
    paths: CachePaths, old: Snapshot, *, fields: Mapping[str, FieldColumns], shards: Sequence[str], complete: bool
) -> int:
    """Publish a snapshot with its entries in other places, or without some; it says which one it replaces.

    Errors as :func:`publish_snapshot`.
    """
    facts = {name: value for name, value in old.manifest.items() if name not in _OWN_NAMES}
    new = NewSnapshot(
        samples=old.samples,
        fields=tuple(fields.values()),
        shards=shards,
        source=old.source,
        rejected=old.rejected,
        notes=old.notes,
        complete=complete,
        allow_failed=old.allow_failed,
        demo=old.demo,
        facts=facts | {"replaces": old.number},
    )
    return publish_snapshot(paths, new)


def fingerprint(samples: SampleTable, fields: Iterable[FieldColumns]) -> str:
    """Hex hash of samples, rows and recipes."""
    found = xxhash.xxh3_128()
    for part in (samples.names.data, samples.names.ends, *(one.content for one in samples.inputs.values())):
        found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    for one in fields:
        found.update(one.name.encode() + one.recipe_id)
        for name in ("sample", "group", "variant", "length"):
            found.update(np.ascontiguousarray(getattr(one, name), dtype=ROW_TYPES[name]).view(np.uint8).data)
    return found.hexdigest()


def _needed_shards(new: NewSnapshot) -> tuple[list[str], list[FieldColumns]]:
    """Names of the shards that entries need, sorted, and the fields pointing into these."""
    used = {number for one in new.fields for number in np.flatnonzero(np.bincount(one.shard)).tolist()}
    order = sorted(used, key=lambda number: new.shards[number])
    if order == list(range(len(order))):
        return list(new.shards[: len(order)]), list(new.fields)
    position = np.zeros(len(new.shards) + 1, dtype=np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    moved = [replace(one, shard=position[np.asarray(one.shard)]) for one in new.fields]
    return [new.shards[number] for number in order], moved


def _described(one: FieldColumns) -> dict[str, Any]:
    return {
        "kind": one.kind_byte,
        "packing": one.packing,
        "recipe": dict(one.recipe_json),
        "recipe_id": one.recipe_id.hex(),
        "spec": {item.name: getattr(one.spec, item.name) for item in fields(one.spec)},
        "groups": [group.as_json() for group in one.groups],
        "counts": {"entries": len(one.offset), "rows": len(one.sample)},
        "columns": sorted(one.columns),
        "ragged_columns": sorted(one.ragged_columns),
        "provenance": dict(one.provenance),
        "noise": dict(one.noise),
    }


def _field_columns(one: FieldColumns) -> dict[str, Any]:
    content, frames, frame = split_keys(one.key)
    columns: dict[str, Any] = {"key.content": content, "key.frame": frame, "key.frames": frames}
    for name, dtype in {**ENTRY_TYPES, **ROW_TYPES}.items():
        columns[name] = np.asarray(getattr(one, name)).astype(dtype, copy=False)
    columns |= {f"columns/{name}": values for name, values in one.columns.items()}
    for name, (ends, values) in one.ragged_columns.items():
        columns |= {f"ragged/{name}.ends": np.asarray(ends, dtype=np.int64), f"ragged/{name}.values": values}
    return columns


def _sample_columns(samples: SampleTable) -> dict[str, Any]:
    files = samples.files
    columns = {
        "samples/names": samples.names,
        "files/names": files.names,
        "files/stat": files.stat,
        "files/content": files.content,
    }
    if files.reading is not None:
        columns["files/reading"] = files.reading
    for name, one in samples.inputs.items():
        columns |= {f"inputs/{name}/{part}": values for part, values in _input_columns(one).items()}
    return columns | {f"samples/columns/{name}": values for name, values in samples.columns.items()}


def _input_columns(one: Input) -> dict[str, Any]:
    found = {"content": one.content, "file": one.file, "line": one.line, "text": one.text}
    return {name: values for name, values in found.items() if values is not None}


def rejected_line(kind: str, one: Rejected) -> bytes:
    """One line of ``rejected.jsonl``."""
    value = {item.name: getattr(one, item.name) for item in fields(one)} | {"content": one.content.hex()}
    kept = {name: entry for name, entry in value.items() if entry not in ("", 0, (), None)}
    return json.dumps({"type": kind, **kept}, ensure_ascii=True).encode("ascii") + b"\n"


def _known_rows(catalog: Catalog, rows: CatalogRows, known: FieldRows) -> NDArray[np.int64]:
    """(R,) the row of a known field that is the same item; -1 if none was found."""
    number = {name: position for position, name in enumerate(catalog.shards)}
    shard = np.array([number.get(name, -1) for name in known.shards], dtype=np.int32)[np.asarray(known.shard)]
    entry = np.asarray(known.entry)
    theirs: list[NDArray[Any]] = [shard[entry], np.asarray(known.offset)[entry], np.asarray(known.start)]
    mine: list[NDArray[Any]] = [rows.shard, rows.offset, rows.start]
    count, others = len(rows.shard), len(entry)
    found = np.full(count, -1, dtype=np.int64)
    front = _alike(theirs, mine)
    back = min(_alike([one[::-1] for one in theirs], [one[::-1] for one in mine]), min(count, others) - front)
    found[:front], found[count - back :] = np.arange(front), np.arange(others - back, others)
    theirs = [one[front : others - back] for one in theirs]
    mine = [one[front : count - back] for one in mine]
    if not len(theirs[0]) or not len(mine[0]):
        return found
    mixed = _mixed(*theirs)
    order = np.argsort(mixed, kind="stable")
    at = order[np.minimum(np.searchsorted(mixed[order], _mixed(*mine)), len(order) - 1)]
    same = np.logical_and.reduce([one[at] == other for one, other in zip(theirs, mine, strict=True)])
    found[front : count - back] = np.where(same, front + at, -1)
    return found


def _alike(some: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> int:
    """Number of rows from the first on that are the same in all columns."""
    least = min(len(some[0]), len(others[0]))
    same = np.logical_and.reduce([one[:least] == other[:least] for one, other in zip(some, others, strict=True)])
    return least if same.all() else int(np.argmin(same))


def _mixed(shard: NDArray[Any], offset: NDArray[Any], start: NDArray[Any]) -> NDArray[np.uint64]:
    """(n,) one number for each place; equal for equal places, and rarely for others."""
    mixed: NDArray[np.uint64] = offset.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed ^= shard.astype(np.uint64) * np.uint64(0xC2B2_AE3D_27D4_EB4F)
    mixed ^= start.astype(np.uint64) * np.uint64(0x1656_67B1_9E37_79F9)
    return mixed


def _ranges(start: NDArray[np.integer], count: NDArray[np.integer]) -> NDArray[np.int64]:
    """All positions from each start on, as many as its count, one range after the other."""
    total = np.cumsum(count, dtype=np.int64)
    positions = np.arange(int(total[-1]) if len(total) else 0)
    return positions + np.repeat(np.asarray(start, dtype=np.int64) - (total - count), count)


def _kept_values(ends: Any, values: Any, rows: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    bounds = np.asarray(ends, dtype=np.int64)
    counts = np.diff(bounds, prepend=np.int64(0))[rows]
    return np.cumsum(counts), np.asarray(values)[_ranges(bounds[rows] - counts, counts)]

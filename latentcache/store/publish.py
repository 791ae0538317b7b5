"""Put a snapshot together and publish it: written whole, then ``CURRENT`` is switched. docs/format/snapshot.md.

A crash leaves the old snapshot or the new one. Entries are shared between snapshots and never rewritten.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.fields.protocol import FieldKind, FieldRecipe
from latentcache.fields.table import Files, Input, Rejected, SampleTable
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import make_folder, sync_folder, write_atomically, write_json, writing
from latentcache.store.catalog import Catalog, picked
from latentcache.store.columns import write_columns
from latentcache.store.lock import unleased
from latentcache.store.paths import FORMAT_VERSION, CachePaths
from latentcache.store.snapshot import (
    COLUMNS,
    ENTRY_TYPES,
    MANIFEST,
    REJECTED,
    ROW_TYPES,
    FieldRows,
    Snapshot,
    own_checksum,
)
from latentcache.value import Value

#: Parts of a snapshot that one in its place has too, unless they change.
_KEPT = ("samples", "source", "shards", "rejected", "notes", "complete", "allow_failed", "demo",
         "building")  # fmt: skip


class NewSnapshot(Value):
    """A snapshot that is to be published."""

    samples: SampleTable
    fields: tuple[FieldRows, ...]
    shards: Sequence[str]
    source: Mapping[str, Any]
    """``root``, ``data_kind``, options and ``part``: any JSON."""
    rejected: Iterable[Rejected] = ()
    notes: Iterable[Rejected] = ()
    complete: bool = True
    """False if a repair removed entries that no build has made again."""
    allow_failed: str = "0"
    demo: bool = False
    building: int = 0
    """Samples that the build will have, if it goes on; 0: it has ended."""
    created: str = ""
    """When it was made, if not now."""


def kept_rows(rows: FieldRows, chosen: NDArray[np.bool_]) -> FieldRows:
    """A field with the rows that are chosen (R,), and with the entries that these need."""
    needed, entry = np.unique(np.asarray(rows.entry)[chosen], return_inverse=True)
    changed: dict[str, Any] = {name: np.asarray(getattr(rows, name))[needed] for name in ("key", *ENTRY_TYPES)}
    changed |= {name: np.asarray(getattr(rows, name))[chosen] for name in ROW_TYPES}
    changed |= {
        "entry": entry.astype(np.int32),
        "columns": {k: np.asarray(v)[chosen] for k, v in rows.columns.items()},
    }
    return replace(
        rows,
        **changed,
        ragged_columns={k: picked(*v, np.flatnonzero(chosen)) for k, v in rows.ragged_columns.items()},
    )


def new_field(
    catalog: Catalog,
    *,
    kind: FieldKind,
    recipe: FieldRecipe,
    sample: NDArray[np.integer],
    group: NDArray[np.integer],
    variant: NDArray[np.integer],
    items: NDArray[np.integer],
    **about: Any,
) -> FieldRows:
    """The field of a snapshot with these items of the catalog, whose shards it has.

    ``sample``, ``group`` and ``variant`` are (R,) as in ``FieldRows``, in any order, ``items`` (R,) too. ``about``:
    ``groups``, ``provenance`` and ``noise``.
    """
    if (np.diff(sample) <= 0).any():
        order = np.lexsort((variant, group, sample))
        sample = sample[order]
        group = group[order]
        variant = variant[order]
        items = items[order]
    rows = catalog.locations(items)
    entry, first = _in_order(catalog.entry_numbers(rows))
    entries = rows if len(first) == len(rows) else rows[first]  # there may be ten million
    plain, ragged = catalog.own_columns(kind, items)
    return FieldRows(
        name=kind.name,
        kind=kind,
        kind_byte=kind.kind,
        packing=kind.packing,
        recipe=recipe,
        recipe_json=recipe.as_json(),
        recipe_id=recipe.recipe_id,
        spec=recipe.spec,
        key=catalog.entry_keys(entries),
        sample=sample,
        entry=entry,
        group=group,
        variant=variant,
        start=rows.start,
        length=rows.length,
        columns=plain,
        ragged_columns=ragged,
        **{name: entries[name] for name in ENTRY_TYPES},
        **about,
    )


def _in_order(number: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """(n,) the rank of each number, in the order in which numbers appear, and the first row of each."""
    first_row = np.empty(int(number.max(initial=-1)) + 1, dtype=np.int32)
    first_row[number[::-1]] = np.arange(len(number) - 1, -1, -1, dtype=np.int32)  # of two writes the last one stays
    first = first_row[number]
    is_first = first == np.arange(len(number), dtype=np.int32)
    rank = np.cumsum(is_first, dtype=np.int32) - np.int32(1)
    return rank[first], np.flatnonzero(is_first)


def shard_numbers(catalog: Catalog, known: FieldRows) -> NDArray[np.int32]:
    """Return the position of each shard of a snapshot in the catalog; -1: it is damaged or gone."""
    names = catalog.shards
    return np.array([names.index(name) if name in names else -1 for name in known.shards], dtype=np.int32)


def is_unchanged(new: NewSnapshot, current: Snapshot, provenance: Sequence[str]) -> bool:
    """True if a new snapshot says what the current one says, so that it need not be published.

    Neither its time nor the machines that made its entries count; of the provenance of fields, only these parts do.
    """
    new = _needed_shards(new)
    prints = current.fingerprint, str(current.manifest["columns"]["checksum"])
    manifest, _ = _manifest(new, current.number, prints)
    said, known = (_comparable(version, provenance) for version in (manifest, current.manifest))
    return said == known and current.columns.holds(_columns(new.samples, new.fields))


def _comparable(manifest: Mapping[str, Any], provenance: Sequence[str]) -> Any:
    """The values of a manifest that make a snapshot a new one."""
    named = ("complete", "allow_failed", "shards", "inputs", "columns", "rejected")
    fields = [
        (name, {**about, "provenance": [about["provenance"].get(part) for part in provenance], "noise": None})
        for name, about in manifest["fields"].items()
    ]
    values = {name: manifest[name] for name in named} | {"fields": fields, "building": manifest.get("building")}
    return json.loads(json.dumps(values | {"source": {**manifest["source"], "relative": ""}}))


def publish_snapshot(paths: CachePaths, new: NewSnapshot) -> int:
    """Write the next snapshot and switch ``CURRENT`` to it; returns its number. The caller holds the builder lock."""
    new = _needed_shards(new)
    number = paths.next_snapshot()
    folder = paths.snapshot(number)
    make_folder(folder)
    signature = write_columns(folder / COLUMNS, _columns(new.samples, new.fields))
    manifest, listed = _manifest(new, number, (_fingerprint(new.samples, new.fields), f"{signature:016x}"))
    write_atomically(folder / REJECTED, listed)
    write_json(folder / MANIFEST, {**manifest, "checksum": own_checksum(manifest)})
    with writing(folder):
        sync_folder(paths.snapshots_folder)
    write_atomically(paths.current, f"{number:06d}\n".encode("ascii"))
    return number


def publish_replacement(paths: CachePaths, old: Snapshot, fields: Iterable[FieldRows], **changes: Any) -> None:
    """Publish a snapshot in place of another one, which goes unless a reader has it open."""
    kept = {name: getattr(old, name) for name in _KEPT}
    publish_snapshot(paths, NewSnapshot(fields=tuple(fields), **{**kept, **changes}))
    remove_snapshot(paths, old.number)


def remove_snapshot(paths: CachePaths, number: int) -> bool:
    """Remove the columns of a snapshot; False if a reader has it open. Its shards stay."""
    folder = paths.snapshot(number)
    with writing(folder), unleased(folder / MANIFEST) as is_free:
        if is_free:
            shutil.rmtree(paths.to_scratch(folder), ignore_errors=True)
            with contextlib.suppress(OSError):
                paths.scratch.rmdir()
    return is_free


def _manifest(new: NewSnapshot, number: int, prints: tuple[str, str]) -> tuple[dict[str, Any], bytes]:
    """The manifest without its checksum, and the rejected inputs; ``prints`` of rows and of the file of columns."""
    rejected = [rejected_line("rejected", rejection) for rejection in new.rejected]
    listed = b"".join([*rejected, *(rejected_line("note", note) for note in new.notes)])
    manifest = {
        "format": {"name": "latentcache", "version": FORMAT_VERSION},
        "snapshot": number,
        "complete": new.complete,
        "created": new.created or datetime.now(UTC).isoformat(timespec="seconds"),
        "demo": new.demo,
        "allow_failed": new.allow_failed,
        "fingerprint": prints[0],
        "source": dict(new.source),
        "shards": list(new.shards),
        "counts": {
            "samples": len(new.samples),
            "entries": sum(len(rows.offset) for rows in new.fields),
            "quarantined": len(rejected),
        },
        "inputs": {
            name: [part[1:] for part in sorted(_parts("", column))] for name, column in new.samples.inputs.items()
        },
        "columns": {"file": COLUMNS, "checksum": prints[1]},
        "rejected": {"file": REJECTED, "checksum": f"{checksum(listed):016x}"},
        "fields": {rows.name: _described(rows) for rows in new.fields},
    }
    return manifest | ({"building": new.building} if new.building else {}), listed


def _fingerprint(samples: SampleTable, fields: Iterable[FieldRows]) -> str:
    digest = xxhash.xxh3_128()
    for part in (samples.names.data, samples.names.ends, *(column.content for column in samples.inputs.values())):
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    for rows in fields:
        digest.update(rows.name.encode() + rows.recipe_id)
        for name in ("sample", "group", "variant", "length"):
            digest.update(np.ascontiguousarray(getattr(rows, name), dtype=ROW_TYPES[name]).view(np.uint8).data)
    return digest.hexdigest()


def _needed_shards(new: NewSnapshot) -> NewSnapshot:
    """With the shards that entries need, sorted by name."""
    used = {number for rows in new.fields for number in np.flatnonzero(np.bincount(rows.shard)).tolist()}
    order = sorted(used, key=lambda number: new.shards[number])
    if order == list(range(len(order))):
        return replace(new, shards=new.shards[: len(order)])
    position = np.zeros(len(new.shards) + 1, dtype=np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    moved = tuple(replace(rows, shard=position[np.asarray(rows.shard)]) for rows in new.fields)
    return replace(new, shards=[new.shards[number] for number in order], fields=moved)


def _described(rows: FieldRows) -> dict[str, Any]:
    return {
        "kind": rows.kind_byte,
        "packing": rows.packing,
        "recipe": dict(rows.recipe_json),
        "recipe_id": rows.recipe_id.hex(),
        "spec": {item.name: getattr(rows.spec, item.name) for item in fields(rows.spec)},
        "groups": [asdict(group) for group in rows.groups],
        "counts": {"entries": len(rows.offset), "rows": len(rows.sample)},
        "columns": sorted(rows.columns),
        "ragged_columns": sorted(rows.ragged_columns),
        "provenance": dict(rows.provenance),
        "noise": dict(rows.noise),
    }


def _field_columns(rows: FieldRows) -> dict[str, Any]:
    columns: dict[str, Any] = {"key": rows.key}
    columns |= {name: _typed(getattr(rows, name), dtype) for name, dtype in {**ENTRY_TYPES, **ROW_TYPES}.items()}
    columns |= {f"columns/{name}": values for name, values in rows.columns.items()}
    for name, (ends, values) in rows.ragged_columns.items():
        columns |= {f"ragged/{name}.ends": _typed(ends, "i8"), f"ragged/{name}.values": values}
    return columns


def _typed(values: Any, dtype: str) -> Any:
    return values if values.dtype == np.dtype(dtype) else np.asarray(values).astype(dtype)


def _columns(samples: SampleTable, fields: Iterable[FieldRows]) -> dict[str, Any]:
    columns = {"samples/names": samples.names, **_parts("files", samples.files)}
    for name, column in samples.inputs.items():
        columns |= _parts(f"inputs/{name}", column)
    columns |= {f"samples/columns/{name}": values for name, values in samples.columns.items()}
    for rows in fields:
        columns |= {f"fields/{rows.name}/{name}": values for name, values in _field_columns(rows).items()}
    return columns


def _parts(prefix: str, part: Files | Input) -> dict[str, Any]:
    columns = {f"{prefix}/{item.name}": getattr(part, item.name) for item in fields(part)}
    return {name: values for name, values in columns.items() if values is not None}


def rejected_line(kind: str, rejected: Rejected) -> bytes:
    """One line of ``rejected.jsonl``."""
    value = {item.name: getattr(rejected, item.name) for item in fields(rejected)} | {
        "content": rejected.content.hex()
    }
    kept = {name: entry for name, entry in value.items() if entry not in ("", 0, (), None)}
    return json.dumps({"type": kind, **kept}, ensure_ascii=True).encode("ascii") + b"\n"

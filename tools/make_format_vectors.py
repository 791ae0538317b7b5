"""Make a tiny cache whose every byte is known: the test vectors of docs/format for authors of a second reader.

Three fields of made-up kinds cover what the format can do: one item per entry, blocks of equal items, blocks of
ragged items; plain and ragged columns; inline and large values; a name that is not UTF-8. Values come from a formula,
so the same entries come out on every machine. Run it again only if the format changes; tests/golden compares.

    python tools/make_format_vectors.py            writes docs/format/vectors
    python tools/make_format_vectors.py FOLDER     writes elsewhere
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.protocol import FieldKind, FieldRecipe, FieldSpec, Group
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, Rejected, SampleTable
from latentcache.identity.content import checksum, content_hash, entry_key, json_hash
from latentcache.store.atomic_io import write_json
from latentcache.store.catalog import load_catalog
from latentcache.store.entry import Item, pack_items, read_header
from latentcache.store.paths import FORMAT_VERSION, CachePaths
from latentcache.store.publish import NewSnapshot, new_field, publish_snapshot
from latentcache.store.shard import ShardWriter

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "format" / "vectors"
NAMES = ("a/wide.png", "b/tall.png", "caf\u00e9.png", "raw-\udcff.png")
CAPTIONS = ("a wide gradient", "a tall gradient", "\u00abcaf\u00e9\u00bb \u753b\u50cf", "")
SHARDS = ("first", "second")


class VectorRecipe(FieldRecipe):
    """The recipe of one field of the vectors."""

    kind: str
    stored: FieldSpec

    @property
    def spec(self) -> FieldSpec:
        """Storage and collation."""
        return self.stored

    def identity(self) -> dict[str, Any]:
        """Return the fields of the id."""
        return {"dtype": self.spec.dtype, "rule": 1}

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the id, and a number outside of it."""
        return self.identity() | {"scale": 0.18215}

    @cached_property
    def recipe_id(self) -> bytes:
        """16 bytes."""
        return json_hash({self.kind: self.identity()})


class Plane(FieldKind):
    """One float16 array per entry, with a pixel hash and a crop; one fits into a page, one does not."""

    name, kind, packing, inputs = "example_plane", 200, "entry", ("image",)
    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {"crop": ("<u4", (2,)), "quality": ("<f4", ())}


class Vector(FieldKind):
    """Blocks of float32 vectors of equal length."""

    name, kind, packing, inputs = "example_vector", 201, "block", ("image",)


class Words(FieldKind):
    """Blocks of ragged uint32 items with spans."""

    name, kind, packing, inputs = "example_words", 202, "block", ("image",)
    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {"odd": ("<u4", ())}
    ragged_columns: Mapping[str, tuple[str, tuple[int, ...]]] = {"spans": ("<u4", (2,))}


PLANE, VECTOR, WORDS = Plane(), Vector(), Words()
FIELDS: tuple[tuple[FieldKind, FieldSpec, tuple[Group, ...]], ...] = (
    (
        PLANE,
        FieldSpec(dtype="bfloat16", dims=("C", "h", "w")),
        (
            Group(label="64x64", shape=(4, 8, 8), dims=(1, 64, 64)),
            Group(label="256x192", shape=(4, 32, 24), dims=(1, 256, 192)),
        ),
    ),
    (VECTOR, FieldSpec(dtype="float32", dims=("d",)), (Group(label="", shape=(6,)),)),
    (WORDS, FieldSpec(dtype="uint32", dims=("n",), ragged=True, collate="pack"), (Group(label="", shape=(-1,)),)),
)


def recipe_of(kind: FieldKind, spec: FieldSpec) -> VectorRecipe:
    """Return the recipe of a field."""
    return VectorRecipe(kind=kind.name, stored=spec)


def values_of(number: int, count: int, dtype: str) -> NDArray[Any]:
    """Compute (count,) values by a formula."""
    rising = (np.arange(count) * (2 * number + 3) + number) % 251
    return (rising + 0x3F00 if dtype == "bfloat16" else rising / 8 if dtype == "float32" else rising * 300).astype(
        numpy_dtype(dtype)
    )


def group_of(number: int, groups: tuple[Group, ...]) -> int:
    """Return the group of a sample."""
    return int(number == 3) if len(groups) > 1 else 0


def item_of(number: int, kind: FieldKind, spec: FieldSpec, groups: tuple[Group, ...]) -> Item:
    """Return the item of a sample in a field."""
    group = groups[group_of(number, groups)]
    key = entry_key(
        kind=kind.kind, content=content_of(number), recipe=recipe_of(kind, spec).recipe_id[:8], dims=group.dims
    )
    shape = group.shape if not spec.ragged else (5 + 4 * number,)
    array = values_of(number, int(np.prod(shape)), spec.dtype).reshape(shape)
    if kind is PLANE:
        columns = {"crop": (number, 300 * number), "quality": number / 4}
        return Item(key=key, array=array, same=content_hash(array.tobytes()), columns=columns)
    spans = np.array([[0, 2], [3, 1]])[: number % 3]
    return Item(key=key, array=array, columns={"odd": number % 2, "spans": spans})


def content_of(number: int) -> bytes:
    """Return the content hash of a sample's image."""
    return content_hash(NAMES[number].encode("utf-8", "surrogateescape"))


def samples() -> SampleTable:
    """Return four samples."""
    count = len(NAMES)
    names = Strings.of(NAMES)
    content = np.frombuffer(b"".join(map(content_of, range(count))), dtype=np.uint8).reshape(count, 16)
    stat = np.arange(6 * count, dtype=np.uint64).reshape(count, 6)
    nothing = np.zeros((count, 16), dtype=np.uint8)
    image = Input(content=content, file=np.arange(count, dtype=np.int32))
    caption = Input(content=nothing, file=np.full(count, -1, dtype=np.int32), text=Strings.of(CAPTIONS))
    return SampleTable(
        names=names,
        files=Files(names=names, stat=stat, content=content),
        inputs={"image": image, "caption": caption},
        columns={"original_size": np.array([[64, 72], [70, 64], [64, 64], [256, 192]], dtype=np.uint32)},
    )


def make_vectors(folder: Path) -> dict[str, Any]:
    """Write ``cache/`` and ``expected.json`` into a folder, in place of what is there; return the latter."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    paths = CachePaths(folder / "cache")
    entries = []
    for number, shard in enumerate(SHARDS):
        chosen = [sample for sample in range(len(NAMES)) if sample % len(SHARDS) == number]
        packed = [
            entry
            for kind, spec, groups in FIELDS
            for entry in pack_items(
                [item_of(sample, kind, spec, groups) for sample in chosen], recipe_of(kind, spec), kind
            )
        ]
        with contextlib.closing(ShardWriter(paths.shards / f"{shard}.open", map_bytes=1 << 20)) as writer:
            writer.write(packed)
            writer.seal()
        entries += packed
    _publish(paths)
    expected = {
        "format": FORMAT_VERSION,
        "entries": [
            {"key": entry.key.hex(), "head": bytes(entry.value[: read_header(entry.value).head_bytes]).hex()}
            for entry in entries
        ],
        "items": [
            _expected(sample, kind, spec, groups) for kind, spec, groups in FIELDS for sample in range(len(NAMES))
        ],
    }
    write_json(folder / "expected.json", expected)
    return expected


def _publish(paths: CachePaths) -> None:
    catalog, count = load_catalog(paths), len(NAMES)
    new_fields = []
    for kind, spec, groups in FIELDS:
        keys = b"".join(item_of(sample, kind, spec, groups).key for sample in range(count))
        new = new_field(
            catalog,
            kind=kind,
            recipe=recipe_of(kind, spec),
            groups=groups,
            sample=np.arange(count),
            group=np.array([group_of(sample, groups) for sample in range(count)]),
            variant=np.zeros(count, dtype=np.uint8),
            items=catalog.find(np.frombuffer(keys, dtype=np.uint8).reshape(count, 32)),
            provenance={"latentcache": "vectors"},
        )
        new_fields.append(new)
    publish_snapshot(
        paths,
        NewSnapshot(
            samples=samples(),
            fields=tuple(new_fields),
            shards=catalog.shards,
            source={"root": "images", "data_kind": "images"},
            rejected=[Rejected(name="d/broken.png", reason="truncated", detail="ends after 9 of 12 288 bytes")],
            notes=[Rejected(name="notes.md", reason="unlisted")],
            created="2026-01-01T00:00:00+00:00",
        ),
    )


def _expected(sample: int, kind: FieldKind, spec: FieldSpec, groups: tuple[Group, ...]) -> dict[str, Any]:
    """Return the values of a row that every reader must find."""
    item = item_of(sample, kind, spec, groups)
    return {
        "field": kind.name,
        "key": item.key.hex(),
        "name_hex": NAMES[sample].encode("utf-8", "surrogateescape").hex(),
        "dtype": spec.dtype,
        "shape": list(item.array.shape),
        "checksum": f"{checksum(item.array.tobytes()):016x}",
        "columns": {name: json.loads(json.dumps(one)) for name, one in item.columns.items() if name != "spans"},
        "spans": np.asarray(item.columns.get("spans", [])).tolist(),
    }


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    print(f"{len(make_vectors(target)['items'])} items in {target}")

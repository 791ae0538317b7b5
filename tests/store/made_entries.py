"""Kinds and items for tests of the store, and small caches written with the store only."""

import contextlib
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from latentcache.fields import registry
from latentcache.fields.protocol import FieldKind, FieldSpec, Group
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, Rejected, SampleTable
from latentcache.identity.content import content_hash, entry_key
from latentcache.store.atomic_io import make_folder
from latentcache.store.catalog import load_catalog
from latentcache.store.entry import Item, pack_items
from latentcache.store.paths import CachePaths
from latentcache.store.publish import NewSnapshot, new_field, publish_snapshot
from latentcache.store.shard import ShardWriter


@dataclass(frozen=True)
class ToyRecipe:
    spec: FieldSpec
    recipe_id: bytes = b"recipe-of-16-byt"

    def as_json(self):
        return {"dtype": self.spec.dtype, "ratio": 0.25}


class Plane(FieldKind):
    """One float16 array per entry, with a pixel hash and a crop."""

    name, kind, packing, inputs = "plane", 200, "entry", ("image",)
    recipe = SimpleNamespace(from_json=lambda data: PLANE_RECIPE)
    columns = {"crop": ("<u4", (2,)), "resize": ("<u4", (2,))}  # noqa: RUF012


class Words(FieldKind):
    """Ragged uint16 with spans, many per block."""

    name, kind, packing, inputs = "words", 201, "block", ("image",)
    recipe = SimpleNamespace(from_json=lambda data: WORDS_RECIPE)
    columns = {"control": ("<u4", ())}  # noqa: RUF012
    ragged_columns = {"spans": ("<u4", (2,))}  # noqa: RUF012


class Vector(FieldKind):
    """One float32 vector each, many per block."""

    name, kind, packing, inputs = "vector", 202, "block", ("image",)
    recipe = SimpleNamespace(from_json=lambda data: VECTOR_RECIPE)


PLANE, WORDS, VECTOR = Plane(), Words(), Vector()
PLANE_RECIPE = ToyRecipe(FieldSpec(dtype="float16", dims=("C", "h", "w")))
WORDS_RECIPE = ToyRecipe(FieldSpec(dtype="uint16", dims=("n",), ragged=True, collate="pack"))
VECTOR_RECIPE = ToyRecipe(FieldSpec(dtype="float32", dims=("d",)))
RECIPES = {"plane": PLANE_RECIPE, "words": WORDS_RECIPE, "vector": VECTOR_RECIPE}
KINDS = {"plane": PLANE, "words": WORDS, "vector": VECTOR}
GROUPS = {
    "plane": tuple(Group(label=f"64x{w}", shape=(4, 8, w // 8), dims=(1, 64, w)) for w in (64, 128, 256)),
    "words": (Group(label="", shape=(-1,)),),
    "vector": (Group(label="", shape=(48,)),),
}


def about(name):
    return {"kind": KINDS[name], "recipe": RECIPES[name], "groups": GROUPS[name]}


def content_of(number):
    return content_hash(b"content %d" % number)


def group_of(name, number):
    return number % len(GROUPS[name])


def item_of(name, number):
    rng, group = np.random.default_rng(number), GROUPS[name][group_of(name, number)]
    key = entry_key(kind=KINDS[name].kind, content=content_of(number), recipe=b"recipe-o", dims=group.dims)
    if name == "plane":
        array = rng.standard_normal(group.shape).astype("<f2")
        columns = {"crop": (number % 7, number % 300), "resize": (64, 64 + number % 1000)}
        return Item(key=key, array=array, same=content_hash(array.tobytes()), columns=columns)
    if name == "vector":
        return Item(key=key, array=rng.standard_normal(48).astype("<f4"))
    array = rng.integers(0, 60_000, rng.integers(1, 2000)).astype("<u2")
    spans = np.array([[0, 1], [2, number % 5 + 1], [9, 4]])[: number % 4]
    return Item(key=key, array=array, columns={"control": number % 3, "spans": spans})


def items_of(name, numbers):
    return [item_of(name, number) for number in numbers]


def entries_of(name, numbers):
    return pack_items(items_of(name, numbers), RECIPES[name], KINDS[name])


def flat_entry(number, size):
    """An entry whose payload has about ``size`` bytes."""
    array = np.frombuffer(random.Random(number).randbytes(max(size, 2) // 2 * 2), dtype="<f2").reshape(1, 1, -1)
    key = entry_key(kind=200, content=content_of(number), recipe=b"recipe-o")
    return pack_items([Item(key=key, array=array)], PLANE_RECIPE, PLANE)[0]


def make_shard(folder, entries):
    with contextlib.closing(ShardWriter(folder.with_name(f"{folder.name}.open"))) as writer:
        writer.write(entries)
        return writer.seal()


def open_shard(folder, entries):
    """Write a shard as a killed build leaves it; return its data file."""
    with contextlib.closing(ShardWriter(folder)) as writer:
        writer.write(entries)
    return folder / "data.mdb"


def keys_of(items):
    return np.frombuffer(b"".join(item.key for item in items), dtype=np.uint8).reshape(-1, 32)


def samples_of(numbers):
    contents = np.frombuffer(b"".join(map(content_of, numbers)), dtype=np.uint8).reshape(-1, 16)
    names = Strings.of([f"im\u00e4ge-{number:04d}.png" for number in numbers])
    count = len(contents)
    files = Files(names=names, stat=np.arange(6 * count, dtype=np.uint64).reshape(-1, 6), content=contents)
    image = Input(content=contents, file=np.arange(count, dtype=np.int32))
    text = Strings.of([f"caption {number}" for number in numbers])
    caption = Input(content=np.zeros((count, 16), np.uint8), file=np.full(count, -1, np.int32), text=text)
    size = np.stack([np.arange(count), np.full(count, 512)], axis=1).astype(np.uint32)
    table = SampleTable(names=names, files=files, inputs={"image": image, "caption": caption})
    return replace(table, columns={**table.columns, "original_size": size})


def new_field_of(catalog, name, numbers):
    count, items = len(numbers), catalog.find(keys_of(items_of(name, numbers)))
    group = np.array([group_of(name, number) for number in numbers], dtype=np.int32)
    columns = {"sample": np.arange(count), "group": group, "variant": np.zeros(count, dtype=np.uint8)}
    return new_field(catalog, **about(name), **columns, items=items)


def publish(paths, numbers, fields=("plane", "words", "vector"), **more):
    catalog = load_catalog(paths)
    new_fields = [new_field_of(catalog, name, numbers) for name in fields]
    new = NewSnapshot(
        samples=samples_of(numbers),
        fields=tuple(new_fields),
        shards=catalog.shards,
        source={"root": "/data", "data_kind": "images"},
        rejected=[Rejected(name="bad.png", reason="truncated", content=b"c" * 16, stat=(1, 2, 3, 4, 5, 6))],
        notes=[Rejected(name="a.txt", reason="unlisted", line=3)],
    )
    return publish_snapshot(paths, replace(new, **more))


def make_cache(root, numbers=range(12), shards=2):
    """Create a cache of three fields in some shards; return its paths."""
    paths, numbers = CachePaths(root), list(numbers)
    make_folder(paths.shards)
    for number in range(shards):
        some = numbers[number::shards]
        entries = [entry for name in KINDS for entry in entries_of(name, some)]
        make_shard(paths.shard(f"shard-{number}"), entries)
    publish(paths, numbers)
    return paths


def install(monkeypatch):
    monkeypatch.setattr(registry, "field_kinds", lambda: KINDS)

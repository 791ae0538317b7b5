"""Small caches written with the store only: latents, documents and edges of known values."""

import warnings
from pathlib import Path

import numpy as np

from latentcache.fields.input_ids import InputIds, InputIdsRecipe
from latentcache.fields.latents import (
    EncoderSpec,
    GeometrySettings,
    Latents,
    LatentsRecipe,
    Normalization,
    PixelProfile,
)
from latentcache.fields.protocol import Group
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Input, SampleTable
from latentcache.identity.content import content_hash
from latentcache.loader.cache import open_cache
from latentcache.store.catalog import load_catalog
from latentcache.store.entry import Item, pack_items
from latentcache.store.paths import CachePaths
from latentcache.store.publish import NewSnapshot, new_field, publish_snapshot
from latentcache.store.shard import ShardWriter
from tests.fields.edge_map import EdgeMap, EdgeRecipe

EOS = 1


def contents(values):
    """Return (n, 16) content hashes of the repr of values."""
    return np.frombuffer(b"".join(content_hash(repr(value).encode()) for value in values), np.uint8).reshape(-1, 16)


def files_of(names):
    count = len(names)
    return Files(names=Strings.of(names), stat=np.zeros((count, STAT_WIDTH), np.uint64), content=contents(names))


class Field:
    def __init__(self, kind, recipe, groups, sample, group, arrays, *, variant=None, columns=None, ragged=None):
        count = len(arrays)
        self.kind, self.recipe, self.groups, self.arrays = kind, recipe, tuple(groups), arrays
        self.sample, self.group = np.asarray(sample, np.int32), np.asarray(group, np.int32)
        self.variant = np.zeros(count, np.uint8) if variant is None else np.asarray(variant, np.uint8)
        self.columns, self.ragged = columns or {}, ragged or {}


def publish(root, samples, fields, *, seal_every=10_000, part="", building=0):
    """Write the items and publish a snapshot with these fields; gives the cache folder."""
    paths = CachePaths(Path(root))
    paths.shards.mkdir(parents=True, exist_ok=True)
    keys = {}
    for field in fields:
        content = field.kind.content(samples)[field.sample]
        keys[field.kind.name] = key = field.kind.keys(content, field.group, field.variant, field.groups, field.recipe)
        items = [
            Item(key=key[row].tobytes(), array=array,
                 columns={name: values[row] for name, values in (field.columns | field.ragged).items()})
            for row, array in enumerate(field.arrays)
        ]  # fmt: skip
        for start in range(0, len(items), seal_every):
            writer = ShardWriter(paths.shards / f"{field.kind.name}-{start}-{len(list(paths.shards.iterdir()))}.open")
            for group in sorted(set(field.group[start : start + seal_every].tolist())):
                groups = field.group[start:].tolist()
                of_group = [item for item, other in zip(items[start:], groups, strict=True) if other == group]
                writer.write(pack_items(of_group[:seal_every], field.recipe, field.kind))
            writer.seal()
    catalog = load_catalog(paths)
    new_fields = []
    for field in fields:
        catalog_items = catalog.find(keys[field.kind.name])
        assert (catalog_items >= 0).all()
        new_fields.append(
            new_field(catalog, kind=field.kind, recipe=field.recipe, groups=field.groups, sample=field.sample,
                        group=field.group, variant=field.variant, items=catalog_items)
        )  # fmt: skip
    source = {"root": str(Path(root).parent / "data"), "options": {}, "data_kind": "images", "part": part}
    new = NewSnapshot(samples=samples, fields=tuple(new_fields), shards=catalog.shards, source=source,
                      rejected=(), notes=(), building=building)  # fmt: skip
    publish_snapshot(paths, new)
    return Path(root)


def recipe(*, flip=False, posterior="mode", dtype="float16", channels=4, **normalization):
    encoder = EncoderSpec(
        family="stub", fingerprint="ab" * 16, config="cd" * 16, channels=channels, factor=8, multiple=8,
        storage_dtype=dtype, posterior=posterior, normalization=Normalization(**normalization),
    )  # fmt: skip
    return LatentsRecipe(geometry=GeometrySettings(flip=flip), pixels=PixelProfile(), encoder=encoder)


def as_stored(values, dtype):
    """Convert float32 values to a storage type; bfloat16 as uint16."""
    if dtype == "bfloat16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    return np.asarray(values).astype(dtype)


def images(
    root, sizes, *, captions=True, names=None, field=None, edges=None, resolutions=1, seed=0, seal_every=7,
    repeats=None, texts=None, building=0, **more
):  # fmt: skip
    """Create a cache of latents; return the folder.

    ``sizes`` are (height, width) in pixels; values are seeded normal numbers. ``edges`` are heights of a ragged
    field; None omits the image.
    """
    latents = field or recipe(**more)
    names = names or [f"{number:02}.png" for number in range(len(sizes))]
    count, generator = len(sizes), np.random.default_rng(seed)
    kinds = {(h * by, w * by) for h, w in sizes for by in range(1, resolutions + 1)}
    kinds = sorted(kinds, key=lambda size: -size[0] * size[1])
    caption_texts = texts or [f"caption of {name}" for name in names]
    stored = latents.encoder.stored_channels
    groups = [Group(label=f"{h}x{w}", shape=(stored, h // 8, w // 8), dims=(1, h, w)) for h, w in kinds]
    variants = latents.spec.variants
    table = SampleTable(
        names=Strings.of(names),
        files=files_of(names),
        inputs={
            "image": Input(content=contents([(seed, name) for name in names]), file=np.arange(count, dtype=np.int32)),
            **({"caption": Input(content=contents(names), file=np.full(count, -1, np.int32),
                                 text=Strings.of(caption_texts))} if captions else {}),
        },
        columns={"original_size": np.array([(h + 3, w + 5) for h, w in sizes], np.uint32).reshape(-1, 2),
                 **({"repeats": np.array(repeats, np.uint16)} if repeats else {})},
    )  # fmt: skip
    sample, group, variant, arrays, crop = [], [], [], [], []
    for number, (height, width) in enumerate(sizes):
        buckets = sorted(kinds.index((height * by, width * by)) for by in range(1, resolutions + 1))
        for bucket in buckets:
            for flip in range(variants):
                sample.append(number)
                group.append(bucket)
                variant.append(flip)
                crop.append((number, flip))
                arrays.append(
                    as_stored(generator.standard_normal(groups[bucket].shape), latents.encoder.storage_dtype)
                )
    fields = [Field(Latents(), latents, groups, sample, group, arrays, variant=variant,
                    columns={"crop": np.array(crop, np.uint32), "resize": np.array(crop, np.uint32)})]  # fmt: skip
    if edges is not None:
        there = [number for number, height in enumerate(edges) if height is not None]
        values = [generator.integers(0, 255, (edges[number], 8), dtype=np.uint8) for number in there]
        ragged = [Group(label="", shape=(-1, 8))]
        fields.append(Field(EdgeMap(), EdgeRecipe(), ragged, there, [0] * len(there), values))
    return publish(root, table, fields, seal_every=seal_every, building=building)


def latents_of(cache, row=None):
    """Read the stored latents in row order: (sample, variant) -> array."""
    from latentcache.store.reader import EntryReader

    snapshot = cache.snapshots[0]
    reader, field = EntryReader(snapshot.paths, snapshot), snapshot.fields["latents"]
    return {
        (int(field.sample[row]), int(field.group[row]), int(field.variant[row])): reader.read("latents", row)
        for row in range(len(field))
    }


def texts(count=40, longest=30, seed=0):
    random = np.random.default_rng(seed)
    return [[*random.integers(2, 1000, random.integers(1, longest)).tolist(), EOS] for _ in range(count)]


def chats(count=40, longest=30, seed=0):
    """Documents with random loss spans; the last span ends with the document."""
    random = np.random.default_rng(seed)
    ids, spans = texts(count, longest, seed), []
    for document in ids:
        half = len(document) // 2
        first = [(0, int(random.integers(1, half)))] if half > 2 and random.random() < 0.5 else []
        spans.append([*first, (half, len(document) - half)])
    return ids, spans


def documents(
    root, ids, spans=None, *, files=("data.jsonl",), pad=None, loss=None, num_ids=1000, seal_every=25, repeats=None
):
    """Create a cache of documents with ``ids`` and loss spans (default: everything). Return the folder."""
    count = len(ids)
    loss = loss or ("all" if spans is None else "assistant")
    ids_recipe = InputIdsRecipe(tokenizer="ab" * 16, num_ids=num_ids, eos_id=EOS, pad_id=pad, loss=loss)
    file = np.arange(count, dtype=np.int32) % len(files)
    lines = np.arange(count, dtype=np.uint32) // len(files) + 1
    names = [f"{files[at]}:{line}" for at, line in zip(file.tolist(), lines.tolist(), strict=True)]
    content = contents([(number, document) for number, document in enumerate(ids)])
    table = SampleTable(names=Strings.of(names), files=files_of(list(files)),
                        inputs={"record": Input(content=content, file=file, line=lines)},
                        columns={"repeats": np.array(repeats, np.uint16)} if repeats else {})  # fmt: skip
    spans_of = [[(0, len(document))] for document in ids] if spans is None else spans
    field = Field(
        InputIds(), ids_recipe, [Group(label="", shape=(-1,))], range(count), [0] * count,
        [np.array(document, ids_recipe.spec.dtype) for document in ids],
        columns={"control": np.zeros(count, np.uint32), "not_rendered": np.zeros(count, np.uint16)},
        ragged={"spans": [np.array(document_spans, np.uint32).reshape(-1, 2) for document_spans in spans_of]},
    )  # fmt: skip
    return publish(root, table, [field], seal_every=seal_every)


def opened(root, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_cache(root, **more)

"""Caches written by the store alone, without an encoder: for ``bench_read``, ``bench_scale`` and ``bench_verify``.

``made_cache`` has a data folder of small files and payloads of noise. ``stretched`` has any number of entries without
payloads: one real entry, and an index that repeats it under other keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.vae.describe import describe
from latentcache.fields.latents import Latents, LatentsRecipe, LatentsSettings, Normalization
from latentcache.fields.prompt_embeds import PromptEmbeds, PromptRecipe
from latentcache.fields.protocol import DescribeContext, Described, FieldKind, FieldPlan, FieldRecipe
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Input, SampleTable
from latentcache.geometry.sizes import Size
from latentcache.identity.content import CONTENT_SLICE
from latentcache.pipeline.settings import BuildSettings
from latentcache.sources.inventory import Inventory
from latentcache.sources.layout import ImageSet
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import scan
from latentcache.store.catalog import load_catalog
from latentcache.store.columns import ColumnFile, write_columns
from latentcache.store.entry import Item, pack_items
from latentcache.store.paths import CachePaths
from latentcache.store.publish import NewSnapshot, new_field, publish_snapshot
from latentcache.store.shard import ShardWriter
from latentcache.store.snapshot import FieldRows

KIND: FieldKind = Latents()
PROMPTS = PromptEmbeds()


CHANNELS = 16
#: Files per folder, and payload bytes per commit.
_PER_FOLDER, _COMMIT_BYTES = 1000, 16 << 20


def settings_of(*sizes: Size) -> LatentsSettings:
    """Describe the stub encoder with these buckets."""
    return LatentsSettings(model="stub", buckets=sizes)


def described(*sizes: Size, normalization: Normalization | None = None) -> Described:
    """Create the recipe of these buckets; with a normalization it has 16 channels."""
    found: Described = describe(settings_of(*sizes), DescribeContext())
    assert isinstance(found.recipe, LatentsRecipe)
    if normalization is None:
        return found
    encoder = replace(found.recipe.encoder, normalization=normalization, channels=CHANNELS)
    return replace(found, recipe=replace(found.recipe, encoder=encoder))


def table_of(names: Strings, size: NDArray[np.uint32], *, seed: int = 0, stat: Any = None) -> SampleTable:
    """Create a table of images with these names, sizes (height, width), and invented contents and captions."""
    count = len(names)
    content = np.random.default_rng(seed).integers(1, 256, (count, 16), dtype=np.uint8)
    number = np.arange(count, dtype=np.int32)
    stat = np.zeros((count, STAT_WIDTH), np.uint64) if stat is None else stat
    captions = numbered("an image of something, number %08d", count)
    missing = Input(content=np.zeros((count, 16), np.uint8), file=np.full(count, -1, np.int32), text=captions)
    return SampleTable(
        names=names,
        files=Files(names=names, stat=stat, content=content),
        inputs={"image": Input(content=content, file=number), "caption": missing},
        columns={"original_size": size},
    )


def numbered(pattern: str, count: int) -> Strings:
    """Fill ``pattern`` with numbers from 0; all strings have one length."""
    data = "".join(pattern % number for number in range(count)).encode("ascii")
    ends = np.arange(1, count + 1, dtype=np.int64) * len(pattern % 0)
    return Strings(np.frombuffer(data, np.uint8), ends)


def noise(count: int, shape: Sequence[int]) -> NDArray[np.float16]:
    """Create (count, *shape) of finite values."""
    return np.random.default_rng(0).standard_normal((count, *shape), dtype=np.float32).astype(np.float16)


def write_shard(
    paths: CachePaths,
    plan: FieldPlan,
    samples: SampleTable,
    recipe: FieldRecipe,
    arrays: Iterator[NDArray[Any]],
    kind: FieldKind = KIND,
    *,
    per_shard: int = 0,
) -> None:
    """Write the items of a plan, in order, into sealed shards of so many; 0: into one."""
    keys = plan.keys(kind, kind.content(samples), recipe)
    paths.shards.mkdir(parents=True, exist_ok=True)
    size, per_shard = max(2 * abs(int(np.prod(plan.groups[0].shape))), 1), per_shard or len(keys)
    for first in range(0, len(keys), per_shard):
        writer = ShardWriter(paths.shards / f"{len(paths.sealed_shards()):016x}.open")
        for some in _batches(min(per_shard, len(keys) - first), size):
            rows = range(first + some.start, first + some.stop)
            placed = [_placed(plan, row) if kind is KIND else {} for row in rows]
            items = [
                Item(key=keys[row].tobytes(), array=next(arrays), columns=columns)
                for row, columns in zip(rows, placed, strict=True)
            ]
            writer.write(pack_items(items, recipe, kind))
        writer.seal()


def publish(
    cache: Path,
    data: Path,
    samples: SampleTable,
    found: Described,
    plan: FieldPlan,
    prompts: tuple[PromptRecipe, FieldPlan] | None = None,
) -> None:
    """Publish the snapshot of plans whose items are all committed."""
    paths, catalog = CachePaths(cache), load_catalog(CachePaths(cache))

    def field_of(kind: FieldKind, recipe: FieldRecipe, plan: FieldPlan) -> FieldRows:
        return new_field(
            catalog,
            kind=kind,
            recipe=recipe,
            groups=plan.groups,
            sample=plan.sample,
            group=plan.group,
            variant=plan.variant,
            items=catalog.find(plan.keys(kind, kind.content(samples), recipe)),
            provenance=found.provenance,
        )

    field = field_of(KIND, found.recipe, plan)
    others = (field_of(PROMPTS, *prompts),) if prompts else ()
    dims = np.array([group.dims[1:] for group in plan.groups], np.uint32)[plan.group]
    field = replace(field, columns={"crop": np.zeros_like(dims), "resize": dims})
    source: dict[str, Any] = {
        "root": str(data.resolve()),
        "relative": os.path.relpath(data, cache),
        "part": "",
    }
    source |= {
        "layout": "folder",
        "sets": [ImageSet(folder="").as_json()],
        "data_kind": "images",
        "inventory": Inventory(data).digest() if data.is_dir() else "",
        "options": SourceOptions(kind="images").as_json(),
    }
    publish_snapshot(
        paths, NewSnapshot(samples=samples, fields=(field, *others), shards=catalog.shards, source=source)
    )


def made_latents(
    cache: Path,
    sizes: Sequence[Size],
    latents: Sequence[NDArray[np.float16]],
    embeds: Sequence[NDArray[np.float16]] = (),
    *,
    length: int = 0,
    per_shard: int = 0,
) -> None:
    """A cache without a data folder: image n has the size, the latents and the embeddings n.

    Scale and shift are in the recipe.

    Args:
        cache: Where it will be.
        sizes: Of the images.
        latents: One for each.
        embeds: (tokens, width) for each, or none at all.
        length: Tokens that a model gets; embeddings with fewer are padded when they are read.
        per_shard: Latents of a shard; 0: all are in one.
    """
    distinct = sorted(set(sizes), key=lambda size: (-size.area, size.width))
    found = described(*distinct, normalization=Normalization(kind="scale-shift", scale=0.3611, shift=0.1159))
    size = np.array([(one.height, one.width) for one in sizes], np.uint32)
    samples = table_of(numbered("folder/image_%06d.png", len(sizes)), size)
    plan, prompts = KIND.plan(samples, found.recipe), None
    write_shard(CachePaths(cache), plan, samples, found.recipe, iter(latents), per_shard=per_shard)
    if len(embeds):
        caption = samples.inputs["caption"]
        content = np.random.default_rng(2).integers(1, 256, caption.content.shape, dtype=np.uint8)
        samples = replace(samples, inputs={**samples.inputs, "caption": replace(caption, content=content)})
        recipe = PromptRecipe(
            output="prompt_embeds", pipeline="stub", fingerprint="00" * 16, config="00" * 16, tokenizer="00" * 16,
            width=embeds[0].shape[1], length=length, trimmed=any(len(one) < length for one in embeds),
            storage_dtype="float16",
        )  # fmt: skip
        prompts = recipe, PROMPTS.plan(samples, recipe)
        write_shard(CachePaths(cache), prompts[1], samples, recipe, iter(embeds), PROMPTS)
    publish(cache, cache.parent / "data", samples, found, plan, prompts)


def made_cache(folder: Path, count: int, side: int) -> tuple[Path, Path]:
    """Create a data folder of ``count`` small files, and a cache equal to that of a build."""
    data, cache = folder / "data", folder / "cache"
    write_files(data, count)
    samples, found = known_files(data, side), described(Size(side, side))
    plan = KIND.plan(samples, found.recipe)
    assert isinstance(found.recipe, LatentsRecipe)
    some = noise(64, plan.groups[0].shape)
    arrays = (some[n % 64] + np.float16(n % 97) for n in range(count))
    write_shard(CachePaths(cache), plan, samples, found.recipe, arrays)
    publish(cache, data, samples, found, plan)
    return data, cache


def stretched(folder: Path, count: int, side: int = 64) -> tuple[Path, Path]:
    """Create a cache of ``count`` entries with one real entry; no reader can open it."""
    data, cache = folder / "data", folder / "cache"
    write_files(data, count)
    samples, found = known_files(data, side, hashed=False), described(Size(side, side))
    plan = KIND.plan(samples, found.recipe)
    assert isinstance(found.recipe, LatentsRecipe)
    one = replace(plan, **{name: getattr(plan, name)[:1] for name in ("sample", "group", "variant", "cost")})
    write_shard(CachePaths(cache), one, samples, found.recipe, iter(noise(1, plan.groups[0].shape)))
    keys = plan.keys(KIND, samples.inputs["image"].content, found.recipe)
    stretch_index(CachePaths(cache).shards / CachePaths(cache).sealed_shards()[0], keys)
    publish(cache, data, samples, found, plan)
    return data, cache


def stretch_index(shard: Path, keys: NDArray[np.uint8]) -> None:
    """Write an index with the first entry of the shard under each of these keys."""
    file, count = ColumnFile(shard / "index.safetensors"), len(keys)
    old = {name: np.asarray(file[name]) for name in file}
    keys = keys[np.lexsort(keys[:, CONTENT_SLICE].copy().view(">u8").astype(np.uint64).T[::-1])]
    columns: dict[str, Any] = {name: np.repeat(v, count, axis=0) if len(v) == 1 else v for name, v in old.items()}
    columns["key"] = columns["item.key"] = keys
    columns["item.same"], columns["item.entry"] = keys[:, CONTENT_SLICE], np.arange(count, dtype=np.uint32)
    columns["offset"] = old["offset"][0] + np.arange(count, dtype=np.uint64) * np.uint64(12 << 10)
    columns["checksum"] = np.random.default_rng(1).integers(0, 1 << 63, count).astype(np.uint64)
    (shard / "index.safetensors").chmod(0o644)
    write_columns(shard / "index.safetensors", columns, file.metadata)
    (shard / "data.mdb").chmod(0o644)
    os.truncate(shard / "data.mdb", (count + 1) * (12 << 10))  # sparse: no entry may end behind the end of the file


def write_files(data: Path, count: int) -> None:
    """Create small files with image names, a thousand per folder."""
    for number in range(count):
        if number % _PER_FOLDER == 0:
            folder = data / f"{number // _PER_FOLDER:05}"
            folder.mkdir(parents=True)
        file = os.open(f"{folder}/{number:08}.png", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(file, b"image %d" % number)
        os.close(file)


def known_files(data: Path, side: int, *, hashed: bool = True) -> SampleTable:
    """The files as a snapshot has them: old enough to be trusted. Their contents are invented unless hashed."""
    found = scan(data, SourceOptions(), hash_all=hashed).samples
    stat = np.asarray(found.files.stat).copy()
    stat[:, 5] = stat[:, 1:3].max(axis=1) + np.uint64(10**12)
    size = np.full((len(found), 2), side, np.uint32)
    if hashed:
        return replace(found, files=replace(found.files, stat=stat), columns={**found.columns, "original_size": size})
    made = table_of(found.names, size, stat=stat)
    return replace(made, inputs={**found.inputs, "image": made.inputs["image"]})


def build_settings(data: Path, cache: Path, side: int = 64) -> BuildSettings:
    """A build of the same recipe."""
    return BuildSettings(data=data, out=cache, fields={"latents": settings_of(Size(side, side))}, device="cpu")


def _placed(plan: FieldPlan, row: int) -> dict[str, Any]:
    height, width = plan.groups[int(plan.group[row])].dims[1:]
    return {"crop": (0, 0), "resize": (height, width)}


def _batches(count: int, size: int) -> Iterator[range]:
    step = max(1, min(2048, _COMMIT_BYTES // size))
    return (range(start, min(start + step, count)) for start in range(0, count, step))

"""A made cache, the same payloads in other stores, and what reads each of them: the candidates of ``bench_read``.

Decides what the loader is measured against. Limits are copies that check nothing and describe nothing; ``memcpy``
copies from anonymous memory into one buffer that is used again. Every candidate takes a plan, rows of each batch, and
gives contiguous batches; the public loader brings an order of its own, which is shuffled as well.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from latentcache import open_cache
from latentcache.geometry.placement import place_in
from latentcache.geometry.sizes import Size
from latentcache.identity.content import checksum, content_hash
from latentcache.identity.key import EntryKey
from latentcache.loader.ring import BatchRing
from latentcache.recipe import EncoderSpec, GeometrySettings, PixelProfile, Recipe
from latentcache.store.catalog import load_catalog
from latentcache.store.columns import StringColumn
from latentcache.store.entry import HEADER_BYTES, EntryFacts, EntryHeader, NewEntry, pack_facts, pack_header
from latentcache.store.generation import Rows, Samples, load_generation, publish
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import ShardWriter

CHANNELS = 16
BATCH = 32
PAYLOADS = {512: Size(1024, 1024), 128: Size(512, 512), 32: Size(256, 256)}
"""KiB of 16 channels of float16 on a grid of 8 pixels -> bucket."""
ENCODER = EncoderSpec(family="made", fingerprint="ab" * 16, config="cd" * 16, channels=CHANNELS, factor=8, multiple=8)
RECIPE = Recipe(geometry=GeometrySettings(resolutions=(256,)), pixels=PixelProfile(), encoder=ENCODER)

Epoch = Callable[[list[list[int]]], Iterator[Any]]
"""Batches of the given rows."""


def payloads(size: int, count: int) -> NDArray[np.uint8]:
    """(count, size) of noise."""
    return np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)


def make_cache(root: Path, bucket: Size, data: NDArray[np.uint8]) -> None:
    """A cache of one bucket, written by the package's own writer, commit by commit as a build does."""
    layout, shape = CacheLayout(root), (CHANNELS, bucket.height // 8, bucket.width // 8)
    writer = ShardWriter(layout.shards / "one.open")
    step = max(1, (16 << 20) // data.shape[1])
    keys = [
        EntryKey(content=content_hash(b"%d" % i), bucket=bucket, recipe=RECIPE.key_part).pack()
        for i in range(len(data))
    ]
    for start in range(0, len(data), step):
        span = range(start, min(start + step, len(data)))
        writer.write([new_entry(keys[i], i, shape, bucket, data[i].tobytes()) for i in span])
    writer.seal()
    catalog = load_catalog(layout)
    found, count = [catalog.locate(key) for key in keys], len(keys)
    rows = Rows(
        key=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32),
        shard=np.zeros(count, np.int32),
        offset=np.array([entry.offset for entry in found if entry], np.uint64),
        bucket=np.zeros(count, np.int32),
        sample=np.arange(count, dtype=np.int32),
        crop=np.zeros((count, 2), np.uint32),
        resize=np.tile(np.array([bucket.height, bucket.width], np.uint32), (count, 1)),
        pixel_hash=np.zeros((count, 16), np.uint8),
    )
    samples = Samples(
        names=StringColumn.of(f"folder/picture_{i:06}.png" for i in range(count)),
        captions=StringColumn.of(f"a drawing of number {i}, in three colours" for i in range(count)),
        content=np.zeros((count, 16), np.uint8),
        original_size=np.tile(np.array([bucket.height, bucket.width], np.uint32), (count, 1)),
        stat=np.zeros((count, 6), np.uint64),
    )
    facts = {"source": {"root": "made"}, "demo": False, "provenance": {"model": "made"}}
    lists: dict[str, Any] = {"buckets": [bucket], "shards": ["one"], "refused": (), "notes": ()}
    publish(layout, recipe=RECIPE, rows=rows, samples=samples, facts=facts, **lists)


def new_entry(key: bytes, number: int, shape: tuple[int, ...], bucket: Size, payload: bytes) -> NewEntry:
    header = EntryHeader(
        kind=1,
        dtype="float16",
        shape=shape,
        payload_checksum=checksum(payload),
        content=content_hash(b"%d" % number),
        recipe_id=RECIPE.recipe_id,
        original_size=bucket,
    )
    facts = pack_facts(EntryFacts(pixel_hash=b"\0" * 16, placement=place_in(bucket, bucket)))
    return NewEntry(key=key, value=pack_header(header, key) + payload, facts=facts)


def key_of(row: int) -> bytes:
    return b"%08d" % row


class LmdbSet(torch.utils.data.Dataset[torch.Tensor]):
    """One value per sample, as a training script would write it: opened where it is used."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.transaction: Any = None

    def __getitem__(self, row: int) -> torch.Tensor:
        if self.transaction is None:
            environment = lmdb.open(self.path, readonly=True, lock=False)
            self.transaction = environment.begin(buffers=True)
        value = self.transaction.get(key_of(row))
        return torch.frombuffer(bytearray(value), dtype=torch.float16)


def write_peers(folder: Path, data: NDArray[np.uint8]) -> None:
    environment = lmdb.open(str(folder / "lmdb"), map_size=2 * data.nbytes + (64 << 20))
    with environment.begin(write=True) as transaction:
        for row, payload in enumerate(data):
            transaction.put(key_of(row), payload.tobytes(), append=True)
    environment.close()
    data.tofile(folder / "raw")
    (folder / "files").mkdir()
    for row, payload in enumerate(data):
        save_file({"latents": payload.view(np.float16)}, folder / "files" / f"{row}.safetensors")


def data_loader(values: LmdbSet, workers: int) -> Epoch:
    """Torch's own loader over single values, with as many processes."""
    dataset = LmdbSet(values.path) if workers else values

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        context = "spawn" if workers else None  # a process that holds the file may not open it again after a fork
        yield from torch.utils.data.DataLoader(
            dataset, batch_sampler=plan, num_workers=workers, multiprocessing_context=context
        )

    return serve


def ours(folder: Path, **options: Any) -> Epoch:
    """The public loader; its own plan has the same number of batches, in another shuffled order."""
    loader = open_cache(folder / "cache").loader(batch_size=BATCH, small_buckets="drop", **options)

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        loader.set_epoch(loader.epoch + 1)
        yield from loader

    return serve


def sequential(folder: Path, **options: Any) -> Epoch:
    """The public loader, asked for the rows of the plan one batch after the other, without a thread."""
    loader = open_cache(folder / "cache").loader(batch_size=BATCH, small_buckets="drop", **options)

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        for rows in plan:
            yield loader.batch(rows)

    return serve


def memcpy(source: memoryview, size: int, buffers: int) -> Epoch:
    """A plain copy into as many buffers in turn."""
    slots = [np.ones((BATCH, size), np.uint8) for _ in range(buffers)]
    places = [[row.data for row in slot] for slot in slots]

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        for number, rows in enumerate(plan):
            for place, row in zip(places[number % buffers], rows, strict=True):
                place[:] = source[row * size : (row + 1) * size]
            yield slots[number % buffers]

    return serve


def shard_unchecked(folder: Path, size: int, *, mapped: bool) -> Epoch:
    """Payloads of the cache's shard copied into two buffers in turn: no check, nothing that describes them."""
    generation = load_generation(folder / "cache")
    starts = (generation.rows.offset.astype(np.int64) + HEADER_BYTES).tolist()
    file = os.open(folder / "cache" / "shards" / "one" / "data.mdb", os.O_RDONLY)
    view = memoryview(mmap.mmap(file, os.fstat(file).st_size, prot=mmap.PROT_READ))
    ring = BatchRing(2)
    slots = [ring.take(BATCH * size).reshape(BATCH, size) for _ in range(2)]
    places = [[row.data for row in slot] for slot in slots]

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        for number, rows in enumerate(plan):
            for place, row in zip(places[number % 2], rows, strict=True):
                if mapped:
                    place[:] = view[starts[row] : starts[row] + size]
                else:
                    os.preadv(file, (place,), starts[row])
            yield slots[number % 2]

    return serve


def limits(folder: Path, data: NDArray[np.uint8]) -> dict[str, Epoch]:
    """What no reader that checks can beat by much."""
    size, source = data.shape[1], data.reshape(-1).data
    raw = np.memmap(folder / "raw", np.uint8, "r", shape=(data.size,)).data
    return {
        "memcpy": memcpy(source, size, 1),
        "memcpy, two buffers in turn": memcpy(source, size, 2),
        "one mapped file, memcpy": memcpy(raw, size, 1),
        "shard, read unchecked": shard_unchecked(folder, size, mapped=False),
        "shard, mapped unchecked": shard_unchecked(folder, size, mapped=True),
    }


def others(folder: Path, shape: tuple[int, int]) -> dict[str, Epoch]:
    """The same payloads in other stores; all are opened when the first batch is asked for."""
    values, reused = LmdbSet(str(folder / "lmdb")), np.ones((BATCH, shape[1]), np.uint8)
    places = [row.data for row in reused]

    def lmdb_get(plan: list[list[int]]) -> Iterator[Any]:
        values[0]
        for rows in plan:
            for place, row in zip(places, rows, strict=True):
                place[:] = values.transaction.get(key_of(row))
            yield reused

    def memmap_index(plan: list[list[int]]) -> Iterator[Any]:
        mapped = np.memmap(folder / "raw", np.uint8, "r", shape=shape)
        for rows in plan:
            yield torch.from_numpy(mapped[rows])

    def files(plan: list[list[int]]) -> Iterator[Any]:
        for rows in plan:
            yield np.stack([load_file(folder / "files" / f"{row}.safetensors")["latents"] for row in rows])

    return {
        "LMDB get and copy": lmdb_get,
        "np.memmap, fancy index": memmap_index,
        "DataLoader, LMDB, 0 workers": data_loader(values, 0),
        "safetensors file per sample": files,
    }


def ways(folder: Path) -> dict[str, Epoch]:
    """The public loader in its ways, in its own shuffled order."""
    options: list[dict[str, Any]] = [{}, {"prefetch": 0}, {"mapped": True}, {"mapped": True, "prefetch": 0}]
    return {f"loader({spelled(option)})": ours(folder, **option) for option in options}


def spelled(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())

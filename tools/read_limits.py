"""A made cache, the same payloads in other stores, and readers of each: the candidates of ``bench_read``.

Limits are copies that check and describe nothing; ``memcpy`` copies from anonymous memory into one buffer that is
used again. Every candidate takes a plan, the rows of each batch, and gives contiguous batches; the public loader has
an order of its own, which is shuffled as well. The recipe has a scale and a shift, as that of a real model has; what
is no limit multiplies its batches by a scale, in place, as a training script would.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from synthetic_caches import CHANNELS, made_latents, noise

from latentcache import open_cache
from latentcache.geometry.sizes import Size
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot

BATCH, SCALE = 32, 0.3611
SIDES = {512: 1024, 128: 512, 32: 256}
"""KiB of 16 channels of float16 -> side of the square bucket in pixels."""

Epoch = Callable[[list[list[int]]], Iterator[Any]]
"""Batches of the given rows."""


def payloads(kib: int, count: int) -> NDArray[np.uint8]:
    """Create (count, bytes) of finite values."""
    side = SIDES[kib] // 8
    values = noise(count, (CHANNELS, side, side)).reshape(count, -1).view(np.uint8)
    found = aligned(*values.shape)
    found[:] = values
    return found


def aligned(rows: int, size: int) -> NDArray[np.uint8]:
    """Allocate (rows, size) aligned to 64 bytes: unaligned copies can take twice as long."""
    memory = np.ones(rows * size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + rows * size].reshape(rows, size)


def write_caches(folder: Path, kib: int, data: NDArray[np.uint8]) -> None:
    """Create a cache of one bucket, and one of three buckets of similar area."""
    side, values = SIDES[kib], data.view(np.float16)
    square = values.reshape(-1, CHANNELS, side // 8, side // 8)
    made_latents(folder / "cache", [Size(side, side)] * len(data), list(square))
    wide, high = Size(side * 3 // 4, side * 5 // 4), Size(side * 5 // 4, side * 3 // 4)
    sizes = [(Size(side, side), wide, high)[row % 3] for row in range(len(data))]
    shapes = [(CHANNELS, size.height // 8, size.width // 8) for size in sizes]
    some = [row[: int(np.prod(shape))].reshape(shape) for row, shape in zip(values, shapes, strict=True)]
    made_latents(folder / "three", sizes, some)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Embeddings beside latents."""

    kib: int
    """Shape of the latents."""
    tokens: int
    width: int
    trimmed: bool = False
    """True if captions have different lengths: the loader pads them and adds a mask."""

    @property
    def size(self) -> int:
        """Bytes per sample in a batch."""
        return self.kib * 1024 + 2 * self.tokens * self.width


#: Inputs of two models: CLIP with latents of 128 KiB, T5 with latents of 512 KiB.
PROMPTS = {
    "latents, 77 x 2048": Prompts(kib=128, tokens=77, width=2048),
    "latents, 512 x 4096 and mask": Prompts(kib=512, tokens=512, width=4096, trimmed=True),
}


def write_prompts(cache: Path, prompts: Prompts, count: int) -> None:
    """Create a cache of latents and embeddings of this shape."""
    side, random = SIDES[prompts.kib], np.random.default_rng(3)
    values = payloads(prompts.kib, count).view(np.float16).reshape(-1, CHANNELS, side // 8, side // 8)
    embeds = noise(count, (prompts.tokens, prompts.width))
    lengths = random.integers(8, prompts.tokens + 1, count) if prompts.trimmed else np.full(count, prompts.tokens)
    some = [one[:length] for one, length in zip(embeds, lengths.tolist(), strict=True)]
    made_latents(cache, [Size(side, side)] * count, list(values), some, length=prompts.tokens)


def key_of(row: int) -> bytes:
    return b"%08d" % row


class LmdbSet(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset of single values as in a training script; opened at first use."""

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
    """Read with torch's DataLoader over single values, with as many processes."""
    dataset = LmdbSet(values.path) if workers else values

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        context = "spawn" if workers else None  # a process with an open file may not open it again after a fork
        yield from torch.utils.data.DataLoader(
            dataset, batch_sampler=plan, num_workers=workers, multiprocessing_context=context
        )

    return serve


def multiplied(epoch: Epoch) -> Epoch:
    """Scale batches in place in one pass, which is less work than the loader's."""

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        for batch in epoch(plan):
            yield torch.as_tensor(batch).view(torch.float16).mul_(SCALE)

    return serve


def ours(
    folder: Path, cache: str = "cache", *, scaled: bool = True, checksum: Any = "first", **options: Any
) -> Epoch:
    """Read with the public loader; its own shuffled plan has as many batches."""
    opened = open_cache(folder / cache, checksum=checksum).read(scaled=scaled)
    loader = opened.loader(batch_size=BATCH, remainder="drop", **options)

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        loader.set_epoch(loader.epoch + 1)
        yield from loader

    return serve


def sequential(folder: Path, **options: Any) -> Epoch:
    """Read the plan with the public loader, batch by batch, without a thread."""
    loader = open_cache(folder / "cache").loader(batch_size=BATCH, remainder="drop", **options)

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        for rows in plan:
            yield loader.batch(rows)

    return serve


def in_order(folder: Path, **options: Any) -> Epoch:
    """Read with the public loader in data order, with default options."""
    loader = open_cache(folder / "cache").loader(batch_size=BATCH, seed=None, remainder="drop", **options)
    return lambda plan: iter(loader)


def memcpy(source: memoryview, size: int, targets: int) -> Epoch:
    """Copy into as many buffers in turn."""
    buffers = [aligned(BATCH, size) for _ in range(targets)]
    places = [[row.data for row in buffer] for buffer in buffers]

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        for number, rows in enumerate(plan):
            for place, row in zip(places[number % targets], rows, strict=True):
                place[:] = source[row * size : (row + 1) * size]
            yield buffers[number % targets]

    return serve


def shard_unchecked(folder: Path, size: int) -> Epoch:
    """Read payloads of the cache's shard into two buffers in turn, without checks or metadata."""
    snapshot = open_snapshot(folder / "cache")
    rows = snapshot.fields["latents"]
    starts = np.asarray(rows.offset)[np.asarray(rows.entry)].tolist()
    file = os.open(CachePaths(folder / "cache").data(snapshot.shards[0]), os.O_RDONLY)
    buffers = [aligned(BATCH, size) for _ in range(2)]
    places = [[row.data for row in buffer] for buffer in buffers]

    def serve(plan: list[list[int]]) -> Iterator[Any]:
        for number, rows in enumerate(plan):
            for place, row in zip(places[number % 2], rows, strict=True):
                os.preadv(file, (place,), starts[row])
            yield buffers[number % 2]

    return serve


def limits(folder: Path, data: NDArray[np.uint8]) -> dict[str, Epoch]:
    """Copy without checks: the upper limits of a reader."""
    size, source = data.shape[1], data.reshape(-1).data
    raw = np.memmap(folder / "raw", np.uint8, "r", shape=(data.size,)).data
    return {
        "memcpy": memcpy(source, size, 1),
        "memcpy, two buffers in turn": memcpy(source, size, 2),
        "one mapped file, memcpy": memcpy(raw, size, 1),
        "shard, read unchecked": shard_unchecked(folder, size),
    }


def others(folder: Path, shape: tuple[int, int]) -> dict[str, Epoch]:
    """Read the payloads in other stores; all open at the first batch."""
    values, reused = LmdbSet(str(folder / "lmdb")), aligned(BATCH, shape[1])
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


WAYS: dict[str, dict[str, Any]] = {
    "loader()": {},
    "loader(), three resolutions": {"cache": "three"},
    "loader(), latents alone": {"fields": ["latents"]},
    "loader(), checksum='always'": {"checksum": "always"},
    "loader(), unscaled": {"scaled": False},
    "loader(prefetch=0)": {"prefetch": 0},
}
"""The public loader, the default options first."""


def ways(folder: Path) -> dict[str, Epoch]:
    """Read with the public loader in its own shuffled order."""
    return {name: ours(folder, **options) for name, options in WAYS.items()}

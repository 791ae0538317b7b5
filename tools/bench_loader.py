"""Measure reading: the loader against a plain memory copy and against other ways to store the same tensors.

All candidates hand over whole batches, in the same shuffled order, and take turns in every round, so that whatever
else the machine does hits them alike. ``memcpy`` copies the same bytes from anonymous memory into memory that is
used again. Ratios are taken round by round; the median is shown. Then: how long a training step waits for its batch,
the time to the first batch, and the memory of a process of its own.

    python tools/bench_loader.py --json times.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from latentcache.recipe import EncoderSpec, GeometrySettings, PixelProfile, Recipe
from latentcache.store.catalog import load_catalog
from latentcache.store.columns import StringColumn
from latentcache.store.entry import EntryFacts, EntryHeader, pack_facts, pack_header
from latentcache.store.generation import Rows, Samples, publish
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import NewEntry, ShardWriter

CHANNELS = 16
BATCH = 32
PAYLOADS = {512: Size(1024, 1024), 128: Size(512, 512), 32: Size(256, 256)}
"""KiB of 16 channels of float16 on a grid of 8 pixels -> bucket."""
ENCODER = EncoderSpec(family="made", fingerprint="ab" * 16, config="cd" * 16, channels=CHANNELS, factor=8, multiple=8)
RECIPE = Recipe(geometry=GeometrySettings(resolutions=(256,)), pixels=PixelProfile(), encoder=ENCODER)
COMPUTE_S = 0.004

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


def candidates(folder: Path, data: NDArray[np.uint8]) -> dict[str, Epoch]:
    """Name -> what serves an epoch of batches."""
    count, size = data.shape
    reused = np.ones((BATCH, size), np.uint8)
    places = [reused[i].data for i in range(BATCH)]
    source, mapped = data.reshape(-1).data, np.memmap(folder / "raw", np.uint8, "r", shape=(count, size))
    values = LmdbSet(str(folder / "lmdb"))
    values[0]

    def memcpy(plan: list[list[int]]) -> Iterator[Any]:
        for rows in plan:
            for place, row in zip(places, rows, strict=True):
                place[:] = source[row * size : (row + 1) * size]
            yield reused

    def lmdb_get(plan: list[list[int]]) -> Iterator[Any]:
        for rows in plan:
            for place, row in zip(places, rows, strict=True):
                place[:] = values.transaction.get(key_of(row))
            yield reused

    def memmap_index(plan: list[list[int]]) -> Iterator[Any]:
        for rows in plan:
            yield torch.from_numpy(mapped[rows])

    def files(plan: list[list[int]]) -> Iterator[Any]:
        for rows in plan:
            yield np.stack([load_file(folder / "files" / f"{row}.safetensors")["latents"] for row in rows])

    return {
        "memcpy": memcpy,
        "loader()": ours(folder),
        "loader(prefetch=0)": ours(folder, prefetch=0),
        "loader(mapped=True)": ours(folder, mapped=True),
        "loader(mapped=True, prefetch=0)": ours(folder, mapped=True, prefetch=0),
        "LMDB get and copy": lmdb_get,
        "np.memmap, fancy index": memmap_index,
        "DataLoader, LMDB, 0 workers": data_loader(values, 0),
        "DataLoader, LMDB, 2 workers": data_loader(values, 2),
        "safetensors file per sample": files,
    }


def seconds_per_batch(epoch: Epoch, plan: list[list[int]]) -> float:
    """Workers are started before the clock is, and the first batch is not counted."""
    iterator = epoch(plan)
    next(iterator)
    start = time.perf_counter()
    served = sum(1 for _ in iterator)
    return (time.perf_counter() - start) / served


def bench_reading(folder: Path, kib: int, megabytes: int, rounds: int) -> dict[str, list[float]]:
    data = payloads(kib << 10, megabytes * 1024 // kib)
    make_cache(folder / "cache", PAYLOADS[kib], data)
    write_peers(folder, data)
    epochs = candidates(folder, data)
    times: dict[str, list[float]] = {name: [] for name in epochs}
    random = np.random.default_rng(1)
    for number in range(rounds + 1):
        plan = random.permutation(len(data))[: len(data) // BATCH * BATCH].reshape(-1, BATCH).tolist()
        for name in list(epochs) if number % 2 else reversed(list(epochs)):
            gc.collect()
            taken = seconds_per_batch(epochs[name], plan)
            if number:  # the first round warms the page cache
                times[name].append(taken)
    return times


def busy() -> None:
    """4 ms of numpy, which holds the interpreter only in part."""
    end, values = time.perf_counter() + COMPUTE_S, np.ones(1 << 14, np.float32)
    while time.perf_counter() < end:
        np.sqrt(values, out=values)


def spinning() -> None:
    """4 ms of pure Python, which never lets the interpreter go of its own accord."""
    end = time.perf_counter() + COMPUTE_S
    while time.perf_counter() < end:
        pass


STEPS: dict[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(COMPUTE_S), "numpy": busy, "pure Python": spinning
}  # fmt: skip


def bench_waiting(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step waits, median of an epoch; and what a step of 4 ms takes in all."""
    cache = open_cache(folder / "cache")
    waits: dict[str, list[float]] = {}
    options: list[dict[str, Any]] = [{}, {"mapped": True}, {"prefetch": 0}, {"prefetch": 0, "mapped": True}]
    kinds = [(option, name) for option in options for name in STEPS]
    for _ in range(rounds):
        for option, name in kinds:
            loader = cache.loader(batch_size=BATCH, small_buckets="drop", **option)
            words = ", ".join(f"{key}={value}" for key, value in option.items())
            waits.setdefault(f"loader({words}) beside {name}", []).append(median_wait(iter(loader), STEPS[name]))
    return waits


def median_wait(iterator: Iterator[Any], step: Callable[[], None]) -> float:
    next(iterator)
    waits: list[float] = []
    while True:
        step()
        start = time.perf_counter()
        if next(iterator, None) is None:
            return 1000 * float(statistics.median(waits))
        waits.append(time.perf_counter() - start)


_CHILD = """
import sys, time
import numpy, torch
from latentcache import open_cache
open_cache
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
before, start = anonymous(), time.perf_counter()
loader = open_cache(sys.argv[1]).loader(batch_size=32, small_buckets="drop", **eval(sys.argv[2]))
iterator = iter(loader)
next(iterator)
first = time.perf_counter() - start
for batch in iterator: pass
print(1000 * first, anonymous() - before)
"""


def bench_start(folder: Path, option: str) -> tuple[float, float]:
    """(ms from opening to the first batch, MiB of anonymous memory after an epoch) in a process of its own."""
    command = [sys.executable, "-c", _CHILD, str(folder / "cache"), option]
    first, memory = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(first), float(memory)


def reading_table(results: dict[int, dict[str, list[float]]]) -> str:
    """How many times as quick as memcpy, and thousand samples a second."""
    sizes = list(results)
    head = [f"{kib} KiB, x memcpy (range)" for kib in sizes] + [f"{kib} KiB, k samples/s" for kib in sizes]
    lines = [f"| candidate | {' | '.join(head)} |", "|---|" + "---:|" * len(head)]
    for name in next(iter(results.values())):
        ratios = [ratios_of(results[kib], name) for kib in sizes]
        cells = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios]
        cells += [f"{BATCH / statistics.median(results[kib][name]) / 1000:.1f}" for kib in sizes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios_of(times: dict[str, list[float]], name: str) -> list[float]:
    return [memcpy / mine for memcpy, mine in zip(times["memcpy"], times[name], strict=True)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the loader against a memory copy and other stores.")
    parser.add_argument("--kib", default="512,128,32", help="payloads (default: 512,128,32)")
    parser.add_argument("--megabytes", type=int, default=256, help="of payload for each (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times")
    options = parser.parse_args(words)
    reading, waiting, starts = {}, {}, {}
    for kib in map(int, options.kib.split(",")):
        with tempfile.TemporaryDirectory() as name:
            reading[kib] = bench_reading(Path(name), kib, options.megabytes, options.rounds)
            waiting[kib] = bench_waiting(Path(name), options.rounds)
            starts[kib] = {words: bench_start(Path(name), words) for words in ("{}", "{'mapped': True}")}
    print(f"{options.megabytes} MiB each, batches of {BATCH}, {options.rounds} rounds, page cache warm\n")
    print(reading_table(reading))
    print("\n| ms a step of 4 ms waits, median | " + " | ".join(f"{kib} KiB" for kib in waiting) + " |")
    print("|---|" + "---:|" * len(waiting))
    for name in next(iter(waiting.values())):
        print(
            f"| {name} | " + " | ".join(f"{statistics.median(waits[name]):.3f}" for waits in waiting.values()) + " |"
        )
    print("\n| loader(...) | " + " | ".join(f"{kib} KiB: ms to first batch, MiB of memory" for kib in starts) + " |")
    print("|---|" + "---:|" * len(starts))
    for words_of in ("{}", "{'mapped': True}"):
        print(
            f"| {words_of} | "
            + " | ".join("{:.0f}, {:.0f}".format(*found[words_of]) for found in starts.values())
            + " |"
        )
    if options.json:
        report = {"rounds": options.rounds, "seconds_per_batch": reading, "wait_ms": waiting, "start": starts}
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

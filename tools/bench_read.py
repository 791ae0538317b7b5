"""Measure reading: the loader against plain copies and against other ways to store the same tensors.

The recipe has a scale and a shift; the first row is the loader with its default options. All candidates give whole
batches of scaled values (but the limits, which only copy) and take turns in every round. Ratios to ``memcpy`` are
taken round by round; the median is shown. Shuffled and in the order of the file (``loader.batch``), with the page
cache warm; shuffled from a cold one, in a process of its own each time. Then: the wait of a training step for its
batch, time to the first batch and memory, latents with embeddings of prompts, and packed rows of tokens. Other
formats take part if their libraries are installed (``read_peers``).

    python tools/bench_read.py --json times.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_tokens import bench_packed, packed_table
from numpy.typing import NDArray
from read_limits import (
    BATCH,
    PROMPTS,
    Epoch,
    Prompts,
    in_order,
    limits,
    memcpy,
    multiplied,
    others,
    ours,
    payloads,
    sequential,
    ways,
    write_caches,
    write_peers,
    write_prompts,
)
from read_peers import peers

from latentcache import open_cache
from latentcache.loader.sample_reader import SampleReader
from latentcache.loader.values import Affine
from latentcache.store.reader import Located

COMPUTE_S = 0.004
STEPS_TIMED = 64
COLD_PART = 4
"""One in so many batches is timed from a cold cache: later ones may find pages that were read for earlier ones."""
PARTS = ("cold", "waiting", "start", "warm", "profile", "prompts", "tokens")


def log(words: str) -> None:
    """Print progress: a full run takes half an hour."""
    print(words, file=sys.stderr, flush=True)


def candidates(folder: Path, data: NDArray[np.uint8]) -> dict[str, dict[str, Epoch]]:
    """Map order and name to the function that serves an epoch of batches."""
    plain, other = limits(folder, data), others(folder, (data.shape[0], data.shape[1]))
    other |= peers(folder / "peers", data, BATCH)
    other = {name: multiplied(epoch) for name, epoch in other.items()}
    ordered = {"loader(seed=None)": in_order(folder), "loader.batch()": sequential(folder)}
    return {"shuffled": ways(folder) | plain | other, "sequential": ordered | plain | other}


def seconds_per_batch(epoch: Epoch, plan: list[list[int]]) -> float:
    """Measure seconds per batch, without the start of workers and the first batch."""
    iterator = epoch(plan)
    next(iterator)
    start = time.perf_counter()
    served = sum(1 for _ in iterator)
    return (time.perf_counter() - start) / served


def bench_warm(epochs: dict[str, Epoch], count: int, rounds: int, *, shuffle: bool) -> dict[str, list[float]]:
    """Measure seconds per batch; the first round warms the page cache and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in epochs}
    random = np.random.default_rng(1)
    for number in range(rounds + 1):
        order = random.permutation(count) if shuffle else np.arange(count)
        plan = order[: count // BATCH * BATCH].reshape(-1, BATCH).tolist()
        for name in list(epochs) if number % 2 else reversed(list(epochs)):
            gc.collect()
            taken = seconds_per_batch(epochs[name], plan)
            log(f"round {number} of {rounds}: {name} {1e6 * taken:.0f} us a batch")
            if number:
                times[name].append(taken)
    return times


def bench_prompts(folder: Path, prompts: Prompts, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Measure seconds per batch of latents and embeddings; ``memcpy`` copies as many bytes."""
    count = max((megabytes << 20) // prompts.size, 2 * BATCH)
    write_prompts(folder / "cache", prompts, count)
    source = np.random.default_rng(4).integers(0, 256, count * prompts.size, dtype=np.uint8).data
    epochs = {
        "loader()": ours(folder),
        "loader(prefetch=0)": ours(folder, prefetch=0),
        "memcpy": memcpy(source, prompts.size, 1),
    }
    return bench_warm(epochs, count, rounds, shuffle=True)


def cold_names(folder: Path, data: NDArray[np.uint8]) -> list[str]:
    """Measure candidates from a cold page cache: all that read a disk, without workers."""
    names = ["loader()", "loader(), three resolutions", "cat, loader()"]
    names += [*others(folder, (data.shape[0], data.shape[1])), *peers(folder / "peers", data, BATCH)]
    return [name for name in names if "2 workers" not in name]


def bench_cold(
    folder: Path, names: Iterable[str], count: int, size: int, rounds: int
) -> dict[str, list[list[float]]]:
    """Measure (seconds to the first batch, seconds per batch, MiB read), each in a new process."""
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, rows in found.items():
            evict(folder)
            command = [sys.executable, __file__, "--cold", name, str(folder), str(count), str(size)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows.append([float(word) for word in out.split()[-3:]])
            log(f"cold: {name} {1000 * rows[-1][0]:.0f} ms to the first batch")
    return found


def evict(folder: Path) -> None:
    """Drop all files below a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def cat(cache: Path) -> None:
    """Read the shards of a cache once, in large pieces."""
    for path in cache.glob("shards/*/data.mdb"):
        with path.open("rb", buffering=0) as file:
            while file.read(4 << 20):
                pass


def cold_child(name: str, folder: Path, count: int, size: int) -> None:
    """Serve part of an epoch and print its times."""
    data = np.broadcast_to(np.zeros(1, np.uint8), (count, size))
    plan = np.random.default_rng(7).permutation(count)[: count // BATCH * BATCH].reshape(-1, BATCH).tolist()
    batches = max(2, len(plan) // COLD_PART)
    plain = others(folder, (count, size))
    if "loader()" not in name and name not in plain:  # imports the library before the clock starts
        plain = peers(folder / "peers", data, BATCH, formats=name.split(",")[:1])
    before, start = disk_mib(), time.perf_counter()
    if name == "cat, loader()":
        cat(folder / "cache")
        name = "loader()"
    iterator = (ways(folder) if name.startswith("loader") else plain)[name](plan)
    next(iterator)
    first = time.perf_counter() - start
    served = 1 + sum(1 for _ in itertools.islice(iterator, batches - 1))
    print(first, (time.perf_counter() - start) / served, disk_mib() - before)


def disk_mib() -> float:
    """Return the MiB that this process has read from a disk."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1]) / 2**20


def busy() -> None:
    """4 ms of numpy, which holds the GIL part of the time."""
    end, values = time.perf_counter() + COMPUTE_S, np.ones(1 << 14, np.float32)
    while time.perf_counter() < end:
        np.sqrt(values, out=values)


def multiplying() -> None:
    """4 ms of matrix products of torch."""
    end, values = time.perf_counter() + COMPUTE_S, torch.ones(300, 300)
    while time.perf_counter() < end:
        values @ values


def spinning() -> None:
    """4 ms of pure Python, which holds the GIL."""
    end = time.perf_counter() + COMPUTE_S
    while time.perf_counter() < end:
        pass


STEPS: dict[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(COMPUTE_S), "torch": multiplying, "numpy": busy, "pure Python": spinning
}  # fmt: skip


def bench_waiting(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measure the milliseconds that each step waits for its batch."""
    cache = open_cache(folder / "cache")
    waits: dict[str, list[float]] = {}
    options: list[dict[str, Any]] = [{}, {"prefetch": 0}]
    for _ in range(rounds):
        for option in options:
            for name, step in STEPS.items():
                loader = cache.loader(batch_size=BATCH, remainder="drop", **option)
                for _ in loader:  # the first epoch verifies checksums and allocates buffers
                    pass
                words = ", ".join(f"{key}={value}" for key, value in option.items())
                waits.setdefault(f"loader({words}) beside {name}", []).extend(step_waits(iter(loader), step))
    return waits


def step_waits(iterator: Iterator[Any], step: Callable[[], None]) -> list[float]:
    """Return the milliseconds of each wait except the first two, before the loader knows the step time.

    A step keeps its batch until it has the next one.
    """
    waits: list[float] = []
    batch = next(iterator)
    while batch is not None and len(waits) < STEPS_TIMED + 3:
        step()
        start = time.perf_counter()
        batch = next(iterator, None)
        waits.append(1000 * (time.perf_counter() - start))
    return waits[2:-1]


#: Stage of a batch -> its functions in the package.
STAGES: dict[str, tuple[Any, str]] = {
    "read, prove and scale": (Located, "read"),
    "scale and shift without the library": (Affine, "apply"),
    "names, captions, sizes, keys": (SampleReader, "_chosen"),
}


def bench_profile(folder: Path, epochs: int) -> dict[str, float]:
    """Measure CPU microseconds per batch and stage; other processes hardly change them."""
    cache = open_cache(folder / "cache")
    depths = {depth: cache.loader(batch_size=BATCH, remainder="drop", prefetch=depth) for depth in (0, 2)}
    spent, totals = dict.fromkeys(STAGES, 0.0), dict.fromkeys(depths, 0.0)
    for number in range(epochs + 1):  # warm-up, not counted
        for depth, loader in depths.items():
            with contextlib.ExitStack() as stack:
                for name, (owner, function) in STAGES.items() if number and not depth else ():
                    stack.enter_context(timed(owner, function, spent, name))
                start = time.process_time()
                for _ in loader:
                    pass
                totals[depth] += time.process_time() - start if number else 0
    batches = epochs * len(depths[0]) / 1e6
    found = {name: seconds / batches for name, seconds in spent.items()}
    found["places of the bytes, buffers, the plan"] = totals[0] / batches - sum(found.values())
    return found | {"reading ahead instead of not": (totals[2] - totals[0]) / batches}


@contextlib.contextmanager
def timed(owner: Any, function: str, spent: dict[str, float], name: str) -> Iterator[None]:
    """Wrap a function to add its CPU seconds to ``spent``."""
    real = getattr(owner, function)

    def measured(*words: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return real(*words, **options)
        finally:
            spent[name] += time.thread_time() - start

    setattr(owner, function, measured)
    try:
        yield
    finally:
        setattr(owner, function, real)


_CHILD = """
import sys, time
import numpy, torch
from latentcache import open_cache
open_cache
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
before, start = anonymous(), time.perf_counter()
loader = open_cache(sys.argv[1]).loader(batch_size=32, remainder="drop")
iterator = iter(loader)
next(iterator)
first = time.perf_counter() - start
for batch in iterator: pass
print(1000 * first, anonymous() - before)
"""


def bench_start(folder: Path) -> tuple[float, float]:
    """Measure (ms from open to the first batch, MiB of anonymous memory after an epoch) in a new process."""
    command = [sys.executable, "-c", _CHILD, str(folder / "cache")]
    first, memory = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(first), float(memory)


def ratios_of(times: dict[str, list[float]], name: str) -> list[float]:
    return [memcpy / seconds for memcpy, seconds in zip(times["memcpy"], times[name], strict=True)]


def table(first: str, heads: Sequence[str], rows: dict[str, list[str]]) -> str:
    lines = [f"| {first} | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def warm_table(results: dict[int, dict[str, list[float]]]) -> str:
    """Format the speed relative to memcpy (middle half of the rounds) and thousand samples per second."""
    heads = [f"{kib} KiB, x memcpy" for kib in results] + [f"{kib} KiB, k samples/s" for kib in results]
    rows: dict[str, list[str]] = {}
    for name in next(iter(results.values())):
        quarters = [np.percentile(ratios_of(times, name), (25, 50, 75)) for times in results.values()]
        rows[name] = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in quarters]
        rows[name] += [f"{BATCH / statistics.median(times[name]) / 1000:.1f}" for times in results.values()]
    return table("candidate", heads, rows)


def prompts_table(results: dict[str, dict[str, list[float]]]) -> str:
    """Format the speed relative to memcpy, and samples per second."""
    rows = {
        name: [
            f"{statistics.median(ratios_of(times, name)):.2f}, {BATCH / statistics.median(times[name]):.0f}"
            for times in results.values()
        ]
        for name in next(iter(results.values()))
    }
    return table("candidate", [f"{about}: x memcpy, samples/s" for about in results], rows)


def cold_table(results: dict[int, dict[str, list[list[float]]]]) -> str:
    """Format ms to the first batch, samples per second, and MiB read from the disk."""
    rows: dict[str, list[str]] = {}
    for name in next(iter(results.values())):
        medians = [np.median(found[name], axis=0) for found in results.values()]
        rows[name] = [f"{1000 * first:.0f}, {BATCH / taken:.0f}, {mib:.0f}" for first, taken, mib in medians]
    return table("cold", [f"{kib} KiB: ms, samples/s, MiB" for kib in results], rows)


def measure(kib: int, megabytes: int, rounds: int, parts: Sequence[str], only: Sequence[str]) -> dict[str, Any]:
    """Run the chosen parts for one payload size; ``only`` selects readers beside ``memcpy``."""
    found: dict[str, Any] = {}

    def is_chosen(name: str) -> bool:
        return any(word in name for word in only)

    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), payloads(kib, megabytes * 1024 // kib)
        write_caches(folder, kib, data)
        write_peers(folder, data)
        if "cold" in parts:
            names = filter(is_chosen, cold_names(folder, data))
            found["cold"] = bench_cold(folder, names, len(data), data.shape[1], min(rounds, 3))
        evict(folder)  # random reads leave small pages in the page cache
        cat(folder / "three")
        cat(folder / "cache")
        if "waiting" in parts:
            found["waiting"] = bench_waiting(folder, min(rounds, 3))
        if "profile" in parts:
            found["profile"] = bench_profile(folder, rounds)
        if "start" in parts:
            found["start"] = {"loader()": bench_start(folder)}
        if "warm" in parts:
            for order, every in candidates(folder, data).items():
                epochs = {name: epoch for name, epoch in every.items() if is_chosen(name) or name == "memcpy"}
                found[order] = bench_warm(epochs, len(data), rounds, shuffle=order == "shuffled")
    return found


def report(results: dict[int, dict[str, Any]]) -> str:
    """Format all tables."""
    some = next(iter(results.values()))
    warm = {order: {kib: found[order] for kib, found in results.items()} for order in ORDERS if order in some}
    parts = [f"{order}\n\n{warm_table(found)}" for order, found in warm.items()]
    if "cold" in some:
        parts.append(cold_table({kib: found["cold"] for kib, found in results.items()}))
    if "waiting" in some:
        rows = {
            name: ["{:.3f}, {:.3f}".format(*np.percentile(f["waiting"][name], (50, 90))) for f in results.values()]
            for name in some["waiting"]
        }
        parts.append(table("a step of 4 ms waits", [f"{kib} KiB: ms, median and p90" for kib in results], rows))
    if "profile" in some:
        rows = {
            name: [
                f"{f['profile'][name]:.0f} ({100 * f['profile'][name] / sum(f['profile'].values()):.0f} %)"
                for f in results.values()
            ]
            for name in some["profile"]
        }
        parts.append(table("a batch", [f"{kib} KiB: CPU us" for kib in results], rows))
    if "start" in some:
        rows = {
            words: ["{:.0f}, {:.0f}".format(*f["start"][words]) for f in results.values()] for words in some["start"]
        }
        parts.append(table("start", [f"{kib} KiB: ms to first batch, MiB of memory" for kib in results], rows))
    return "\n\n".join(parts)


ORDERS = ("shuffled", "sequential")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the loader against memory copies and other stores.")
    parser.add_argument("--kib", default="512,128,32", help="payloads [default: 512,128,32]")
    parser.add_argument("--megabytes", type=int, default=256, help="of payload for each [default: 256]")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds [default: 9]")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"[default: {','.join(PARTS)}]")
    parser.add_argument("--only", default="", metavar="WORDS", help="readers with one of these words in their names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times")
    parser.add_argument("--cold", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.cold:
        name, folder, count, size = options.cold
        cold_child(name, Path(folder), int(count), int(size))
        return
    load = os.getloadavg()[0]
    results: dict[int, dict[str, Any]] = {}
    for kib in map(int, options.kib.split(",")):
        parts, only = options.parts.split(","), options.only.split(",")
        results[kib] = measure(kib, options.megabytes, options.rounds, parts, only)
        log(f"\n{kib} KiB\n\n{report({kib: results[kib]})}\n")
    print(f"{options.megabytes} MiB each, batches of {BATCH}, {options.rounds} rounds, load {load:.1f} before\n")
    print(report(results))
    prompts: dict[str, Any] = {}
    for about, shape in PROMPTS.items() if "prompts" in options.parts.split(",") else ():
        with tempfile.TemporaryDirectory() as name:
            prompts[about] = bench_prompts(Path(name), shape, 4 * options.megabytes, options.rounds)
    if prompts:
        print("\n" + prompts_table(prompts))
    tokens: dict[str, Any] = {}
    if "tokens" in options.parts.split(","):
        with tempfile.TemporaryDirectory() as name:
            tokens = bench_packed(Path(name), 1600, options.rounds)
        print("\n" + packed_table(tokens))
    if options.json:
        settings = {"rounds": options.rounds, "batch": BATCH, "megabytes": options.megabytes, "load": load}
        found = {**settings, "kib": results, "prompts": prompts, "tokens": tokens}
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

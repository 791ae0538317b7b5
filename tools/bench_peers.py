"""Measure other formats beside the loader and beside LMDB: warm or cold, shuffled or in the order they were written.

Warm: all candidates take turns in every round on the same plan, as in ``bench_loader``, whose cache, LMDB copy and
plain memory copy are used; ratios to ``memcpy`` are taken round by round. Cold: every candidate runs once in a
process of its own, after all files below its folder were dropped from the page cache; the clock runs from opening
to the last batch of one epoch, and the bytes that were read from the disk are counted against the payload. Formats
whose library is missing are named and left out; ``read_peers`` says how to install them.

    python tools/bench_peers.py --kib 512,128,32 --json times.json
    python tools/bench_peers.py --cold
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_loader
import numpy as np
import torch
from read_peers import PEERS, Epoch, Plan, left_out, peers, versions

BATCH = bench_loader.BATCH
FIRST = ("memcpy", "loader()", "loader(mapped=True)", "LMDB get and copy")
"""What the formats are compared with."""
ORDERS = ("shuffled", "sequential")
Times = dict[str, list[float]]


def plan_of(count: int, order: str, number: int) -> Plan:
    """Full batches of all rows."""
    rows = np.random.default_rng(number).permutation(count) if order == "shuffled" else np.arange(count)
    plan: Plan = rows[: count // BATCH * BATCH].reshape(-1, BATCH).tolist()
    return plan


def write_all(folder: Path, kib: int, megabytes: int) -> None:
    """The same payloads in every format."""
    data = bench_loader.payloads(kib << 10, megabytes * 1024 // kib)
    bench_loader.make_cache(folder / "cache", bench_loader.PAYLOADS[kib], data)
    bench_loader.write_peers(folder, data)
    peers(folder / "peers", data, BATCH)


def candidates(folder: Path, kib: int, megabytes: int) -> dict[str, Epoch]:
    """What reads them warm: everything of ours is open already."""
    data = bench_loader.payloads(kib << 10, megabytes * 1024 // kib)
    first = bench_loader.candidates(folder, data)
    return {name: first[name] for name in FIRST} | peers(folder / "peers", data, BATCH)


def cold_candidates(folder: Path, kib: int, megabytes: int, formats: Collection[str]) -> dict[str, Epoch]:
    """What reads them cold: nothing is opened before the first batch is asked for, and only what is read imported."""
    shape = np.broadcast_to(np.uint8(0), (megabytes * 1024 // kib, kib << 10))

    def loader(**options: Any) -> Epoch:
        return lambda plan: bench_loader.ours(folder, **options)(plan)

    def lmdb_get(plan: Plan) -> Iterator[Any]:
        values = bench_loader.LmdbSet(str(folder / "lmdb"))
        for rows in plan:
            yield torch.stack([values[row] for row in rows])

    ours = {"loader()": loader(), "loader(mapped=True)": loader(mapped=True)}
    return ours | {"LMDB get and copy": lmdb_get} | peers(folder / "peers", shape, BATCH, formats=formats)


def bench_warm(folder: Path, kib: int, megabytes: int, rounds: int) -> dict[str, Times]:
    """Order -> candidate -> seconds per batch in each round."""
    write_all(folder, kib, megabytes)
    epochs = candidates(folder, kib, megabytes)
    count = megabytes * 1024 // kib
    times: dict[str, Times] = {order: {name: [] for name in epochs} for order in ORDERS}
    for number in range(rounds + 1):
        for order in ORDERS:
            plan = plan_of(count, order, number)
            for name in list(epochs) if number % 2 else reversed(list(epochs)):
                if order == "sequential" and name.startswith("loader"):
                    continue  # a loader always shuffles
                gc.collect()
                taken = bench_loader.seconds_per_batch(epochs[name], plan)
                if number:  # the first round warms the page cache
                    times[order][name].append(taken)
    return times


def bench_cold(folder: Path, kib: int, megabytes: int) -> dict[str, dict[str, float]]:
    """Candidate -> what :func:`read_once` says of it."""
    names = own_process("write", "", folder, kib, megabytes)  # whoever has a file mapped keeps it in the page cache
    found = {}
    for name in names:
        evict(folder)
        found[name] = own_process("read", name, folder, kib, megabytes)
    return found


def own_process(step: str, name: str, folder: Path, kib: int, megabytes: int) -> Any:
    """The result of one step in a fresh interpreter."""
    words = ["--step", step, "--candidate", name, "--folder", str(folder), "--megabytes", str(megabytes)]
    command = [sys.executable, __file__, "--kib", str(kib), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def evict(folder: Path) -> None:
    """Drop every file below a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # a dirty page stays
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(epoch: Epoch, plan: Plan) -> dict[str, float]:
    """One epoch; libraries were imported before the clock starts, files are opened after."""
    before, start = bytes_from_disk(), time.perf_counter()
    iterator = epoch(plan)
    served = len(next(iterator))
    first = time.perf_counter() - start
    served += sum(BATCH for _ in iterator)
    taken = time.perf_counter() - start
    return {"samples_s": served / taken, "first_batch_ms": 1000 * first, "disk_bytes": bytes_from_disk() - before}


def bytes_from_disk() -> int:
    """By this process and the workers that have ended."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def run_step(options: argparse.Namespace) -> None:
    """What a process of its own does; the last line it prints is the result."""
    sizes = options.folder, int(options.kib), options.megabytes
    result: Any
    if options.step == "write":
        write_all(*sizes)
        result = list(cold_candidates(*sizes, PEERS))
    else:
        epoch = cold_candidates(*sizes, [options.candidate.split(",")[0]])[options.candidate]
        result = read_once(epoch, plan_of(options.megabytes * 1024 // sizes[1], "shuffled", 1))
    print(json.dumps(result))


def warm_table(results: dict[int, dict[str, Times]], order: str) -> str:
    """How many times as quick as memcpy; median and range of the rounds."""
    names = [name for name, times in results[next(iter(results))][order].items() if times]
    lines = [f"| {order} | {' | '.join(f'{kib} KiB, x memcpy (range), k samples/s' for kib in results)} |"]
    lines.append("|---|" + "---:|" * len(results))
    for name in names:
        cells = []
        for found in results.values():
            ratios = bench_loader.ratios_of(found[order], name)
            rate = BATCH / statistics.median(found[order][name]) / 1000
            spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
            cells.append(f"{statistics.median(ratios):.3f} {spread}, {rate:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cold_table(results: dict[int, dict[str, dict[str, float]]], megabytes: int) -> str:
    """Samples a second, time to the first batch, and how often the payload came from the disk."""
    lines = [f"| cold, shuffled | {' | '.join(f'{kib} KiB: samples/s, ms to first, disk' for kib in results)} |"]
    lines.append("|---|" + "---:|" * len(results))
    for name in next(iter(results.values())):
        cells = [
            f"{row['samples_s']:.0f}, {row['first_batch_ms']:.0f}, {row['disk_bytes'] / (megabytes << 20):.2f}x"
            for row in (found[name] for found in results.values())
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure other formats beside the loader.")
    parser.add_argument("--kib", default="512,128,32", help="payloads (default: 512,128,32)")
    parser.add_argument("--megabytes", type=int, default=256, help="of payload for each (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds, warm (default: 3)")
    parser.add_argument("--cold", action="store_true", help="page cache empty, one process for each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times")
    parser.add_argument("--step", choices=("write", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--candidate", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.step:
        run_step(options)
        return
    results: dict[int, Any] = {}
    for kib in map(int, options.kib.split(",")):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            cold = options.cold
            sizes = Path(name), kib, options.megabytes
            results[kib] = bench_cold(*sizes) if cold else bench_warm(*sizes, options.rounds)
        if options.json:  # after each size: the last one may take long
            options.json.write_text(
                json.dumps({"versions": versions(), "results": results}, indent=1) + "\n", "utf-8"
            )
    print(f"{options.megabytes} MiB each, batches of {BATCH}; {versions()}\n")
    tables = [cold_table(results, options.megabytes)] if options.cold else [warm_table(results, o) for o in ORDERS]
    print("\n\n".join(tables))
    print("".join(f"\nleft out: {name}: {reason}" for name, reason in left_out().items()))


if __name__ == "__main__":
    main()

"""Measure tokens: reading padded rows, packing, and building, each against what others do.

Reading and building are given in CPU time of this process beside wall time, because the former says what is taken
from training; candidates take turns in every round and ratios are taken round by round. Documents are log-normal,
1055 tokens on average; texts are the Python sources of this environment.

    python tools/bench_tokens.py --json tokens.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from token_builds import bench_build
from token_peers import Epoch, token_peers

from latentcache.loader.token_opening import open_tokens
from latentcache.pipeline.token_build import build_tokens
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.plan.row_kinds import packed_rows
from latentcache.plan.rows import Corpus

LENGTH, BATCH = 4096, 16
MEAN, SIGMA = 1055, 1.0
PACKED_DOCUMENTS = 60_000
OURS = "latentcache, loader(prefetch=0)"
FLOORS = ("flat memmap and offsets, with labels", "flat memmap and offsets")


def lengths(count: int, seed: int) -> NDArray[np.int64]:
    """Log-normal lengths with a mean of about 1055 tokens, 1 to 32 times the row."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(drawn, 2, 32 * LENGTH).astype(np.int64)


def make_cache(folder: Path, sizes: NDArray[np.int64]) -> tuple[Path, list[NDArray[np.uint16]]]:
    """A cache of such documents by the byte tokeniser, and their ids."""
    letters = np.random.default_rng(1)
    texts = [letters.integers(97, 123, int(size)).astype(np.uint8).tobytes().decode() for size in sizes]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "documents.jsonl").write_text("".join(lines))
    cache = folder / "documents.latentcache"
    build_tokens(TokenSettings(data=folder / "documents.jsonl", out=cache, tokenizer="stub", add_eos=False))
    return cache, [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]


def ours(cache: Path) -> dict[str, Epoch]:
    """The rows of a plan, and an epoch of the loader."""
    view = open_tokens(cache).padded(LENGTH, overflow="truncate_right")
    return {
        "latentcache, view.batch(rows)": lambda plan: (view.batch(rows) for rows in plan),
        OURS: lambda plan: iter(view.loader(batch_size=BATCH, seed=len(plan), prefetch=0)),
        "latentcache, loader()": lambda plan: iter(view.loader(batch_size=BATCH, seed=len(plan))),
    }


def bench_read(folder: Path, documents: int, rounds: int) -> dict[str, Any]:
    """CPU and wall seconds per row of each candidate, and bytes on disk per token."""
    cache, ids = make_cache(folder, lengths(documents, 0))
    peers, missing = token_peers(folder, ids, LENGTH)
    epochs = ours(cache) | peers
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in epochs}
    random = np.random.default_rng(2)
    for number in range(rounds + 1):
        plan = random.permutation(documents)[: documents // BATCH * BATCH].reshape(-1, BATCH).tolist()
        for name in list(epochs) if number % 2 else reversed(list(epochs)):
            few = plan if name in epochs and not name.startswith("HF lists") else plan[:4]
            taken = per_row(epochs[name], few)
            if number:
                times[name].append(taken)
    tokens = sum(len(document) for document in ids)
    stored = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    return {"times": times, "missing": missing, "bytes_per_token": stored / tokens, "tokens": tokens}


def per_row(epoch: Epoch, plan: list[list[int]]) -> tuple[float, float]:
    """(CPU, wall) seconds per row; iterators are opened before the clock is."""
    batches = epoch(plan)
    cpu, wall, rows = time.process_time(), time.perf_counter(), 0
    for batch in batches:
        rows += len(batch["input_ids"])
    return (time.process_time() - cpu) / rows, (time.perf_counter() - wall) / rows


def bench_packing(folder: Path) -> dict[str, float]:
    """Fill, rows and CPU seconds per million documents of one global plan."""
    sizes = np.minimum(lengths(PACKED_DOCUMENTS, 3), LENGTH)
    ends = np.arange(1, len(sizes) + 1, dtype=np.int64)
    spans = np.column_stack([np.zeros_like(sizes), sizes]).astype(np.uint32)
    corpus = Corpus(length=sizes.astype(np.uint32), span_ends=ends, spans=spans, where=str, chosen=None)
    start = time.process_time()
    plan = packed_rows(corpus, LENGTH, overflow="error", idle="drop")
    taken = time.process_time() - start
    bound = -(-int(sizes.sum()) // LENGTH)
    return {"fill": plan.fill, "rows": len(plan), "least": bound, "s_per_million": taken * 1e6 / len(sizes)}


def texts_of_this_environment(megabytes: float) -> list[str]:
    """Python sources of the standard library, in pieces of at most 8 kB."""
    found: list[str] = []
    left = int(megabytes * 1e6)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text("utf-8", "ignore")
        found += [text[start : start + 8000] for start in range(0, len(text), 8000)]
        left -= len(text)
        if left < 0:
            break
    return found


def show_read(found: dict[str, Any]) -> None:
    """A table of ratios to both floors."""
    times = found["times"]
    print(f"\nreading, batch {BATCH} x {LENGTH}, shuffled, {found['tokens']:,} tokens\n")
    print(f"| candidate | {' | '.join(f'CPU, x {floor}' for floor in FLOORS)} | rows per CPU second | wall rows/s |")
    print("|---|---:|---:|---:|---:|")
    for name, rounds in sorted(times.items(), key=lambda item: statistics.median(cpu for cpu, _ in item[1])):
        ratios = [median_ratio(rounds, times[floor], 0) for floor in FLOORS]
        cpu, wall = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | {1 / cpu:,.0f} | {1 / wall:,.0f} |")
    print(f"\n{found['bytes_per_token']:.2f} bytes per token on disk, columns and reports included")
    for line in found["missing"]:
        print(f"not run: {line}")


def median_ratio(mine: Sequence[tuple[float, float]], floor: Sequence[tuple[float, float]], column: int) -> float:
    """Of the rounds one by one."""
    return statistics.median(a[column] / b[column] for a, b in zip(mine, floor, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="Measure reading, packing and building of tokens.")
    parser.add_argument("--only", choices=("read", "pack", "build"))
    parser.add_argument("--documents", type=int, default=1600, help="to read (default: 1600)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text to tokenise (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    parts: dict[str, Callable[[Path], Any]] = {
        "read": lambda folder: bench_read(folder, given.documents, given.rounds),
        "pack": bench_packing,
        "build": lambda folder: bench_build(folder, texts_of_this_environment(given.megabytes), given.rounds),
    }
    found: dict[str, Any] = {}
    for name, measure in parts.items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="bench-tokens-") as folder:
                found[name] = measure(Path(folder))
            if name == "read":
                show_read(found[name])
            else:
                print(f"\n{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found[name].items()))
    if given.json:
        given.json.write_text(json.dumps({"argv": sys.argv, **found}, indent=1))


if __name__ == "__main__":
    main()

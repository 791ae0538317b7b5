"""What ten million entries cost: planning an epoch, resuming, opening columns, finding that nothing has changed.

Synthetic entries of one resolution in 24 skewed buckets, one per sample, names of 20 bytes and captions of 42; a
generation written by the package's own ``publish`` and the index of one shard that holds them all, without payloads.
Each measurement runs in a process of its own and is given a time and the most memory that the process held. The last
column is the cost of the larger size over that of the smaller, divided by how many times larger it is: 1 is linear.

    python tools/bench_scale.py [--entries 1000000 10000000] [--folder DIR] [--parts plan,open,...] [--json FILE]

Cost: about 5 GB of disk, removed at the end, up to 6 GiB of memory and five minutes. ``--most-gib`` refuses a
part before it starts where the machine has less memory free.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_plan import measure as measure_plan

from latentcache.geometry.sizes import Size
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.pipeline.standstill import _same_samples
from latentcache.recipe import EncoderSpec, GeometrySettings, PixelProfile, Recipe
from latentcache.sources.sample import SampleColumns
from latentcache.store.catalog import Catalog
from latentcache.store.columns import StringColumn, npy_bytes
from latentcache.store.durable import write_json
from latentcache.store.generation import Rows, Samples, load_generation, publish
from latentcache.store.index import INDEX_DTYPE, holds, load_rows
from latentcache.store.layout import CacheLayout

_ENCODER = EncoderSpec(family="made", fingerprint="ab" * 16, config="cd" * 16, channels=16, factor=8, multiple=8)
_RECIPE = Recipe(geometry=GeometrySettings(resolutions=(512,)), pixels=PixelProfile(), encoder=_ENCODER)
_NUM_BUCKETS = 24
_VALUE_BYTES = 4096 + 64
_MIB = 1 << 20
_GIB = 1 << 30
#: MiB per million entries that a part holds at its peak; what is refused before it starts.
_NEEDS = {"make": 700, "plan": 100, "open": 600, "unchanged": 800, "index": 700, "catalog": 700}


def make(entries: int, folder: Path) -> dict[str, float]:
    """Write the generation and the index; returns the seconds of the generation alone."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.ones(_NUM_BUCKETS) * 0.5)
    keys = rng.integers(0, 256, (entries, KEY_BYTES), dtype=np.uint8)
    rows = Rows(
        key=keys,
        shard=np.zeros(entries, np.int32),
        offset=(np.arange(entries, dtype=np.uint64) + 1) * np.uint64(_VALUE_BYTES),
        bucket=rng.choice(_NUM_BUCKETS, p=share, size=entries).astype(np.int32),
        sample=np.arange(entries, dtype=np.int32),
        crop=np.zeros((entries, 2), np.uint32),
        resize=np.full((entries, 2), 512, np.uint32),
        pixel_hash=rng.integers(0, 256, (entries, 16), dtype=np.uint8),
    )
    samples = Samples(
        names=_strings("pictures/%08d.jpg", entries),
        captions=_strings("a picture of something, number %08d", entries),
        content=rng.integers(0, 256, (entries, 16), dtype=np.uint8),
        original_size=np.full((entries, 2), 1024, np.uint32),
        stat=np.tile(np.array([1 << 20, 10**18, 10**18, 7, 8, 10**18 + 10**10], np.uint64), (entries, 1)),
    )
    layout = CacheLayout(folder)
    layout.shards.mkdir(parents=True)
    started = time.perf_counter()
    publish(
        layout,
        recipe=_RECIPE,
        rows=rows,
        samples=samples,
        buckets=[Size(64 + 8 * number, 64) for number in range(_NUM_BUCKETS)],
        shards=["one"],
        refused=[],
        notes=[],
        facts={"source": {"root": "/", "relative": ".", "captions": "none"}, "demo": False, "provenance": {}},
    )
    taken = time.perf_counter() - started
    _write_index(layout.shards / "one", rows)
    return {"seconds": taken}


def plan(entries: int, folder: Path) -> dict[str, float]:
    """One epoch on 4 ranks, and the rest of one on 3."""
    found = measure_plan(entries, rounds=1)
    return {"seconds": found["plan_s"], "resume": found["resume_s"]}


def open_columns(entries: int, folder: Path) -> dict[str, float]:
    """Open a generation: what every reader, plan and check begins with."""
    started = time.perf_counter()
    generation = load_generation(folder)
    taken = time.perf_counter() - started
    return {"seconds": taken, "checked": float(len(generation.rows.shard) == entries)}


def unchanged(entries: int, folder: Path) -> dict[str, float]:
    """Compare a folder's names, captions and stats with the generation, as a second build does after its walk."""
    generation = load_generation(folder)
    samples = generation.samples
    found = SampleColumns(list(samples.names), list(samples.captions), np.ascontiguousarray(samples.stat[:, :5]))
    started = time.perf_counter()
    same = _same_samples(found, set(), generation)
    return {"seconds": time.perf_counter() - started, "checked": float(same)}


def index(entries: int, folder: Path) -> dict[str, float]:
    """Open a shard's index and look every entry of the generation up in it, as a second build does."""
    generation = load_generation(folder)
    started = time.perf_counter()
    found = load_rows(folder / "shards" / "one")
    held = bool(holds(found, generation.rows.key, generation.rows.offset).all())
    return {"seconds": time.perf_counter() - started, "checked": float(held)}


def catalog(entries: int, folder: Path) -> dict[str, float]:
    """Every committed key in one dictionary: what a build with something to do looks entries up in."""
    found = load_rows(folder / "shards" / "one")
    started = time.perf_counter()
    entry = Catalog([found])
    taken = time.perf_counter() - started
    return {"seconds": taken, "checked": float(len(entry) == entries)}


PARTS: Mapping[str, Callable[[int, Path], dict[str, float]]] = {
    "make": make,
    "plan": plan,
    "open": open_columns,
    "unchanged": unchanged,
    "index": index,
    "catalog": catalog,
}


def in_own_process(part: str, entries: int, folder: Path, free_bytes: int) -> dict[str, Any]:
    """One part in a fresh interpreter, or why it was not run."""
    if _NEEDS[part] * _MIB * entries // 1_000_000 > free_bytes:
        return {"part": part, "entries": entries, "not run": "not enough memory free"}
    words = [sys.executable, __file__, "--alone", part, str(entries), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"part": part, "entries": entries, "not run": (done.stderr.strip().splitlines() or ["ended"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    if not found.pop("checked", 1.0):
        raise SystemExit(f"{part} did not find what was written")
    return {"part": part, "entries": entries} | found


def alone(part: str, entries: int, folder: Path) -> dict[str, float]:
    """One part, the most MiB it held beyond the interpreter and its libraries, and all its processor time."""
    before, cpu = _most_bytes(), time.process_time()
    found = PARTS[part](entries, folder)
    return found | {"peak_mib": (_most_bytes() - before) / _MIB, "cpu_s": time.process_time() - cpu}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All parts as Markdown; slopes against the first size."""
    lines = ["| part | entries | s | peak, MiB | bytes per entry | time, slope |", "|---|---:|---:|---:|---:|---:|"]
    for row in with_resume(rows):
        about = f"| {row['part']} | {row['entries']:,} |"
        if "not run" in row:
            lines.append(f"{about} not run: {row['not run']} | | | |")
            continue
        first = next(other for other in with_resume(rows) if other["part"] == row["part"])
        times = row["entries"] / first["entries"]
        slope = f"{row['seconds'] / first['seconds'] / times:.2f}" if times > 1 and "seconds" in first else ""
        each = row["peak_mib"] * _MIB / row["entries"]
        lines.append(f"{about} {row['seconds']:.2f} | {row['peak_mib']:.0f} | {each:.0f} | {slope} |")
    return "\n".join(lines)


def with_resume(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows, with resuming as a row of its own."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        found.append(row)
        if "resume" in row:
            found.append({**row, "part": "resume", "seconds": row["resume"]})
    return found


def free_memory() -> int:
    """Bytes that the system says are available."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _most_bytes() -> int:
    """The most memory this process has held; ``ru_maxrss`` would count its parent's before it was another program."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    parser.add_argument("--folder", type=Path, help="where the synthetic caches go (default: a temporary one)")
    parser.add_argument("--most-gib", type=float, default=8.0, help="memory a part may take (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.alone:
        part, entries, folder = options.alone
        print(json.dumps(alone(part, int(entries), Path(folder))))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for entries in options.entries:
            cache = Path(name) / str(entries)
            for part in options.parts.split(","):
                free = min(free_memory(), int(options.most_gib * _GIB))
                rows.append(in_own_process(part, entries, cache, free))
                print(rows[-1], file=sys.stderr, flush=True)
            shutil.rmtree(cache, ignore_errors=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def _strings(pattern: str, count: int) -> StringColumn:
    """``pattern`` with the numbers from 0, all of one length."""
    data = "".join(pattern % number for number in range(count)).encode("ascii")
    each = len(pattern % 0)
    return StringColumn(np.frombuffer(data, np.uint8), np.arange(1, count + 1, dtype=np.uint64) * np.uint64(each))


def _write_index(folder: Path, rows: Rows) -> None:
    """The index of a shard with these entries, in the order of their keys; headers and facts are left empty."""
    folder.mkdir()
    order = np.argsort(rows.key.view("S32")[:, 0])
    found = np.zeros(len(order), INDEX_DTYPE)
    found["key"], found["offset"] = rows.key[order], rows.offset[order]
    data = npy_bytes(found)
    del found
    (folder / "index.npy").write_bytes(data)
    facts = {"schema": 1, "entries": len(order), "transaction": 1, "index_checksum": f"{checksum(data):016x}"}
    write_json(folder / "shard.json", facts)


if __name__ == "__main__":
    main()

"""Time and memory of large caches: planning, a training rank, the catalog of a build, one new image; real records.

Synthetic samples of one bucket, each with a small file of its own; a snapshot written by the package and the index of
one shard that holds all entries, without payloads. Each part runs in a process of its own; memory is its peak above
the interpreter with its libraries. The parts ``texts`` to ``collect`` are one real cache from end to end: a file of
short records, a build with the stub tokenizer, checks, the first batch of a rank, a collection. Goals at ten million:
a rank 2 s and 0.6 GB, a catalog 3 s and 0.6 GB, one new image 2 us per known sample beyond a bare listing and stat of
the same files, and 2 GB. A scan with the headers of all files: 10,000 JPEGs per second and core.

    python tools/bench_scale.py [--rows 1000000] [--folder DIR] [--parts make,plan,...] [--json FILE]

Cost for a million rows: 5 GB of disk, one inode per row, two minutes. For the record: ``--rows 1000000 10000000``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from process_costs import cpu_seconds, peak_bytes
from synthetic_caches import build_settings, stretched

import latentcache.loader.loader  # noqa: F401 - torch is loaded before anything is measured
from latentcache import BuildSettings, build_cache, open_cache, verify_cache
from latentcache.fields.input_ids import InputIdsSettings
from latentcache.images.headers import fill_sizes
from latentcache.plan.batching import BatchPlan, Bucket
from latentcache.plan.mixing import mixture
from latentcache.plan.samples import SampleIndex, plan_epoch, rest_of_epoch
from latentcache.sources.scan import scan
from latentcache.store.catalog import load_catalog
from latentcache.store.paths import CachePaths
from latentcache.store.reader import EntryReader
from latentcache.verify.collect import collect

_NUM_BUCKETS = 24
_MIB, _GIB = 1 << 20, 1 << 30
#: Peak MiB per million rows of each part; a part that needs more than the free memory is skipped.
_NEEDS = {
    "make": 700,
    "plan": 100,
    "mixture": 100,
    "rank": 100,
    "catalog": 150,
    "listing": 50,
    "new image": 400,
    "jpegs": 400,
    **dict.fromkeys(("texts", "build", "second build", "verify", "verify --full", "first batch", "collect"), 500),
}
#: Number of files behind the links of the part ``jpegs``.
_JPEGS = 200

Found = dict[str, float]


def make(rows: int, folder: Path) -> Found:
    """Write the files, the snapshot and the index."""
    stretched(folder, rows)
    return {}


def plan(rows: int, folder: Path, *, weighted: bool = False) -> Found:
    """Plan one epoch of 24 skewed buckets on 4 ranks, and its rest on 3."""
    rng = np.random.default_rng(0)
    part = rng.dirichlet(np.ones(_NUM_BUCKETS) * 0.5)
    bucket = rng.choice(_NUM_BUCKETS, p=part, size=rows).astype(np.int32)
    buckets = tuple(Bucket(label=str(n), size=(1, 64 + 8 * n, 64)) for n in range(_NUM_BUCKETS))
    mix = mixture(["many", "few"], [rows - rows // 4, rows // 4], [1, 1]) if weighted else None
    index = SampleIndex(bucket=bucket, buckets=buckets, identify=lambda: "made", mixture=mix)
    started = time.perf_counter()
    batches, fewer = BatchPlan(batch_size=16, world_size=4), BatchPlan(batch_size=16, world_size=3)
    steps = len(plan_epoch(index, batches, seed=0, epoch=0))
    taken = time.perf_counter() - started
    started = time.perf_counter()
    rest = rest_of_epoch(index, [(batches, steps // 2), (fewer, 0)], seed=0, epoch=0)
    return {"seconds": taken, "resume": time.perf_counter() - started, "checked": float(len(rest) > 0)}


def mixed(rows: int, folder: Path) -> Found:
    """Plan two sources with three quarters and one quarter of the samples, and equal weights."""
    return plan(rows, folder, weighted=True)


def rank(rows: int, folder: Path) -> Found:
    """Load a training rank up to its first read: snapshot, plan and the position of the first batch."""
    started = time.perf_counter()
    cache = open_cache(folder / "cache")
    loader = cache.loader(batch_size=16, rank=0, world_size=4, fields=("latents",))
    batch = next(iter(loader.sampler))
    snapshot = cache.snapshots[0]
    _, offset, _ = EntryReader(snapshot.paths, snapshot)._field("latents").segments(batch.rows)
    return {
        "seconds": time.perf_counter() - started,
        "checked": float(len(cache) == rows and len(offset) == 16),
    }


def catalog(rows: int, folder: Path) -> Found:
    """Look up the committed items as a build does."""
    started = time.perf_counter()
    count = len(load_catalog(CachePaths(folder / "cache")))  # loads its columns
    return {"seconds": time.perf_counter() - started, "checked": float(count == rows)}


def listing(rows: int, folder: Path) -> Found:
    """List the folder and stat each file."""
    started = time.perf_counter()
    count, folders = 0, [str(folder / "data")]
    while folders:
        for one in os.scandir(folders.pop()):
            if one.is_dir(follow_symlinks=False):
                folders.append(one.path)
            else:
                one.stat(follow_symlinks=False)
                count += 1
    return {"seconds": time.perf_counter() - started, "checked": float(count == rows)}


def new_image(rows: int, folder: Path) -> Found:
    """Build with one new image."""
    Image.new("RGB", (64, 64), (1, 2, 3)).save(folder / "data" / "00000" / "new.png")
    started = time.perf_counter()
    report = build_cache(build_settings(folder / "data", folder / "cache"))
    checked = (report.encoded, report.cached) == (1, rows)
    return {"seconds": time.perf_counter() - started, "checked": float(checked)}


def jpegs(rows: int, folder: Path) -> Found:
    """Scan links to 200 JPEGs of 1024 x 768 and read their headers, on one core, from a warm page cache."""
    place, noise = folder / "jpegs", np.random.default_rng(0)
    place.mkdir(parents=True)
    for number in range(rows):
        if number < _JPEGS:
            small = Image.fromarray(noise.integers(0, 256, (96, 128, 3), np.uint8))
            small.resize((1024, 768)).save(place / f"{number}.jpg", quality=90)
        else:
            os.link(place / f"{number % _JPEGS}.jpg", place / f"{number}.jpg")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(2):
        started = time.perf_counter()
        found = scan(place)
        sizes, *_ = fill_sizes(place, found.samples, np.arange(rows))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "checked": float((sizes["original_size"] == (768, 1024)).all())}


def texts(rows: int, folder: Path) -> Found:
    """Write one file of short records: 230 bytes on average."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "texts.jsonl").open("w", encoding="ascii") as file:
        for number in range(rows):
            file.write(json.dumps({"text": f"{number}: " + "a line of text " * (number % 29)}) + "\n")
    return {}


def build(rows: int, folder: Path) -> Found:
    """Build the records with one worker process."""
    fields = {"input_ids": InputIdsSettings(tokenizer="stub")}
    settings = BuildSettings(data=folder / "texts.jsonl", out=folder / "tokens", fields=fields)
    report = build_cache(settings)
    return {"checked": float(report.encoded + report.cached == rows)}


def check(rows: int, folder: Path, *, full: bool = False) -> Found:
    """Check the records: stat their file, read indexes and columns."""
    report = verify_cache(folder / "tokens", full=full)
    return {"checked": float(report.counts["ok"] == rows)}


def full_check(rows: int, folder: Path) -> Found:
    """Check every record and every token."""
    return check(rows, folder, full=True)


def first_batch(rows: int, folder: Path) -> Found:
    """Start a rank: open, pack into rows of 2048 tokens, plan, read one batch."""
    view = open_cache(folder / "tokens").rows(pack=2048)
    batch = next(iter(view.loader(batch_size=8, rank=0, world_size=4)))
    return {"checked": float(len(batch["input_ids"]) == 8)}


def garbage(rows: int, folder: Path) -> Found:
    """Run gc with nothing to delete."""
    return {"checked": float(collect(folder / "tokens", apply=True).unreferenced == 0)}


PARTS: Mapping[str, Callable[[int, Path], Found]] = {
    "make": make, "plan": plan, "mixture": mixed, "rank": rank, "catalog": catalog, "listing": listing,
    "new image": new_image, "jpegs": jpegs, "texts": texts, "build": build, "second build": build, "verify": check,
    "verify --full": full_check, "first batch": first_batch, "collect": garbage,
}  # fmt: skip


def in_own_process(part: str, rows: int, folder: Path, free_bytes: int) -> dict[str, Any]:
    """Run one part in a new interpreter; return its row or the reason why it did not run."""
    if _NEEDS[part] * _MIB * rows // 1_000_000 > free_bytes:
        return {"part": part, "rows": rows, "not run": "not enough memory free"}
    words = [sys.executable, __file__, "--alone", part, str(rows), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"part": part, "rows": rows, "not run": (done.stderr.strip().splitlines() or ["ended"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    if not found.pop("checked", 1.0):
        raise SystemExit(f"{part} did not find the written rows")
    return {"part": part, "rows": rows} | found


def run_part(part: str, rows: int, folder: Path) -> Found:
    """Run one part; return wall and processor seconds, and peak MiB above the interpreter."""
    before, cpu, started = peak_bytes(), cpu_seconds(), time.perf_counter()
    found = PARTS[part](rows, folder)
    times = {"seconds": time.perf_counter() - started, "cpu_s": cpu_seconds() - cpu}
    return times | found | {"peak_mib": (peak_bytes() - before) / _MIB}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Format all parts as Markdown, with the cost of a new image beyond the listing."""
    lines = ["| part | rows | s | CPU s | us per row | peak, MiB | bytes per row |", "|---|" + "---:|" * 6]
    for row in _with_differences(found):
        about = f"| {row['part']} | {row['rows']:,} |"
        if "not run" in row:
            lines.append(f"{about} not run: {row['not run']} | | | | |")
            continue
        times = f"{row['seconds']:.2f} | {row['cpu_s']:.2f} | {1e6 * row['seconds'] / row['rows']:.2f}"
        lines.append(f"{about} {times} | {row['peak_mib']:.0f} | {row['peak_mib'] * _MIB / row['rows']:.0f} |")
    return "\n".join(lines)


def _with_differences(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    listed = {row["rows"]: row for row in found if row["part"] == "listing" and "seconds" in row}
    rows: list[Mapping[str, Any]] = []
    for row in found:
        rows.append(row)
        if "resume" in row:
            rows.append({**row, "part": f"{row['part']}, resume", "seconds": row["resume"]})
        if row["part"] == "new image" and "seconds" in row and row["rows"] in listed:
            less = {name: row[name] - listed[row["rows"]][name] for name in ("seconds", "cpu_s")}
            rows.append({**row, "part": "new image, beyond the listing", **less})
    return rows


def free_memory() -> int:
    """Return the available bytes of the system."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000], help="samples [default: 1000000]")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"[default: {','.join(PARTS)}]")
    parser.add_argument("--folder", type=Path, help="place of the synthetic caches [default: a temporary folder]")
    parser.add_argument("--most-gib", type=float, default=8.0, help="memory that a part may take [default: 8]")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.alone:
        part, rows, folder = options.alone
        print(json.dumps(run_part(part, int(rows), Path(folder))))
        return
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for rows in options.rows:
            made = Path(name) / str(rows)
            for part in options.parts.split(","):
                free = min(free_memory(), int(options.most_gib * _GIB))
                found.append(in_own_process(part, rows, made, free))
                print(found[-1], file=sys.stderr, flush=True)
            shutil.rmtree(made, ignore_errors=True)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

"""How long it takes to check a cache, and to find that a build has nothing to do.

Makes caches with the store's own writer: many small entries with one real file each for the fast form and the second
build, and payloads of 128 KiB for the full one. Each measure runs in a process of its own, none of which made the
cache; rounds of the full form take turns with plain sequential reading and hashing of the same file. Prints Markdown
tables. Cost: minutes; 1,000,000 entries are as many files, 5 GB of disk and a quarter of an hour.

    python tools/bench_verify.py [--entries 20000 100000] [--payloads 4000] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.describe import describe_model
from latentcache.geometry.placement import place
from latentcache.geometry.sizes import Size, latent_size
from latentcache.identity.content import checksum, content_hash
from latentcache.identity.key import KIND_LATENTS, EntryKey
from latentcache.identity.stat import RACY_NS, StatMemo
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.preflight import source_facts
from latentcache.pipeline.recipes import resolve_recipe
from latentcache.pipeline.settings import BuildSettings, RecipeSettings
from latentcache.sources.resolve import scan
from latentcache.store.columns import StringColumn
from latentcache.store.entry import EntryFacts, EntryHeader, NewEntry, numpy_dtype, pack_facts, pack_header
from latentcache.store.generation import Rows, Samples, open_generation, pack_memo, publish
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import ShardWriter
from latentcache.verify.entries import check_entries
from latentcache.verify.payloads import scan_shards
from latentcache.verify.run import verify_cache
from latentcache.verify.sources import check_sources

_MIB = 1 << 20
_PER_FOLDER = 1000
_BATCH = 2048


def settings_of(side: int) -> RecipeSettings:
    """The stub encoder and one bucket of this side."""
    return RecipeSettings(model="stub", buckets=(Size(side, side),))


def make_cache(folder: Path, count: int, side: int) -> tuple[Path, Path]:
    """A data folder of ``count`` small files and a cache that says it was built from them."""
    data, layout = folder / "data", CacheLayout(folder / "cache")
    names, contents, stats = _make_files(data, count)
    recipe, _ = resolve_recipe(settings_of(side), None, cached_model=None, has_cuda=False)
    size = Size(side, side)
    (table,) = recipe.geometry.tables()
    placement = place(size, table)
    facts = pack_facts(EntryFacts(pixel_hash=b"\1" * 16, placement=placement))
    keys = [EntryKey(content=content, bucket=size, recipe=recipe.key_part).pack() for content in contents]
    cells = latent_size(size, recipe.encoder.factor)
    shape = (recipe.encoder.channels, cells.height, cells.width)
    shard = ShardWriter(layout.shards / "0123456789abcdef.open")
    rng = np.random.default_rng(0)
    for start in range(0, count, _BATCH):
        batch = []
        for key, content in zip(keys[start : start + _BATCH], contents[start : start + _BATCH], strict=True):
            payload = (
                rng.standard_normal(shape, np.float32).astype(numpy_dtype(recipe.encoder.storage_dtype)).tobytes()
            )
            header = EntryHeader(
                kind=KIND_LATENTS,
                dtype=recipe.encoder.storage_dtype,
                shape=shape,
                payload_checksum=checksum(payload),
                content=content,
                recipe_id=recipe.recipe_id,
                original_size=size,
            )
            batch.append(NewEntry(key=key, value=pack_header(header, key) + payload, facts=facts))
        shard.write(batch)
    index = load_index(shard.seal())
    place_of = dict(zip(index.keys(), index.rows["offset"].tolist(), strict=True))
    crop, resize = placement.crop, placement.resize
    rows = Rows(
        key=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32),
        shard=np.zeros(count, np.int32),
        offset=np.array([place_of[key] for key in keys], np.uint64),
        bucket=np.zeros(count, np.int32),
        sample=np.arange(count, dtype=np.int32),
        crop=np.tile(np.array([crop.top, crop.left], np.uint32), (count, 1)),
        resize=np.tile(np.array([resize.height, resize.width], np.uint32), (count, 1)),
        pixel_hash=np.full((count, 16), 1, np.uint8),
    )
    samples = Samples(
        names=StringColumn.of(names),
        captions=StringColumn.of([""] * count),
        content=np.frombuffer(b"".join(contents), np.uint8).reshape(-1, 16),
        original_size=np.full((count, 2), side, np.uint32),
        stat=stats,
    )
    description = describe_model("stub", compute_dtype="auto", storage_dtype="float16", has_cuda=False)
    publish(
        layout,
        recipe=recipe,
        rows=rows,
        samples=samples,
        buckets=(size,),
        shards=[index.folder.name],
        refused=[],
        notes=[],
        facts=source_facts(scan(data), description, layout.root),
    )
    return data, layout.root


def measure_many(count: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Rates of the fast form, of its parts, and of a second build; memory of a process that only checks."""
    made = _alone("make", count, rounds, folder)
    data, cache = Path(made["data"]), Path(made["cache"])
    memory = _alone("memory", count, rounds, folder)
    layout, generation, found = CacheLayout(cache), open_generation(cache), scan(data)
    stages: dict[str, Callable[[], Any]] = {
        "fast verify": lambda: verify_cache(cache),
        "walk and stat": lambda: scan(data),
        "stat columns compared": lambda: check_sources(generation, found, full=False),
        "headers": lambda: check_entries(layout, generation),
        "second build": lambda: build_cache(BuildSettings(data=data, out=cache, recipe=settings_of(64))),
    }
    times: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(rounds):
        for name, stage in stages.items():
            times[name].append(_seconds(stage))
    return {
        "entries": count,
        "rates": {name: count / statistics.median(found) for name, found in times.items()},
        **memory,
    }


def measure_memory(count: int, folder: Path) -> dict[str, Any]:
    """Peak memory in MiB of this process before and after one fast check of a cache that another process made."""
    before = _peak_mib()
    report = verify_cache(folder / "cache")
    if report.counts["ok"] != count:
        raise SystemExit(f"the made cache is not clean: {report.counts}")
    return {"mib_before": before, "mib": _peak_mib()}


def measure_full(payloads: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Bytes per second of payload checks, alone and with pages, beside plain reading and hashing in 1 MiB pieces.

    ``share`` is of wall time, ``work`` of processor time, which other work on the machine moves less.
    """
    _, cache = make_cache(folder, payloads, 1024)
    layout, generation = CacheLayout(cache), open_generation(cache)
    file = layout.shards / generation.shards[0] / "data.mdb"
    stages: dict[str, Callable[[], Any]] = {
        "plain read and xxh3": lambda: _read_plainly(file),
        "payloads": lambda: list(scan_shards(layout, generation, [0], pages=False)),
        "payloads and pages": lambda: list(scan_shards(layout, generation, [0])),
    }
    times: dict[str, list[float]] = {name: [] for name in stages}
    work: dict[str, list[float]] = {name: [] for name in stages}
    for number in range(rounds + 1):
        for name, stage in stages.items():
            before = time.process_time()
            taken = _seconds(stage)
            if number:  # the first round fills the page cache
                times[name].append(taken)
                work[name].append(time.process_time() - before)
    size = file.stat().st_size
    return {
        "bytes": size,
        "rates": {name: size / statistics.median(found) / 1e9 for name, found in times.items()},
        "share": _shares(times, "plain read and xxh3"),
        "work": _shares(work, "plain read and xxh3"),
    }


def _shares(times: dict[str, list[float]], of: str) -> dict[str, float]:
    """How quick each stage is as a share of one of them: median of the rounds' pairs."""
    return {
        name: statistics.median(one / other for one, other in zip(times[of], found, strict=True))
        for name, found in times.items()
    }


def tables(many: Sequence[dict[str, Any]], full: dict[str, Any]) -> str:
    """The results as Markdown."""
    names = list(many[0]["rates"])
    lines = ["| entries | " + " | ".join(f"{name}, /s" for name in names) + " | MiB at the peak (before) |"]
    lines.append("|" + "---:|" * (len(names) + 2))
    for row in many:
        rates = " | ".join(f"{row['rates'][name]:,.0f}" for name in names)
        lines.append(f"| {row['entries']:,} | {rates} | {row['mib']:.0f} ({row['mib_before']:.0f}) |")
    least, most = min(many, key=lambda row: row["entries"]), max(many, key=lambda row: row["entries"])
    if least is not most:
        slope = (most["mib"] - least["mib"]) * _MIB / (most["entries"] - least["entries"])
        lines += ["", f"Memory of a check grows by {slope:,.0f} bytes per entry."]
    lines += [
        "",
        f"| of {full['bytes'] / _MIB:,.0f} MiB | GB/s | share of plain, median of pairs | in processor time |",
        "|---|---:|---:|---:|",
    ]
    shares = [(name, f"{full['share'][name]:.2f} | {full['work'][name]:.2f}") for name in full["rates"]]
    lines += [f"| {name} | {full['rates'][name]:.2f} | {both} |" for name, both in shares]
    return "\n".join(lines)


def in_own_process(kind: str, count: int, rounds: int) -> dict[str, Any]:
    """One measure in a fresh interpreter and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return _alone(kind, count, rounds, Path(folder))


def _alone(kind: str, count: int, rounds: int, folder: Path) -> dict[str, Any]:
    """One step in a fresh interpreter, in a folder that is there."""
    command = [sys.executable, __file__, "--alone", kind, str(count), str(folder), "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--payloads", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        kind, count, folder = options.alone
        print(json.dumps(_step(kind, int(count), options.rounds, Path(folder))))
        return
    many = [in_own_process("many", count, options.rounds) for count in options.entries]
    full = in_own_process("full", options.payloads, options.rounds)
    print(tables(many, full))
    if options.json:
        options.json.write_text(json.dumps({"many": many, "full": full}, indent=1))


def _step(kind: str, count: int, rounds: int, folder: Path) -> dict[str, Any]:
    """What a fresh interpreter is asked for."""
    if kind == "make":
        data, cache = make_cache(folder, count, 64)
        return {"data": str(data), "cache": str(cache)}
    if kind == "memory":
        return measure_memory(count, folder)
    return (measure_many if kind == "many" else measure_full)(count, rounds, folder)


def _make_files(data: Path, count: int) -> tuple[list[str], list[bytes], NDArray[np.uint64]]:
    """Names in byte order, content hashes, and (S, 6) stat memos of small files."""
    names, contents, memos = [], [], []
    for number, (name, content) in enumerate(_small_files(count)):
        path = data / name
        if number % _PER_FOLDER == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(content)
        found = path.stat()
        seen = max(found.st_mtime_ns, found.st_ctime_ns) + 2 * RACY_NS
        names.append(name)
        contents.append(content_hash(content))
        memos.append(pack_memo(StatMemo.of(found, seen_ns=seen)))
    return names, contents, np.array(memos, np.uint64)


def _small_files(count: int) -> Iterator[tuple[str, bytes]]:
    for number in range(count):
        yield f"{number // _PER_FOLDER:05d}/{number:08d}.png", b"picture %d" % number


def _read_plainly(file: Path) -> int:
    """Hash of a whole file in pieces that are read one after the other into one buffer."""
    buffer, total = bytearray(_MIB), 0
    descriptor = os.open(file, os.O_RDONLY)
    while found := os.readv(descriptor, [buffer]):
        total ^= checksum(memoryview(buffer)[:found])
    os.close(descriptor)
    return total


def _seconds(stage: Callable[[], Any]) -> float:
    started = time.perf_counter()
    stage()
    return time.perf_counter() - started


def _peak_mib() -> float:
    """Peak memory of this process; what the system counts for a child begins with its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()

"""Measure verify and a build with nothing to do.

Many small entries with one file each for the fast check and the second build. For the full one entries of three sizes
and blocks of small items, beside plain sequential reading and hashing of the same shard: what it does with payloads,
after the check of the indexes. Each measure runs in a process of its own, which did not make the cache; rounds take
turns.

    python tools/bench_verify.py [--rows 20000 100000] [--mib 1024] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from process_costs import peak_bytes
from synthetic_caches import CHANNELS, build_settings, made_cache, made_latents, noise

from latentcache.geometry.sizes import Size
from latentcache.identity.content import checksum
from latentcache.pipeline.build import build_cache
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import scan
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot
from latentcache.verify.entries import Check, Depth, check_entries, scan_payloads
from latentcache.verify.verify import verify_cache

_MIB = 1 << 20
PLAIN = "plain read and xxh3"
#: Entry size -> side of the image of its latents; 0: embeddings of 8 KiB, packed in blocks.
FORMS = {"512 KiB": 1024, "128 KiB": 512, "32 KiB": 256, "blocks": 0}
Stages = Mapping[str, Callable[[], Any]]


def measure_many(count: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure samples per second of the fast check, its parts and a second build, and memory of a check."""
    _alone("make", count, rounds, folder, 64)
    memory = _alone("memory", count, rounds, folder)
    data, cache = folder / "data", folder / "cache"
    settings = build_settings(data, cache)
    stages: Stages = {
        "fast verify": lambda: verify_cache(cache),
        "walk and stat": lambda: scan(data, SourceOptions(), open_snapshot(cache).samples),
        "headers": lambda: checked_entries(cache),
        "second build": lambda: build_cache(settings),
    }
    times, _ = _timed(stages, rounds)
    rates = {name: count / statistics.median(taken) for name, taken in times.items()}
    return {"rows": count, "rates": rates, **memory}


def measure_memory(count: int, folder: Path) -> dict[str, Any]:
    """Return the peak MiB of this process before and after one fast check."""
    before = peak_bytes() / _MIB
    report = verify_cache(folder / "cache")
    if report.counts["ok"] != count:
        raise SystemExit(f"the made cache is not clean: {report.counts}")
    return {"mib_before": before, "mib": peak_bytes() / _MIB}


def measure_full(rounds: int, folder: Path) -> dict[str, Any]:
    """Measure bytes per second of the payload scan, and of plain reading and hashing in pieces of 1 MiB."""
    cache = folder / "cache"
    snapshot = open_snapshot(cache)
    field = list(snapshot.fields)[-1]
    check = checked_entries(cache)
    view = check.views[field]
    file = CachePaths(cache).data(snapshot.shards[int(view.shard[0])])
    check.entries = {name: marked & (name == field) for name, marked in check.entries.items()}

    def scanned() -> None:
        check.payloads = 0
        scan_payloads(check)
        if check.payloads != len(view.shard) or check.findings.of("corrupt").any():
            raise SystemExit("the scan left payloads out, or found some that are wrong")

    wall, cpu = _timed({PLAIN: lambda: _read_plainly(file), "payload scan": scanned}, rounds)
    size = file.stat().st_size
    return {
        "bytes": size,
        "rates": {name: size / statistics.median(taken) / 1e9 for name, taken in wall.items()},
        "ratio": _ratios(wall)["payload scan"],
        "cpu": _ratios(cpu)["payload scan"],
    }


def make_full(mib: int, side: int, folder: Path) -> None:
    """Create a cache of about ``mib`` MiB."""
    if side:
        shape = (CHANNELS, side // 8, side // 8)
        some, count = noise(64, shape), max(mib * _MIB // (2 * CHANNELS * (side // 8) ** 2), 1)
        made_latents(folder / "cache", [Size(side, side)] * count, [some[n % 64] for n in range(count)])
        return
    some, count, tiny = noise(64, (4, 1024)), max(mib * 128, 1), noise(1, (CHANNELS, 8, 8))[0]
    embeds = [some[n % 64] for n in range(count)]
    made_latents(folder / "cache", [Size(64, 64)] * count, [tiny] * count, embeds, length=4)


def checked_entries(cache: Path) -> Check:
    """Check the indexes of a cache."""
    check = Check(open_snapshot(cache), Depth(full=True))
    check_entries(check)
    return check


def _timed(stages: Stages, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measure wall and processor seconds per round; a first round fills the page cache."""
    wall: dict[str, list[float]] = {name: [] for name in stages}
    cpu: dict[str, list[float]] = {name: [] for name in stages}
    for number in range(rounds + 1):
        for name, stage in stages.items():
            started, before = time.perf_counter(), time.process_time()
            stage()
            if number:
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - before)
    return wall, cpu


def _ratios(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Compare each stage with plain reading: median over pairs of rounds."""
    pairs = {name: zip(times[PLAIN], found, strict=True) for name, found in times.items()}
    return {name: statistics.median(one / other for one, other in both) for name, both in pairs.items()}


def tables(many: Sequence[dict[str, Any]], full: Mapping[str, dict[str, Any]]) -> str:
    """Format the results as Markdown."""
    names = list(many[0]["rates"]) if many else []
    lines = ["| samples | " + " | ".join(f"{name}, /s" for name in names) + " | peak MiB (before) |"]
    lines.append("|" + "---:|" * (len(names) + 2))
    for row in many:
        rates = " | ".join(f"{row['rates'][name]:,.0f}" for name in names)
        lines.append(f"| {row['rows']:,} | {rates} | {row['mib']:.0f} ({row['mib_before']:.0f}) |")
    least, most = min(many, key=lambda row: row["rows"]), max(many, key=lambda row: row["rows"])
    if least is not most:
        slope = (most["mib"] - least["mib"]) * _MIB / (most["rows"] - least["rows"])
        lines += ["", f"Memory of a check grows by {slope:,.0f} bytes per sample."]
    lines += [
        "",
        f"| entries | MiB | {PLAIN}, GB/s | payload scan, GB/s | x plain | x plain, CPU |",
        "|---" * 6 + "|",
    ]
    for form, row in full.items():
        rates = " | ".join(f"{rate:.2f}" for rate in row["rates"].values())
        lines.append(f"| {form} | {row['bytes'] / _MIB:,.0f} | {rates} | {row['ratio']:.2f} | {row['cpu']:.2f} |")
    return "\n".join(lines)


def many_rows(count: int, rounds: int) -> dict[str, Any]:
    """Run :func:`measure_many` in a new interpreter and folder."""
    with tempfile.TemporaryDirectory() as folder:
        return _alone("many", count, rounds, Path(folder))


def full_checks(mib: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Run :func:`measure_full` of each form in a new interpreter and folder."""
    found = {}
    for form, side in FORMS.items():
        with tempfile.TemporaryDirectory() as folder:
            _alone("make-full", mib, rounds, Path(folder), side)
            found[form] = _alone("full", mib, rounds, Path(folder))
    return found


def _alone(kind: str, count: int, rounds: int, folder: Path, side: int = 0) -> dict[str, Any]:
    command = [sys.executable, __file__, "--alone", kind, str(count), str(folder), str(side), "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _step(kind: str, count: int, rounds: int, folder: Path, side: int) -> dict[str, Any]:
    if kind == "make":
        made_cache(folder, count, side)
        return {}
    if kind == "memory":
        return measure_memory(count, folder)
    if kind == "many":
        return measure_many(count, rounds, folder)
    if kind == "make-full":
        make_full(count, side, folder)
        return {}
    return measure_full(rounds, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[20_000, 100_000], help="[default: 20000 100000]")
    parser.add_argument("--mib", type=int, default=1024, help="[default: 1024]")
    parser.add_argument("--rounds", type=int, default=5, help="[default: 5]")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        kind, count, folder, side = options.alone
        print(json.dumps(_step(kind, int(count), options.rounds, Path(folder), int(side))))
        return
    many = [many_rows(count, options.rounds) for count in options.rows]
    full = full_checks(options.mib, options.rounds)
    print(tables(many, full))
    if options.json:
        options.json.write_text(json.dumps({"many": many, "full": full}, indent=1) + "\n", "utf-8")


def _read_plainly(file: Path) -> int:
    """Hash a whole file, read sequentially into one buffer."""
    buffer, total = bytearray(_MIB), 0
    descriptor = os.open(file, os.O_RDONLY)
    while found := os.readv(descriptor, [buffer]):
        total ^= checksum(memoryview(buffer)[:found])
    os.close(descriptor)
    return total


if __name__ == "__main__":
    main()

"""What a build costs beside the encoding itself, against other ways to make the same latents.

Data: drawn JPEGs of about one megapixel in three aspect ratios, some of twelve, a few PNGs and odd files
(``build_data``). Systems, once per round in turning order: the encoder alone on batches that are in memory already;
``build_cache``, whole, into a fresh folder; the same with Pillow in place of simplejpeg and of torch's resize; a
``DataLoader`` loop with one file per latent, and one with large files (``build_peers``). Encoders: the stub, which
sleeps 10 or 2 ms a image as a device of its own would, and a small AutoencoderKL on the cores that decode, with one
torch thread and with all. Efficiency is (time of the encoder alone / time of the system), round by round.

Then, once: the build through the command, the memory of each system in a process of its own (its share, workers
included, above what the process held before), builds that find nothing to do, and what was stored: latents against
each image encoded alone in float32, pixels against Pillow.

    python tools/bench_build.py [--rounds 5] [--encoders sim10,sim2,vae,vae-all] [--json FILE]

Cost: about four minutes on two free cores; ``--quick`` measures sim10 and vae alone on fewer images in one.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from build_checks import Watch, memory_of, stored_as_referred
from build_data import Counts, draw_data, draw_tiny, small_vae
from build_systems import PURE, SYSTEMS, Bench, again, bench_for
from process_costs import cpu_seconds

QUICK = Counts(jpegs=72, large=6, pngs=2, odd=4)
MIB = 1 << 20

Times = dict[str, list[float]]


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process, its threads and its finished workers)."""
    gc.collect()
    wall, cpu = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def run_rounds(bench: Bench, rounds: int, names: Sequence[str]) -> dict[str, Times]:
    """Measure wall and CPU seconds of these systems; one warm-up round is not counted."""
    times: dict[str, Times] = {"wall": {name: [] for name in names}, "cpu": {name: [] for name in names}}
    for number in range(rounds + 1):
        turned = [*names[number % len(names) :], *names[: number % len(names)]]
        for name in turned:
            bench.clear()
            wall, cpu = measured(lambda name=name: SYSTEMS[name](bench))  # type: ignore[misc]
            print(f"{bench.name}, round {number} of {rounds}: {name} {wall:.2f} s", file=sys.stderr, flush=True)
            if number:
                times["wall"][name].append(wall)
                times["cpu"][name].append(cpu)
    return times


def by_command(bench: Bench) -> dict[str, Any]:
    """Time a build by the command, with start, imports and model."""
    bench.clear()
    words = [sys.executable, "-m", "latentcache", "build", bench.data, "--out", bench.work / "cache", "--json"]
    words += ["--model", bench.model, "--resolution", "256", "--bucket-step", "32", "--resample", "lanczos-u8"]
    started = time.perf_counter()
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    taken = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"seconds": taken, "counts": json.loads(done.stdout)["counts"]}


def measure(bench: Bench, rounds: int, names: Sequence[str], *, memory: bool) -> dict[str, Any]:
    """Run all measures of one encoder."""
    found: dict[str, Any] = {"encoder": bench.name, "images": bench.images, "threads": bench.torch_threads}
    found |= {"seconds": run_rounds(bench, rounds, names), "command": by_command(bench)}
    if memory:
        found["memory_bytes"] = {name: memory_of(__file__, bench, name) for name in names if name != PURE}
    return found


def summary(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Map each system to images per second, efficiency, CPU milliseconds per image and MiB."""
    wall, cpu, count = result["seconds"]["wall"], result["seconds"]["cpu"], result["images"]
    found = {}
    for name in wall:
        ratios = [pure / taken for pure, taken in zip(wall[PURE], wall[name], strict=True)]
        found[name] = {
            "rate": count / statistics.median(wall[name]),
            "best_rate": count / min(wall[name]),
            "efficiency": statistics.median(ratios),
            "worst": min(ratios),
            "cpu_ms": 1000 * statistics.median(cpu[name]) / count,
            "mib": result.get("memory_bytes", {}).get(name, 0) / MIB,
        }
    return found


def table(result: dict[str, Any]) -> str:
    """Format one encoder as Markdown."""
    head = "img/s, median | best | efficiency, median | worst | CPU ms a image | MiB"
    lines = [f"| {result['encoder']} | {head} |", "|---|" + "---:|" * 6]
    for name, row in summary(result).items():
        mib = f"{row['mib']:.0f}" if row["mib"] else ""
        rates = f"{row['rate']:.1f} | {row['best_rate']:.1f} | {row['efficiency']:.3f} | {row['worst']:.3f}"
        lines.append(f"| {name} | {rates} | {row['cpu_ms']:.1f} | {mib} |")
    seconds = result["command"]["seconds"]
    lines.append(f"\nOnce through the command: {seconds:.1f} s, {result['images'] / seconds:.1f} img/s.")
    return "\n".join(lines)


def again_table(found: Times, count: int) -> str:
    """Format second builds as Markdown."""
    lines = ["| a second build | files/s, median | best |", "|---|---:|---:|"]
    labels = {"young": "right after, all files hashed again", "touched": "files touched", "old": "nothing touched"}
    for name, label in labels.items():
        rates = f"{count / statistics.median(found[name]):.0f} | {count / min(found[name]):.0f}"
        lines.append(f"| {label} | {rates} |")
    return "\n".join(lines)


def check_table(found: dict[str, float]) -> str:
    """Format the differences of stored latents as Markdown."""
    lines = ["| what is stored, against a reference | |", "|---|---:|"]
    return "\n".join(lines + [f"| {name} | {value:.3g} |" for name, value in found.items()])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--encoders", default="sim10,sim2,vae,vae-all", help="default: sim10,sim2,vae,vae-all")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer images, no memory, no second builds")
    parser.add_argument("--alone", action="store_true", help="only the rounds and the run through the command")
    parser.add_argument("--jpegs", type=int, help="only so many images, all JPEGs of one megapixel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times in seconds")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.memory_of:
        name, system, folder = options.memory_of
        print(json.dumps(peak_in_here(bench_for(name, Path(folder)), system)))
        return
    counts = QUICK if options.quick else Counts()
    counts = Counts(jpegs=options.jpegs, large=0, pngs=0, odd=0) if options.jpegs else counts
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        found = run_all(Path(name), counts, options)
    found |= {"rounds": options.rounds, "load": load, "counts": [counts.jpegs, counts.large, counts.pngs, counts.odd]}
    print(f"{counts.images} images, {options.rounds} rounds, load {load:.1f} before\n")
    print("\n\n".join(map(table, found["results"])))
    if "again" in found:
        print("\n" + again_table(found["again"], found["files"]))
    if "stored" in found:
        print("\n" + check_table(found["stored"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def run_all(folder: Path, counts: Counts, options: argparse.Namespace) -> dict[str, Any]:
    """Draw, then measure every encoder."""
    draw_data(folder / "data", counts)
    small_vae(folder / "vae")
    whole = not (options.quick or options.alone)
    names = [name for name in SYSTEMS if name == PURE or name in options.systems]
    found: dict[str, Any] = {
        "results": [
            measure(bench_for(name, folder), options.rounds, names, memory=whole)
            for name in options.encoders.split(",")
        ]
    }
    if not options.alone:
        found["stored"] = stored_as_referred(folder)
    if whole:
        found["files"] = 4000 if counts.large else counts.jpegs
        draw_tiny(folder / "tiny", found["files"])
        found["again"] = again(folder / "tiny", folder / "again", options.rounds)
    return found


def peak_in_here(bench: Bench, system: str) -> int:
    """Measure the peak memory of one system with its workers, above the start, in a new process."""
    bench.clear()
    gc.collect()
    with Watch() as watch:
        SYSTEMS[system](bench)
    return watch.gained


if __name__ == "__main__":
    main()

"""How quickly a command starts: bare Python, the commands on a small cache, and torch beside them.

Every round runs each command once in a process of its own, in turn, so that a busy moment of the machine falls on
all of them. Processor time is measured: the clock says little on a machine that others use. The cache is built first,
from drawn images with the stub encoder, unless one is given. Prints a Markdown table. Cost: about a minute, nearly
all of it the import of torch.

    python tools/bench_startup.py [CACHE] [--rounds 9] [--json FILE]
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from make_images import make_images

PROGRAM = str(Path(sys.executable).with_name("latentcache"))
BARE = "python -c pass"


def commands(cache: Path) -> dict[str, list[str]]:
    """Return the compared commands."""
    return {
        BARE: [sys.executable, "-c", "pass"],
        "latentcache --help": [PROGRAM, "--help"],
        "latentcache info CACHE": [PROGRAM, "info", str(cache)],
        "latentcache verify CACHE": [PROGRAM, "verify", str(cache)],
        "latentcache plan CACHE": [PROGRAM, "plan", str(cache), "--batch-size", "2"],
        "latentcache build, nothing new": [PROGRAM, "build", str(cache.with_suffix("")), "--quiet"],
        "python -c 'import numpy'": [sys.executable, "-c", "import numpy"],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    }


def small_cache(folder: Path, count: int = 40) -> Path:
    """Create a cache of drawn images without torch."""
    make_images(folder / "images", count, side=96)
    build = [PROGRAM, "build", str(folder / "images"), "--model", "stub", "--resolution", "128", "--quiet"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    return folder / "images.latentcache"


def measure(todo: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[float]]:
    """Measure processor seconds per command and round; a first round writes the bytecode."""
    times: dict[str, list[float]] = {name: [] for name in todo}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise every start compiles the package
    for number in range(rounds + 1):
        for name, command in todo.items():
            before = used()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if number:
                times[name].append(used() - before)
    return times


def used() -> float:
    """Processor seconds of all finished child processes."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def table(times: Mapping[str, Sequence[float]]) -> str:
    """Format median and best processor time in ms as Markdown."""
    lines = ["| command | median ms | best ms |", "|---|---:|---:|"]
    for name, values in times.items():
        lines.append(f"| `{name}` | {1000 * statistics.median(values):.0f} | {1000 * min(values):.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how quickly commands start.")
    parser.add_argument("cache", nargs="?", type=Path, help="a cache whose data folder is there (default: make one)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times in seconds")
    options = parser.parse_args()
    with ExitStack() as stack:
        cache = options.cache or small_cache(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        times = measure(commands(cache), options.rounds)
    print(table(times))
    if options.json:
        options.json.write_text(json.dumps({"rounds": options.rounds, "seconds": times}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

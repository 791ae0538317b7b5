"""Compare two versions of latentcache in one interleaved run.

Both versions get the same images and records and do one piece of work after the other in turn, each in a process of
its own that stays open. The ratio is old / new of the medians: above 1 the new version is faster.

    python tools/bench_versions.py OLD_CHECKOUT OLD_PYTHON [--rounds 5] [--only WORD] [--profile WORD] [--json FILE]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib import import_module as module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from process_costs import cpu_seconds

KIB, BATCH, ROW = {512: 1024, 128: 512, 32: 256}, 8, 2048
_OPTIONS: tuple[dict[str, int], ...] = ({}, {"prefetch": 0})
AFFINE = {"kind": "scale-shift", "scale": 0.3611, "shift": 0.1159}


def version_1(package: Any) -> SimpleNamespace:
    """Calls of the version before format 1."""
    limits: Any = module("read_limits")
    recipe = module("latentcache.recipe")
    affine = replace(limits.ENCODER, normalisation=recipe.Normalisation(**AFFINE))
    limits.RECIPE = replace(limits.RECIPE, encoder=affine)
    verify, records = module("latentcache.verify.run").verify_cache, module("latentcache.verify.token_run")
    records_of = module("latentcache.pipeline.token_inputs").open_records
    tokens, settings = module("latentcache.pipeline.token_build"), module("latentcache.pipeline.token_settings")
    stub = package.RecipeSettings(model="stub", resolutions=(256,))

    def check(cache: Path, full: bool) -> Any:
        opened = {"open_records": lambda data, _: records_of(settings.TokenSettings(data=data))}
        return records.verify_tokens(cache, full=full, **opened) if "rec" in cache.name else verify(cache, full=full)

    return SimpleNamespace(
        images=lambda data, out: package.build_cache(package.BuildSettings(data=data, out=out, recipe=stub)),
        records=lambda data, out: tokens.build_tokens(settings.TokenSettings(data=data, out=out, tokenizer="stub")),
        verify=check,
        make=lambda out, kib, values: limits.make_cache(out, limits.PAYLOADS[kib], values.view("u1")),
        rows=lambda cache: module("latentcache.loader.token_opening").open_tokens(cache).packed(ROW),
        options={"small_buckets": "drop"},
    )


def version_2(package: Any) -> SimpleNamespace:
    """Calls of format 1."""
    made, size = module("synthetic_caches"), module("latentcache.geometry.sizes").Size
    latents = module("latentcache.fields.latents").LatentsSettings(model="stub", resolutions=(256,))
    ids = module("latentcache.fields.input_ids").InputIdsSettings(tokenizer="stub")

    def build(data: Path, out: Path, **fields: Any) -> Any:
        return package.build_cache(package.BuildSettings(data=data, out=out, fields=fields))

    return SimpleNamespace(
        images=lambda data, out: build(data, out, latents=latents),
        records=lambda data, out: build(data, out, input_ids=ids),
        verify=lambda cache, full: package.verify_cache(cache, full=full),
        make=lambda out, kib, values: made.made_latents(
            out, [size(KIB[kib], KIB[kib])] * len(values), values.reshape(-1, 16, KIB[kib] // 8, KIB[kib] // 8)
        ),
        rows=lambda cache: package.open_cache(cache).rows(pack=ROW),
        options={"remainder": "drop"},
    )


def works(calls: SimpleNamespace, shared: Path, own: Path) -> dict[str, Any]:
    """Map each name to work that takes the round."""
    numpy, package = module("numpy"), module("latentcache")
    found: dict[str, Any] = {}
    for name, data in (("images", shared / "images"), ("records", shared / "texts.jsonl")):
        build, cache = getattr(calls, name), own / f"{name}0"
        found[f"build, {name}"] = lambda n, build=build, data=data, at=own / name: build(data, Path(f"{at}{n}"))
        found[f"second build, {name}"] = lambda n, build=build, data=data, cache=cache: build(data, cache)
        found[f"verify, {name}"] = lambda n, cache=cache: calls.verify(cache, False)
        found[f"verify --full, {name}"] = lambda n, cache=cache: calls.verify(cache, True)
    opened: dict[str, Any] = {}
    views: dict[str, Any] = {"rows": lambda: calls.rows(own / "records0")}
    for kib in KIB:
        count = min(1024, (128 << 10) // kib)
        values = numpy.random.default_rng(0).standard_normal((count, kib << 9), "f4").astype("f2")
        calls.make(own / f"made{kib}", kib, values)
        views[f"{kib} KiB"] = partial(package.open_cache, own / f"made{kib}")
    for name, view in views.items():
        for options in _OPTIONS:
            words = f"{name}: loader({', '.join(f'{key}={value}' for key, value in options.items())})"
            found[words] = lambda n, words=words, view=view, options=options: epoch(
                opened.get(words)
                or opened.setdefault(words, view().loader(batch_size=BATCH, **options, **calls.options))
            )
    return found


def epoch(loader: Any) -> None:
    """Read all batches of one epoch."""
    loader.set_epoch(loader.epoch + 1)
    for _ in loader:
        pass


def child(number: str, shared: Path, own: Path) -> None:
    """Run the work named on each line of stdin; answer with wall and processor seconds."""
    calls = (version_1 if number == "1" else version_2)(module("latentcache"))
    todo = works(calls, shared, own)
    print(json.dumps(list(todo)), flush=True)
    for line in sys.stdin:
        name, round_, profiled = json.loads(line)
        profile = cProfile.Profile()
        wall, cpu = time.perf_counter(), cpu_seconds()
        (profile.runcall if profiled else lambda work, n: work(n))(todo[name], round_)
        taken = [time.perf_counter() - wall, cpu_seconds() - cpu]
        if profiled:
            print(f"\nversion {number}: {name}", file=sys.stderr)
            pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(45)
        print(json.dumps(taken), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="+", metavar="OLD_CHECKOUT OLD_PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--text", type=int, default=97, help="records have up to that many times 15 characters")
    parser.add_argument("--only", default="", metavar="WORD", help="only works with this word in their name")
    parser.add_argument("--profile", default="\n", metavar="WORD", help="profile these once more at the end")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.old[0], Path(given.old[1]), Path(given.old[2]))
        return
    with tempfile.TemporaryDirectory() as name:
        times = compare(Path(name), given)
    lines = ["| work | old, ms | new, ms | old / new | CPU, old / new |", "|---|---:|---:|---:|---:|"]
    for work, found in times.items():
        (old, old_cpu), (new, new_cpu) = ([statistics.median(one) for one in zip(*v, strict=True)] for v in found)
        lines.append(f"| {work} | {1000 * old:.1f} | {1000 * new:.1f} | {old / new:.2f} | {old_cpu / new_cpu:.2f} |")
    print("\n".join(lines))
    if given.json:
        given.json.write_text(json.dumps(times, indent=1) + "\n", "utf-8")


def compare(folder: Path, given: argparse.Namespace) -> dict[str, list[list[list[float]]]]:
    """Map work to (wall, processor) seconds per round, of the old and the new version."""
    module("make_images").make_images(folder / "images", given.images, side=400)
    lines = (json.dumps({"text": f"{n}: " + "a line of text " * (n % given.text)}) for n in range(given.records))
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    here, pair = Path(__file__).resolve(), []
    for number, python, checkout in (("1", given.old[1], given.old[0]), ("2", sys.executable, here.parents[1])):
        words = [python, "-W", "ignore", str(here), "--child", number, str(folder), f"{folder}/{number}"]
        path = f"{checkout}:{checkout}/tools:{Path(__file__).parent}"
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        pair.append(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
    names, _ = (json.loads(one.stdout.readline()) for one in pair)  # type: ignore[union-attr]
    times: dict[str, list[list[list[float]]]] = {name: [[], []] for name in names if given.only in name}
    needed = [name for name in names if name.startswith("build,")]
    for turn in range(given.rounds + 1):
        for name in names if turn else [*needed, *(n for n in times if n not in needed)]:
            if name not in times and turn:
                continue
            for which in (0, 1) if turn % 2 else (1, 0):
                found = _request(pair[which], [name, turn, False])
                if turn:
                    times[name][which].append(found)
            print(f"round {turn}: {name}", file=sys.stderr, flush=True)
    for name in (name for name in names if given.profile in name):
        for one in pair:
            _request(one, [name, given.rounds + 1, True])
    for one in pair:
        one.communicate()
    return times


def _request(process: subprocess.Popen[str], words: Any) -> Any:
    print(json.dumps(words), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())  # type: ignore[union-attr]


if __name__ == "__main__":
    main()

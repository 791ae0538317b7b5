"""What a build costs beside the encoding itself, and what a second build costs when there is nothing to do.

Data: drawn JPEGs of about one megapixel in three aspect ratios. Systems, once per round and each first in every
second round: the encoder alone on pixels that are in memory already (same encoder object, same batches), and
``build_cache`` into a fresh folder. Reported per encoder: pictures per second, CPU milliseconds per picture over all
threads, and efficiency, the median of (encode time / build time) of the rounds. On few cores decoding and encoding
compete: an encoder as cheap as the demo's shows the cost of the host, the tiny VAE what that means beside a model.

Then the second build, all reused: files per second right after the first one, when every file is read and hashed
again because it was young when it was hashed (the racy rule), and once more with old files, which are not opened.

    python tools/bench_build.py [--count 192] [--rounds 5] [--encoders demo,vae] [--json FILE]

Cost: three minutes on two cores that are free. Run it alone, or read ratios only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import AutoencoderKL
from make_pictures import draw, invent

from latentcache import BuildSettings, RecipeSettings, build_cache
from latentcache.encoders.describe import describe_model
from latentcache.encoders.opening import open_encoder
from latentcache.encoders.protocol import Encoder, Pixels
from latentcache.geometry.placement import place
from latentcache.geometry.sizes import Size
from latentcache.pipeline.decode import decode
from latentcache.pipeline.preflight import default_threads
from latentcache.pipeline.recipes import resolve_recipe
from latentcache.pipeline.resize import resize_crop
from latentcache.recipe import Recipe

ASPECTS = ((1, 1), (4, 3), (3, 4))
SIDE = 1000
RESOLUTION = 256
BATCH = 8

Times = dict[str, list[float]]


def draw_jpegs(folder: Path, count: int) -> None:
    """JPEGs of about one megapixel; each scene is drawn once and saved in several crops, which is quicker."""
    folder.mkdir()
    scenes = [
        draw(invent(aspect, SIDE, np.random.default_rng(i)), np.random.default_rng(i))
        for i, aspect in enumerate(ASPECTS)
    ]
    for number in range(count):
        picture, shift = scenes[number % len(scenes)], number // len(scenes)
        picture.crop((shift, shift, picture.width, picture.height)).save(folder / f"{number:04}.jpg", quality=90)


def tiny_vae(folder: Path) -> str:
    """An AutoencoderKL of two small levels without attention, saved as diffusers saves one."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(
        block_out_channels=[8, 16], norm_num_groups=4, latent_channels=4, mid_block_add_attention=False, **blocks
    )
    vae.save_pretrained(folder, safe_serialization=True)
    return str(folder)


def batches_in_memory(data: Path, recipe: Recipe) -> list[Pixels]:
    """The batches a build makes of these files, decoded and resized beforehand."""
    (table,) = recipe.geometry.tables()
    by_bucket: dict[Size, list[Pixels]] = {}
    for path in sorted(data.iterdir()):
        pixels = decode(path.read_bytes(), recipe.pixels)
        placement = place(Size(pixels.shape[0], pixels.shape[1]), table)
        by_bucket.setdefault(placement.bucket, []).append(resize_crop(pixels, placement, recipe.pixels.resample))
    return [np.stack(items[i : i + BATCH]) for items in by_bucket.values() for i in range(0, len(items), BATCH)]


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process with all its threads)."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def bench_encoder(model: str, data: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Encode alone against a whole build, interleaved; then the builds that find nothing to do."""
    settings = RecipeSettings(model=model, resolutions=(RESOLUTION,), bucket_step=32)
    recipe, description = resolve_recipe(settings, None, cached_model=None, has_cuda=False)
    encoder = open_encoder(describe_model(model), device="cpu")
    batches = batches_in_memory(data, recipe)
    build_once(settings, data, work, encoder)  # warm: page cache, imports, self-tests
    times: Times = {"encode": [], "encode_cpu": [], "build": [], "build_cpu": []}
    systems: list[tuple[str, Callable[[], object]]] = [
        ("encode", lambda: [encoder.encode(batch) for batch in batches]),
        ("build", lambda: build_once(settings, data, work, encoder)),
    ]
    for number in range(rounds):
        for name, step in systems if number % 2 == 0 else reversed(systems):
            wall, cpu = measured(step)
            times[name].append(wall)
            times[f"{name}_cpu"].append(cpu)
    again = second_builds(settings, data, work, encoder, rounds)
    encoder.close()
    return {"family": description.spec.family, "resample": recipe.pixels.resample, "seconds": times, "again": again}


def build_once(settings: RecipeSettings, data: Path, work: Path, encoder: Encoder, *, fresh: bool = True) -> None:
    """One build; with the encoder that is open already, so that both systems run the same object."""
    cache = work / "cache"
    if fresh:
        shutil.rmtree(cache, ignore_errors=True)
    settings_of_build = BuildSettings(data=data, out=cache, recipe=settings, device="cpu", batch_size=BATCH)
    with patch("latentcache.pipeline.worker.open_encoder", lambda *_, **__: encoder):
        report = build_cache(settings_of_build)
    expected = report.samples if fresh else 0
    if report.encoded != expected:
        raise SystemExit(f"the build encoded {report.encoded} entries, expected {expected}")


def second_builds(settings: RecipeSettings, data: Path, work: Path, encoder: Encoder, rounds: int) -> Times:
    """Seconds of builds that reuse everything: with young files, and with files older than the racy rule asks."""
    times: Times = {"young": [], "old": []}
    for _ in range(rounds):
        for path in data.iterdir():
            os.utime(path)
        build_once(settings, data, work, encoder, fresh=False)
        times["young"].append(measured(lambda: build_once(settings, data, work, encoder, fresh=False))[0])
        time.sleep(2.1)
        build_once(settings, data, work, encoder, fresh=False)  # hashes once more, and now the memo can be trusted
        times["old"].append(measured(lambda: build_once(settings, data, work, encoder, fresh=False))[0])
    return times


def table(results: Sequence[dict[str, Any]], count: int) -> str:
    """The results as Markdown."""
    head = "encoder | system | img/s, median | img/s, best | CPU ms per image | efficiency, median (range)"
    lines = [f"| {head} |", "|---|---|---:|---:|---:|---:|"]
    for result in results:
        times = result["seconds"]
        ratios = [encode / build for encode, build in zip(times["encode"], times["build"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        for name, system, shown in (("encode", "encode alone", "1"), ("build", "latentcache build", spread)):
            middle, best = statistics.median(times[name]), min(times[name])
            cpu = 1000 * statistics.median(times[f"{name}_cpu"]) / count
            cells = result["family"], system, f"{count / middle:.0f}", f"{count / best:.0f}", f"{cpu:.1f}", shown
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| encoder | second build | files/s, median | files/s, best |", "|---|---|---:|---:|"]
    for result in results:
        for name, label in (("young", "right after, all files hashed again"), ("old", "files older than 2 s")):
            middle, best = statistics.median(result["again"][name]), min(result["again"][name])
            lines.append(f"| {result['family']} | {label} | {count / middle:.0f} | {count / best:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure builds against the encoder alone.")
    parser.add_argument("--count", type=int, default=192, help="pictures (default: 192)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--encoders", default="demo,vae", help="demo, vae or both (default: demo,vae)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_jpegs(folder / "data", options.count)
        models = {"demo": "demo", "vae": tiny_vae(folder / "vae")}
        chosen = [models[word] for word in options.encoders.split(",")]
        results = [bench_encoder(model, folder / "data", folder, options.rounds) for model in chosen]
    print(f"{options.count} pictures, {options.rounds} rounds, batch {BATCH}, {default_threads()} decode threads\n")
    print(table(results, options.count))
    if options.json:
        options.json.write_text(json.dumps({"count": options.count, "results": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

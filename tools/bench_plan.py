"""Samples that each trainer's buckets lose, beside ours as given and planned, and the time of a plan.

Image sizes only. ``329 images`` is a stand-in that is drawn here: usual ratios of cameras and screens, and one third
of free crops. The three mixtures have log-normal ratios, 2,000 images each. The LoRA set has 54 images as the first.
All are larger than the resolution, 1,024 x 1,024 pixels. One rank. Prints a Markdown table.

    python tools/bench_plan.py [--sizes 4 8 16] [--most 1000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.like.trainers import TRAINERS
from latentcache.geometry.planned import Target, planned_table
from latentcache.geometry.sizes import Size, bucket_table
from latentcache.plan.trainers import OurLoader, TrainerRun

RESOLUTION, STEP = 1024, 64
#: Width : height of usual pictures, and how many of 100 have it; the others are cropped freely.
USUAL = {(2, 3): 16, (3, 2): 14, (3, 4): 10, (4, 3): 8, (1, 1): 9, (16, 9): 5, (9, 16): 3, (4, 5): 2}
#: Part, mean and deviation of the logarithm of the ratio.
MIXTURES = {
    "portraits": [(0.8, math.log(2 / 3), 0.1), (0.2, 0.0, 0.2)],
    "photographs": [(0.5, math.log(3 / 2), 0.12), (0.3, math.log(2 / 3), 0.12), (0.2, 0.0, 0.05)],
    "web": [(1.0, 0.15, 0.5)],
}
#: Crops that a plan may make, in percent: a row for each.
LIMITS = (8, 15, 25)
Images = NDArray[np.int64]


def sizes_of(ratios: NDArray[np.float64], random: np.random.Generator) -> Images:
    """Make (n, 2) height and width of images with these ratios, larger than the resolution."""
    area = random.uniform(1.1e6, 4e6, len(ratios))
    return np.column_stack([np.sqrt(area / ratios), np.sqrt(area * ratios)]).round().astype(np.int64)


def usual(count: int) -> Images:
    """Draw images of usual ratios; a third of them is cropped freely."""
    random = np.random.default_rng(387)
    free = 100 - sum(USUAL.values())
    weights = np.array([*USUAL.values(), free]) / 100
    ratios = np.array([*(width / height for width, height in USUAL), 0.0])[
        random.choice(len(weights), count, p=weights)
    ]
    crops = np.exp(random.normal(-0.05, 0.3, count))
    return sizes_of(np.where(ratios > 0, ratios, crops), random)


def mixed(count: int, parts: Sequence[tuple[float, float, float]], seed: int = 0) -> Images:
    """Draw images from a mixture of log-normal ratios."""
    random = np.random.default_rng(seed)
    number = random.choice(len(parts), count, p=[part for part, _, _ in parts])
    mean, deviation = (np.array([part[place] for part in parts])[number] for place in (1, 2))
    return sizes_of(np.exp(random.normal(mean, deviation)).clip(0.2, 5.0), random)


def planned(images: Images, batch: int, max_crop: int) -> Any:
    """Plan the buckets of images."""
    buckets = bucket_table(resolution=RESOLUTION, multiple=STEP).sizes
    return planned_table(images, np.ones(len(images), np.int64), buckets, Target(batch=batch, max_crop=max_crop))


def runs(images: Images, batch: int) -> Iterator[tuple[str, TrainerRun]]:
    """Yield each table of buckets, by its name."""
    ours, table = OurLoader("repeat"), bucket_table(resolution=RESOLUTION, multiple=STEP)
    yield "as given", TrainerRun(trainer=ours, tables=[table], upscale=True, batch=batch)
    for limit in LIMITS:
        tables = [planned(images, batch, limit)]
        yield f"planned, crops up to {limit} %", TrainerRun(trainer=ours, tables=tables, upscale=True, batch=batch)
    for name, trainer in TRAINERS.items():
        buckets = trainer.tables(resolutions=(RESOLUTION,), step=trainer.step or STEP)
        yield name, TrainerRun(trainer=trainer, tables=buckets, upscale=True, batch=batch)


def rows(images: Images, batch: int) -> list[dict[str, Any]]:
    """Count what each table makes of the images; repeats above those that no table can avoid."""
    sizes = Counter((1, Size(height, width)) for height, width in images.tolist())
    needed, counted = -len(images) % batch, []
    for name, run in runs(images, batch):
        row = run.compared(run.plan([sizes]), epochs=1)
        row["repeated_above"] = max(row["repeated"] - needed, 0)
        counted.append({"name": name, "images": len(images), **row})
    return counted


def seconds(count: int, max_crop: int) -> float:
    """Time one plan of the widest mixture."""
    images = mixed(count, MIXTURES["web"])
    start = time.perf_counter()
    planned(images, 64, max_crop)
    return round(time.perf_counter() - start, 2)


def table(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    titles = ("images", "batch", "buckets", "dropped", "repeated above the minimum", "unfilled", "mean crop")
    yield f"| {' | '.join((*titles, 'worst crop', 'shapes'))} |"
    yield "|---" * (len(titles) + 2) + "|"
    for title, by_batch in found["sets"].items():
        for batch, counted in by_batch.items():
            for row in counted:
                parts = (f"{row[name] / row['images']:.1%}" for name in ("dropped", "repeated_above", "unfilled"))
                crops = f"{row['cropped']:.1%} | {row['cropped_most']:.1%}"
                yield f"| {title} | {batch} | {row['name']} | {' | '.join(parts)} | {crops} | {row['shapes']} |"
    yield ""
    yield "| images | " + " | ".join(f"crops up to {limit} %" for limit in found["limits"]) + " |"
    yield "|---" * (1 + len(found["limits"])) + "|"
    for count, by_limit in found["seconds"].items():
        yield f"| {int(count):,} | " + " | ".join(f"{value:.1f} s" for value in by_limit.values()) + " |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare buckets of trainers with planned ones.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16], help="batch sizes")
    parser.add_argument("--most", type=int, default=10**6, help="largest set whose plan is timed")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(words)
    sets = {"329 images": usual(329), "LoRA, 54 images": usual(54)}
    sets |= {f"{name}, 2,000": mixed(2000, parts) for name, parts in MIXTURES.items()}
    counts = [10**power for power in range(4, 10) if 10**power <= options.most]
    limits = (8, 15, 40)
    found: dict[str, Any] = {
        "limits": limits,
        "sets": {title: {batch: rows(images, batch) for batch in options.sizes} for title, images in sets.items()},
        "seconds": {count: {limit: seconds(count, limit) for limit in limits} for count in counts},
    }
    print("\n".join(table(found)))
    if options.json is not None:
        options.json.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()

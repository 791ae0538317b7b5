"""What one GPU does with encoders, and how much of it a build reaches: eleven parts in eight minutes.

1. calibrate: matrix product, convolution, copies. 2. profile: where a batch of 8 spends its time. 3. kernels: each
encoder with torch and with the Triton kernels. 4. builds: drawn JPEGs of 2 and 12 megapixels against the encoder
alone and a DataLoader loop. 5. text encoders, alone and in builds. 6. tests: ``pytest -m gpu``. 7. encoders: images
a second by size, batch and variant. 8. attention of the middle block alone. 9. precision: how far bf16, fp16 and
TF32 lie from float32. 10. memory: batches that do not fit, calls that fail. 11. the loader beside training steps.

Weights are random and made from configurations: nothing is downloaded. Each part has its own time. A part that fails
or takes too long is reported with the rows it had so far, and the others run. JSON and Markdown say percent of
ceiling and which bars were reached. Made files go to TMPDIR: a tmpfs leaves the disk out of the figures.

    python tools/bench_gpu.py [--json FILE] [--markdown FILE] [--parts calibrate,encoders,...] [--device cuda]
    python tools/bench_gpu.py --tiny        # end to end on a CPU in a minute: shapes, no figures

Where there is no network, put wheels of lmdb, diffusers, simplejpeg, xxhash, typer, rich and Pillow on the path.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_builds import memory_drill, whole_builds
from gpu_encoders import attention, precision, rates
from gpu_kernels import before_after, gpu_tests, profiles
from gpu_loader import loader_beside_steps
from gpu_models import Scene
from gpu_text import text_encoders
from gpu_timing import Row, calibrate, ceiling, limited

#: Time of each part in seconds; a part is stopped after 1.5 times as long.
BUDGETS = {
    "calibrate": 10,
    "profile": 20,
    "kernels": 60,
    "builds": 90,
    "text": 50,
    "tests": 90,
    "encoders": 50,
    "attention": 10,
    "precision": 10,
    "memory": 30,
    "loader": 20,
}
_GRACE = 1.5
#: Seconds after which no further part begins, so that the whole ends within eight minutes.
_TOTAL_S = 440

Part = Callable[[Callable[[], float]], Iterable[Row]]
"""Called with a function that says how many seconds are left."""


def parts(scene: Scene, folder: Path, found: Mapping[str, Any]) -> dict[str, Part]:
    """Map the name of each part to its function, in order."""
    return {
        "calibrate": lambda left: calibrate(scene),
        "profile": lambda left: profiles(scene),
        "kernels": lambda left: before_after(scene, left),
        "builds": lambda left: whole_builds(scene, folder, left),
        "text": lambda left: text_encoders(scene, folder),
        "tests": lambda left: gpu_tests(scene, left),
        "encoders": lambda left: rates(scene, ceiling(found["calibrate"]["rows"]), left),
        "attention": lambda left: attention(scene),
        "precision": lambda left: precision(scene),
        "memory": lambda left: memory_drill(scene, folder),
        "loader": lambda left: loader_beside_steps(scene, folder),
    }


def run_part(part: Part, budget_s: float) -> dict[str, Any]:
    """Run one part: rows, time and errors; rows are printed as they arrive."""
    started = time.monotonic()
    found: dict[str, Any] = {"rows": [], "error": None}
    try:
        with limited(_GRACE * budget_s):
            for row in part(lambda: started + budget_s - time.monotonic()):
                found["rows"].append(row)
                print(f"  {time.monotonic() - started:5.1f} s  {', '.join(map(_cell, row.values()))}", flush=True)
    except Exception as error:  # noqa: BLE001 - a part that fails is reported, and the others run
        frames = [f"{Path(one.filename).name}:{one.lineno}" for one in traceback.extract_tb(error.__traceback__)]
        found["error"] = f"{type(error).__name__}: {error} ({' < '.join(frames[:-7:-1])})"[:500]
    found["seconds"] = time.monotonic() - started
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def bars(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return expected and measured values of an H200; None if not measured."""
    encoders, builds = found["encoders"]["rows"], found["builds"]["rows"]
    sdxl = [row for row in encoders if row["model"] == "SDXL KL" and row.get("side") == 1024 and "img/s" in row]
    plain = [row for row in sdxl if row["variant"].startswith("bf16")]
    qwen = {
        row["variant"]: row["img/s"]
        for row in encoders
        if row["model"] == "Qwen-Image" and row.get("side") == 1024 and row.get("batch") == 4 and "img/s" in row
    }
    ours = {row["images"]: row for row in builds if row["system"] == "latentcache" and "img/s" in row}
    loop = {row["images"]: row for row in builds if row["system"].startswith("DataLoader") and "img/s" in row}
    lost = [row["lost"] for row in found["memory"]["rows"]]
    folded, flat = qwen.get("bf16, folded"), qwen.get("bf16, contiguous")
    peer = ours["2 MP"]["img/s"] / loop["2 MP"]["img/s"] if "2 MP" in ours and "2 MP" in loop else None
    return [
        _bar("SDXL with kernels / with torch", 1.6, _gain(found, "SDXL KL")),
        _bar("Flux with kernels / with torch", 1.6, _gain(found, "Flux 16ch")),
        *(
            _bar(f"{row['pipeline']}, build / encoder alone", 0.9, row["build / alone"])
            for row in found["text"]["rows"]
            if "build / alone" in row
        ),
        _bar("SDXL at 1024, bf16, img/s", 80, max((row["img/s"] for row in plain), default=None)),
        _bar("SDXL at 1024, bf16, % of ceiling", 50, max((row["% of ceiling"] for row in plain), default=None)),
        _bar("Qwen-Image at 1024, folded / unfolded", 2, folded / flat if folded and flat else None),
        _bar("build of 2 MP / encoder alone", 0.9, ours.get("2 MP", {}).get("efficiency")),
        _bar("build of 12 MP / encoder alone", 0.8, ours.get("12 MP", {}).get("efficiency")),
        _bar("build of 2 MP / DataLoader loop", 3, peer),
        {"bar": "images lost in the drill", "wanted": 0, "found": sum(lost) if lost else None}
        | {"reached": not any(lost) if lost else None},
    ]


def _gain(found: Mapping[str, Mapping[str, Any]], model: str) -> float | None:
    """Return the rate with kernels at batch 8 in multiples of torch's."""
    rows = [row for row in found["kernels"]["rows"] if row["model"] == model and row["batch"] == 8]
    return next((row["x before"] for row in rows if row.get("way") == "kernels" and "x before" in row), None)


def _bar(name: str, wanted: float, found: float | None) -> Row:
    return {"bar": name, "wanted": wanted, "found": found, "reached": None if found is None else found >= wanted}


def markdown(result: Mapping[str, Any]) -> str:
    """Format all tables."""
    lines = [f"{result['device']}, torch {result['torch']}{', tiny: shapes, no figures' if result['tiny'] else ''}"]
    for name, part in result["parts"].items():
        lines.append(f"\n### {name} ({part['seconds']:.0f} s)\n")
        lines.append(f"failed: {part['error']}" if part["error"] else table(part["rows"]))
    return "\n".join([*lines, "\n### bars\n", table(result["bars"])])


def table(rows: Sequence[Row]) -> str:
    """Format rows as Markdown, with a column for every key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def bench(scene: Scene, chosen: Sequence[str]) -> dict[str, Any]:
    """Run the chosen parts."""
    found: dict[str, Any] = {name: {"rows": [], "error": "not chosen", "seconds": 0.0} for name in BUDGETS}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for part, run in parts(scene, Path(name), found).items():
            if part in chosen and not scene.tiny and time.monotonic() - started + BUDGETS[part] > _TOTAL_S:
                found[part]["error"] = "no time left"
            elif part in chosen:
                print(f"{part}:", flush=True)
                found[part] = run_part(run, BUDGETS[part])
                print(f"{part}: {found[part]['seconds']:.0f} s {found[part]['error'] or ''}", flush=True)
    device = torch.cuda.get_device_name() if scene.cuda else platform.processor() or platform.machine()
    about = {"schema": 1, "tiny": scene.tiny, "device": device, "torch": torch.__version__}
    return about | {"parts": found, "bars": bars(found)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--parts", default=",".join(BUDGETS), help=f"default: {','.join(BUDGETS)}")
    parser.add_argument("--device", help="default: cuda where there is one, else the CPU with --tiny")
    parser.add_argument("--tiny", "--smoke", action="store_true", help="small models and few images: does it run?")
    options = parser.parse_args(words)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and not options.tiny:
        print("no CUDA device here, nothing measured; --tiny runs every part on the CPU")
        return 0
    result = bench(Scene(device=device, tiny=options.tiny), options.parts.split(","))
    print("\n" + markdown(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if options.markdown:
        options.markdown.write_text(markdown(result) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Demonstrate the tool on forty drawn images: from inspect and build to a page that shows the cache.

Runs the installed command line, and shows each command before its output. Checks every exit status and the counts of
the JSON output, and fails if one is wrong. Cost: about ten seconds; no network, no model weights.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from make_images import make_images
from PIL import Image, ImageOps

import latentcache

FOLDER = Path("demo")
IMAGES = FOLDER / "images"
CACHE = FOLDER / "images.latentcache"
PAGE = FOLDER / "report.html"
COUNT = 40
BATCH_SIZE = 4
#: The console script beside this interpreter.
PROGRAM = Path(sys.executable).with_name("latentcache")


def main() -> None:
    os.chdir(Path(__file__).resolve().parent.parent)
    warnings.formatwarning = lambda message, *_rest, **_more: f"warning: {message}\n"
    shutil.rmtree(FOLDER, ignore_errors=True)
    say(f"{COUNT} images in five aspect ratios, with captions, in {IMAGES}/")
    paths = make_images(IMAGES, COUNT)

    show("inspect", IMAGES)
    show("build", IMAGES)
    first = entry_keys()
    expect("images in the cache", COUNT, run_json("info", CACHE)["counts"]["samples"])
    expect("entries after the first build", COUNT, len(first))
    show("info", CACHE)
    show("verify", CACHE)
    expect("up-to-date images", COUNT, run_json("verify", CACHE)["counts"]["ok"])

    edited = paths[7]
    edit(edited)
    say(f"{edited} was edited: its latents are stale now, and only its")
    show("verify", CACHE, status=1)
    check_one_stale(run_json("verify", CACHE, status=1), edited)

    show("build", IMAGES)
    second = entry_keys()
    expect("entries made by the second build", 1, len(second - first))
    expect("entries reused by the second build", COUNT - 1, len(needed_keys(first & second, edited.name)))
    show("verify", CACHE)
    again = run_json("build", IMAGES)["counts"]
    expect("encoded by a build with nothing to do", 0, again["encoded"])
    expect("reused by a build with nothing to do", COUNT, again["cached"])

    show("plan", CACHE, "--batch-size", BATCH_SIZE)
    plan = run_json("plan", CACHE, "--batch-size", BATCH_SIZE)
    read_one_epoch(plan["steps_per_epoch"])
    show("report", CACHE, "--out", PAGE)
    say("All checks passed. What to try next:")
    print(f"  open {PAGE} in a browser")
    print(
        f"  {display()} build YOUR_IMAGES\n"
        "      any folder of images; the cache is beside it: YOUR_IMAGES.latentcache\n"
        f"  {display()} build YOUR_IMAGES --model PATH\n"
        "      with a diffusers VAE to train on: a folder, a pipeline folder or a .safetensors file\n"
        f"  {display()} verify {CACHE} --full\n"
        "      reads every byte, not only what changed\n"
        "  make test"
    )


def show(*words: object, status: int = 0) -> None:
    """Show one command in bold and its output; check its exit status."""
    say("latentcache " + shlex.join(map(str, words)), prefix="$ ")
    found = subprocess.run([PROGRAM, *map(str, words)], check=False).returncode
    expect(f"exit status of {words[0]}", status, found)
    if status:
        print(f"(exit status {status}, as it must be)", flush=True)


def run_json(*words: object, status: int = 0) -> dict[str, Any]:
    """Run one command for its JSON, without output."""
    command = [str(PROGRAM), *map(str, words), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    expect(f"exit status of {shlex.join(command[1:])}", status, done.returncode, more=done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    expect("exit_code in the JSON", status, answer["exit_code"])
    return answer


def entry_keys() -> set[str]:
    """Return the keys of all committed entries."""
    return {entry["key"] for entry in run_json("info", CACHE, "--entries")["entries"]}


def needed_keys(keys: set[str], edited: str) -> set[str]:
    """Return the ``keys`` of images other than the edited one."""
    entries = run_json("info", CACHE, "--entries")["entries"]
    return {e["key"] for e in entries if e["key"] in keys and e["paths"] and edited not in e["paths"]}


def edit(path: Path) -> None:
    """Flip one image and overwrite its file."""
    with Image.open(path) as image:
        flipped = ImageOps.mirror(ImageOps.exif_transpose(image))
    flipped.save(path)


def check_one_stale(answer: dict[str, Any], edited: Path) -> None:
    counts, items = answer["counts"], answer["items"]
    expect("stale images", 1, counts["stale"])
    expect("images still true", COUNT - 1, counts["ok"])
    stale = [(item["path"], item["reason"]) for item in items if item["category"] == "stale"]
    expect("the stale image and why", [(edited.name, "source-changed")], stale)


def read_one_epoch(steps: int) -> None:
    """Read all batches of an epoch as a training loop does."""
    say(f'latentcache.open_cache("{CACHE}").loader(batch_size={BATCH_SIZE}, seed=0)', prefix=">>> ")
    loader = latentcache.open_cache(CACHE).loader(batch_size=BATCH_SIZE, seed=0)
    shapes: Counter[tuple[int, ...]] = Counter()
    names: set[str] = set()
    for batch in loader:
        shapes[tuple(batch["latents"].shape)] += 1
        names.update(batch["names"])
        expect("captions in a batch", len(batch["names"]), len(batch["captions"]))
    for shape, batches in sorted(shapes.items()):
        print(f"  {batches} batches of latents {shape}")
    expect("batches read", len(loader), sum(shapes.values()))
    expect("batches planned", steps, len(loader))
    expect("images seen", COUNT, len(names))


def expect(what: str, expected: object, found: object, *, more: str = "") -> None:
    """Exit with an error unless the values are equal."""
    if found != expected:
        fail(f"{what}: expected {expected!r}, found {found!r}\n{more}".rstrip())


def fail(message: str) -> NoReturn:
    print(f"demo failed: {message}", file=sys.stderr)
    raise SystemExit(1)


def say(text: str, *, prefix: str = "") -> None:
    """Print one line, in bold on a terminal."""
    is_bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    line = f"{prefix}{text}"
    print(f"\n\033[1m{line}\033[0m" if is_bold else f"\n{line}", flush=True)


def display() -> str:
    """Return the program as a user types it."""
    return os.path.relpath(PROGRAM)


if __name__ == "__main__":
    main()

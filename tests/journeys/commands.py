"""Run ``python -m latentcache`` as a process, and create images for it."""

import functools
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer
from PIL import Image

from latentcache import failpoint
from latentcache.cli import app
from latentcache.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
#: A slow build with a commit per image and an event file.
RECIPE = ("--resolution", "64", "--bucket-step", "32")


@dataclass(frozen=True)
class Done:
    """Result of a command; forking programs import this module without pytest."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        assert self.out.count("\n") == 1, self.out + self.err
        found = json.loads(self.out)
        assert found["exit_code"] == self.status
        assert "Traceback" not in self.err
        return found


def noise(seed, height=48, width=48, form="PNG"):
    pixels, buffer = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=form)
    return buffer.getvalue()


def draw_folder(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:04}.png").write_bytes(noise(number, 48 + 16 * (number % 2), 48))
        (folder / f"{number:04}.txt").write_text(f"image {number}")
    return folder


def commands_are_put_together_once(replace=setattr):
    """Cache the command objects: short commands take a third less time."""
    replace(app, "application", functools.cache(app.application))
    replace(typer.main, "get_command", functools.cache(typer.main.get_command))


def start(*words, armed="", variables=None, **options):
    """Start a command with a failpoint and environment variables; its output is piped."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), failpoint.VARIABLE: armed, **(variables or {})}
    command = [sys.executable, "-m", "latentcache", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environment, **pipes | options)


def finished(process, timeout=60):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Done(process.returncode, out.decode("ascii"), err.decode("utf-8", "replace"))


def run(*words, timeout=60, **options):
    return finished(start(*words, **options), timeout)


def look(*words):
    """Run a command in this process, which saves half a second."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([*map(str, words)])
    return Done(status, out.getvalue(), err.getvalue())


def build_words(data, cache, *more, delay_ms=0, events=None):
    words = ["build", data, "--out", cache, "--model", f"stub:delay_ms={delay_ms}", *RECIPE]
    words += ["--commit-every", 1, "--batch-size", 2, "--json", "--quiet", *more]
    return [*words, *(["--events", events] if events else [])]


def start_build(data, cache, *more, delay_ms=0, events=None, **options):
    return start(*build_words(data, cache, *more, delay_ms=delay_ms, events=events), **options)


def build(data, cache, *more, timeout=60, **options):
    return finished(start_build(data, cache, *more, **options), timeout)


def build_here(data, cache, *more, **options):
    """Build in this process without a fault."""
    return look(*build_words(data, cache, *more, **options))


def entries(cache):
    """Map each committed key to (checksum, names)."""
    found = look("info", cache, "--entries", "--json").json["entries"]
    assert len({entry["key"] for entry in found}) == len(found)
    return {entry["key"]: (entry["checksum"], entry["paths"]) for entry in found}


@functools.cache
def undisturbed(count):
    """The entries of an uninterrupted build of ``draw_folder``, cached."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = look(
            "build", draw_folder(folder / "data", count), "--out", folder / "cache", "--model", "stub", *RECIPE
        )
        assert done.status == 0, done.err
        return entries(folder / "cache")


def acknowledged(events):
    """Keys of an event file in commit order; a partial last line is ignored."""
    if not events.exists():
        return []
    lines = events.read_text("ascii").split("\n")[:-1]
    return [key for line in lines for key in json.loads(line)["keys"]]


def wait_for(condition, process=None, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        if process is not None and process.poll() is not None:
            return
        time.sleep(0.002)


def state_of(folder):
    """Map each name below a folder to (kind, size, mtime, ctime, content)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_nlink, content)
    return found

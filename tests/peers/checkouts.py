"""Code of other trainers, each run in a process of its own; ``checkouts.toml`` says where it comes from."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from latentcache.cli.app import main

HERE = Path(__file__).parent
PEERS = Path(os.environ.get("PEERS", "peers"))
CHECKOUTS = tomllib.loads((HERE / "checkouts.toml").read_text("utf-8"))
#: Architecture of sd-scripts -> channels, scale and shift of its VAE.
SCALES = {
    "sd": (4, 0.18215, None),
    "sdxl": (4, 0.13025, None),
    "sd3": (16, 1.5305, 0.0609),
    "flux": (16, 0.3611, 0.1159),
    "hunyuan-image": (64, 0.75289, None),
}


def checkout(name, venv="venv"):
    """The code of a trainer, and the interpreter that runs it."""
    about = CHECKOUTS[name]
    folder = PEERS / name
    if not folder.is_dir():
        pytest.fail(
            f"{folder} is missing: git clone {about['url']} {folder} && git -C {folder} checkout {about['commit']}"
        )
    python = PEERS / venv / "bin/python"
    return (folder / about["code"]).absolute(), python.absolute() if python.exists() else Path(sys.executable)


def exported(trainer, data, folder, model, *words, export=()):
    """Build ``folder/cache`` with the sizes of a trainer, and export ``folder/out``; return both."""
    cache, out = folder / "cache", folder / "out"
    for command in (
        ("build", data, "--out", cache, "--model", model, "--like", trainer, *words),
        ("export", cache, out, "--to", trainer, *export),
    ):
        assert main([*map(str, command)]) == 0
    return cache, out


def served_by(command, served, **options):
    """Values that a script wrote to ``served``, and its counts; what it said and None, if the trainer stopped."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        return done.stderr, None
    with np.load(served) as arrays:
        return dict(arrays), json.loads(done.stdout.splitlines()[-1])


def said_by(command):
    """The JSON that a script ends with."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

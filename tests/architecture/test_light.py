"""Commands import only the modules they need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from make_images import make_images

PROGRAM = Path(sys.executable).with_name("latentcache")
MODELS = {"torch", "diffusers", "transformers"}
ARITHMETIC = {"numpy", "lmdb", "pydantic"}


def imported(*words):
    """Run a command; return its exit status and the top-level modules it imported."""
    command = [sys.executable, "-X", "importtime", PROGRAM, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "latentcache" in names, done.stderr
    return done.returncode, names


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("light")
    make_images(folder / "images", count=5, side=96)
    command = [PROGRAM, "build", folder / "images", "--model", "stub", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["encoded"] == 5
    return str(folder / "images.latentcache")


def test_help_imports_nothing_heavy():
    status, names = imported("--help")
    assert status == 0
    assert names & (MODELS | ARITHMETIC) == set()


@pytest.mark.parametrize(
    "words",
    [
        ["info"],
        ["verify"],
        ["verify", "--full"],
        ["verify", "--sample", "1/2"],
        ["verify", "--untrusted"],
        ["verify", "--reencode", "2"],  # only real models need torch
        ["gc"],
        ["plan", "--batch-size", "2"],
    ],
    ids=" ".join,
)
def test_reading_commands_import_no_torch(cache, words):
    status, names = imported(words[0], cache, *words[1:])
    assert status == 0
    assert names & MODELS == set()


def test_a_check_decodes_no_image(cache):
    assert "PIL" not in imported("verify", cache)[1]

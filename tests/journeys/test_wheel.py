"""The wheel in a fresh environment, with the oldest versions that it allows."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from small_cache import draw_four

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The wheel and the sources of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    (wheel,), (sources,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sources


@pytest.mark.slow
def test_the_wheel_holds_every_file_and_the_reader_for_the_oldest_glibc_that_it_runs_on(packed, tmp_path):
    wheel, _ = packed
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "latentcache"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert set(tracked.stdout.split()) <= names
    reader = zipfile.ZipFile(wheel).extract("latentcache/store/gather/_gather.so", tmp_path)
    symbols = subprocess.run(["objdump", "-T", reader], check=True, capture_output=True, text=True).stdout
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)]
    oldest = max([(2, 5), *versions])  # pip knows no older one
    assert wheel.stem.split("-")[-1].startswith("manylinux_{}_{}_".format(*oldest))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sources"])
def test_a_fresh_environment_with_the_oldest_versions(packed, kind, tmp_path):
    package = dict(zip(("wheel", "sources"), packed, strict=True))[kind]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python, command = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "latentcache"
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints-lowest.txt",
    ]
    subprocess.run([*install, "torch"], check=True)
    subprocess.run([*install, package], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    environment.pop("VIRTUAL_ENV", None)

    def run(*words):
        words = [str(word) for word in words]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    draw_four(tmp_path / "images")
    (tmp_path / "images" / "p3.txt").write_text("caption 3")
    run(python, Path(__file__).with_name("use_wheel.py"), "make", "sdxl")
    run(command, "build", "images", "--model", "sdxl", "--text-encoder", "sdxl", "--resolution", "128")
    counts = json.loads(run(command, "verify", "images.latentcache", "--full", "--json"))["counts"]
    assert {name: number for name, number in counts.items() if number} == {"ok": 4}
    run(command, "report", "images.latentcache")
    machine = json.loads(run(command, "inspect", "--machine", "--json"))
    assert '"compiled_reader": true' in json.dumps(machine)
    assert "4 samples are equal to encode_prompt" in run(
        python, Path(__file__).with_name("use_wheel.py"), "check", "sdxl"
    )

"""The compiled reader: `make setup` compiles it, and a slow loader says how to get it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from latentcache.store import gather

ROOT = Path(__file__).parents[2]
READER = Path("latentcache/store/gather/_gather.so")


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout without a compiled reader, whose .venv is up to date."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "latentcache", tmp_path / "latentcache", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".stamp").touch()
    return tmp_path


def run(folder, *words, **more):
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, **more)


@pytest.mark.skipif(not shutil.which("make") or not shutil.which("cc"), reason="no C compiler")
def test_setup_compiles_the_reader_and_again_when_its_source_changes(checkout):
    done = run(checkout, "make", "setup")
    assert (done.returncode, done.stderr) == (0, "")
    first = (checkout / READER).stat().st_mtime_ns
    run(checkout, "make", "setup")
    assert (checkout / READER).stat().st_mtime_ns == first
    (checkout / READER).with_name("gather.c").touch()
    run(checkout, "make", "setup")
    assert (checkout / READER).stat().st_mtime_ns > first


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_setup_without_a_compiler_is_a_note(checkout):
    done = run(checkout, "make", "CC=no-compiler", "setup")
    assert (done.returncode, done.stderr) == (0, "")
    notes = [line for line in done.stdout.splitlines() if "reader" in line]
    assert len(notes) == 1
    assert "run: make native" in notes[0]
    assert not (checkout / READER).exists()
    assert run(checkout, "make", "CC=no-compiler", "native").returncode != 0


def test_the_kind_of_reader_has_a_reason_and_a_fix(monkeypatch, tmp_path):
    monkeypatch.delenv("LATENTCACHE_NATIVE", raising=False)
    monkeypatch.setattr(gather, "LIBRARY", None)
    monkeypatch.setattr(gather, "_PATH", ROOT / READER.with_name("gone.so"))
    assert gather.reader_kind().fix.startswith("make native")
    monkeypatch.setattr(gather, "_PATH", tmp_path / "a" / "b" / "c" / "gone.so")
    assert gather.reader_kind().fix.startswith("pip install")
    monkeypatch.setenv("LATENTCACHE_NATIVE", "0")
    assert gather.reader_kind() == (
        "python",
        "LATENTCACHE_NATIVE=0 turns the compiled reader off",
        "unset LATENTCACHE_NATIVE",
    )
    monkeypatch.setattr(gather, "LIBRARY", object())
    assert gather.reader_kind().kind == "compiled"


def test_the_environment_disables_the_library(library, monkeypatch):
    monkeypatch.delenv("LATENTCACHE_NATIVE", raising=False)
    assert gather.compiled(library) is not None
    assert gather.compiled(library.with_name("gone.so")) is None
    monkeypatch.setenv("LATENTCACHE_NATIVE", "0")
    assert gather.compiled(library) is None


@pytest.mark.slow
def test_a_wheel_without_a_compiler_has_no_reader(checkout):
    words = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "wheels", ".")
    built = run(checkout, *words, env=os.environ | {"CC": "no-compiler"})
    if "hatchling" in built.stderr:
        pytest.skip("no index to install hatchling from")
    (wheel,) = (checkout / "wheels").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")

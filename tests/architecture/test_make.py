import re
import shutil
import subprocess

import pytest
from package_source import ROOT

MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.M)[1].split()

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*words):
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_make_alone_lists_every_target_with_a_line():
    done = make()
    assert done.returncode == 0
    assert re.findall(r"^  (\S+) +\S.*$", done.stdout, flags=re.M) == TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_planned(target):
    done = make("--dry-run", target)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["setup", "test", "demo", "check"])
def test_an_old_python_is_refused_before_anything_is_made(target, tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python-of-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.1" && exit 0\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    command = ["make", f"PYTHON={old}", target]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.1" in done.stderr
    assert f"fix: make PYTHON=python3.12 {target}" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_first_commands_of_a_fresh_clone_make_the_environment():
    for target in ("test", "demo", "check", "bench", "docs", "test-slow", "format"):
        (needs,) = re.findall(rf"^{target}:(.*?)##", MAKEFILE, flags=re.M)
        assert ".venv/.stamp" in needs or target == "check"


def test_the_integration_script_is_a_script():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0

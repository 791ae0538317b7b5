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


def test_the_integration_script_is_a_script():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0

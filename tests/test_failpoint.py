import errno
import os
import subprocess
import sys

import pytest

from latentcache import failpoint as fp


@pytest.fixture(autouse=True)
def disarmed():
    yield
    fp.arm(None)


def test_only_the_nth_passage_fails():
    fp.arm("after-commit:2:raise")
    fp.failpoint("after-commit")
    fp.failpoint("before-put")
    with pytest.raises(OSError, match="after-commit") as error:
        fp.failpoint("after-commit")
    assert error.value.errno == errno.EIO
    fp.failpoint("after-commit")


def test_an_unknown_failpoint_is_rejected(tmp_path):
    environment = os.environ | {fp.VARIABLE: "nowhere:1:kill"}
    command = [sys.executable, "-m", "latentcache", "info", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown failpoint" in done.stderr

"""The page on Ray: its cluster is started and its build runs there."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from make_images import make_images
from page_blocks import DOCS, blocks, run_console

pytest.importorskip("ray")
PAGE = DOCS / "guides/ray.md"


@pytest.fixture
def head(tmp_path):
    for block in blocks(PAGE):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short: sockets
        options = f"--num-cpus 2 --include-dashboard false --temp-dir {folder}"
        around = os.environ | {"PORT": str(port), "PATH": path, "OPTIONS": options}
        process = subprocess.Popen(["sh", tmp_path / "cluster.sh"], env=around)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_the_page_builds_on_the_cluster_that_it_starts(head, tmp_path, monkeypatch):
    make_images(tmp_path / "images", count=12, side=256)
    monkeypatch.setenv("HEAD", head)
    for block in blocks(PAGE, "Build"):
        if block.language == "console":
            run_console(block, tmp_path, PAGE.name)

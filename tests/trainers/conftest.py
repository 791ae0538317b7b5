"""A cache of thirteen images in buckets of five, four and four, and a runner of how-to pages."""

import os
import sys
from pathlib import Path

import pytest
from small_cache import build, run
from thirteen_images import draw_thirteen

from latentcache import open_cache

__all__ = ["run"]
sys.path.append(str(Path(__file__).parents[1] / "docs"))  # page_blocks

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def thirteen(tmp_path_factory):
    """A folder with ``images/`` and ``images.latentcache/``, as the pages assume."""
    folder = tmp_path_factory.mktemp("trainers")
    build(draw_thirteen(folder / "images"), folder / "images.latentcache")
    return folder


@pytest.fixture(scope="session")
def fifty(tmp_path_factory):
    from tiny_tokens import build_fifty

    return open_cache(build_fifty(tmp_path_factory.mktemp("fifty")) / "texts.latentcache")


@pytest.fixture
def working_folder(thirteen, tmp_path, monkeypatch):
    """An empty working folder with the images and their cache."""
    for name in ("images", "images.latentcache"):
        (tmp_path / name).symlink_to(thirteen / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_howto():
    """Run the Python blocks and commands in a section of a page of trainers; return its namespace."""
    from page_blocks import DOCS, blocks, run_console

    def run(name, section=None, consoles=False, **names):
        page = DOCS / "trainers" / f"{name}.md"
        scope = {"__name__": name.replace("-", "_")} | names
        for block in blocks(page, section):
            if block.language == "python":
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), scope)
            elif consoles and block.language == "console":
                run_console(block, Path.cwd(), page.name)
        return scope

    return run


@pytest.fixture
def run_on_two_ranks():
    """Run the first Python block of a section of the page on PyTorch on two ranks; return its output."""
    import subprocess

    from page_blocks import DOCS, blocks

    def run(section):
        script = next(b.text for b in blocks(DOCS / "trainers" / "pytorch.md", section) if b.language == "python")
        Path("train.py").write_text(script)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--nproc-per-node", "2", Path(__file__).with_name("leave_at_once.py"), "train.py"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=environment | {"ACCELERATE_USE_CPU": "true"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run

"""Commands run in this process, and a small cache of a few pictures: what the tests of the upper folders share."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image

from latentcache.cli.app import main
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.generation import load_generation

#: The stub encoder on a small grid: builds take milliseconds.
SMALL = ("--model", "stub", "--resolution", "64", "--bucket-step", "8")


@dataclass
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.out.count("\n") == 1, self.out
        value = json.loads(self.out)
        assert self.out.isascii()
        assert value["schema"] == 1
        assert value["exit_code"] == self.status
        return value

    @property
    def error(self) -> dict[str, Any]:
        """Its error, checked to be said on stderr in the same words."""
        found = self.json["error"]
        assert set(found) - {"holder"} == {"slug", "what", "where", "why", "fix"}
        assert found["slug"]
        assert found["what"]
        assert found["fix"]
        assert f"error[{found['slug']}]: {found['what']}\n" in self.err
        assert f"  fix: {found['fix']}\n" in self.err
        assert "Traceback" not in self.err
        return found


@pytest.fixture
def run(capsys):
    """Runs a command; gives status, stdout and stderr."""

    def command(*words):
        capsys.readouterr()
        status = main([str(word) for word in words])
        done = Done(status, *capsys.readouterr())
        assert "Traceback" not in done.err
        return done

    return command


def draw(path, size=(96, 64), seed=0):
    """A picture of noise; ``size`` is (width, height)."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).save(path)
    return path


@pytest.fixture
def data(tmp_path):
    """Four pictures of three shapes; three have captions."""
    folder = tmp_path / "data"
    for number, size in enumerate([(96, 64), (64, 96), (80, 80), (96, 64)]):
        draw(folder / f"p{number}.png", size, seed=number)
    for number in range(3):
        (folder / f"p{number}.txt").write_text(f"caption {number}")
    return folder


@pytest.fixture
def cache(data, run, tmp_path):
    """A finished cache of ``data``."""
    done = run("build", data, *SMALL, "--out", tmp_path / "cache", "--quiet")
    assert done.status == 0, done.err
    return tmp_path / "cache"


def damage_payload(cache, row=0, bit=0x10):
    """Flip one bit in the payload of one entry, behind the back of its index; gives the name of the sample."""
    generation = load_generation(cache)
    rows = generation.rows
    file = cache / "shards" / generation.shards[int(rows.shard[row])] / "data.mdb"
    file.chmod(0o644)
    with file.open("r+b") as shard:
        place = int(rows.offset[row]) + HEADER_BYTES + 5
        shard.seek(place)
        byte = shard.read(1)[0]
        shard.seek(place)
        shard.write(bytes([byte ^ bit]))
    return generation.samples.names[int(rows.sample[row])]

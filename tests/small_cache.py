"""Commands run in this process, and a small cache of a few images."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from latentcache.cli.app import main
from latentcache.fields.latents import LatentsSettings
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings

#: The stub encoder on a small grid: builds take milliseconds.
SMALL = ("--model", "stub", "--resolution", "64", "--bucket-step", "8")
_RECIPE_FIELDS = {one.name for one in dataclasses.fields(LatentsSettings)}


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, self.out + self.err
        value = json.loads(self.out)
        assert self.out.isascii()
        assert value["schema"] == 2
        assert value["exit_code"] == self.status
        assert "Traceback" not in self.err
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The error; it must also be on stderr."""
        found = self.json["error"]
        assert set(found) - {"holder"} == {"slug", "what", "where", "why", "fix"}
        assert found["slug"]
        assert found["what"]
        assert found["fix"]
        assert f"error[{found['slug']}]: {found['what']}\n" in self.err
        assert f"  fix: {found['fix']}\n" in self.err
        return found


@pytest.fixture
def run(capsys):
    def command(*words):
        capsys.readouterr()
        status = main([str(word) for word in words])
        done = Done(status, *capsys.readouterr())
        assert "Traceback" not in done.err
        return done

    return command


def draw(path, size=(96, 64), seed=0):
    """Draw an image of noise; ``size`` is (width, height)."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).save(path)
    return path


def draw_four(folder):
    """Four images of three shapes; three have captions."""
    for number, size in enumerate([(96, 64), (64, 96), (80, 80), (96, 64)]):
        draw(folder / f"p{number}.png", size, seed=number)
    for number in range(3):
        (folder / f"p{number}.txt").write_text(f"caption {number}")
    return folder


def build(data, out, **more):
    """Build ``out`` from ``data`` with the stub encoder on a small grid; return the report."""
    wanted = {"model": "stub", "resolutions": (64,), "bucket_step": 8}
    recipe = wanted | {name: more.pop(name) for name in list(more) if name in _RECIPE_FIELDS}
    return build_cache(BuildSettings(data=data, out=out, fields={"latents": LatentsSettings(**recipe)}, **more))


@pytest.fixture
def data(tmp_path):
    return draw_four(tmp_path / "data")


@pytest.fixture
def cache(data, tmp_path):
    assert build(data, tmp_path / "cache").encoded == 4
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A data folder and its finished cache, for tests that do not change them."""
    folder = tmp_path_factory.mktemp("shared")
    build(draw_four(folder / "data"), folder / "cache")
    return folder / "data", folder / "cache"


_AS_NOBODY = """
import json, os, sys
from latentcache.cli.app import main
from latentcache.fields.registry import field_kinds
warm, words = json.loads(sys.argv[1])
stdout, sys.stdout = sys.stdout, open(os.devnull, "w")
main(warm), field_kinds()  # imports everything: the interpreter may be readable by root alone
sys.stdout = stdout
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(main(words))
"""


def as_nobody(warm, words):
    """Run a command as an unprivileged user, after a similar one as root."""
    given = json.dumps([[str(word) for word in part] for part in (warm, words)])
    done = subprocess.run([sys.executable, "-c", _AS_NOBODY, given], capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def open_folder():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def of_three_sizes(folder, count):
    """A cache of ``count`` images in three buckets in turn; 17 images give six batches of three."""
    for number in range(count):
        draw(folder / "data" / f"{number:02}.png", [(96, 64), (64, 96), (80, 80)][number % 3], seed=number)
    build(folder / "data", folder / "cache")
    return folder / "cache"


def counts(samples, encoded=0, cached=0, quarantined=0, *, duplicates=0, no_caption=1):
    """Expected ``counts`` of a build; one of four drawn images has no caption."""
    made = {"samples": samples, "encoded": encoded, "cached": cached, "duplicates": duplicates}
    return made | {"quarantined": quarantined, "no_caption": no_caption}

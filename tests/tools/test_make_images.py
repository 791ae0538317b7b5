import subprocess
import sys
from pathlib import Path

import pytest
from make_images import ASPECTS, make_images
from PIL import Image, ImageOps

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_images.py"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), count=35, seed=3, side=96)


def upright(path):
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def test_an_upright_image_has_the_aspect_it_was_drawn_in(images):
    for index, path in enumerate(images):
        width, height = ASPECTS[index % len(ASPECTS)]
        found = upright(path)
        assert found.width / found.height == pytest.approx(width / height, rel=0.05)
        assert found.width * found.height == pytest.approx(96 * 96, rel=0.15)


def test_the_same_seed_draws_the_same(images, tmp_path):
    again = make_images(tmp_path / "again", count=8, seed=3, side=96)
    for first, second in zip(images, again, strict=False):
        assert first.name == second.name
        assert upright(first).tobytes() == upright(second).tobytes()
        assert first.with_suffix(".txt").read_bytes() == second.with_suffix(".txt").read_bytes()


def test_it_is_a_script(tmp_path):
    command = [sys.executable, TOOL, tmp_path / "out", "--count", "3", "--side", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("3 images")
    assert len(list((tmp_path / "out").iterdir())) == 6

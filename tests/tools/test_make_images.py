import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from make_images import ASPECTS, COLORS, ORIENTATION_TAG, SHAPES, make_images
from PIL import Image, ImageOps

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_images.py"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), count=35, seed=3, side=96)


def upright(path):
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def test_every_aspect_comes_in_every_format(images):
    found = {(index % len(ASPECTS), path.suffix) for index, path in enumerate(images)}
    assert found == {(aspect, suffix) for aspect in range(len(ASPECTS)) for suffix in (".jpg", ".png", ".webp")}


def test_an_upright_image_has_the_aspect_it_was_drawn_in(images):
    for index, path in enumerate(images):
        width, height = ASPECTS[index % len(ASPECTS)]
        found = upright(path)
        assert found.width / found.height == pytest.approx(width / height, rel=0.05)
        assert found.width * found.height == pytest.approx(96 * 96, rel=0.15)


def test_some_are_stored_turned_and_some_see_through(images):
    turned, modes = Counter(), Counter()
    for path in images:
        with Image.open(path) as image:
            turned[image.getexif().get(ORIENTATION_TAG, 1)] += 1
            modes[image.format, image.mode] += 1
    assert {1, 3, 6, 8} <= turned.keys()
    assert modes["PNG", "RGBA"] >= 1
    assert modes["PNG", "RGB"] >= 1


def test_captions_name_what_was_drawn(images):
    for path in images:
        words = path.with_suffix(".txt").read_text("utf-8").replace(",", "").split()
        assert set(words) & set(COLORS)
        assert set(words) & set(SHAPES)


def test_no_two_images_are_alike(images):
    thumbnails = sorted(upright(path).resize((8, 8)).tobytes() for path in images)
    assert all(first != second for first, second in pairwise(thumbnails))


def test_the_same_seed_draws_the_same(images, tmp_path):
    again = make_images(tmp_path / "again", count=8, seed=3, side=96)
    for first, second in zip(images, again, strict=False):
        assert first.name == second.name
        assert upright(first).tobytes() == upright(second).tobytes()
        assert first.with_suffix(".txt").read_bytes() == second.with_suffix(".txt").read_bytes()


def test_another_seed_draws_something_else(images, tmp_path):
    (other,) = make_images(tmp_path, count=1, seed=4, side=96)
    assert upright(other).tobytes() != upright(images[0]).tobytes()


def test_it_is_a_script(tmp_path):
    command = [sys.executable, TOOL, tmp_path / "out", "--count", "3", "--side", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("3 images")
    assert len(list((tmp_path / "out").iterdir())) == 6

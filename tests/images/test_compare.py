import subprocess
import sys
from dataclasses import replace

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from small_cache import build, draw_four

from latentcache.pipeline.compare import same_pixels
from latentcache.store.generation import load_generation
from latentcache.verify.placements import Placements


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(draw_four(folder / "data"), folder / "cache")
    generation = load_generation(folder / "cache")
    return folder, generation, Placements(generation)


def asked(built, change):
    """What is said of the first picture after a change of its bytes."""
    folder, generation, placements = built
    data = change(folder / "data" / "p0.png", folder / "changed.png")
    return same_pixels(data, generation.recipe, placements.size(0), placements.placed(0))


def metadata(source, target):
    info = PngInfo()
    info.add_text("Comment", "edited")
    Image.open(source).save(target, pnginfo=info)
    return target.read_bytes()


def one_pixel(source, target):
    picture = Image.open(source).convert("RGB")
    picture.putpixel((40, 30), (1, 2, 3))
    picture.save(target)
    return target.read_bytes()


def larger(source, target):
    Image.open(source).resize((192, 128)).save(target)
    return target.read_bytes()


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda source, target: source.read_bytes(), True),
        (metadata, True),
        (one_pixel, False),
        (larger, False),
        (lambda source, target: b"<html>", False),
        (lambda source, target: source.read_bytes()[:-200], False),
    ],
    ids=["untouched", "metadata", "one pixel", "larger", "no picture", "cut"],
)
def test_pixels_decide(built, change, same):
    assert asked(built, change) is same


def test_a_resize_of_torch_cannot_be_told_without_torch(built, monkeypatch):
    folder, generation, placements = built
    recipe = replace(generation.recipe, pixels=replace(generation.recipe.pixels, resample="lanczos-u8"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    data = metadata(folder / "data" / "p0.png", folder / "changed.png")
    wanted = placements.placed(0)
    assert placements.size(0) != wanted[0][0].resize
    assert same_pixels(data, recipe, placements.size(0), wanted) is None
    assert same_pixels(b"<html>", recipe, placements.size(0), wanted) is False


def test_it_imports_no_torch():
    script = "import sys, latentcache.pipeline.compare; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

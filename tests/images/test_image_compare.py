import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from latentcache.fields.latents import EncoderSpec, GeometrySettings, LatentsRecipe, PixelProfile
from latentcache.geometry.placement import place_in
from latentcache.geometry.sizes import Size
from latentcache.images.compare import same_input
from latentcache.images.decode import decode
from latentcache.images.resize import pixel_hash, resize_crop

SIZE = Size(64, 96)
PLACEMENT = place_in(SIZE, Size(32, 32))
ENCODER = EncoderSpec(family="stub", fingerprint="", config="", channels=4, factor=8, multiple=8)
RECIPE = LatentsRecipe(geometry=GeometrySettings(), pixels=PixelProfile(), encoder=ENCODER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("built")
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(made / "p0.png")
    return made


def row(folder):
    """Group, own columns and pixel hash of the row that was encoded."""
    pixels = decode((folder / "p0.png").read_bytes(), RECIPE.pixels)
    crop, resize = PLACEMENT.crop, PLACEMENT.resize
    columns = {"crop": np.array([crop.top, crop.left]), "resize": np.array([resize.height, resize.width])}
    return RECIPE.group(PLACEMENT.bucket), columns, pixel_hash(resize_crop(pixels, PLACEMENT, "lanczos-pil"))


def metadata(source, target):
    info = PngInfo()
    info.add_text("Comment", "edited")
    Image.open(source).save(target, pnginfo=info)
    return target.read_bytes()


def one_pixel(source, target):
    image = Image.open(source).convert("RGB")
    image.putpixel((40, 30), (1, 2, 3))
    image.save(target)
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
    ids=["untouched", "metadata", "one pixel", "larger", "no image", "cut"],
)
def test_pixels_decide(folder, change, same):
    data = change(folder / "p0.png", folder / "changed.png")
    assert same_input(data, RECIPE, *row(folder)) is same


def test_without_torch_a_resize_of_torch_is_unknown(folder, monkeypatch):
    recipe = replace(RECIPE, pixels=replace(RECIPE.pixels, resample="lanczos-u8"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    data = metadata(folder / "p0.png", folder / "changed.png")
    assert same_input(data, recipe, *row(folder)) is None
    assert same_input(b"<html>", recipe, *row(folder)) is False


def test_it_imports_no_torch():
    script = "import sys, latentcache.images.compare; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

import pytest
from make_images import ASPECTS, make_images
from PIL import Image, ImageOps


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

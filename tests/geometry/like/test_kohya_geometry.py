"""Sizes of sd-scripts: vectors of its own code, and properties."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.like.kohya import KohyaTable, KohyaTrainer, letterbox
from latentcache.geometry.sizes import Size

#: Of ``BucketManager`` at 48d368f: resolution, limits, step, whether images are enlarged, then (width, height) of the
#: image, its bucket and its resized size, and left and top of ``get_crop_ltrb``.
VECTORS = json.loads((Path(__file__).parent / "kohya_vectors.json").read_text("utf-8"))
sides = st.integers(64, 4096)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: "-".join(map(str, vector[:7])))
def test_sizes_are_those_of_the_trainer(vector):
    resolution, low, high, step, upscale, width, height, *expected = vector
    table = KohyaTable(resolution=Size(resolution, resolution), min_side=low, max_side=high, step=step)
    image = Size(height, width)
    bucket = table.nearest(image) if upscale else table.within(image)
    resized = table.resized(image, bucket, upscale=bool(upscale))
    left, top, right, bottom = letterbox(image, bucket)
    assert [bucket.width, bucket.height, resized.width, resized.height, left, top] == expected
    assert left < right
    assert top < bottom


@given(height=sides, width=sides, upscale=st.booleans(), step=st.sampled_from([8, 32, 64]))
def test_the_resized_image_covers_its_bucket(height, width, upscale, step):
    table, image = KohyaTable(resolution=Size(512, 512), step=step), Size(height, width)
    bucket = table.nearest(image) if upscale else table.within(image)
    if bucket is not None:
        assert bucket.fits(table.resized(image, bucket, upscale=upscale))
        assert bucket.height % step == bucket.width % step == 0


def test_without_buckets_every_image_has_the_resolution():
    table = KohyaTable(resolution=Size(384, 512), buckets=False)
    assert table.sizes == (Size(384, 512),)
    assert table.resized(Size(1000, 1000), Size(384, 512), upscale=True) == Size(512, 512)


def test_a_resolution_outside_of_its_limits_is_named():
    with pytest.raises(RecipeError, match="sides are 256 to 1024"):
        KohyaTable(resolution=Size(1536, 1536))


def test_configurations_of_both_kinds_are_read(tmp_path):
    plain, datasets = tmp_path / "lora.toml", tmp_path / "dataset.toml"
    plain.write_text('[training]\nresolution = "512,768"\nshuffle_caption = true\n[others]\nmin_bucket_reso = 320\n')
    datasets.write_text(
        "[general]\nenable_bucket = true\nflip_aug = true\n[[datasets]]\nresolution = 1024\nbatch_size = 4\n"
        "[[datasets.subsets]]\nimage_dir = 'a'\nrandom_crop = true\n[[datasets]]\nresolution = [512, 768]\n"
        "[[datasets.subsets]]\nimage_dir = 'a'\nrandom_crop = true\n"
    )
    found = KohyaTrainer().settings(plain)
    assert found.options == {"buckets": (Size(768, 512),), "flip": None}
    assert "min_bucket_reso 320," in found.words
    assert found.no_text == ("shuffle_caption = true",)
    assert "max_bucket_reso 1024 (default)" in found.words
    found = KohyaTrainer().settings(datasets)
    assert (found.options["resolutions"], found.options["flip"]) == ((1024, Size(768, 512)), True)
    assert found.no_latents == ("random_crop = true",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("resolution = ", "no TOML"),
        ("enable_bucket = true", "has no resolution"),
        ("resolution = 'big'", "another form"),
        ("[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets]]\nresolution = 512", "several values of"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_named(tmp_path, text, expected):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        KohyaTrainer().settings(path)
    assert expected in caught.value.what


def test_a_missing_configuration_is_named(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        KohyaTrainer().settings(tmp_path / "none.toml")

"""Sizes of musubi-tuner: vectors of its own code, and its settings."""

import json
from pathlib import Path

import pytest

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.like.musubi import Musubi, MusubiTable
from latentcache.geometry.like.trainer import SizeOptions
from latentcache.geometry.like.trainers import trainer_of
from latentcache.geometry.sizes import Size

#: Of ``BucketSelector`` and ``resize_image_to_bucket`` at 30c658c: width and height of the resolution,
#: ``enable_bucket``, ``bucket_no_upscale``; then (height, width) of the image, its bucket and the resized image.
VECTORS = json.loads((Path(__file__).parent / "musubi_vectors.json").read_text("utf-8"))
OPTIONS = {"resolutions": (512,), "buckets": (), "step": 16, "min_side": None, "max_side": None}


@pytest.mark.parametrize("vector", VECTORS, ids=str)
def test_sizes_are_those_of_its_own_code(vector):
    width, height, has_buckets, no_upscale, *sides = vector
    table = MusubiTable(resolution=Size(height, width), buckets=has_buckets)
    image, bucket, resized = (Size(*sides[at : at + 2]) for at in (0, 2, 4))
    assert (table.within(image) if no_upscale else table.nearest(image)) == bucket
    assert table.resized(image, bucket, upscale=not no_upscale) == resized


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"step": 64}, "rounds sides to 16"), ({"max_side": 256}, "no longest"), ({"resolutions": (16,)}, "no buckets")],
)
def test_what_it_cannot_have_is_named(options, expected):
    with pytest.raises(RecipeError, match=expected):
        Musubi().tables(SizeOptions(**OPTIONS | options))


def test_a_small_image_without_enlarging(tmp_path):
    table = Musubi().tables(SizeOptions(**OPTIONS))[0]
    assert table.within(Size(100, 70)) == Size(96, 64)
    assert table.within(Size(100, 15)) is None


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("resolution = 512\nenable_bucket = true", {"resolutions": (512,), "upscale": True, "frames": None}),
        ("enable_bucket = true\nbucket_no_upscale = true", {"resolutions": (Size(544, 960),), "upscale": False}),
        ("resolution = [640, 480]", {"buckets": (Size(480, 640),), "upscale": True}),
        ("target_frames = [1, 46, 81]", {"frames": (1, 45, 81)}),
    ],
)
def test_settings_are_read(tmp_path, text, options):
    path = tmp_path / "data.toml"
    path.write_text(f"[general]\nbatch_size = 3\n[[datasets]]\nvideo_directory = 'x'\n{text}\n")
    assert trainer_of(path, None).name == "musubi"
    settings = Musubi().settings(path)
    assert options.items() <= settings.options.items()
    assert (settings.options["bucket_step"], settings.batch) == (16, 3)


def test_what_forbids_a_cache_and_what_is_not_used_is_named(tmp_path):
    path = tmp_path / "data.toml"
    path.write_text("[[datasets]]\nvideo_directory = 'x'\nframe_extraction = 'slide'\nframe_stride = 4\n")
    settings = Musubi().settings(path)
    assert settings.no_latents == ("frame_extraction = slide",)
    assert "frame_stride is not used" in settings.words
    assert "enable_bucket False (default)" in settings.words
    path.write_text(
        "[[datasets]]\nimage_directory = 'x'\nenable_bucket = true\n[[datasets]]\nimage_directory = 'y'\n"
    )
    with pytest.raises(UsageError, match="several values of enable_bucket"):
        Musubi().settings(path)

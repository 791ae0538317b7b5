"""Sizes of SimpleTuner: vectors of its own code, the order of files, and its settings."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.like.simpletuner import SimpleTuner, SimpleTunerTable
from latentcache.geometry.like.trainer import SizeOptions
from latentcache.geometry.like.trainers import trainer_of
from latentcache.geometry.sizes import Size

#: Of ``TrainingSample.calculate_target_size`` at bc8e6ab, with the map of the table: side, step, 1 for squares and 2
#: for ``resolution_type = pixel``; then
#: (height, width) of the image, of its bucket and of the resized image.
VECTORS = json.loads((Path(__file__).parent / "simpletuner_vectors.json").read_text("utf-8"))
images = st.builds(Size, st.integers(64, 4096), st.integers(64, 4096))


@pytest.mark.parametrize("vector", VECTORS, ids=str)
def test_sizes_are_those_of_its_own_code(vector):
    side, step, kind, height, width, *expected = vector
    table = SimpleTunerTable(resolution=Size(side, side), step=step, buckets=kind != 1, by_edge=kind == 2)
    image = Size(height, width)
    bucket = table.nearest(image)
    resized = table.resized(image, bucket, upscale=True)
    assert [bucket.height, bucket.width, resized.height, resized.width] == expected


@given(image=images, side=st.integers(256, 2048), step=st.sampled_from([8, 16, 32, 64]))
def test_a_ratio_has_one_size_whatever_other_images_there_are(image, side, step):
    table = SimpleTunerTable(resolution=Size(side, side), step=step)
    bucket = table.nearest(image)
    assert bucket.fits(table.resized(image, bucket, upscale=True))
    ratio = round(bucket.width / bucket.height, 2)
    assert table.sizes.get(ratio, bucket) == bucket  # what the trainer finds in its map


@given(samples=st.integers(1, 99), batch=st.integers(1, 9), ranks=st.integers(1, 4))
def test_every_sample_is_in_a_batch_or_dropped(samples, batch, ranks):
    batches, short, dropped = SimpleTuner().batches(samples, batch, ranks)
    assert batches * batch - short + dropped == samples
    assert not (short and dropped)


def test_what_it_has_no_setting_for_is_named():
    options = {"resolutions": (512,), "buckets": (), "step": 64, "min_side": None, "max_side": None}
    with pytest.raises(RecipeError, match="no longest"):
        SimpleTuner().tables(SizeOptions(**options | {"max_side": 256}))
    with pytest.raises(RecipeError, match="one number as a resolution"):
        SimpleTuner().tables(SizeOptions(**options | {"resolutions": (), "buckets": (Size(512, 768),)}))
    with pytest.raises(RecipeError, match="SimpleTuner enlarges"):
        SimpleTuner().tables(SizeOptions(**options))[0].within(Size(64, 64))


def written(folder, backend, **general):
    backends = [
        {"id": "cats", "type": "local", "instance_data_dir": "cats", **backend},
        {"dataset_type": "text_embeds"},
    ]
    (folder / "multidatabackend.json").write_text(json.dumps(backends))
    (folder / "config.json").write_text(
        json.dumps(
            {f"--{name}": value for name, value in general.items()} | {"data_backend_config": "multidatabackend.json"}
        )
    )
    return folder / "config.json"


@pytest.mark.parametrize(
    ("backend", "general", "options"),
    [
        ({"resolution": 1024, "resolution_type": "pixel_area"}, {}, {"resolutions": (1024,), "bucket_step": 64}),
        ({}, {"aspect_bucket_alignment": 16}, {"resolutions": (1024,), "bucket_step": 16}),
        ({}, {"model_family": "sdxl", "aspect_bucket_alignment": 8}, {"resolutions": (1024,), "bucket_step": 64}),
        (
            {"resolution": 0.5, "resolution_type": "area", "crop": True},
            {},
            {"buckets": (Size(707, 707),), "bucket_step": 64},
        ),
        (
            {"resolution": 768, "resolution_type": "pixel", "crop": True},
            {},
            {"buckets": (Size(768, 768),), "bucket_step": 64},
        ),
        (
            {"resolution": 768, "resolution_type": "pixel"},
            {},
            {"resolutions": (768,), "bucket_step": 64, "min_side": 768},
        ),
    ],
)
def test_both_files_of_settings_are_read(tmp_path, backend, general, options):
    path = written(tmp_path, backend, **general)
    for file in (path, tmp_path / "multidatabackend.json") if not general else (path,):
        assert trainer_of(file, None).name == "simpletuner"
        settings = SimpleTuner().settings(file)
        assert settings.options == options
        assert settings.source["config"] == str(tmp_path / "multidatabackend.json")


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ({"vae_cache_disable": True}, "cats: vae_cache_disable = true"),
        ({"crop": True, "crop_aspect": "random"}, "cats: crop_aspect = random"),
        ({"crop": True, "crop_style": "corner"}, "cats: crop_style = corner"),
        ({"caption_shuffle": {"enable": True}}, "cats: caption_shuffle.enable = true"),
    ],
)
def test_what_forbids_cached_values_is_named(tmp_path, backend, expected):
    settings = SimpleTuner().settings(written(tmp_path, backend))
    assert (*settings.no_latents, *settings.no_text) == (expected,)


def test_what_is_not_followed_is_said(tmp_path):
    backend = {"crop": True, "minimum_image_size": 0.25}
    words = SimpleTuner().settings(written(tmp_path, backend)).words
    assert "minimum_image_size is not used" in words
    assert "crops are centered, crop_style is not used" in words
    assert "aspect_bucket_alignment 64 (default)" in words
    settings = SimpleTuner().settings(written(tmp_path, {}, aspect_bucket_rounding=3))
    assert settings.no_latents == ("aspect_bucket_rounding = 3",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[", "no JSON file"),
        ('[{"id": "t", "type": "local", "dataset_type": "text_embeds"}]', "no backend of images"),
        ('[{"id": "a", "type": "local", "resolution": "big"}]', "another form"),
        (
            '[{"id": "a", "type": "local"}, {"id": "b", "type": "local", "resolution_type": "pixel"}]',
            "several values of resolution or resolution_type",
        ),
        ('{"data_backend_config": "none.json"}', "none.json is not there"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, expected):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=expected):
        SimpleTuner().settings(path)

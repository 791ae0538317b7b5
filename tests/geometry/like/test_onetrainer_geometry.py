"""Sizes of OneTrainer: vectors of its own code, and its settings."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.like.onetrainer import OneTrainer, OneTrainerTable
from latentcache.geometry.like.trainer import SizeOptions
from latentcache.geometry.like.trainers import trainer_of
from latentcache.geometry.sizes import Size

#: Of ``AspectBucketing`` at mgds 3a6994a: resolution, step, then (height, width) of the image, its bucket and its
#: resized size.
VECTORS = json.loads((Path(__file__).parent / "onetrainer_vectors.json").read_text("utf-8"))
sides = st.integers(64, 4096)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: "-".join(map(str, vector[:4])))
def test_sizes_are_those_of_the_trainer(vector):
    resolution, step, height, width, *expected = vector
    table, image = OneTrainerTable(resolution=Size(resolution, resolution), step=step), Size(height, width)
    bucket = table.nearest(image)
    resized = table.resized(image, bucket, upscale=True)
    assert [bucket.height, bucket.width, resized.height, resized.width] == expected


@given(height=sides, width=sides, step=st.sampled_from([8, 16, 32, 64]), buckets=st.booleans())
def test_the_resized_image_covers_its_bucket(height, width, step, buckets):
    table = OneTrainerTable(resolution=Size(512, 512), step=step, buckets=buckets)
    image = Size(height, width)
    bucket = table.nearest(image)
    assert bucket.fits(table.resized(image, bucket, upscale=True))
    assert bucket.height % step == bucket.width % step == 0


def test_a_small_resolution_has_no_empty_bucket():
    assert OneTrainerTable(resolution=Size(64, 64)).nearest(Size(64, 400)) == Size(64, 128)


def test_options_that_it_does_not_have_are_named():
    table = OneTrainerTable(resolution=Size(512, 512))
    with pytest.raises(RecipeError, match="enlarges images"):
        table.within(Size(64, 64))
    sizes = SizeOptions(resolutions=(512,), buckets=(), step=64, min_side=128, max_side=None)
    with pytest.raises(RecipeError, match="no shortest side"):
        OneTrainer().tables(sizes)


def save(folder, concepts=None, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({"concept_file_name": "concepts.json", **values}), "utf-8")
    if concepts is not None:
        (folder / "concepts.json").write_text(json.dumps(concepts), "utf-8")
    return path


STILL = {"enable_crop_jitter": False}


def test_sizes_come_from_the_settings_file(tmp_path):
    path = save(tmp_path, [{"image": STILL}], model_type="STABLE_DIFFUSION_15")
    found = trainer_of(path, None).settings(path)
    assert found.options == {"bucket_step": 8, "resolutions": (512,), "flip": None}
    assert "resolution 512 (default)" in found.words
    assert found.no_latents == ()
    path = save(tmp_path, [], model_type="STABLE_DIFFUSION_XL_10_BASE", resolution="512, 768")
    assert OneTrainer().settings(path).options["resolutions"] == (512, 768)
    path = save(tmp_path, [], model_type="SANA", resolution="1000x512")
    assert OneTrainer().settings(path).options["buckets"] == (Size(512, 992),)
    path = save(tmp_path, [], resolution="500", aspect_ratio_bucketing=False)
    assert OneTrainer().settings(path).options["buckets"] == (Size(500, 500),)


def test_settings_that_forbid_a_cache_have_their_names(tmp_path):
    concepts = [{"name": "cats", "image": {"enable_random_hue": True}, "text": {"enable_tag_shuffling": True}}]
    path = save(tmp_path, concepts, latent_caching=False, text_encoder={"train": False}, text_encoder_layer_skip=1)
    found = OneTrainer().settings(path)
    assert found.no_latents == (
        "latent_caching = false",
        "concept cats: enable_crop_jitter = true",
        "concept cats: enable_random_hue = true",
    )
    assert found.no_text == ("text_encoder_layer_skip = 1", "concept cats: enable_tag_shuffling = true")
    path = save(tmp_path, [], text_encoder={"train": False}, model_type="STABLE_DIFFUSION_XL_10_BASE")
    assert OneTrainer().settings(path).no_text == ("text_encoder_2.train = true",)
    (tmp_path / "concepts.json").unlink()
    assert "concepts.json is not there" in OneTrainer().settings(path).words


@pytest.mark.parametrize(("text", "expected"), [("[]", "no file of OneTrainer"), ("{", "no JSON file")])
def test_other_files_are_named(tmp_path, text, expected):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=expected):
        OneTrainer().settings(path)
    with pytest.raises(UsageError, match="another form"):
        OneTrainer().settings(save(tmp_path, [], resolution="large"))

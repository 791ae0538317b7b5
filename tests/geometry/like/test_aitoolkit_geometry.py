"""Sizes of ai-toolkit: vectors of its own code, and its settings."""

import json
from pathlib import Path

import pytest
import yaml

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.like.aitoolkit import AiToolkit, AiToolkitTable
from latentcache.geometry.like.trainer import SizeOptions
from latentcache.geometry.like.trainers import trainer_of
from latentcache.geometry.sizes import Size

#: Of ``get_bucket_for_image_size`` at 27a03a9: side, step; then (height, width) of the image and of its bucket.
VECTORS = json.loads((Path(__file__).parent / "aitoolkit_vectors.json").read_text("utf-8"))


@pytest.mark.parametrize("vector", VECTORS, ids=str)
def test_sizes_are_those_of_its_own_code(vector):
    side, step, *sides = vector
    image, bucket = (Size(*sides[at : at + 2]) for at in (0, 2))
    table = AiToolkitTable(resolution=Size(side, side), step=step)
    assert table.nearest(image) == bucket
    assert bucket.fits(table.resized(image, bucket, upscale=True))


def test_squares_and_what_it_cannot_have():
    options = {"resolutions": (), "buckets": (Size(512, 512),), "step": 16, "min_side": None, "max_side": None}
    (table,) = AiToolkit().tables(SizeOptions(**options))
    assert table.nearest(Size(100, 900)) == Size(512, 512)
    assert table.resized(Size(100, 900), Size(512, 512), upscale=True) == Size(512, 4608)
    with pytest.raises(RecipeError, match="one number as a resolution"):
        AiToolkit().tables(SizeOptions(**options | {"buckets": (Size(512, 768),)}))
    with pytest.raises(RecipeError, match="no shortest side"):
        AiToolkit().tables(SizeOptions(**options | {"min_side": 256}))


def job(path, *datasets, model=None, **process):
    process |= {"model": model or {"is_flux": True}, "datasets": [{"folder_path": "x", **each} for each in datasets]}
    path.write_text(yaml.safe_dump({"job": "extension", "config": {"process": [process]}}))
    return path


@pytest.mark.parametrize(
    ("dataset", "model", "options"),
    [
        ({"resolution": [512, 768]}, None, {"resolutions": (512, 768), "bucket_step": 32, "flip": None}),
        ({"flip_x": True}, {"arch": "sdxl"}, {"resolutions": (512,), "bucket_step": 16, "flip": True}),
        ({"square_crop": True}, {"arch": "wan21:t2v"}, {"buckets": (Size(512, 512),), "bucket_step": 16}),
    ],
)
def test_settings_are_read(tmp_path, dataset, model, options):
    path = job(tmp_path / "job.yaml", dataset, model=model, train={"batch_size": 3}, trigger_word="ohwx")
    assert trainer_of(path, None).name == "ai-toolkit"
    settings = AiToolkit().settings(path)
    assert options.items() <= settings.options.items()
    assert settings.batch == 3
    assert "trigger_word 'ohwx'" in settings.words


def test_what_forbids_a_cache_is_named(tmp_path):
    dataset = {"random_crop": True, "flip_y": True, "num_frames": 41, "scale": 0.5, "shuffle_tokens": True}
    settings = AiToolkit().settings(job(tmp_path / "job.yaml", dataset, train={"train_text_encoder": True}))
    assert settings.no_latents == ("random_crop = true", "flip_y = true", "scale = 0.5", "num_frames: videos")
    assert settings.no_text == ("shuffle_tokens = true", "train_text_encoder = true")
    with pytest.raises(UsageError, match="several values of resolution"):
        AiToolkit().settings(job(tmp_path / "job.yaml", {"resolution": 512}, {"resolution": 768}))
    (tmp_path / "job.yaml").write_text("config: [")
    with pytest.raises(UsageError, match="no YAML file"):
        AiToolkit().settings(tmp_path / "job.yaml")

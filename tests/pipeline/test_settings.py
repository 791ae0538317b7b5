from pathlib import Path

import pytest

from latentcache import recipe
from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.pipeline.settings import POSTERIORS, BuildSettings, RecipeSettings


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"alpha": "white"}, "no colour"),
        ({"storage_dtype": "int8"}, "--storage-dtype"),
        ({"compute_dtype": "half"}, "--compute-dtype"),
        ({"resample": "bicubic"}, "--resample"),
        ({"icc": "adobe"}, "--icc"),
        ({"buckets": (Size(64, 64),), "resolutions": (64,)}, "--bucket"),
    ],
)
def test_settings_that_cannot_be_are_refused(said, word):
    with pytest.raises(UsageError, match=word) as caught:
        RecipeSettings(**said)
    assert caught.value.fix


@pytest.mark.parametrize("name", ["batch_size", "decode_threads", "host_memory", "max_pixels", "commit_every"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one_are_refused(name, value):
    with pytest.raises(UsageError, match=name.replace("_", "-")):
        BuildSettings(data=Path("data"), **{name: value})


def test_the_cache_lies_beside_the_data(tmp_path):
    assert BuildSettings(data=tmp_path / "cats").cache == tmp_path / "cats.latentcache"
    assert BuildSettings(data=tmp_path / "cats" / ".." / "dogs").cache == tmp_path / "dogs.latentcache"
    assert BuildSettings(data=tmp_path / "cats", out=tmp_path / "x").cache == tmp_path / "x"


def test_the_data_may_be_given_as_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert BuildSettings(data=Path()).cache == tmp_path.with_name(tmp_path.name + ".latentcache")


def test_the_kinds_of_latents_are_those_of_a_recipe():
    assert POSTERIORS == recipe.POSTERIORS
    with pytest.raises(UsageError, match="--latents 'mean' is not known"):
        RecipeSettings(latents="mean")

from dataclasses import replace

import pytest
from small_builds import RECIPE
from tiny_vae import tiny_vae

from latentcache.encoders.protocol import Precision
from latentcache.errors import LatentcacheError, RecipeError, UnsupportedModelError
from latentcache.geometry.sizes import Size
from latentcache.pipeline.recipes import (
    DEFAULT_RESOLUTION,
    DEFAULT_STEP,
    found_precision,
    requested_recipe,
    resolve_recipe,
)
from latentcache.pipeline.settings import BuildSettings, RecipeSettings


def resolved(cached=None, cached_model=None, **said):
    return resolve_recipe(RecipeSettings(**said), cached, cached_model=cached_model, has_cuda=False)


def test_a_new_cache_gets_the_defaults():
    recipe, description = resolved()
    assert description.kind == "demo"
    assert recipe.geometry.resolutions == (DEFAULT_RESOLUTION,)
    assert recipe.geometry.multiple == DEFAULT_STEP
    assert (recipe.encoder.storage_dtype, recipe.pixels.alpha, recipe.pixels.icc) == ("float16", "#ffffff", "srgb")
    assert recipe.pixels.resample == "lanczos-pil"  # torch is not loaded for an encoder that does without it


@pytest.mark.parametrize(
    "said",
    [
        {"model": "stub", "resolutions": (256, 512), "bucket_step": 32, "alpha": "#102030"},
        {"model": "stub", "storage_dtype": "float32", "icc": "ignore"},
        {"model": "stub", "latents": "moments"},
        {"model": "stub", "buckets": (Size(64, 96),), "resample": "lanczos-u8"},
        {"model": "stub", "min_side": 320, "max_side": 768},
    ],
)
def test_what_is_not_said_follows_the_cache(said):
    first, _ = resolved(**said)
    assert resolved(first, "stub")[0] == first
    assert resolved(first, "stub", **said)[0] == first


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"storage_dtype": "bfloat16"}, "encoder.storage_dtype"),
        ({"alpha": "#000000"}, "pixels.alpha"),
        ({"latents": "moments"}, "encoder.posterior"),
        ({"icc": "ignore"}, "pixels.icc"),
        ({"resample": "lanczos-u8"}, "pixels.resample"),
        ({"resolutions": (128,)}, "geometry.resolutions"),
    ],
)
def test_what_is_said_wins_and_changes_nothing_else(changed, path):
    first, _ = resolved(model="stub")
    second, _ = resolved(first, "stub", **changed)
    part, name = path.split(".")
    assert getattr(getattr(second, part), name) == next(iter(changed.values()))
    restored = replace(getattr(second, part), **{name: getattr(getattr(first, part), name)})
    assert restored == getattr(first, part)
    assert requested_recipe(RecipeSettings(**changed), first) == second


def test_auto_means_what_the_cache_has():
    first, _ = resolved(model="stub", resample="lanczos-u8")
    assert resolved(first, "stub", resample="auto", compute_dtype="auto")[0] == first


def test_another_model_keeps_the_rest():
    first, _ = resolved(model="stub", resolutions=(256,), alpha="#112233")
    second, description = resolved(first, "stub", model="demo")
    assert description.kind == "demo"
    assert (second.geometry, second.pixels) == (first.geometry, first.pixels)
    assert second.encoder.family != first.encoder.family


def test_a_list_of_buckets_is_its_own_grid_in_a_new_cache_and_in_an_old_one():
    buckets = (Size(72, 88),)
    assert resolved(model="stub", buckets=buckets)[0].geometry.multiple == 8
    cached, _ = resolved(model="stub", resolutions=(512,))
    recipe, _ = resolved(cached, "stub", buckets=buckets)
    assert (recipe.geometry.multiple, recipe.geometry.resolutions, recipe.geometry.buckets) == (8, (), buckets)


def test_back_from_a_list_to_a_resolution_the_usual_grid_comes_back():
    cached, _ = resolved(model="stub", buckets=(Size(72, 88),))
    recipe, _ = resolved(cached, "stub", resolutions=(512,))
    assert (recipe.geometry.multiple, recipe.geometry.buckets) == (DEFAULT_STEP, ())


def test_the_grid_holds_the_multiple_of_the_model():
    assert resolved(model="stub", resolutions=(512,), bucket_step=20)[0].geometry.multiple == 40


@pytest.mark.parametrize("said", [{"bucket_step": 0}, {"resolutions": (16,)}, {"buckets": (Size(60, 64),)}])
def test_geometry_that_leaves_no_bucket_is_refused(said):
    with pytest.raises(RecipeError) as caught:
        resolved(model="stub", **said)
    assert caught.value.fix


def test_an_unknown_model_is_an_error_that_says_so(tmp_path):
    with pytest.raises(LatentcacheError) as caught:
        resolved(model=str(tmp_path / "nothing"))
    assert caught.value.exit_code == 2


def test_the_recipe_of_these_tests_is_a_new_one():
    assert RECIPE.bucket_step == 32


def test_auto_precision_is_asked_once_and_kept_by_the_cache(tmp_path):
    model, asked = str(tiny_vae(tmp_path / "model")), []

    def find(description):
        asked.append(description.kind)
        return "bfloat16"

    def resolve(cached, *, has_cuda=True, **said):
        settings = RecipeSettings(model=model, **said)
        return resolve_recipe(settings, cached, cached_model=None, has_cuda=has_cuda, auto_compute=find)

    first, description = resolve(None)
    assert (first.encoder.compute_dtype, description.spec) == ("bfloat16", first.encoder)
    assert asked == ["diffusers"]
    assert resolve(first)[0] == resolve(first, has_cuda=False)[0] == resolve(first, compute_dtype="auto")[0] == first
    assert resolve(first, compute_dtype="float32")[0].encoder.compute_dtype == "float32"
    assert resolve(None, compute_dtype="float16")[0].encoder.compute_dtype == "float16"
    assert resolve(None, has_cuda=False)[0].encoder.compute_dtype == "float32"
    assert len(asked) == 1


def test_a_probe_that_fails_says_why(tmp_path):
    told, asked = [], []

    def ask(description, fold):
        asked.append((description, fold))
        return Precision(compute_dtype="bfloat16", why="too wide")

    find = found_precision(BuildSettings(data=tmp_path, fold=False), ask, told.append)
    assert find("a model") == "bfloat16"
    assert told == ["computing in bfloat16: too wide"]
    assert asked == [("a model", False)]


def test_tiles_are_another_recipe_and_kept_by_the_cache(tmp_path):
    model = str(tiny_vae(tmp_path / "model"))
    whole, _ = resolved(model=model)
    tiled, _ = resolved(model=model, tiling=True)
    assert tiled.encoder.tiling
    assert tiled.recipe_id != whole.recipe_id
    assert resolved(tiled, model)[0] == tiled
    assert resolved(tiled, model, tiling=False)[0] == whole
    assert requested_recipe(RecipeSettings(tiling=False), tiled).encoder.tiling is False
    assert requested_recipe(RecipeSettings(), tiled) == tiled
    assert not resolved(tiled, model, model="demo")[0].encoder.tiling


def test_tiles_of_another_size_are_another_recipe(tmp_path):
    model = tiny_vae(tmp_path / "model")
    ids = {resolved(model=str(model), tiling=tiling)[0].recipe_id for tiling in (False, True)}
    config = model / "config.json"
    config.write_text(config.read_text().replace('"sample_size": 32', '"sample_size": 64'))
    others = {resolved(model=str(model), tiling=tiling)[0].recipe_id for tiling in (False, True)}
    assert len(ids & others) == 1  # without tiles the size of one says nothing
    assert len(ids | others) == 3


@pytest.mark.parametrize("model", ["demo", "stub"])
def test_an_encoder_without_tiles_refuses_them(model):
    with pytest.raises(UnsupportedModelError) as caught:
        resolved(model=model, tiling=True)
    assert caught.value.slug == "no-tiling"

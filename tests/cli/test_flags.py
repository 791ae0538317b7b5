import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.cli import flags
from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.pipeline.settings import RecipeSettings


def test_nothing_said_is_nothing():
    settings = flags.recipe_settings()
    assert settings == RecipeSettings()
    assert not flags.any_said(settings)
    assert flags.as_words(settings) == ""


def test_what_was_said_is_said():
    settings = flags.recipe_settings(
        model="stub",
        model_config=Path("c.json"),
        bucket=["64x96"],
        bucket_step=8,
        min_side=32,
        max_side=128,
        compute_dtype="auto",
        storage_dtype="float32",
        resample="auto",
        icc="ignore",
        alpha="#000000",
    )
    assert flags.any_said(settings)
    assert (settings.model, settings.model_config, settings.buckets) == ("stub", "c.json", (Size(64, 96),))
    assert (settings.bucket_step, settings.min_side, settings.max_side) == (8, 32, 128)


@pytest.mark.parametrize(("flip", "words"), [(None, ""), (True, "--flip"), (False, "--no-flip")])
def test_a_switch_is_said_without_a_value(flip, words):
    settings = flags.recipe_settings(flip=flip)
    assert flags.as_words(settings) == words
    assert flags.any_said(settings) == (flip is not None)


def test_a_resolution_counts_once():
    settings = flags.recipe_settings(resolution=[512, 768, 512])
    assert settings.resolutions == (512, 768)
    assert flags.as_words(settings) == "--resolution 512 --resolution 768"


def test_words_are_those_of_the_command_line(run, data):
    """What ``as_words`` writes, ``build`` takes."""
    settings = flags.recipe_settings(
        model="stub",
        bucket=["64x96", "96x64"],
        bucket_step=8,
        min_side=32,
        max_side=128,
        flip=True,
        latents="moments",
        compute_dtype="float32",
        storage_dtype="float32",
        resample="lanczos-pil",
        icc="ignore",
        alpha="#00ff00",
    )
    done = run("build", data, "--out", data.with_name("c"), *shlex.split(flags.as_words(settings)), "--json")
    recipe = done.json["recipe"]
    assert recipe["geometry"]["buckets"] == [[64, 96], [96, 64]]
    assert (recipe["geometry"]["min_side"], recipe["geometry"]["max_side"]) == (32, 128)
    assert (recipe["encoder"]["storage_dtype"], recipe["pixels"]["alpha"]) == ("float32", "#00ff00")


@given(st.integers(1, 99999), st.integers(1, 99999))
def test_sizes_are_height_by_width(height, width):
    assert flags.parse_size(f"{height}x{width}") == Size(height, width)


@pytest.mark.parametrize(
    "text", ["", "64", "64x", "x64", "0x64", "64x0", "-64x64", "64X64", "64x64x3", "1e3x64", "٦٤x٦٤"]
)
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="is no size") as caught:
        flags.parse_size(text)
    assert caught.value.fix == "--bucket 704x1152"


@pytest.mark.parametrize(
    ("text", "samples", "allowed"),
    [("0", 9, 0), ("3", 1, 3), ("0%", 100, 0), ("1%", 99, 0), ("1%", 100, 1), ("2.3%", 1000, 23), ("100%", 7, 7)],
)
def test_allowed_failures(text, samples, allowed):
    assert flags.parse_allowed(text, samples) == allowed


@given(st.integers(0, 1000), st.integers(1, 10**6))
def test_a_share_is_exact(tenths, samples):
    assert flags.parse_allowed(f"{tenths / 10}%", samples) == tenths * samples // 1000


@pytest.mark.parametrize("text", ["", "few", "-1", "1.5", "1 %", "%", "1%%", "9" * 5000, "٣"])
def test_what_is_no_number_of_failures(text):
    with pytest.raises(UsageError, match="is no number"):
        flags.parse_allowed(text, 10)


@pytest.mark.parametrize(
    ("words", "slug", "what"),
    [
        (["--bucket", "64"], "usage", "--bucket '64' is no size"),
        (["--bucket", "60x64"], "recipe", "bucket 60x64 does not fit the grid of 8 pixels"),
        (["--bucket", "64x64", "--resolution", "64"], "usage", "--bucket and --resolution were both given"),
        (["--resolution", "0"], "recipe", "resolution 0 is below "),
        (["--resolution", "-64"], "recipe", "resolution -64 is below "),
        (["--bucket-step", "0"], "recipe", "--bucket-step 0 is below 1"),
        (["--min-side", "512", "--max-side", "64"], "recipe", "no bucket has sides of 512 to 64"),
        (["--alpha", "white"], "usage", "--alpha 'white' is no colour"),
        (["--icc", "p3"], "usage", "--icc 'p3' is not known"),
        (["--resample", "bicubic"], "usage", "--resample 'bicubic' is not known"),
        (["--storage-dtype", "fp8"], "usage", "--storage-dtype 'fp8' is not known"),
        (["--compute-dtype", "half"], "usage", "--compute-dtype 'half' is not known"),
        (["--model", "stub:delay=1"], "usage", "unknown option of the stub encoder: delay=1"),
    ],
)
@pytest.mark.parametrize("command", ["build", "verify"])
def test_flags_that_cannot_be_are_refused_in_words(run, shared, tmp_path, command, words, slug, what):
    new = tmp_path / "new"
    target = [shared[0], "--out", new, "--model", "stub"] if command == "build" else [shared[1]]
    done = run(command, *target, *words, "--json")
    assert (done.status, done.error["slug"]) == (2, slug)
    assert what in done.error["what"]
    assert done.error["fix"]
    assert not new.exists()

"""``plan --compare``: our buckets, as given and planned, beside those of every trainer."""

import shutil

import numpy as np
import pytest
from small_cache import SMALL, draw

from latentcache.geometry.like.trainers import TRAINERS

WORDS = (*SMALL, "--compare", "--batch-size")


@pytest.fixture
def images(tmp_path):
    sizes = np.random.default_rng(0).integers(60, 120, (30, 2)).tolist()
    for number, size in enumerate(sizes):
        draw(tmp_path / "images" / f"{number:02}.png", size, seed=number)
    return tmp_path / "images"


def rows(done):
    """The rows by name; kohya takes no resolution of 64."""
    return {row["name"]: row for row in done.json["compare"] if "why" not in row}


def reasons(done):
    return {row["name"]: row["why"] for row in done.json["compare"] if "why" in row}


@pytest.mark.parametrize("remainder", ["repeat", "drop", "partial", "pad"])
def test_the_row_as_given_is_the_plan_of_the_loader(run, images, remainder):
    done = run("plan", images, *WORDS, 8, "--world-size", 2, "--remainder", remainder, "--json")
    row, plan = rows(done)["as given"], done.json
    assert row["used"] == plan["samples_used"]
    assert row["repeated"] == plan["samples_repeated"]
    assert row["dropped"] == plan["samples_dropped"]
    assert row["steps_per_epoch"] == plan["steps_per_epoch"]
    assert row["shapes"] == sum(bucket["batches"] > 0 for bucket in plan["buckets"])


def test_rows_of_trainers_are_those_of_for(run, images):
    done = run("plan", images, *WORDS, 4, "--grad-accum", 2, "--epochs", 3, "--json")
    assert [row["name"] for row in done.json["compare"]] == ["as given", "planned", *TRAINERS]
    for name in sorted({*rows(done)} - {"as given", "planned"}):
        alone = run("plan", images, *SMALL, "--batch-size", 4, "--grad-accum", 2, "--for", name, "--json").json
        row, plan = rows(done)[name], alone["trainer"]
        assert row["dropped"] == plan["samples_dropped"]
        assert row["repeated"] + row["unfilled"] == plan["samples_short"]
        assert (row["cropped"], row["steps_per_epoch"]) == (plan["cropped"], plan["steps_per_epoch"])
        batches = plan["batches_per_epoch"]
        assert row["steps"] == (batches * 3 // 2 if name == "onetrainer" else 3 * plan["steps_per_epoch"])


def test_the_image_that_loses_most_is_named(run, images):
    draw(images / "wide.png", (64, 600), seed=99)
    done = run("plan", images, *WORDS, 4, "--json")
    for row in rows(done).values():
        assert row["worst"][0] == "wide.png"
        assert row["cropped_most"] > 0.1
    assert "wide.png" in run("plan", images, *WORDS, 4).out


def test_a_range_of_batch_sizes_shows_what_each_loses(run, images):
    done = run("plan", images, *WORDS, "1..6", "--json").json
    by_size = {entry["batch_size"]: entry["lost"] for entry in done["by_batch_size"]}
    assert list(by_size) == [1, 2, 3, 4, 5, 6]
    assert set(by_size[1].values()) == {0}
    assert by_size[6] == {row["name"]: row["lost"] for row in done["compare"] if "why" not in row}
    alone = rows(run("plan", images, *WORDS, 3, "--json"))
    assert by_size[3] == {name: row["lost"] for name, row in alone.items()}
    assert "by batch size:" in run("plan", images, *WORDS, "1..6").out


def test_a_cache_is_compared_like_its_images(run, images, tmp_path):
    run("build", images, *SMALL, "--out", tmp_path / "cache")
    of_cache = run("plan", tmp_path / "cache", *WORDS, 4, "--json")
    assert rows(of_cache) == rows(run("plan", images, *WORDS, 4, "--json"))
    wide = rows(run("plan", tmp_path / "cache", *WORDS, 4, "--max-crop", 40, "--json"))
    assert wide["planned"] == rows(run("plan", images, *WORDS, 4, "--max-crop", 40, "--json"))["planned"]


def test_rows_that_cannot_be_compared_say_why(run, images):
    done = run("plan", images, *WORDS, 4, "--min-side", 48, "--json")
    assert "OneTrainer has no shortest side" in reasons(done)["onetrainer"]
    assert rows(done)["kohya"]["used"] == 30
    done = run("plan", images, "--model", "stub", "--bucket", "64x64", "--compare", "--batch-size", 4, "--json")
    assert "not with planned buckets" in reasons(done)["planned"]
    assert "not compared: " in run("plan", images, *WORDS, 4, "--min-side", 48).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "0..4", "--compare"), "--batch-size=0..4: must be a whole number from 1, or a range"),
        (("--batch-size", "4..1", "--compare"), "--batch-size=4..1"),
        (("--batch-size", "1..999", "--compare"), "--batch-size=1..999"),
        (("--batch-size", "1..4"), "--batch-size=1..4: must be a whole number from 1"),
        (("--batch-size", "x"), "--batch-size=x"),
        (("--batch-size", "4", "--epochs", "3"), "--epochs=3: only with --compare"),
        (("--batch-pixels", "100000", "--compare"), "--compare: trainers have one batch size"),
    ],
)
def test_batch_sizes_that_are_not_allowed(run, images, words, message):
    error = run("plan", images, *SMALL, *words, "--json").error
    assert message in error["what"]


# Numbers for data that is hard to plan: never an empty epoch.


def test_one_extreme_ratio_costs_one_batch(run, images):
    draw(images / "long.png", (64, 1500), seed=99)
    planned = rows(run("plan", images, *WORDS, 4, "--json"))["planned"]
    assert (planned["used"], planned["dropped"], planned["unused"]) == (30, 0, 1), "a build rejects it"
    done = run("build", images, *SMALL, "--plan-buckets", 4, "--out", images.parent / "cache", "--allow-failed", 1)
    assert done.status == 0
    assert "extreme-aspect" in done.err + done.out


def test_repeats_of_the_data_set_count(run, tmp_path):
    for number in range(6):
        draw(tmp_path / "data" / ("3_cats", "1_dogs")[number % 2] / f"{number}.png", (90, 60), seed=number)
    row = rows(run("plan", tmp_path / "data", *WORDS, 4, "--json"))["planned"]
    assert (row["used"], row["repeated"], row["steps_per_epoch"]) == (12, 0, 3)


def test_masks_of_another_size_follow_their_image(run, images, tmp_path):
    shutil.copytree(images, tmp_path / "data" / "photos")
    for path in images.iterdir():
        draw(tmp_path / "data" / "masks" / path.name, (70, 70))
    options = ("--masks", "masks", *WORDS, 8, "--json")
    assert rows(run("plan", tmp_path / "data", *options)) == {
        name: row | {"worst": [f"photos/{path}" for path in row["worst"]]}
        for name, row in rows(run("plan", images, *WORDS, 8, "--json")).items()
    }


def test_limits_that_contradict_get_the_table_that_costs_least(run, images):
    planned = rows(run("plan", images, *WORDS, 8, "--max-crop", 0, "--max-buckets", 1, "--json"))["planned"]
    assert (planned["shapes"], planned["used"], planned["repeated"]) == (1, 30, 2)
    assert planned["cropped_most"] > 0.2 > planned["max_crop"] == 0
    words = (*WORDS, 8, "--max-buckets", 1)
    assert "planned: more than 15% of an image is cut off: raise --max-crop" in run("plan", images, *words).out


def test_data_without_a_usable_image(run, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_text("no image")
    done = run("plan", tmp_path / "data", *WORDS, 4)
    assert done.status == 1
    assert "there are no samples" in done.err
    assert "needs 0 samples" not in done.err

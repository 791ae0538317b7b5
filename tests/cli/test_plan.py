import shlex

import pytest
from small_cache import SMALL, draw


@pytest.mark.parametrize("policy", ["repeat", "drop", "partial"])
@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_folder_and_cache_give_the_same_plan(run, shared, policy, batch_size, world_size):
    data, cache = shared
    words = ["--batch-size", batch_size, "--world-size", world_size, "--remainder", policy, "--json"]
    of_cache = run("plan", cache, *words).json
    of_data = run("plan", data, *SMALL, *words).json
    assert {**of_cache, "path": ""} == {**of_data, "path": ""}


def test_a_sample_that_two_fields_reject_counts_once(run, data, tmp_path):
    words, plan = (*SMALL, "--text-encoder", "stub"), ("--batch-size", "1", "--json")
    assert run("plan", data, *words, *plan).json["quarantined"] == 1, "p3.png has no caption"
    assert run("build", data, *words, "--out", tmp_path / "cache", "--allow-failed", "1").status == 0
    assert run("plan", tmp_path / "cache", *plan).json["quarantined"] == 1


def test_a_missing_batch_size_is_named_with_a_command(run, shared):
    error = run("plan", shared[1], "--world-size", 2, "--json").error
    assert error["what"] == "Missing option '--batch-size'"
    assert error["fix"].endswith(f"plan {shared[1]} --batch-size 8")
    assert run(*shlex.split(error["fix"])[1:]).status == 0


def test_an_empty_cache_is_not_a_data_folder(run, tmp_path):
    (tmp_path / "builder.lock").touch()
    done = run("plan", tmp_path, "--batch-size", "1", "--json")
    assert (done.status, done.error["slug"]) == (3, "cache-not-found")


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_optimizer_steps_are_rounded_up(run, shared, accumulation, steps):
    cache = shared[1]
    value = run("plan", cache, "--batch-size", "1", "--grad-accum", accumulation, "--json").json
    assert (value["batches_per_epoch"], value["steps_per_epoch"]) == (4, steps)


def test_unusable_files_are_counted_separately(run, data):
    (data / "bad.png").write_bytes(b"")
    (data / "tiny.png").write_bytes(draw(data / "t" / "t.png", (8, 8)).read_bytes())
    done = run("plan", data, *SMALL, "--batch-size", "1")
    assert "4 steps per epoch at batch size 1 on 1 rank: 4 samples used" in done.out
    assert "3 rejected samples not counted: `latentcache build` lists them" in done.out
    assert run("plan", data, *SMALL, "--batch-size", "1", "--json").json["quarantined"] == 3


def test_an_image_repeated_to_a_full_batch_is_reported(run, shared):
    cache = shared[1]
    done = run("plan", cache, "--batch-size", 8)
    assert (
        "warning: bucket 80x48 has 1 sample (p1.png) and repeats it 8 times in an epoch to fill a batch" in done.out
    )
    assert "  fix: --remainder partial or drop, a smaller --batch-size, or fewer buckets" in done.out
    value = run("plan", cache, "--batch-size", 8, "--json").json
    assert sorted(bucket["copies"] for bucket in value["buckets"]) == [4, 8, 8]
    assert len(value["overfilled"]) == 2
    assert run("plan", cache, "--batch-size", 4, "--json").json["overfilled"] == []
    assert "warning" not in run("plan", cache, "--batch-size", 8, "--remainder", "partial").out


def test_simpletuner_fills_batches_of_images_that_are_repeated_as_often(run, tmp_path):
    for folder, count in (("2_cats", 3), ("2_dogs", 3), ("1_birds", 5)):
        for number in range(count):
            draw(tmp_path / "data" / folder / f"{number}.png", (64, 64), seed=number)
    options = ("plan", tmp_path / "data", "--model", "stub", "--resolution", "64", "--batch-size", "4", "--json")
    batches = {
        name: run(*options, "--for", name, "--bucket-step", "64").json["trainer"]["batches_per_epoch"]
        for name in ("simpletuner", "onetrainer")
    }
    assert batches == {"simpletuner": 5, "onetrainer": 4}


def test_a_budget_of_pixels_shows_the_batches_of_each_bucket(run, data, tmp_path):
    run("build", data, *SMALL, "--out", tmp_path / "cache", "--allow-failed", "9")
    options = ("--batch-pixels", 2 * 4096, "--world-size", 2)
    of_cache = run("plan", tmp_path / "cache", *options, "--json").json
    assert {**of_cache, "path": ""} == {**run("plan", data, *SMALL, *options, "--json").json, "path": ""}
    assert (of_cache["batch_size"], of_cache["batch_pixels"], of_cache["multiple_of"]) == (None, 8192, 2)
    largest = of_cache["largest_batch"]
    for bucket in of_cache["buckets"]:
        pixels = bucket["batch_size"] * bucket["height"] * bucket["width"]
        assert (2 * pixels <= 8192, pixels <= largest["pixels"]) == (True, True)
        assert bucket["batch_bytes"] == pixels // 64 * 4 * 2, "4 channels of float16, 8 pixels to a side"
    assert largest["cells"] * 64 == largest["pixels"]
    text = run("plan", tmp_path / "cache", *options).out
    assert "per epoch with up to 8,192 pixels on 2 ranks" in text
    assert f"largest batches of a rank: {largest['samples']} samples" in text


def test_a_budget_that_fits_no_batch_names_one_that_does(run, shared):
    error = run("plan", shared[1], "--batch-pixels", 100, "--json").error
    fix = error["fix"].partition(",")[0]
    assert run("plan", shared[1], *fix.split()).status == 0
    assert (
        run("plan", shared[1], "--batch-tokens", 99, "--json").error["what"]
        == "--batch-tokens=99: the samples have no tokens"
    )
    both = run("plan", shared[1], "--batch-size", 2, "--batch-pixels", 10**6, "--json")
    assert "exclude each other" in both.error["what"]

"""OneTrainer: buckets hold fewer images than a batch, so epochs have no steps and nothing trains.

OneTrainer gives no step for a bucket smaller than a batch, and does not report it. Here the plan is computed before
the model is loaded: by default every image is used, and an epoch without steps is rejected with buckets, counts and
fixes. The first two tests fail if ``remainder="drop"`` is the default, the next two if ``require_steps`` accepts an
empty epoch. Two are for those who stay with OneTrainer: its own count, the setting that mends it, and a folder that
it trains from; ``tests/peers`` trains an epoch with it.
"""

import json
from collections import Counter

import pytest
import torch
from small_cache import SMALL, draw
from trained_steps import train

from latentcache import open_cache
from latentcache.errors import EmptyPlanError

pytestmark = pytest.mark.filterwarnings("ignore:bucket .* in an epoch to fill a batch")
SHAPES = [(96, 64), (64, 96), (80, 80), (128, 40), (40, 128)]


@pytest.fixture
def scattered(run, tmp_path):
    """Five images in five buckets: no two fit into one batch."""
    for number, size in enumerate(SHAPES):
        draw(tmp_path / "data" / f"{number}.png", size, seed=number)
    done = run("build", tmp_path / "data", *SMALL, "--out", tmp_path / "cache")
    assert done.status == 0
    return tmp_path / "cache"


def test_every_image_is_trained_on_though_no_bucket_fills_a_batch(scattered):
    batches = list(open_cache(scattered).loader(batch_size=4))
    assert len(batches) == 5
    assert {name for batch in batches for name in batch["names"]} == {f"{n}.png" for n in range(5)}
    assert all(batch["latents"].shape[0] == 4 for batch in batches)
    assert train(batch["latents"] for batch in batches) == 5


def test_an_epoch_of_zero_steps_is_rejected_with_buckets_counts_and_fixes(run, scattered):
    done = run("plan", scattered, "--batch-size", "4", "--remainder", "drop", "--json")
    assert (done.status, done.json["steps_per_epoch"], done.json["samples_dropped"]) == (1, 0, 5)
    assert done.error["slug"] == "plan-empty"
    assert "0 steps per epoch" in done.error["what"]
    assert done.error["where"].count(": 1") == 5
    assert "--remainder=repeat, or more data" in done.error["fix"]
    text = run("plan", scattered, "--batch-size", "4", "--remainder", "drop").out
    assert "0 steps per epoch at batch size 4" in text


def test_the_reader_rejects_it_as_well(scattered):
    with pytest.raises(EmptyPlanError, match="0 steps per epoch"):
        open_cache(scattered).loader(batch_size=4, remainder="drop")


def test_the_trainers_own_count_is_known_before(run, scattered):
    data = scattered.with_name("data")
    words = ("--for", "onetrainer", "--resolution", "64", "--bucket-step", "8", "--suggest")
    done = run("plan", data, "--batch-size", "4", *words, "--json")
    theirs, suggestion = done.json["trainer"], done.json["suggestion"]
    assert (theirs["steps_per_epoch"], theirs["samples_dropped"]) == (0, 5)
    assert all((bucket["samples"], bucket["batches"], bucket["dropped"]) == (1, 0, 1) for bucket in theirs["buckets"])
    assert (suggestion["change"], suggestion["steps_per_epoch"]) == ("batch_size = 1", 5)
    text = run("plan", data, "--batch-size", "4", *words).out
    assert "onetrainer trains nothing and reports nothing: no bucket fills a batch" in text


def test_from_images_to_a_folder_that_it_trains_from(run, scattered, tmp_path):
    concept = {"image": {"enable_crop_jitter": False}}
    values = {
        "model_type": "STABLE_DIFFUSION_15",
        "resolution": "64",
        "batch_size": 4,
        "aspect_ratio_bucketing": True,
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**values, "concepts": [concept]}))
    words = ("--model", "stub", "--trainer-config", config, "--out", tmp_path / "like")
    assert run("build", tmp_path / "data", *words).status == 0
    export = (
        "export",
        tmp_path / "like",
        tmp_path / "out",
        "--to",
        "onetrainer",
        "--trainer-config",
        config,
        "--json",
    )
    assert any("5 samples of an epoch fill no batch" in line for line in run(*export).json["advice"])
    config.write_text(json.dumps({**values, "batch_size": 1, "concepts": [concept]}))
    assert not any("fill no batch" in line for line in run(*export).json["advice"])
    (listing,) = (tmp_path / "out").glob("cache/image/*/variation-0/aggregate.pt")
    counts = Counter(entry["crop_resolution"] for entry in torch.load(listing, weights_only=True))
    # As its ``AspectBatchSorting`` counts the batches of a bucket.
    assert [sum(int(count / size) for count in counts.values()) for size in (4, 1)] == [0, 5]
    files = [listing.with_name(f"{number}.pt") for number in range(5)]
    assert train(torch.load(file, weights_only=True)["latent_image"][None] for file in files) == 5


def test_ranks_count_too(run, scattered):
    """Two ranks need two batches of one bucket in the same step."""
    words = ["--batch-size", "1", "--world-size", "2", "--remainder", "drop"]
    assert run("plan", scattered, *words).status == 1
    loaders = [open_cache(scattered).loader(batch_size=1, rank=rank, world_size=2) for rank in (0, 1)]
    steps = list(zip(*loaders, strict=True))
    assert len(steps) == 5
    assert all(first["latents"].shape == second["latents"].shape for first, second in steps)

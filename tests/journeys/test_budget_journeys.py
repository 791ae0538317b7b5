"""Batches by budget from real builds: text embeddings, videos, and data that is hard to batch."""

import json
import warnings

import pytest
from commands import look, noise
from made_videos import write_video

from latentcache import combine, open_cache

IMAGES = ("--model", "stub", "--resolution", "64", "--bucket-step", "8")


@pytest.fixture
def captioned(tmp_path):
    for number in range(7):
        path = tmp_path / "data" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(noise(number, 64, 64))
        path.with_suffix(".txt").write_text(f"caption number {number}")
    return tmp_path / "data"


def build(data, cache, *words):
    done = look("build", data, "--out", cache, *words, "--json")
    assert done.status == 0, done.err
    return open_cache(cache)


def test_a_budget_of_tokens_counts_padded_text(captioned, tmp_path):
    cache = build(captioned, tmp_path / "cache", *IMAGES, "--text-encoder", "stub")
    batch = next(iter(cache.loader(batch_size=1)))
    tokens = batch["prompt_embeds"].shape[1]
    loader = cache.loader(batch_tokens=3 * tokens + 1, fields=["prompt_embeds"])
    assert {batch["prompt_embeds"].shape[:2] for batch in loader} == {(3, tokens)}
    largest = look("plan", tmp_path / "cache", "--batch-tokens", str(3 * tokens), "--json").json["largest_batch"]
    assert (largest["samples"], largest["tokens"]) == (3, 3 * tokens)
    images = cache.loader(batch_pixels=2 * 64 * 64, remainder="partial")
    assert sorted(len(batch["names"]) for batch in images) == [1, 2, 2, 2]


def test_clips_cost_frames_times_pixels(tmp_path):
    for number, frames in enumerate([9, 9, 9, 5, 5, 5]):
        write_video(tmp_path / "data" / f"{number}.mp4", frames, seed=number)
    options = ("--model", "stub", "--bucket", "64x96", "--frames", "5", "--frames", "9")
    cache = build(tmp_path / "data", tmp_path / "cache", *options)
    batches = list(cache.loader(batch_pixels=9 * 64 * 96 + 1))
    assert {(len(batch["latents"]), batch["latents"].shape[2]) for batch in batches} == {(1, 3), (1, 2)}
    batches = list(cache.loader(batch_pixels=2 * 5 * 64 * 96))
    assert {(len(batch["latents"]), batch["latents"].shape[2]) for batch in batches} == {(1, 3), (2, 2)}
    compared = look("plan", tmp_path / "cache", "--batch-size", "2", "--compare", "--json").json["compare"]
    assert (compared[0]["shapes"], compared[0]["repeated"]) == (2, 2)


def hard(folder, name):
    """Data that is hard to batch: number of images, and the batch size."""
    sizes = {
        "one image": [(64, 64)],
        "a batch larger than the data": [(64, 64), (64, 96), (96, 64)],
        "equal ratios": [(64, 64), (80, 80), (96, 96), (72, 72), (120, 120)],
        "one extreme ratio": [(64, 64)] * 5 + [(64, 400)],
    }[name]
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        (folder / f"{number}.png").write_bytes(noise(number, *size))
    return len(sizes)


@pytest.mark.parametrize("name", ["one image", "a batch larger than the data", "equal ratios", "one extreme ratio"])
@pytest.mark.parametrize("limits", [(), ("--max-crop", "0", "--max-buckets", "1")], ids=["", "contradicting limits"])
def test_hard_data_has_an_epoch_with_every_image(tmp_path, name, limits):
    count = hard(tmp_path / "data", name)
    cache = build(tmp_path / "data", tmp_path / "cache", *IMAGES, "--plan-buckets", "4", *limits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of images that fill a batch alone
        for sizes in ({"batch_size": 4}, {"batch_pixels": 4 * 64 * 64}, {"batch_size": 64}):
            loader = cache.loader(**sizes)
            names = {name for batch in loader for name in batch["names"]}
            assert (len(loader) > 0, len(names)) == (True, count)
    if limits:
        assert len(cache.buckets) == 1
    for size in (4, 64):
        compared = look("plan", tmp_path / "data", *IMAGES, *limits, "--compare", "--batch-size", str(size), "--json")
        rows = {row["name"]: row for row in compared.json["compare"] if "why" not in row}
        for row in rows.values():
            assert (row["used"] + row["dropped"], row["steps_per_epoch"] > 0) == (count, row["used"] > 0)
        planned = rows["planned"]
        assert (planned["used"], planned["steps_per_epoch"] * size) == (count, count + planned["repeated"])
        if size == 4:
            plan = look("plan", tmp_path / "cache", "--batch-size", "4", "--json").json
            assert planned["repeated"] == plan["samples_repeated"]
            assert planned["shapes"] == len(plan["buckets"])


def test_sources_of_other_batch_sizes_resume(captioned, tmp_path):
    many = build(captioned, tmp_path / "many", *IMAGES)
    few = build(captioned, tmp_path / "few", *IMAGES).split(0.5)[0]
    both = combine([many, few], weights=[1, 1])
    loader = both.loader(batch_size=[3, 1], remainder="partial")
    iteration = iter(loader)
    seen = [batch["names"] for _, batch in zip(range(3), iteration, strict=False)]
    again = both.loader(batch_size=[3, 1], remainder="partial")
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = [batch["names"] for batch in again]
    assert seen + rest == [batch["names"] for batch in both.loader(batch_size=[3, 1], remainder="partial")]

"""Buckets planned for a batch size: no image is lost, and the table stays until it is planned again."""

import shutil

import numpy as np
import pytest
from made_videos import write_video
from small_cache import SMALL, draw, run

from latentcache.loader.cache import open_cache

__all__ = ["run"]
PLAN = (*SMALL, "--plan-buckets", "8")


@pytest.fixture
def images(tmp_path):
    sizes = np.random.default_rng(0).integers(60, 120, (30, 2)).tolist()
    for number, size in enumerate(sizes):
        draw(tmp_path / "images" / f"{number:02}.png", size, seed=number)
    return tmp_path / "images"


def buckets(run, cache, batch=8):
    """(frames, height, width) -> samples, an image has one frame; and the plan."""
    plan = run("plan", cache, "--batch-size", batch, "--json").json
    names = ("frames", "height", "width")
    return {tuple(bucket.get(name, 1) for name in names): bucket["samples"] for bucket in plan["buckets"]}, plan


def test_fewer_samples_are_repeated_than_with_the_usual_buckets(run, images, tmp_path):
    run("build", images, "--out", tmp_path / "usual", *SMALL)
    run("build", images, "--out", tmp_path / "planned", *PLAN)
    _, usual = buckets(run, tmp_path / "usual")
    _, planned = buckets(run, tmp_path / "planned")
    assert (planned["samples_dropped"], planned["samples_used"]) == (0, 30)
    assert planned["samples_repeated"] < usual["samples_repeated"]
    assert len(list(open_cache(tmp_path / "planned").loader(batch_size=8, seed=0))) == planned["steps_per_epoch"]


def test_the_table_stays_when_images_come_until_a_replan(run, images, tmp_path):
    cache = tmp_path / "cache"
    run("build", images, "--out", cache, *PLAN, "--max-crop", 40)
    before, _ = buckets(run, cache)
    for number in range(3):
        draw(images / f"wide{number}.png", (80 + number, 70), seed=number)
        draw(images / f"high{number}.png", (70, 80 + number), seed=9 + number)
    dry = run("inspect", images, "--out", cache, "--json").json["plan"]["fields"]["latents"]
    later = run("build", images, "--out", cache)
    assert "6 entries to make, 30 reused" in later.err
    assert f"--replan would encode {dry['replan']['entries']} entr" in later.err
    assert dry["replan"]["seconds"] > 0
    assert set(buckets(run, cache)[0]) <= set(before)
    assert run("verify", cache).status == 0
    again = run("build", images, "--out", cache, "--replan", "--json").json
    replanned = again["plan"]["fields"]["latents"]
    assert replanned["to_make"] == dry["replan"]["entries"] > 0
    assert replanned["replan"]["entries"] == 0
    assert buckets(run, cache)[1]["samples_repeated"] <= buckets(run, cache)[1]["samples_used"]
    assert run("verify", cache).status == 0
    again = run("build", images, "--out", cache, "--plan-buckets", "8")
    assert "nothing to encode" in again.out


def test_another_batch_size_plans_again(run, images, tmp_path):
    run("build", images, "--out", tmp_path / "cache", *PLAN)
    run("build", images, "--out", tmp_path / "cache", "--plan-buckets", "15", "--max-crop", "40")
    assert buckets(run, tmp_path / "cache", 15)[1]["samples_repeated"] == 0
    run("build", images, "--out", tmp_path / "cache", "--plan-buckets", "0")
    run("build", images, "--out", tmp_path / "usual", *SMALL)
    assert buckets(run, tmp_path / "cache")[0] == buckets(run, tmp_path / "usual")[0]


def test_masks_have_the_buckets_of_their_images(run, images, tmp_path):
    for path in sorted(images.iterdir()):
        for folder in ("pictures", "masks"):
            (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / "data" / folder)
    done = run("build", tmp_path / "data", "--masks", "masks", "--out", tmp_path / "cache", *PLAN)
    assert done.status == 0, done.err
    for batch in open_cache(tmp_path / "cache").loader(batch_size=8, seed=0, remainder="partial"):
        assert batch["mask"].shape[-2:] == batch["latents"].shape[-2:]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--plan-buckets", "8", "--like", "kohya"), "--like"),
        (("--plan-buckets", "8", "--bucket", "64x64"), "--bucket"),
        (("--plan-buckets", "8", "--no-upscale"), "--upscale"),
        (("--max-crop", "8"), "--max-crop"),
        (("--replan",), "--replan"),
    ],
)
def test_what_cannot_be_planned_is_named(run, images, tmp_path, words, what):
    size = ("--resolution", "64", "--bucket-step", "8") if "--bucket" not in words else ()
    done = run("build", images, "--out", tmp_path / "cache", "--model", "stub", *size, *words, "--json")
    assert (done.status, done.error["slug"]) == (2, "usage")
    assert what in done.error["what"]


def test_images_that_are_all_broken_are_named_and_the_next_build_plans(run, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_text("no image")
    done = run("build", tmp_path / "images", "--out", tmp_path / "cache", *PLAN)
    assert done.status == 1
    assert "rejected a.png" in done.out
    for number in range(8):
        draw(tmp_path / "images" / f"b{number}.png", (60 + number, 64), seed=number)
    run("build", tmp_path / "images", "--out", tmp_path / "cache", *PLAN)
    assert buckets(run, tmp_path / "cache")[1]["samples_repeated"] == 0


CLIPS = (*PLAN, "--max-crop", "40", "--frames", "5", "--frames", "9")


@pytest.fixture
def videos(tmp_path):
    """Videos of 9 and of 5 frames, about wide and about high ones, each with a mask, and two images."""
    sides = np.random.default_rng(1).integers(30, 50, (20, 2)) * 2
    for number, (height, width) in enumerate(sides.tolist()):
        name, frames = f"{number:02}", 9 if number < 11 else 5
        write_video(tmp_path / "videos" / f"{name}.mp4", frames, height=height, width=width, seed=number)
        draw(tmp_path / "videos" / f"{name}-masklabel.png", (width, height), seed=number)
    for name in ("image1.png", "image2.png"):
        draw(tmp_path / "videos" / name, (80, 80))
    return tmp_path / "videos"


def test_clips_of_each_length_are_planned_alone(run, videos, tmp_path):
    done = run("build", videos, "--out", tmp_path / "cache", *CLIPS)
    assert done.status == 0, done.err
    together = buckets(run, tmp_path / "cache")[0]
    for frames, numbers in ((9, range(11)), (5, range(11, 20))):
        folder = tmp_path / f"only{frames}"
        folder.mkdir()
        for number in numbers:
            shutil.copy(videos / f"{number:02}.mp4", folder)
        run("build", folder, "--out", tmp_path / f"cache{frames}", *CLIPS)
        alone = buckets(run, tmp_path / f"cache{frames}")[0]
        assert alone == {shape: count for shape, count in together.items() if shape[0] == frames}
    loader, seen = open_cache(tmp_path / "cache").loader(batch_size=8, seed=0), set()
    for batch in loader:
        assert len(batch["names"]) == 8
        assert batch["mask"].shape[-2:] == batch["latents"].shape[-2:]
        seen |= set(batch["names"])
    assert len(seen) == 22
    assert run("verify", tmp_path / "cache").status == 0


def test_the_tables_of_clips_stay_when_videos_come_until_a_replan(run, videos, tmp_path):
    cache = tmp_path / "cache"
    for path in [*videos.glob("1[1-9]*"), *videos.glob("image*")]:
        path.rename(tmp_path / path.name)
    run("build", videos, "--out", cache, *CLIPS)
    before = buckets(run, cache)[0]
    assert {frames for frames, _, _ in before} == {9}
    write_video(videos / "wide.mp4", 9, height=60, width=100, seed=99)
    for path in tmp_path.glob("1[1-9]*"):  # the first clips of 5 frames
        path.rename(videos / path.name)
    later = run("build", videos, "--out", cache, "--json").json["plan"]["fields"]["latents"]
    assert later["to_make"] == 10
    assert {shape for shape in buckets(run, cache)[0] if shape[0] == 9} <= set(before)
    assert run("verify", cache).status == 0
    again = run("build", videos, "--out", cache, "--replan", "--json").json["plan"]["fields"]["latents"]
    assert again["to_make"] == later["replan"]["entries"]
    run("build", videos, "--out", tmp_path / "fresh", *CLIPS)
    assert buckets(run, cache)[0] == buckets(run, tmp_path / "fresh")[0]
    assert run("verify", cache).status == 0


@pytest.mark.parametrize(("kind", "words"), [("images", PLAN), ("videos", CLIPS)])
def test_parts_of_the_data_have_the_buckets_of_all_of_it(run, request, tmp_path, kind, words):
    data = request.getfixturevalue(kind)
    parts = [tmp_path / f"part{number}" for number in range(3)]
    for number, part in enumerate(parts):
        done = run("build", data, "--out", part, *words, "--part", f"{number}/3")
        assert done.status == 0, done.err
    done = run("merge", *parts, "--out", tmp_path / "merged")
    assert done.status == 0, done.err
    run("build", data, "--out", tmp_path / "whole", *words)
    assert buckets(run, tmp_path / "merged")[0] == buckets(run, tmp_path / "whole")[0]
    again = run("build", data, "--out", parts[0], "--part", "0/3")
    assert "nothing to encode" in again.out


def test_videos_are_compared_as_clips(run, videos, tmp_path):
    words = (*SMALL, "--frames", "5", "--frames", "9", "--compare", "--batch-size", "8", "--max-crop", "40", "--json")
    usual = run("plan", videos, *words).json
    run("build", videos, "--out", tmp_path / "cache", *CLIPS)
    _, planned = buckets(run, tmp_path / "cache")
    rows = {row["name"]: (row["repeated"], row["shapes"]) for row in usual["compare"] if "why" not in row}
    assert rows["as given"] == (usual["samples_repeated"], len(usual["buckets"]))
    assert rows["planned"] == (planned["samples_repeated"], len(planned["buckets"]))
    assert rows["planned"] < rows["as given"]


def test_images_that_lose_more_than_the_limit_are_named(run, images, tmp_path):
    done = run("build", images, "--out", tmp_path / "cache", *PLAN, "--max-crop", 8, "--max-buckets", 1, "--json")
    (note,) = [item for item in done.json["items"] if item["reason"] == "over-max-crop"]
    assert "more than 8 % is cut off" in str(note)
    within = run("build", images, "--out", tmp_path / "wide", *PLAN, "--max-crop", 40, "--json").json["items"]
    assert "over-max-crop" not in {item["reason"] for item in within}

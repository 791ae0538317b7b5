"""A copy with some of the fields of a cache at a URL."""

import pytest
from s3_server import server, url
from small_cache import SMALL, draw, run

from latentcache.loader.cache import open_cache
from latentcache.store.remote.bucket import Bucket

__all__ = ["run", "server", "url"]


@pytest.fixture
def pushed(url, tmp_path, run):
    """A URL with latents, masks and control images of six images; the cache is beside it."""
    for number in range(6):
        draw(tmp_path / f"data/{number}.png", (80, 64), seed=number)
        draw(tmp_path / f"data/{number}-masklabel.png", (80, 64), seed=10 + number)
        draw(tmp_path / f"data/{number}-condlabel.png", (80, 64), seed=20 + number)
    assert run("build", tmp_path / "data", "--out", tmp_path / "cache", *SMALL).status == 0
    assert run("push", tmp_path / "cache", url).status == 0
    return url


def test_only_the_shards_of_the_fields_come(pushed, run, tmp_path):
    copy = tmp_path / "copy"
    done = run("pull", pushed, copy, "--fields", "latents", "--json")
    assert done.json["files"] == 2
    about = run("info", copy, "--json").json
    assert (list(about["fields"]), about["left_out"]) == (["latents"], ["mask", "control"])
    assert "pulled without mask, control" in run("info", copy).out
    assert run("verify", copy, "--full", "--json").json["counts"]["ok"] == 6
    assert open_cache(copy).fields == ("latents",)
    assert len(open_cache(copy).loader(batch_size=2, seed=0)) == 3


def test_other_fields_and_all_of_them_come_later(pushed, run, tmp_path):
    copy = tmp_path / "copy"
    assert run("pull", pushed, copy, "--fields", "latents").status == 0
    again = run("pull", pushed, copy, "--fields", "latents,mask", "--json")
    assert (again.json["files"], again.json["kept"]) == (2, 2)
    assert set(open_cache(copy).fields) == {"latents", "mask"}
    assert run("pull", pushed, copy, "--json").json["files"] == 2
    assert set(open_cache(copy).fields) == {"latents", "mask", "control"}
    assert run("push", copy, pushed, "--json").json["files"] == 0


def test_a_part_of_the_fields_never_replaces_the_cache(pushed, run, tmp_path):
    copy = tmp_path / "copy"
    assert run("pull", pushed, copy, "--fields", "mask").status == 0
    done = run("push", copy, pushed, "--json")
    assert (done.status, done.error["slug"]) == (2, "usage")
    assert done.error["fix"] == f"latentcache pull {pushed} {copy}, then push"
    draw(tmp_path / "data/new.png", (80, 64), seed=30)
    draw(tmp_path / "data/new-masklabel.png", (80, 64), seed=31)
    assert run("build", tmp_path / "data", "--out", copy).status == 0
    assert run("push", copy, pushed).status == 2
    assert set(run("info", pushed, "--json").json["fields"]) == {"latents", "mask", "control"}


def test_a_newer_snapshot_replaces_a_copy_of_some_fields(pushed, run, tmp_path):
    copy = tmp_path / "copy"
    assert run("pull", pushed, copy, "--fields", "latents").status == 0
    draw(tmp_path / "data/0.png", (80, 64), seed=40)
    assert run("build", tmp_path / "data", "--out", tmp_path / "cache").status == 0
    assert run("push", tmp_path / "cache", pushed).status == 0
    assert run("pull", pushed, copy, "--fields", "latents", "--json").json["snapshot"] == 2
    assert run("verify", copy, "--full", "--json").json["counts"]["ok"] == 6


def test_a_field_that_is_not_there(pushed, run, tmp_path):
    done = run("pull", pushed, tmp_path / "copy", "--fields", "latents,depth", "--json")
    assert (done.status, done.error["fix"]) == (2, "--fields latents,mask,control")
    assert not Bucket(pushed).sizes("probe")

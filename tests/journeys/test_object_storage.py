import shutil
import subprocess
import sys

import pytest
from s3_server import files, server, url
from small_cache import SMALL, cache, data, draw, run, shared

from latentcache.errors import RemoteError, StoreError, UsageError
from latentcache.loader.cache import open_cache
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull, push

__all__ = ["cache", "data", "run", "server", "shared", "url"]


def test_a_pulled_cache_is_the_pushed_one(url, cache, tmp_path):
    sent = push(cache, url)
    fetched = pull(url, tmp_path / "copy")
    assert files(tmp_path / "copy") == files(cache)
    assert sent.kept == 0
    assert (sent.snapshot, fetched.snapshot) == (1, 1)
    assert len(open_cache(tmp_path / "copy").loader(batch_size=1, seed=0)) == 4


def test_only_what_is_new_is_sent_and_fetched(url, cache, data, run, tmp_path):
    push(cache, url)
    pull(url, tmp_path / "copy")
    again = push(cache, url)
    assert (again.files, again.num_bytes) == (0, 0)
    draw(data / "new.png", (80, 64))
    assert run("build", data, "--out", cache).status == 0
    plan = push(cache, url, dry_run=True)
    assert pull(url, tmp_path / "copy").snapshot == 1  # nothing was sent
    sent = push(cache, url)
    assert (sent.files, sent.num_bytes) == (plan.files, plan.num_bytes)
    assert sent.kept > 0
    fetched = pull(url, tmp_path / "copy")
    assert fetched.kept > 0
    assert (
        files(tmp_path / "copy").items()
        >= {name: value for name, value in files(cache).items() if "000001" not in name}.items()
    )
    assert len(open_cache(tmp_path / "copy")) == 5


def test_the_pulled_cache_can_be_built_on_and_pushed(url, cache, data, run, tmp_path):
    push(cache, url)
    pull(url, tmp_path / "copy")
    draw(data / "new.png", (80, 64))
    assert run("build", data, "--out", tmp_path / "copy").status == 0
    push(tmp_path / "copy", url)
    assert pull(url, cache).snapshot == 2
    assert len(open_cache(cache)) == 5


def test_of_two_that_push_one_wins_and_the_other_loses_nothing(url, cache, data, run, tmp_path):
    push(cache, url)
    pull(url, tmp_path / "other")
    draw(data / "a.png", (80, 64))
    run("build", data, "--out", cache)
    push(cache, url)
    draw(data / "b.png", (80, 64), seed=7)
    run("build", data, "--out", tmp_path / "other")
    before = files(tmp_path / "other")
    with pytest.raises(RemoteError, match="got a snapshot from somebody else"):
        push(tmp_path / "other", url)
    with pytest.raises(RemoteError, match="has a snapshot that"):
        pull(url, tmp_path / "other")
    assert files(tmp_path / "other") == before
    pull(url, tmp_path / "new")
    assert len(open_cache(tmp_path / "new")) == 5


def test_another_cache_is_refused(url, cache, data, run, tmp_path):
    push(cache, url)
    assert run("build", data, "--out", tmp_path / "other", *SMALL).status == 0
    with pytest.raises(RemoteError, match="holds another cache"):
        push(tmp_path / "other", url)
    with pytest.raises(RemoteError, match="holds another cache"):
        pull(url, tmp_path / "other")


def test_a_push_that_is_killed_is_continued(url, cache, tmp_path):
    code = (
        "import os, sys; from latentcache.store.remote import bucket, transfer\n"
        "real, sent = bucket.Bucket.send, []\n"
        "def send(self, path, key):\n"
        "    sent.append(key); real(self, path, key); len(sent) == 3 and os.kill(os.getpid(), 9)\n"
        "bucket.Bucket.send = send; transfer.push(sys.argv[1], sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.replace("sys.argv[1],", "__import__('pathlib').Path(sys.argv[1]),"), cache, url],
        check=False,
    )
    assert done.returncode == -9
    with pytest.raises(StoreError, match="no cache at"):
        pull(url, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    assert push(cache, url).kept == 3
    pull(url, tmp_path / "copy")
    assert files(tmp_path / "copy") == files(cache)


def test_a_store_that_ignores_conditions_is_refused(url, cache, monkeypatch):
    real = Bucket.write

    def overwrite(self, key, data, etag=""):
        self.remove(key)
        return real(self, key, data)

    monkeypatch.setattr(Bucket, "write", overwrite)
    with pytest.raises(RemoteError, match="ignores conditions"):
        push(cache, url)
    assert push(cache, url, single_writer=True).snapshot == 1


def test_the_commands(url, cache, run, tmp_path):
    plan = run("push", cache, url, "--dry-run")
    assert "to send" in plan.out
    assert " in 5 requests, 0 there already" in plan.out
    sent = run("push", cache, url, "--json").json
    assert (sent["snapshot"], sent["kept"]) == (1, 0)
    copy = tmp_path / "copy"
    assert f"{copy} has snapshot 1" in run("pull", url, copy).out
    assert run("verify", copy, "--full").status == 0
    assert run("gc", copy, "--apply").status == 0
    assert run("push", copy, url, "--json").json["files"] == 0
    done = run("pull", f"{url}/none", tmp_path / "none", "--json")
    assert (done.status, done.error["slug"]) == (3, "cache-not-found")


@pytest.mark.parametrize(("path", "more"), [("s3://bucket/x", {}), ("folder", {"disk_cache": "copy"})])
def test_a_disk_cache_belongs_to_a_url(path, more):
    with pytest.raises(UsageError, match=r"a URL needs a folder|only for the URL"):
        open_cache(path, **more)


# some fields of a cache


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

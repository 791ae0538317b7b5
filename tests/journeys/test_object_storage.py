import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
from s3_server import server, url
from small_cache import SMALL, cache, data, draw, run, shared

from latentcache.errors import RemoteError, StoreError, UsageError
from latentcache.loader.cache import open_cache
from latentcache.store.paths import CachePaths
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull, push

__all__ = ["cache", "data", "run", "server", "shared", "url"]


def files(folder):
    left_out = ("builder.lock", "REMOTE")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in left_out]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


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


@pytest.mark.parametrize("step", ["send", "write", "fetch"])
def test_a_cut_transfer_goes_on(url, cache, tmp_path, monkeypatch, step):
    real, calls = getattr(Bucket, step), []

    def cut(self, *arguments):
        calls.append(arguments)
        if len(calls) in (1, 3, 4, 8):
            raise RemoteError("cut", where=url)
        return real(self, *arguments)

    monkeypatch.setattr(Bucket, step, cut)

    def until_done(action):
        for _ in range(20):
            with suppress(RemoteError):
                return action()
        raise AssertionError("never done")

    until_done(lambda: push(cache, url))
    until_done(lambda: pull(url, tmp_path / "copy"))
    assert files(tmp_path / "copy") == files(cache)
    assert not CachePaths(tmp_path / "copy").scratch.exists()


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


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"AWS_ACCESS_KEY_ID": "reader"}, "access is denied"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "access is denied"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the store does not answer"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "no credentials|access is denied"),
    ],
)
def test_what_a_store_refuses_is_named(url, cache, monkeypatch, variables, what):
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(RemoteError, match=what) as error:
        push(cache, url)
    assert "secret" not in str(error.value)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("s3://key:secret@bucket/x", "credentials"),
        ("s3://", "not the URL of a bucket"),
        ("http://host/bucket", "not the URL of a bucket"),
        ("bucket/x", "not the URL of a bucket"),
    ],
)
def test_a_url_that_cannot_be_used_is_named_without_its_password(cache, given, what):
    with pytest.raises(UsageError, match=what) as error:
        push(cache, given)
    assert "secret@" not in str(error.value)


def test_a_bucket_that_is_not_there(url, cache):
    with pytest.raises(RemoteError, match="the bucket does not exist"):
        push(cache, "s3://no-such-bucket/x")


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


def test_the_ranks_of_a_node_open_one_copy(url, cache, tmp_path):
    push(cache, url)
    code = (
        "import sys; from latentcache import open_cache\n"
        "loader = open_cache(sys.argv[1], disk_cache=sys.argv[2]).loader(batch_size=1, seed=0)\n"
        "print(sorted(name for batch in loader for name in batch['names']))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, url, tmp_path / "copy"]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    names = {rank.communicate(timeout=60)[0].strip() for rank in ranks}
    assert names == {"['p0.png', 'p1.png', 'p2.png', 'p3.png']"}
    assert files(tmp_path / "copy") == files(cache)


@pytest.mark.parametrize(("path", "more"), [("s3://bucket/x", {}), ("folder", {"disk_cache": "copy"})])
def test_a_disk_cache_belongs_to_a_url(path, more):
    with pytest.raises(UsageError, match=r"a URL needs a folder|only for the URL"):
        open_cache(path, **more)

"""Faults between a client and a real S3 server: nothing lost, nothing half published, the same command finishes."""

import shutil

import pytest
from s3_proxy import Fault
from s3_server import files, proxy, server
from small_cache import SMALL, cache, data, draw, run, shared

from latentcache.errors import CacheNotFoundError, RemoteError, StoreError
from latentcache.loader.cache import open_cache
from latentcache.store.remote import bucket, transfer
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull, push

__all__ = ["cache", "data", "proxy", "run", "server", "shared"]
pytestmark = pytest.mark.filterwarnings("ignore:.*trying again for")

#: Faults that pass, and that a command survives.
PASSING = {
    "cut": Fault("cut", times=4, skip=1),
    "half-sent body": Fault("half-request", "PUT|POST", times=3),
    "half answer": Fault("half-answer", "GET", times=3),
    "answer lost": Fault("lost", "GET|POST|DELETE|PUT .*shards", times=3),
    "500": Fault("500 InternalError", times=4),
    "503": Fault("503 SlowDown", times=4, skip=1),
    "slow": Fault("slow", times=4),
    "wrong etag of a shard": Fault("etag", "data.mdb", times=4),
}
#: Faults that last from some request on, and the words of the error.
LASTING = {
    "cut": (Fault("cut", skip=2), "does not answer|reports an error"),
    "half-sent body": (Fault("half-request", "PUT|POST"), "does not answer|reports an error"),
    "half answer": (Fault("half-answer", "GET", skip=2), "does not answer|reports an error"),
    "500": (Fault("500 InternalError", skip=2), "reports an error"),
    "503": (Fault("503 SlowDown", skip=2), "reports an error"),
    "clock": (Fault("403 RequestTimeTooSkewed", skip=2), "the clock of this machine is wrong"),
    "quota": (Fault("403 QuotaExceeded", "PUT|POST", skip=2), "the bucket is full"),
    "full": (Fault("507 XMinioStorageFull", "PUT|POST", skip=2), "the bucket is full"),
    "credentials end": (Fault("400 ExpiredToken", skip=3), "the credentials have expired"),
    "credentials end at the last step": (Fault("400 ExpiredToken", "PUT .*/CURRENT"), "the credentials have expired"),
}
#: Rows that take a second, and one of each kind that is tried again.
QUICK = {"cut", "clock", "quota", "credentials end", "credentials end at the last step"}


def rows(faults, quick=QUICK):
    return [pytest.param(*row, marks=() if row[0] in quick else pytest.mark.slow) for row in faults]


def is_of_writing(name):
    return LASTING[name][0].match.startswith("PUT")


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setattr(Bucket.__init__, "__kwdefaults__", {"retry_s": 3})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def url(proxy, request, cache, data, run, tmp_path):
    """A URL with snapshot 1; the folder has snapshot 2, and another folder ``old`` has snapshot 1."""
    url = f"s3://bucket/{abs(hash(request.node.name))}"
    push(cache, url)
    pull(url, tmp_path / "old")
    draw(data / "new.png", (80, 64))
    assert run("build", data, "--out", cache).status == 0
    return url


def names_at(path, disk):
    """Names that a new reader gets of a folder or a URL; every byte is proven. Empty: there is no cache."""
    shutil.rmtree(disk, ignore_errors=True)
    try:
        cache = open_cache(path, disk_cache=disk) if "://" in str(path) else open_cache(path)
    except CacheNotFoundError:
        return []
    return names_of(cache)


def names_of(cache):
    return sorted(name for batch in cache.loader(batch_size=1, seed=0) for name in batch["names"])


OLD = [f"p{number}.png" for number in range(4)]
NEW = ["new.png", *OLD]


@pytest.mark.parametrize("name", rows([(name,) for name in PASSING]))
def test_a_fault_that_passes_is_survived(name, url, cache, data, run, proxy, tmp_path):
    built, old, disk = f"{url}/built", tmp_path / "old", tmp_path / "disk"
    build = ("build", data, "--out", built, *SMALL)
    for words in (("push", cache, url), ("pull", url, old), build, ("verify", built, "--full")):
        proxy.faults = [Fault(**vars(PASSING[name]))]
        assert run(*words).status == 0
    newest = {key: value for key, value in files(cache).items() if "000001" not in key}
    assert files(old).items() >= newest.items()
    for path in (url, built):
        proxy.faults = [Fault(**vars(PASSING[name]))]
        assert names_at(path, disk) == NEW


@pytest.mark.parametrize(
    ("name", "command"),
    rows(
        [(name, command) for name in LASTING for command in ("push", "build")]
        + [(name, "pull") for name in LASTING if not is_of_writing(name)]
    ),
)
def test_a_fault_that_lasts_publishes_nothing_and_the_command_goes_on(
    name, command, url, cache, data, run, proxy, tmp_path
):
    fault, problems = LASTING[name]
    path = {"push": url, "pull": tmp_path / "old", "build": f"{url}/built"}[command]
    words = {"push": (cache, url), "pull": (url, path), "build": (data, "--out", path, *SMALL)}[command]
    if command == "pull":
        push(cache, url)
    before = files(cache)
    proxy.faults = [Fault(**vars(fault))]
    done = run(command, *words, "--json")
    proxy.faults = []
    assert done.status == 3
    assert any(problem in done.error["what"] for problem in problems.split("|")), done.error
    assert files(cache) == before
    assert names_at(path, tmp_path / "disk") == ([] if command == "build" else OLD)
    assert run(command, *words).status == 0
    assert names_at(path, tmp_path / "disk") == NEW


@pytest.mark.parametrize(
    "name", rows([(name,) for name in LASTING if not is_of_writing(name)], quick={"clock", "credentials end"})
)
def test_a_reader_that_fails_reads_everything_later(name, url, proxy, tmp_path):
    fault, words = LASTING[name]
    proxy.faults = [Fault(**vars(fault) | {"match": "data.mdb", "skip": 0})]
    cache = open_cache(url, disk_cache=tmp_path / "disk")
    with pytest.raises(RemoteError) as error:
        names_of(cache.read())
    proxy.faults = []
    assert any(word in error.value.what for word in words.split("|")), error.value
    assert names_of(cache.read()) == OLD


def test_a_push_whose_last_answer_is_lost_is_not_taken_for_somebody_elses(url, cache, run, proxy, tmp_path):
    proxy.faults = [Fault("lost", "PUT .*/CURRENT", times=1)]
    assert run("push", cache, url).status == 0
    assert proxy.injected
    assert names_at(url, tmp_path / "disk") == NEW


def test_a_shard_that_comes_with_wrong_bytes_is_found(url, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "_ask", _with_a_wrong_byte(proxy._ask))
    with pytest.raises(StoreError, match="damaged"):
        names_at(url, tmp_path / "disk")


def _with_a_wrong_byte(ask):
    def changed(head, body):
        answer = ask(head, body)
        if b"data.mdb" in head and head.startswith(b"GET"):
            start = answer.index(b"\r\n\r\n") + 4
            answer = answer[:start] + bytes(byte ^ 1 for byte in answer[start:])
        return answer

    return changed


def test_a_shard_that_changes_on_its_way_is_sent_again(cache, url, proxy, run, tmp_path):
    ask, changed = proxy._ask, []

    def change_a_byte(head, body):
        if head.startswith(b"PUT") and b"data.mdb" in head.split(b"\r\n", 1)[0] and not changed:
            changed.append(head)
            body = body[:1000] + bytes([body[1000] ^ 1]) + body[1001:]
        return ask(head, body)

    proxy._ask = change_a_byte
    assert run("push", cache, url).status == 0
    assert changed
    assert names_at(url, tmp_path / "disk") == NEW
    assert run("verify", url, "--full").status == 0


def test_a_plan_of_a_push_counts_the_requests_that_move_files(url, cache, proxy, monkeypatch):
    """Of a file in three parts: one request for each, one before and one behind."""
    data, _ = cache.glob("shards/*/data.mdb")
    data.chmod(0o644)
    with data.open("ab") as file:
        file.write(bytes((12 << 20) - data.stat().st_size))
    monkeypatch.setattr(bucket, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(transfer, "PART_BYTES", 5 << 20)
    asked, ask = [], proxy._ask
    monkeypatch.setattr(proxy, "_ask", lambda head, body: (asked.append(head), ask(head, body))[1])
    plan = push(cache, f"{url}/whole", dry_run=True)
    assert (plan.files, plan.requests) == (7, 11)
    asked.clear()
    push(cache, f"{url}/whole")
    moving = [head for head in asked if b"/shards/" in head.split()[1] or b"/snapshots/" in head.split()[1]]
    assert len([head for head in moving if not head.startswith(b"GET")]) == 11

"""Faults between a client and a real S3 server: nothing lost, nothing half published, the same command finishes."""

import shutil

import pytest
from s3_proxy import Fault
from s3_server import files, proxy, server
from small_cache import SMALL, cache, data, draw, run, shared

from latentcache.errors import RemoteError, StoreError
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
def _impatient(monkeypatch):
    monkeypatch.setattr(Bucket.__init__, "__kwdefaults__", {"retry_s": 3})


@pytest.fixture
def url(proxy, request, cache, data, run, tmp_path):
    """A URL with snapshot 1; the folder has snapshot 2, and another folder ``old`` has snapshot 1."""
    url = f"s3://bucket/{abs(hash(request.node.name))}"
    push(cache, url)
    pull(url, tmp_path / "old")
    draw(data / "new.png", (80, 64))
    assert run("build", data, "--out", cache).status == 0
    return url


def names_at(url, folder):
    """Names that a new reader of a URL gets, and every byte is proven."""
    return names_in(open_cache(url, disk_cache=folder))


def names_in(opened):
    return sorted(name for batch in opened.loader(batch_size=1, seed=0) for name in batch["names"])


def with_new(names):
    return sorted([*names, "new.png"])


OLD = [f"p{number}.png" for number in range(4)]


def push_or_pull(run, command, cache, url, tmp_path):
    if command == "push":
        return run("push", cache, url, "--json")
    return run("pull", url, tmp_path / "old", "--json")


@pytest.mark.parametrize("name", rows([(name,) for name in PASSING]))
def test_a_fault_that_passes_is_survived(name, url, cache, run, proxy, tmp_path):
    proxy.faults = [Fault(**vars(PASSING[name]))]
    assert push_or_pull(run, "push", cache, url, tmp_path).status == 0
    proxy.faults = [Fault(**vars(PASSING[name]))]
    assert push_or_pull(run, "pull", cache, url, tmp_path).status == 0
    assert (
        files(tmp_path / "old").items()
        >= {key: value for key, value in files(cache).items() if "000001" not in key}.items()
    )
    proxy.faults = [Fault(**vars(PASSING[name]))]
    assert names_at(url, tmp_path / "disk") == with_new(OLD)


@pytest.mark.parametrize(
    ("name", "command"),
    rows([(name, "push") for name in LASTING] + [(name, "pull") for name in LASTING if not is_of_writing(name)]),
)
def test_a_fault_that_lasts_leaves_the_snapshot_before_and_the_command_goes_on(
    name, command, url, cache, run, proxy, tmp_path
):
    fault, words = LASTING[name]
    if command == "pull":
        push(cache, url)
    before = files(tmp_path / "old") if command == "pull" else files(cache)
    proxy.faults = [Fault(**vars(fault))]
    done = push_or_pull(run, command, cache, url, tmp_path)
    proxy.faults = []
    assert done.status == 3
    assert any(word in done.error["what"] for word in words.split("|")), done.error
    if command == "push":
        assert files(cache) == before
        assert names_at(url, tmp_path / "disk") == OLD
    else:
        assert names_in(open_cache(tmp_path / "old")) == OLD
    assert push_or_pull(run, command, cache, url, tmp_path).status == 0
    shutil.rmtree(tmp_path / "disk", ignore_errors=True)
    opened = url if command == "push" else tmp_path / "old"
    more = {"disk_cache": tmp_path / "disk"} if command == "push" else {}
    assert names_in(open_cache(opened, **more)) == with_new(OLD)


@pytest.mark.parametrize(
    "name", rows([(name,) for name in LASTING if not is_of_writing(name)], quick={"clock", "credentials end"})
)
def test_a_reader_that_fails_reads_everything_later(name, url, proxy, tmp_path):
    fault, words = LASTING[name]
    proxy.faults = [Fault(**vars(fault) | {"match": "data.mdb", "skip": 0})]
    cache = open_cache(url, disk_cache=tmp_path / "disk")
    with pytest.raises(RemoteError) as error:
        names_in(cache.read())
    proxy.faults = []
    assert any(word in error.value.what for word in words.split("|")), error.value
    assert names_in(cache.read()) == OLD


def test_a_push_whose_last_answer_is_lost_is_not_taken_for_somebody_elses(url, cache, run, proxy, tmp_path):
    proxy.faults = [Fault("lost", "PUT .*/CURRENT", times=1)]
    assert push_or_pull(run, "push", cache, url, tmp_path).status == 0
    assert proxy.injected
    assert names_at(url, tmp_path / "disk") == with_new(OLD)


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


@pytest.fixture
def built_url(proxy, request, monkeypatch, tmp_path):
    """A URL with nothing below it, for a build on a machine of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return f"s3://bucket/{abs(hash(request.node.name))}"


def counts(run, url):
    return run("verify", url, "--full", "--json").json["counts"]


def test_a_shard_that_changes_on_its_way_is_sent_again(cache, url, proxy, run, tmp_path):
    ask, changed = proxy._ask, []

    def change_a_byte(head, body):
        if head.startswith(b"PUT") and b"data.mdb" in head.split(b"\r\n", 1)[0] and not changed:
            changed.append(head)
            body = body[:1000] + bytes([body[1000] ^ 1]) + body[1001:]
        return ask(head, body)

    proxy._ask = change_a_byte
    assert push_or_pull(run, "push", cache, url, tmp_path).status == 0
    assert changed
    assert names_at(url, tmp_path / "disk") == with_new(OLD)
    assert run("verify", url, "--full").status == 0


@pytest.mark.parametrize("name", rows([(name,) for name in PASSING]))
def test_a_build_and_a_check_at_a_url_survive_a_fault_that_passes(name, built_url, data, run, proxy):
    for command in (("build", data, "--out", built_url, *SMALL), ("verify", built_url, "--full")):
        proxy.faults = [Fault(**vars(PASSING[name]))]
        assert run(*command).status == 0
    proxy.faults = []
    assert counts(run, built_url)["ok"] == 4


@pytest.mark.parametrize("name", rows([(name,) for name in LASTING]))
def test_a_build_at_a_url_goes_on_after_a_fault_that_lasts(name, built_url, data, run, proxy):
    fault, words = LASTING[name]
    proxy.faults = [Fault(**vars(fault))]
    done = run("build", data, "--out", built_url, *SMALL, "--json")
    proxy.faults = []
    assert done.status == 3
    assert any(word in done.error["what"] for word in words.split("|")), done.error
    assert run("pull", built_url, data.parent / "copy", "--json").error["slug"] == "cache-not-found"
    assert run("build", data, "--out", built_url, *SMALL).status == 0
    assert counts(run, built_url)["ok"] == 4


def test_a_plan_of_a_push_counts_the_requests_that_move_files(built_url, cache, proxy, monkeypatch):
    """Of a file in three parts: one request for each, one before and one behind."""
    (data,) = cache.glob("shards/*/data.mdb")
    data.chmod(0o644)
    with data.open("ab") as file:
        file.write(bytes((12 << 20) - data.stat().st_size))
    monkeypatch.setattr(bucket, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(transfer, "PART_BYTES", 5 << 20)
    asked, ask = [], proxy._ask
    monkeypatch.setattr(proxy, "_ask", lambda head, body: (asked.append(head), ask(head, body))[1])
    plan = push(cache, built_url, dry_run=True)
    assert (plan.files, plan.requests) == (5, 9)
    asked.clear()
    push(cache, built_url)
    moving = [head for head in asked if b"/shards/" in head.split()[1] or b"/snapshots/" in head.split()[1]]
    assert len([head for head in moving if not head.startswith(b"GET")]) == 9

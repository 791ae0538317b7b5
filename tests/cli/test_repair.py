import io

import pytest
from damaged import damage_payload
from small_cache import build

from latentcache.store.snapshot import open_snapshot

KEYS = {"done", "removed", "removed_bytes", "shards", "snapshot", "complete"}


def test_json_output(run, cache, data):
    name = damage_payload(cache)
    (shard,) = open_snapshot(cache).shards
    (before,) = run("verify", cache, "--full", "--json").json["items"]
    build_it = f"latentcache build {data} --out {cache}"
    assert before["fix"] == f"latentcache verify {cache} --repair --yes; {build_it}"
    done = run("verify", cache, "--repair", "--yes", "--json")
    assert (done.status, done.json["mode"], done.json["counts"]["corrupt"]) == (1, "full", 1)
    assert [(item["path"], item["fix"]) for item in done.json["items"]] == [(name, build_it)]
    found = done.json["repair"]
    assert set(found) == KEYS
    assert (found["done"], found["removed"], found["snapshot"]) == (True, 1, 2)
    assert found["removed_bytes"] > 112
    assert found["shards"] == [shard]
    assert name in done.err
    info = run("info", cache, "--json").json
    assert (info["complete"], info["snapshot"], info["counts"]["entries"]) == (False, 2, 3)
    again = run("verify", cache, "--json")
    assert (again.status, again.json["counts"]["missing"]) == (1, 1)
    assert again.json["items"][0]["reason"] == "entry-lost"
    assert build(data, cache).encoded == 1
    assert run("info", cache, "--json").json["complete"] is True
    assert run("verify", cache, "--full").status == 0


def test_confirmation_only_on_a_terminal(run, cache, monkeypatch):
    damage_payload(cache)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    done = run("verify", cache, "--repair", "--json")
    assert done.status == 2
    assert done.error["fix"] == "add --yes"
    assert open_snapshot(cache).number == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "number"), [("y", 2), ("n", 1), ("", 1)])
def test_only_a_confirmed_repair_removes_entries(run, cache, monkeypatch, answer, number):
    name = damage_payload(cache)
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    done = run("verify", cache, "--repair")
    assert done.status == 1
    assert "to be removed: 1 entry" in done.err
    assert name in done.err
    assert open_snapshot(cache).number == number

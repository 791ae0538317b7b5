import io

import pytest
from damaged import damage_payload

from latentcache.store.snapshot import open_snapshot


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

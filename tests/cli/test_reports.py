"""What a build and a verify leave behind."""

import json
import os
import signal
import subprocess
import sys

import pytest
from small_cache import SMALL, as_nobody, counts, damage_payload, draw, draw_four

from latentcache import failpoint
from latentcache.cli import reports
from latentcache.store.paths import CachePaths


def left(folder, name="report.json"):
    """A report, seen to go with its items."""
    found = json.loads((folder / name).read_text("ascii"))
    items = [json.loads(line) for line in (folder / found["items_file"]).read_text("ascii").splitlines()]
    assert len(items) == found["num_items"]
    return found, items


def of(cache, command):
    return left(cache / "reports" / command)


def test_a_build_leaves_its_object_and_its_items(run, data, tmp_path):
    (data / "bad.png").write_bytes(b"")
    done = run("build", data, *SMALL, "--out", tmp_path / "c", "--json").json
    found, items = of(tmp_path / "c", "build")
    assert items == done["items"]
    same = set(done) - {"items", "elapsed_s"}
    assert {name: found[name] for name in same} == {name: done[name] for name in same}
    assert found["exit_code"] == 1
    assert found["started"].endswith("+00:00")
    assert found["versions"]["python"]
    (cause,) = [one for one in found["causes"] if one["category"] == "quarantined"]
    assert (cause["reason"], cause["count"]) == ("empty", 1)
    assert cause["hint"]
    assert cause["examples"] == [{"path": "bad.png", "field": "latents", "found": "it has 0 bytes"}]


def test_the_last_one_counts(run, data, tmp_path):
    run("build", data, *SMALL, "--out", tmp_path / "c")
    run("build", data, "--out", tmp_path / "c")
    assert of(tmp_path / "c", "build")[0]["counts"]["encoded"] == 0
    assert sorted(path.name for path in (tmp_path / "c" / "reports" / "build").iterdir()) == [
        "report.items.jsonl",
        "report.json",
    ]


def test_a_verify_leaves_one_and_touches_nothing_else(run, cache, data):
    (data / "p0.png").unlink()
    before = {path: path.stat().st_ctime_ns for path in cache.rglob("*") if path.is_file()}
    done = run("verify", cache, "--full", "--json").json
    assert done["error"] is None, done
    found, items = of(cache, "verify")
    assert (found["mode"], found["exit_code"], found["counts"]) == ("full", 1, done["counts"])
    assert found["recipe_ids"] == done["recipe_ids"]
    assert items == done["items"]
    assert {path: path.stat().st_ctime_ns for path in before} == before


def test_a_verify_that_fails_leaves_its_error(run, cache):
    (cache / "snapshots" / "000001" / "columns.safetensors").unlink()
    done = run("verify", cache, "--json")
    assert of(cache, "verify")[0]["error"] == done.error


def test_a_build_that_fails_leaves_its_error(run, cache, data):
    (data / "metadata.csv").write_text("nothing,of,use\n1,2,3\n")
    done = run("build", data, "--out", cache, "--json")
    assert (done.status, of(cache, "build")[0]["error"]) == (2, done.error)


@pytest.mark.parametrize("words", [["--resolution", "64", "--bucket", "64x64"], ["--dry-run"], ["--report", "none"]])
def test_what_was_not_begun_or_not_wanted_leaves_none(run, cache, data, words):
    run("build", data, "--out", cache, *words)
    assert not (cache / "reports").exists()


def test_no_cache_no_report(run, tmp_path):
    assert run("verify", tmp_path).status == 3
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "data").mkdir()
    assert run("build", tmp_path / "data", "--out", tmp_path / "c").status == 2
    assert not (tmp_path / "c").exists()


def test_elsewhere(run, cache, tmp_path):
    assert run("verify", cache, "--report", tmp_path / "mine.json").status == 0
    assert left(tmp_path, "mine.json")[0]["command"] == "verify"
    assert not (cache / "reports").exists()
    done = run("verify", cache, "--report", tmp_path / "no" / "mine.json", "--json")
    assert (done.status, done.error["slug"]) == (2, "usage")


def test_a_cache_that_may_not_be_written_is_verified_all_the_same(run, open_folder):
    build = [*SMALL, "--out", open_folder / "cache"]
    assert run("build", draw_four(open_folder / "data"), *build, "--report", "none").status == 0
    done = as_nobody(["verify", open_folder / "cache"], ["verify", open_folder / "cache", "--json"])
    assert (done.status, done.err) == (0, "")
    assert not (open_folder / "cache" / "reports" / "verify" / "report.json").exists() or os.getuid() == 0


def test_a_place_that_turns_out_unwritable_is_said(run, cache, tmp_path):
    (tmp_path / "mine.json").mkdir()
    done = run("verify", cache, "--report", tmp_path / "mine.json")
    assert done.status == 0
    assert "warning: the report cannot be written" in done.err
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_a_build_that_is_ended_in_order_says_what_it_did(data, tmp_path):
    for number in range(4, 30):
        draw(data / f"p{number}.png", seed=number)
    (data / "bad.png").write_bytes(b"")
    events, cache = tmp_path / "events", tmp_path / "c"
    words = ["build", data, *SMALL, "--out", cache, "--commit-every", "1"]
    command = [sys.executable, "-m", "latentcache", *words, "--batch-size", "1", "--events", events, "--quiet"]
    armed = os.environ | {failpoint.VARIABLE: "before-put:4:stop"}
    process = subprocess.Popen([str(word) for word in command], env=armed, stderr=subprocess.PIPE)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    process.send_signal(signal.SIGTERM)  # obeyed when it goes on
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=30)
    found, items = of(cache, "build")
    keys = sum(len(json.loads(line)["keys"]) for line in events.read_text().splitlines())
    assert (process.returncode, found["exit_code"], found["error"]["slug"]) == (143, 143, "interrupted")
    assert found["counts"] == counts(31, keys, 0, 1, no_caption=28)
    assert [item["reason"] for item in items] == ["empty"]


def test_causes_are_counted_with_a_few_examples():
    items = [{"category": "c", "reason": "r", "path": str(n), "hint": "h"} for n in range(5)]
    items.insert(0, {"category": "c", "reason": "q", "path": "x", "hint": "i", "found": "f"})
    first, second = reports.causes(items)
    assert (first["reason"], first["count"], len(first["examples"])) == ("r", 5, reports.EXAMPLES)
    assert (second["count"], second["examples"]) == (1, [{"path": "x", "found": "f"}])


def test_reports_are_no_part_of_a_cache(run, cache, data):
    damage_payload(cache)
    run("verify", cache, "--full")
    whole = run("info", cache, "--json").json["counts"]
    assert CachePaths(cache).reports.is_dir()
    (cache / "reports" / "verify" / "report.json").write_text("nonsense")
    assert run("info", cache, "--json").json["counts"] == whole
    assert run("build", data, "--out", cache).status == 0

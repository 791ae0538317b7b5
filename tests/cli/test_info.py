from damaged import damage_payload
from small_cache import SMALL, draw_four

from latentcache.pipeline.preflight import write_state
from latentcache.sources.options import SourceOptions
from latentcache.store.paths import CachePaths


def test_a_damaged_entry_has_no_checksum(run, cache):
    whole = {entry["key"]: entry["checksum"] for entry in run("info", cache, "--entries", "--json").json["entries"]}
    damage_payload(cache)
    now = {entry["key"]: entry["checksum"] for entry in run("info", cache, "--entries", "--json").json["entries"]}
    assert set(now) == set(whole)
    damaged = [key for key in now if now[key] is None]
    assert len(damaged) == 1
    assert all(now[key] == whole[key] for key in now if key not in damaged)
    assert "DAMAGED" in run("info", cache, "--entries").out


def test_an_unfinished_build_is_shown(run, data, tmp_path):
    folder = tmp_path / "c"
    run("build", data, *SMALL, "--out", folder)
    (folder / "CURRENT").unlink()
    write_state(CachePaths(folder), {}, SourceOptions(), samples=4)
    value = run("info", folder, "--entries", "--json").json
    assert (value["complete"], value["snapshot"]) == (False, 0)
    assert value["counts"] == {"samples": 4, "entries": 4, "quarantined": 0}
    assert len(value["entries"]) == 4
    assert "not complete: run the same `latentcache build` again" in run("info", folder).out


def test_text_output(run, cache, data):
    lines = run("info", cache).out.splitlines()
    assert lines[0] == f"{cache}  snapshot 1, complete"
    assert lines[1].startswith("4 samples, 4 entries, 0 rejected, ")
    assert f"from {data}" in lines[2]
    assert lines[3].startswith("captions: 1 sample without one")
    assert lines[4].startswith("latents (recipe ")
    assert lines[5].startswith("  encoder   stub ")
    assert "  bucket  items" in lines


def test_no_cache(run, tmp_path):
    done = run("info", tmp_path / "none", "--json")
    assert (done.status, done.error["slug"]) == (3, "cache-not-found")
    assert "no such folder" in done.error["why"]
    draw_four(tmp_path / "data")
    assert run("info", tmp_path / "data", "--json").error["fix"].startswith("if this is DATA, make its cache with ")
    run("build", tmp_path / "data", *SMALL)
    fix = run("info", tmp_path / "data", "--json").error["fix"]
    assert fix == f"give the cache of this data: {tmp_path / 'data.latentcache'}"

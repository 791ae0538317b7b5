import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_cache import SMALL, as_nobody, build, damage_payload, draw, draw_four

from latentcache.errors import CacheDamagedError, CacheNotFoundError, SourceNotFoundError
from latentcache.recipe import Recipe
from latentcache.store.generation import load_generation
from latentcache.verify import run as verify_run
from latentcache.verify.run import verify_cache


def files(folder):
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.parametrize("full", [False, True])
def test_it_writes_nothing(cache, data, full):
    before = files(cache), files(data)
    verify_cache(cache, full=full)
    assert (files(cache), files(data)) == before


def test_the_report(shared):
    report = verify_cache(shared[1])
    assert (report.mode, report.generation, report.samples, report.building) == ("fast", 1, 4, False)
    assert report.findings == ()
    assert report.counts["ok"] == 4
    assert verify_cache(shared[1], full=True).mode == "full"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to become")
def test_a_read_only_folder(open_folder):
    data, cache = draw_four(open_folder / "data"), open_folder / "cache"
    build(data, cache)
    for folder in (data, cache):
        subprocess.run(["chmod", "-R", "a+rX,a-w", folder], check=True)
    for words in (["verify", cache, "--full", "--json"], ["info", cache, "--entries", "--json"]):
        done = as_nobody(words, words)
        assert done.status == 0, done.err
    assert done.json["counts"]["entries"] == 4


def test_no_cache(tmp_path):
    with pytest.raises(CacheNotFoundError):
        verify_cache(tmp_path)


def test_a_data_folder_that_is_gone(cache, data):
    data.rename(data.with_name("elsewhere"))
    with pytest.raises(SourceNotFoundError) as caught:
        verify_cache(cache)
    assert str(data) in caught.value.what
    assert caught.value.fix == f"say where it is: latentcache verify {cache} --data DATA"
    assert verify_cache(cache, data=data.with_name("elsewhere")).counts["ok"] == 4


def test_cache_and_data_that_moved_together(cache, data, tmp_path):
    (tmp_path / "new").mkdir()
    for folder in (cache, data):
        shutil.move(folder, tmp_path / "new")
    report = verify_cache(tmp_path / "new" / "cache", full=True)
    assert (report.counts["ok"], report.exit_code()) == (4, 0)


def test_a_folder_without_pictures_is_one_without_samples(cache, data):
    for picture in data.glob("*.png"):
        picture.unlink()
    assert verify_cache(cache).counts["stale"] == 4


@pytest.mark.parametrize("name", ["manifest.json", "key.npy", "names_bytes.npy", "refused.json"])
def test_damage_to_the_generation_is_an_error_that_leads_out(cache, data, name):
    path = cache / "generations" / "000001" / name
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CacheDamagedError) as caught:
        verify_cache(cache)
    assert caught.value.exit_code == 3
    assert caught.value.where.startswith(str(path.parent))
    assert caught.value.fix.startswith(f"rm {cache}/CURRENT, then the `latentcache build` command")
    (cache / "CURRENT").unlink()
    report = build(data, cache)
    assert (report.encoded, report.cached) == (0, 4)
    assert verify_cache(cache, full=True).exit_code() == 0


def test_a_recipe_that_differs_in_nothing(shared):
    recipe = load_generation(shared[1]).recipe
    assert verify_cache(shared[1], requested=Recipe.from_json(recipe.as_json())).findings == ()


def test_a_recipe_that_differs_names_the_first_field_that_was_asked_for(shared):
    recipe = load_generation(shared[1]).recipe
    asked = recipe.with_encoder(storage_dtype="float32", compute_dtype="float16")
    findings = verify_cache(shared[1], requested=asked).findings
    assert [(f.category, f.reason) for f in findings] == [("stale", "recipe:encoder.compute_dtype")] * 4
    assert (findings[0].expected, findings[0].found) == ("float16", "float32")


def test_a_recipe_counts_more_than_lost_entries_and_less_than_damage(cache):
    recipe = load_generation(cache).recipe.with_encoder(storage_dtype="float32")
    damage_payload(cache)
    report = verify_cache(cache, requested=recipe, full=True)
    assert (report.counts["corrupt"], report.counts["stale"]) == (1, 3)
    shutil.rmtree(cache / "shards")
    assert verify_cache(cache, requested=recipe).counts["stale"] == 4


def test_other_libraries_are_provenance(shared, monkeypatch):
    real = verify_run.installed_version
    monkeypatch.setattr(verify_run, "installed_version", lambda name: "99.0" if name == "numpy" else real(name))
    report = verify_cache(shared[1])
    (finding,) = report.findings
    assert (finding.category, finding.reason, finding.found) == ("provenance", "numpy", "99.0")
    assert (report.counts["provenance"], report.counts["ok"], report.exit_code()) == (1, 4, 0)


def test_beside_a_running_build(cache, data, tmp_path):
    """Readers of the generation before never notice the build."""
    for number in range(10, 25):
        draw(data / f"q{number}.png", seed=number)
    words = [sys.executable, "-m", "latentcache", "build", data, *SMALL, "--out", cache, "--quiet"]
    words += ["--model", "stub:delay_ms=100", "--batch-size", "1", "--commit-every", "1"]
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL)
    seen = []
    try:
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            report = verify_cache(cache, full=True)
            assert report.counts["corrupt"] == report.counts["stale"] == 0
            seen.append((report.building, report.generation))
    finally:
        process.wait(timeout=20)
    assert (True, 1) in seen
    assert verify_cache(cache).counts["ok"] == 19


def test_fixes_are_commands_that_quote_their_paths(run, tmp_path):
    data, cache = draw_four(tmp_path / "my data"), tmp_path / "my cache"
    build(data, cache)
    (data / "p0.png").unlink()
    (finding,) = verify_cache(cache).findings
    assert finding.fix == f"latentcache build '{data}' --out '{cache}'"


def test_a_sample_has_the_worst_of_its_findings(cache, data):
    for shard in Path(cache, "shards").glob("*/index.npy"):
        shard.write_bytes(b"")
    (data / "p0.txt").write_text("another")
    assert {f.category for f in verify_cache(cache).findings} == {"corrupt"}

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
from small_cache import build, damage_payload, draw, draw_four

from latentcache.errors import CacheIncompleteError, CacheLockedError, CacheNotFoundError
from latentcache.loader.cache import open_cache
from latentcache.store.generation import load_generation
from latentcache.store.inventory import stored_entries
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.verify.repair import repair_cache
from latentcache.verify.run import verify_cache


def repair(cache, *, answer=True, **more):
    return repair_cache(cache, confirm=lambda plan: answer, **more)


def counts(cache):
    return {name: number for name, number in verify_cache(cache, full=True).counts.items() if number}


def content(cache):
    """key -> checksum of every entry whose payload is right."""
    return {
        entry.key: entry.header.payload_checksum for entry in stored_entries(cache, payloads=True) if entry.intact
    }


def log_of(cache, report):
    return [json.loads(line) for line in (cache / report.log).read_text("ascii").splitlines()]


def state(folder):
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size, hashlib.sha256(p.read_bytes()).digest())
            for p in sorted(folder.rglob("*")) if p.is_file()}  # fmt: skip


def shard_of(cache, name="data.mdb"):
    generation = load_generation(cache)
    path = cache / "shards" / generation.shards[0] / name
    path.chmod(0o644)
    return path


def test_a_damaged_entry_is_taken_out_and_a_build_makes_it_again(cache, data):
    before, sources = content(cache), state(data)
    name = damage_payload(cache, row=2)
    report = repair(cache)
    assert report.done
    assert (report.generation, report.complete) == (2, False)
    assert [(item.path, item.reason) for item in report.removals] == [(name, "payload")]
    assert [(found.saved, found.lost, found.died) for found in report.salvaged] == [(3, 1, False)]
    assert counts(cache) == {"missing": 1, "ok": 3}
    (finding,) = verify_cache(cache).findings
    assert (finding.category, finding.reason, finding.path) == ("missing", "entry-lost", name)
    made = build(data, cache)
    assert (made.encoded, made.cached) == (1, 3)
    assert counts(cache) == {"ok": 4}
    assert content(cache) == before
    assert load_generation(cache).complete
    assert state(data) == sources


def test_the_log_names_what_was_removed(cache):
    name = damage_payload(cache, row=1)
    rows = load_generation(cache).rows
    (line,) = log_of(cache, repair(cache))
    assert line == {
        "key": rows.key[1].tobytes().hex(), "path": name, "reason": "payload", "generation": 1, "bytes": line["bytes"]
    }  # fmt: skip
    assert line["bytes"] > 112


def test_nothing_to_repair_changes_nothing(cache):
    before = state(cache)
    report = repair(cache)
    assert not report.plan.needed
    assert not report.done
    after = state(cache)
    assert {name for name in after if after[name] != before.get(name)} == {str(cache / "builder.lock")}


def test_a_no_changes_nothing(cache):
    damage_payload(cache)
    before = state(cache / "shards")
    assert not repair(cache, answer=False).done
    assert state(cache / "shards") == before
    assert load_generation(cache).number == 1


def test_twice_is_once(cache):
    damage_payload(cache)
    repair(cache)
    assert not repair(cache).plan.needed
    assert load_generation(cache).number == 2


@pytest.mark.parametrize("name", ["index.npy", "shard.json"])
def test_a_damaged_index_loses_nothing(cache, data, name):
    before = content(cache)
    shard_of(cache, name).write_bytes(b"[]")
    report = repair(cache)
    assert (report.complete, report.removals, report.log) == (True, (), "")
    assert counts(cache) == {"ok": 4}
    assert content(cache) == before
    assert build(data, cache).encoded == 0


def test_pages_that_disagree_are_written_anew(cache):
    key = load_generation(cache).rows.key[0].tobytes()
    path = shard_of(cache)
    path.write_bytes(path.read_bytes().replace(key, key[:-1] + bytes([key[-1] ^ 1]), 1))
    assert counts(cache) == {"corrupt": 1, "ok": 4}
    assert repair(cache).complete
    assert counts(cache) == {"ok": 4}


def test_index_and_pages_lost_the_generation_still_knows(cache):
    generation = load_generation(cache)
    first = int(generation.rows.offset.min())
    path = shard_of(cache)
    raw = bytearray(path.read_bytes())
    raw[:8192] = bytes(8192)  # both meta pages
    assert first >= 8192
    path.write_bytes(raw)
    shard_of(cache, "index.npy").write_bytes(b"")
    report = repair(cache)
    assert report.complete
    assert counts(cache) == {"ok": 4}


def test_a_shard_cut_short_keeps_what_is_before_the_cut(cache, data):
    generation = load_generation(cache)
    offsets = sorted(generation.rows.offset.tolist())
    path = shard_of(cache)
    os.truncate(path, offsets[-1] + 200)
    report = repair(cache)
    assert [item.reason for item in report.removals] == ["not-whole"]
    assert counts(cache) == {"missing": 1, "ok": 3}
    assert build(data, cache).encoded == 1


def test_a_hopeless_shard(cache, data):
    shard_of(cache).write_bytes(b"nothing at all")
    report = repair(cache)
    assert len(report.removals) == 4
    assert counts(cache) == {"missing": 4}
    assert build(data, cache).encoded == 4
    assert counts(cache) == {"ok": 4}


def test_files_with_the_same_bytes_share_an_entry_and_its_fate(tmp_path):
    data = draw_four(tmp_path / "data")
    shutil.copy(data / "p0.png", data / "twin.png")
    build(data, tmp_path / "cache")
    damage_payload(tmp_path / "cache", row=0)
    report = repair(tmp_path / "cache")
    assert sorted(item.path for item in report.removals) == ["p0.png", "twin.png"]
    assert len({item.key for item in report.removals}) == 1
    assert counts(tmp_path / "cache") == {"missing": 2, "ok": 3}
    assert build(data, tmp_path / "cache").encoded == 1


def test_stale_entries_go_only_where_it_is_asked_for(cache, data):
    draw(data / "p0.png", seed=99)
    (data / "p1.txt").write_text("another caption")
    (data / "p3.png").unlink()
    assert not repair(cache).plan.needed
    report = repair(cache, drop_stale=True)
    assert {item.path: item.reason for item in report.removals} == {
        "p0.png": "source-changed",
        "p3.png": "source-removed",
    }
    assert not report.complete
    assert build(data, cache).encoded == 1
    assert counts(cache)["ok"] == 3


def test_an_incomplete_generation_is_not_served_unless_asked(cache):
    damage_payload(cache)
    repair(cache)
    with pytest.raises(CacheIncompleteError) as caught:
        open_cache(cache)
    assert caught.value.fix.startswith("latentcache build ")
    assert str(cache) in caught.value.fix
    partial = open_cache(cache, allow_partial=True)
    assert len(partial) == 3
    assert sum(len(batch["keys"]) for batch in partial.loader(batch_size=1)) == 3


def test_a_build_beside_it_is_named(cache):
    with builder_lock(cache / "builder.lock"), pytest.raises(CacheLockedError) as caught:
        repair(cache)
    assert caught.value.holder["pid"] == os.getpid()


def test_a_folder_that_is_no_cache_gets_no_lock(tmp_path):
    with pytest.raises(CacheNotFoundError):
        repair(tmp_path)
    assert list(tmp_path.iterdir()) == []


def command(cache, **environment):
    words = [sys.executable, "-m", "latentcache", "verify", cache, "--repair", "--yes", "--json"]
    return subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("action", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_killed_or_failed_at_its_durable_steps(cache, data, number, action):
    before, sources = content(cache), state(data)
    damage_payload(cache, row=1)
    process = command(cache, LATENTCACHE_FAILPOINT=f"repair-delete:{number}:{action}")
    assert process.wait(60) == (-signal.SIGKILL if action == "kill" else 3)
    assert load_generation(cache).number == 1
    repair(cache)
    build(data, cache)
    assert counts(cache)["ok"] == 4
    assert content(cache) == before
    assert load_generation(cache).complete
    assert state(data) == sources


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_random(cache, data, seed):
    before = content(cache)
    damage_payload(cache, row=seed % 4)
    process = command(cache)
    try:
        process.wait(random.Random(seed).uniform(0.2, 1.2))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    repair(cache)
    build(data, cache)
    assert (counts(cache)["ok"], content(cache)) == (4, before), f"seed {seed}"


def test_the_old_shard_stays_for_readers_and_out_of_builds(cache):
    reader = open_cache(cache).loader(batch_size=1)
    before = [(batch["keys"], batch["latents"].tolist()) for batch in reader]
    shard_of(cache, "shard.json").write_bytes(b"[]")
    (old,) = load_generation(cache).shards
    repair(cache)
    layout = CacheLayout(cache)
    assert layout.retired() == {old}
    assert old not in [path.name for path in layout.sealed_shards()]
    assert (layout.shards / old / "data.mdb").exists()
    assert [(batch["keys"], batch["latents"].tolist()) for batch in reader] == before

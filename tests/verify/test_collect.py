import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_cache import as_nobody, build, damage_payload, draw, draw_four

from latentcache.errors import CacheDamagedError, CacheLockedError, CacheNotFoundError, UsageError
from latentcache.loader.cache import open_cache
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.retire import retire
from latentcache.verify.collect import collect
from latentcache.verify.repair import repair_cache
from latentcache.verify.run import verify_cache


def states(report):
    """file -> (state, reason)."""
    return {item.file: (item.state, item.reason) for item in report.items}


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def shards(cache):
    return sorted(path.name for path in CacheLayout(cache).all_sealed())


def ok(cache):
    return verify_cache(cache, full=True).counts["ok"]


def age(cache, seconds=10_000):
    """Make everything in a cache look that much older."""
    for path in cache.rglob("*"):
        stat = path.stat()
        os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))


@pytest.fixture
def rebuilt(cache, data):
    """Three generations; each build made one picture anew. Gives the shard of each."""
    for seed in (71, 72):
        draw(data / "p0.png", seed=seed)
        build(data, cache)
    assert CacheLayout(cache).generations() == [1, 2, 3]
    return [load_generation(cache, number).shards for number in (1, 2, 3)]


def test_a_fresh_cache_has_nothing_to_collect(shared):
    assert collect(shared[1]).items == ()


def test_a_dry_run_removes_nothing(cache, rebuilt):
    before = files(cache)
    age(cache)
    report = collect(cache, keep=1)
    assert not report.applied
    assert states(report)["generations/000001"] == ("removable", "superseded")
    assert report.num_bytes("removable") > 0
    assert files(cache) == before


def test_what_it_says_is_what_it_does(cache, rebuilt):
    age(cache)
    said = states(collect(cache, keep=1))
    done = states(collect(cache, keep=1, apply=True))
    assert {file: ("removed", reason) for file, (_, reason) in said.items()} == done
    assert CacheLayout(cache).generations() == [3]
    assert shards(cache) == sorted(rebuilt[2])
    assert ok(cache) == 4
    assert collect(cache, keep=1, apply=True).items == ()
    assert not (cache / "scratch").exists()


def test_two_generations_are_kept(cache, rebuilt):
    age(cache)
    collect(cache, apply=True)
    assert CacheLayout(cache).generations() == [2, 3]
    assert set(shards(cache)) == {*rebuilt[1], *rebuilt[2]}


def test_the_grace_period_holds(cache, rebuilt):
    report = collect(cache, keep=1, apply=True)
    assert states(report)["generations/000001"] == ("held", "grace")
    assert report.num_bytes("removed") == 0
    assert CacheLayout(cache).generations() == [1, 2, 3]
    collect(cache, keep=1, grace_s=0, apply=True)
    assert CacheLayout(cache).generations() == [3]


def test_a_reader_holds_its_generation(cache, data):
    reader = open_cache(cache)
    before = [batch["latents"].tolist() for batch in reader.loader(batch_size=1)]
    for number in range(4):
        draw(data / f"p{number}.png", seed=80 + number)
    build(data, cache)
    report = collect(cache, keep=1, grace_s=0, apply=True)
    held = [item for item in report.items if item.state == "held"]
    assert {item.file.split("/")[0] for item in held} == {"generations", "shards"}
    assert all(item.reason == "pinned" and item.holders[0].pid == os.getpid() for item in held)
    assert [batch["latents"].tolist() for batch in reader.loader(batch_size=1)] == before
    del reader
    assert states(collect(cache, keep=1, grace_s=0, apply=True))["generations/000001"] == ("removed", "superseded")
    assert ok(cache) == 4


def test_a_sparse_shard_is_compacted(cache, data, monkeypatch):
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)  # else a build after 2 s notes newer times
    for number in range(3):
        draw(data / f"p{number}.png", seed=90 + number)
    build(data, cache)
    age(cache)
    collect(cache, keep=1, grace_s=0, apply=True)
    assert CacheLayout(cache).generations() == [3]
    before = [(b["keys"], b["latents"].tolist()) for b in open_cache(cache).loader(batch_size=1, seed=5)]
    report = collect(cache, keep=1, grace_s=0, apply=True)
    assert ok(cache) == 4
    assert [(b["keys"], b["latents"].tolist()) for b in open_cache(cache).loader(batch_size=1, seed=5)] == before
    assert report.items == ()  # the first collection did both
    assert build(data, cache).published is False


def test_compaction_is_said_before_it_is_done(cache, data):
    for number in range(3):
        draw(data / f"p{number}.png", seed=90 + number)
    build(data, cache)
    (old,) = load_generation(cache, 1).shards
    shutil.rmtree(cache / "generations" / "000001")
    assert states(collect(cache)) == {f"shards/{old}": ("compactable", "sparse")}
    names = list(load_generation(cache).samples.names)
    report = collect(cache, apply=True)
    assert states(report)[f"shards/{old}"] == ("held", "grace")
    assert ("compacted", "sparse") in [(item.state, item.reason) for item in report.items]
    assert report.generation == 3
    assert list(load_generation(cache).samples.names) == names
    assert load_generation(cache).complete
    assert states(collect(cache, apply=True, grace_s=0))[f"shards/{old}"] == ("removed", "retired")
    assert not CacheLayout(cache).retired()
    assert ok(cache) == 4


def test_a_sparse_shard_with_damage_is_left_for_a_repair(cache, data):
    for number in range(3):
        draw(data / f"p{number}.png", seed=90 + number)
    build(data, cache)
    shutil.rmtree(cache / "generations" / "000001")
    row = [name.split("/")[0] for name in load_generation(cache).samples.names].index("p3.png")
    damage_payload(cache, row=row)
    report = collect(cache, apply=True)
    assert [(item.state, item.reason) for item in report.items] == [("held", "damaged")]
    assert load_generation(cache).number == 2
    assert len(shards(cache)) == 2


def test_a_repaired_generation_does_not_keep_the_damaged_one(cache, data):
    damage_payload(cache)
    (old,) = shards(cache)
    repair_cache(cache, confirm=lambda plan: True)
    build(data, cache)
    assert states(collect(cache))[f"shards/{old}"] == ("held", "grace")
    collect(cache, grace_s=0, apply=True)
    assert CacheLayout(cache).generations() == [2, 3]
    assert old not in shards(cache)
    assert ok(cache) == 4


def test_leftovers_of_the_dead(cache):
    for name in ("CURRENT.tmp", "shards/x.retired", "scratch/half/data.mdb", "generations/000009/key.npy"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"x")
    (cache / "shards" / "empty.open").mkdir()
    report = collect(cache, apply=True)
    assert {item.reason for item in report.items} == {"left-over"}
    assert len(report.items) == 5
    assert collect(cache).items == ()
    assert ok(cache) == 4


def test_what_an_unfinished_build_has_committed_stays(cache, data):
    build(draw_four(data / "more"), cache.with_name("other"))
    (other,) = shards(cache.with_name("other"))
    shutil.copytree(cache.with_name("other") / "shards" / other, cache / "shards" / other)
    (cache / "shards" / "y.open").mkdir()
    (cache / "BUILDING").write_text("{}")
    held = states(collect(cache, grace_s=0, apply=True))
    assert held == {f"shards/{other}": ("held", "unfinished-build"), "shards/y.open": ("held", "unfinished-build")}
    (cache / "BUILDING").unlink()
    assert states(collect(cache, apply=True))[f"shards/{other}"] == ("held", "grace")
    assert states(collect(cache, grace_s=0, apply=True))[f"shards/{other}"] == ("removed", "unreferenced")


def test_an_open_shard_with_entries_of_its_own_stays(cache, data):
    build(draw_four(data / "more"), cache.with_name("other"))
    draw(data / "more" / "new.png", seed=7)
    build(data / "more", cache.with_name("other"))
    newest = load_generation(cache.with_name("other")).shards
    for name in newest:
        shutil.copytree(cache.with_name("other") / "shards" / name, cache / "shards" / f"{name}.open")
    found = states(collect(cache))
    assert sorted(found.values()) == [("held", "unfinished-build"), ("removable", "left-over")]


def test_quarantine_goes_only_with_a_flag(cache):
    (cache / "quarantine" / "bad").mkdir(parents=True)
    (cache / "quarantine" / "bad" / "data.mdb").write_bytes(b"x")
    assert states(collect(cache, apply=True)) == {"quarantine/bad": ("held", "damaged")}
    assert states(collect(cache, apply=True, damaged=True)) == {"quarantine/bad": ("removed", "damaged")}


def test_a_build_beside_it_is_named(cache):
    with builder_lock(cache / "builder.lock"):
        for apply in (False, True):
            with pytest.raises(CacheLockedError):
                collect(cache, apply=apply)


def test_refusals(cache, tmp_path):
    with pytest.raises(UsageError):
        collect(cache, keep=0)
    with pytest.raises(CacheNotFoundError):
        collect(tmp_path / "nothing", apply=True)
    manifest = cache / "generations" / "000001" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.raises(CacheDamagedError):
        collect(cache, apply=True, grace_s=0)
    assert len(shards(cache)) == 1


def test_an_older_manifest_that_is_damaged_holds_everything_while_it_stays(cache, rebuilt):
    manifest = cache / "generations" / "000001" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    report = states(collect(cache, keep=1, apply=True))
    assert report["generations/000001"] == ("held", "grace")
    assert len(shards(cache)) == 3
    collect(cache, keep=1, grace_s=0, apply=True)
    assert CacheLayout(cache).generations() == [3]
    assert ok(cache) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to become")
def test_a_dry_run_on_a_read_only_folder(open_folder):
    data, cache = draw_four(open_folder / "data"), open_folder / "cache"
    build(data, cache)
    subprocess.run(["chmod", "-R", "a+rX,a-w", cache], check=True)
    words = ["gc", cache, "--json"]
    assert as_nobody(words, words).status == 0
    words = ["gc", cache, "--apply", "--json"]
    done = as_nobody(["gc", cache, "--json"], words)
    assert (done.status, done.json["error"]["slug"]) == (3, "read-only")


@pytest.mark.parametrize("number", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_killed_while_it_removes(cache, rebuilt, number):
    words = [sys.executable, "-m", "latentcache", "gc", cache, "--apply", "--keep", "1", "--grace", "0"]
    environment = os.environ | {"LATENTCACHE_FAILPOINT": f"collect-delete:{number}:kill"}
    done = subprocess.run([str(word) for word in words], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert ok(cache) == 4
    for generation in CacheLayout(cache).generations():
        assert all(Path(cache, "shards", name).is_dir() for name in load_generation(cache, generation).shards)
    collect(cache, keep=1, grace_s=0, apply=True)
    assert ok(cache) == 4
    assert collect(cache, keep=1, grace_s=0).items == ()
    assert len(CacheLayout(cache).generations()) == 1


def test_copies_of_a_repair_that_died_are_held_until_a_generation_names_them(cache, data):
    """Its shard is retired, so nothing would be left that a build could take the entries from."""
    layout = CacheLayout(cache)
    (shard,) = shards(cache)
    shutil.copytree(layout.shards / shard, layout.shards / "0123456789abcdef")
    retire(layout, shard, "damaged")
    report = collect(cache, apply=True, keep=1, grace_s=0)
    assert states(report)["shards/0123456789abcdef"] == ("held", "unfinished-repair")
    assert build(data, cache).encoded == 0
    collect(cache, apply=True, keep=1, grace_s=0)
    assert shards(cache) == ["0123456789abcdef"]
    assert ok(cache) == 4

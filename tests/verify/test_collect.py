import errno
import os
import shutil

import numpy as np
import pytest
from made_cache import make
from stored_items import items

from latentcache.errors import CacheDamagedError, CacheLockedError, StoreError, UsageError
from latentcache.store.atomic_io import unreadable
from latentcache.store.lock import builder_lock
from latentcache.store.snapshot import load_manifest
from latentcache.verify import collect as collect_module
from latentcache.verify.collect import collect
from latentcache.verify.verify import verify_cache


def states(report):
    """Map each file to (state, reason)."""
    return {item.file: (item.state, item.reason) for item in report.items if not item.entries}


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "builder.lock"}


def fine(case):
    report = verify_cache(case.cache, full=True)
    return report.exit_code() == 0 and report.counts["ok"] == case.total


def age(case, seconds=10_000):
    for path in case.cache.rglob("*"):
        stat = path.stat()
        os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))


def everything(case):
    return [(name, key, array.tobytes()) for name, key, array in items(case.cache, case.names[0])]


@pytest.fixture
def rebuilt(case):
    """Three snapshots, each with the first four samples encoded again; returns their shards."""
    for text in ("one", "two"):
        for number in range(4):
            case.write(number, f"{text} {number}")
        case.build()
    assert case.paths.snapshots() == [1, 2, 3]
    from latentcache.store.snapshot import open_snapshot

    return [open_snapshot(case.cache, number).shards for number in (1, 2, 3)]


def test_the_dry_run_equals_the_applied_run(case, rebuilt):
    age(case)
    planned = states(collect(case.cache, keep=1))
    done = states(collect(case.cache, keep=1, apply=True))
    assert {file: ("removed", reason) for file, (_, reason) in planned.items()} == done
    assert case.paths.snapshots() == [3]
    assert sorted(path.name for path in case.paths.sealed_shards()) == sorted(rebuilt[2])
    assert fine(case)
    assert states(collect(case.cache, keep=1, apply=True)) == {}
    assert not case.paths.scratch.exists()


def test_a_snapshot_that_cannot_be_read_now_is_not_removed(case, rebuilt, monkeypatch):
    def failing(folder):
        if folder == case.paths.snapshot(1):
            raise unreadable(folder / "manifest.json", OSError(errno.EIO, "Input/output error"))
        return load_manifest(folder)

    monkeypatch.setattr(collect_module, "load_manifest", failing)
    age(case)
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read"):
        collect(case.cache, keep=1, apply=True)
    assert case.paths.snapshots() == [1, 2, 3]


@pytest.fixture
def sparse(tmp_path, request):
    """Seven of eight entries of the only old shard are unreferenced."""
    case = make(tmp_path, "flat")
    shutil.rmtree(case.cache)
    case.build(per_shard=8)
    for number in range(7):
        case.write(number, f"other {number}")
    case.build(per_shard=8)
    return case


def test_a_rewritten_shard_is_reported_before_and_after(sparse):
    (old,) = {path.name for path in sparse.paths.sealed_shards()} - {_shard(sparse, 0)}
    shutil.rmtree(sparse.paths.snapshot(1))
    (part,) = collect(sparse.cache).items
    assert (part.state, part.reason, part.file, part.entries) == ("removable", "low-utilization", f"shards/{old}", 7)
    before = everything(sparse)
    report = collect(sparse.cache, apply=True)
    assert states(report)[f"shards/{old}"] == ("removed", "unreferenced")
    assert (report.snapshot, sparse.snapshot.complete, everything(sparse)) == (3, True, before)
    assert sparse.build() == (0, 8)
    assert old not in sparse.snapshot.shards
    assert fine(sparse)
    assert sparse.build() == (0, 8)


def test_a_shard_that_another_snapshot_needs_is_not_copied(sparse):
    report = collect(sparse.cache)
    assert [(item.state, item.reason, item.snapshot) for item in report.items] == [("held", "rollback", 1)]
    assert report.items[0].until == "until the next snapshot, or now with --keep 1"
    age(sparse)
    old = sparse.snapshot.shards
    collect(sparse.cache, keep=1, apply=True)
    assert set(old) - set(sparse.snapshot.shards)
    assert fine(sparse)


def test_a_sparse_shard_with_damage_is_left_for_a_repair(sparse):
    shutil.rmtree(sparse.paths.snapshot(1))
    sparse.damage(7)
    report = collect(sparse.cache, apply=True)
    assert [(item.state, item.reason) for item in report.items] == [("held", "damaged")]
    assert sparse.snapshot.number == 2
    assert len(sparse.paths.sealed_shards()) == 2


def test_a_build_that_has_not_ended_holds_everything_it_committed(case):
    snapshot = case.paths.current.read_bytes()
    for number in range(8):
        case.write(number, f"other {number}")
    case.build()
    case.paths.current.write_bytes(snapshot)  # as before the end of the build
    shutil.rmtree(case.paths.snapshot(2))
    case.paths.building.write_text("{}")
    report = collect(case.cache, apply=True)
    assert {(item.state, item.reason) for item in report.items} == {("held", "unfinished-build")}
    assert all(item.until for item in report.items)
    assert case.build() == (0, 8)


def test_leftovers_are_removed(case):
    age(case)
    places = [case.cache / "x.tmp", case.paths.shards / "y.tmp", case.paths.scratch / "z"]
    for place in places:
        place.parent.mkdir(exist_ok=True)
        place.write_text("x")
    (case.cache / "snapshots" / "000009").mkdir()
    assert set(states(collect(case.cache, apply=True)).values()) == {("removed", "left-over")}
    assert not any(place.exists() for place in places)
    assert fine(case)


def test_gc_is_rejected_when_nothing_may_be_removed(case):
    with builder_lock(case.paths.lock), pytest.raises(CacheLockedError):
        collect(case.cache)
    with pytest.raises(UsageError):
        collect(case.cache, keep=0)
    manifest = case.paths.snapshot(1) / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text(manifest.read_text().replace("true", "false", 1))
    before = files(case.cache)
    with pytest.raises(CacheDamagedError):
        collect(case.cache, apply=True)
    assert files(case.cache) == before


def _shard(case, number):
    return case.snapshot.shards[int(np.asarray(case.snapshot.fields["flat"].shard)[case.entry(number)[3]])]

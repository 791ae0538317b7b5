import numpy as np
import pytest
from made_cache import make

from latentcache.errors import CacheLockedError
from latentcache.store.garbage import stored_catalog, stored_entries
from latentcache.store.index import load_index
from latentcache.store.lock import builder_lock
from latentcache.verify.verify import repair_cache, verify_cache


def repair(case):
    return repair_cache(case.cache, confirm=lambda plan: True)


def counts(case):
    report = verify_cache(case.cache, full=True)
    return {name: number for name, number in report.counts.items() if number and name != "unreferenced"}


def state(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_nothing_to_repair_changes_nothing(case):
    before = state(case.cache)
    report = repair(case)
    assert (report.needed, report.done, report.complete) == (False, False, True)
    after = state(case.cache)
    assert {name for name in after if after[name] != before.get(name)} <= {str(case.paths.lock)}


def test_wrong_values_are_removed_in_one_repair(tmp_path, monkeypatch):
    """Otherwise the next build would reuse the unreferenced entry with equal bytes."""
    import made_cache

    made = made_cache.Flat.encode
    monkeypatch.setattr(made_cache.Flat, "encode", lambda self, content, recipe: np.full(64, np.nan, np.float32))
    case = make(tmp_path, "flat", total=3)
    case.write(0, "other")
    case.build()
    monkeypatch.setattr(made_cache.Flat, "encode", made)
    shard = next(name for name in case.snapshot.shards if len(load_index(case.paths.shard(name)).offset) == 1)
    case.write(0)
    case.build()  # no entry of the shard is needed now
    assert load_index(case.paths.shard(shard)).entries == 1
    report = repair(case)
    assert len(report.removals) == 3
    assert load_index(case.paths.shard(shard)).entries == 0
    assert [entry for entry in stored_entries(stored_catalog(case.cache)) if entry.intact] == []
    assert case.build() == (3, 0)
    assert counts(case) == {"ok": 3}


def test_a_running_build_is_not_repaired(case):
    with builder_lock(case.paths.lock), pytest.raises(CacheLockedError):
        repair(case)

import shutil

import pytest
from made_cache import make

from latentcache.errors import CacheLockedError
from latentcache.store.lock import builder_lock
from latentcache.store.shard import load_index, mend_index
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


def test_a_repair_removes_every_entry_of_a_damaged_key(tmp_path):
    """Otherwise the next build would reuse the entry of another shard."""
    case = make(tmp_path, "flat", total=3)
    case.damage(0)
    data = case.entry(0)[0]
    shutil.copytree(data.parent, case.paths.shard("copy"))
    assert mend_index(case.paths.shard("copy"))
    before = load_index(case.paths.shard("copy")).entries
    assert len(repair(case).removals) == 1
    assert load_index(case.paths.shard("copy")).entries == before - 1
    assert case.build() == (1, 2)
    assert counts(case) == {"ok": 3}


def test_a_running_build_is_not_repaired(case):
    with builder_lock(case.paths.lock), pytest.raises(CacheLockedError):
        repair(case)

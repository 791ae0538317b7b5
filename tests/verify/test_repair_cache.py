import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from made_cache import make

from latentcache.errors import CacheLockedError
from latentcache.store.garbage import stored_catalog, stored_entries
from latentcache.store.index import load_index
from latentcache.store.lock import builder_lock
from latentcache.store.publish import publish_replacement
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import removed_entries
from latentcache.verify.verify import repair_cache, verify_cache


def repair(case, *, answer=True, **more):
    return repair_cache(case.cache, confirm=lambda plan: answer, **more)


def counts(case):
    report = verify_cache(case.cache, full=True)
    return {name: number for name, number in report.counts.items() if number and name != "unreferenced"}


def items(case):
    snapshot = case.snapshot
    reader = EntryReader(case.paths, snapshot)
    return {
        (name, rows.row_keys(np.array([row])).tobytes()): reader.read(name, row).tobytes()
        for name, rows in snapshot.fields.items()
        for row in range(len(rows))
    }


def state(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_nothing_to_repair_changes_nothing(case):
    before = state(case.cache)
    report = repair(case)
    assert (report.needed, report.done, report.complete) == (False, False, True)
    after = state(case.cache)
    assert {name for name in after if after[name] != before.get(name)} <= {str(case.paths.lock)}


def test_a_damaged_index_loses_nothing(case):
    before = items(case)
    path = case.paths.shard(case.snapshot.shards[0]) / "index.safetensors"
    path.chmod(0o644)
    path.write_bytes(b"[]")
    report = repair(case)
    assert (report.complete, report.removals) == (True, ())
    assert counts(case) == {"ok": 8}
    assert items(case) == before
    assert case.build()[0] == 0


def test_a_shard_that_was_cut_off_keeps_its_front(tmp_path):
    case = make(tmp_path, "flat")
    offsets = sorted((case.entry(number)[1], number) for number in range(4))
    path = case.entry(0)[0]
    path.chmod(0o644)
    os.truncate(path, offsets[2][0] + 7)
    assert len(repair(case).removals) == 2
    assert counts(case) == {"missing": 2, "ok": 6}
    assert case.build() == (2, 6)
    assert counts(case) == {"ok": 8}


def test_a_shard_that_is_gone_makes_the_snapshot_incomplete(case):
    shutil.rmtree(case.entry(0)[0].parent)
    assert not repair(case).complete
    assert counts(case) == {"missing": 4, "ok": 4}
    assert case.build()[0] == 4
    assert counts(case) == {"ok": 8}


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
    publish_replacement(case.paths, case.snapshot, case.snapshot.fields.values(), removed={shard: []})
    report = repair(case)
    assert len(report.removals) == 3
    assert removed_entries(case.paths)[shard] == [], "all of it is out, as before"
    assert [entry for entry in stored_entries(stored_catalog(case.cache)) if entry.intact] == []
    assert case.build() == (3, 0)
    assert counts(case) == {"ok": 3}


def test_a_running_build_is_not_repaired(case):
    with builder_lock(case.paths.lock), pytest.raises(CacheLockedError):
        repair(case)


_CHILD = """
import sys
from pathlib import Path
from latentcache import failpoint
from latentcache.verify.verify import repair_cache
failpoint.arm(sys.argv[2])
repair_cache(Path(sys.argv[1]), confirm=lambda plan: True)
"""


@pytest.mark.parametrize("case", ["flat"], indirect=True)
@pytest.mark.parametrize("hit", [1, 2])
def test_a_killed_repair_leaves_the_old_or_the_new_cache(case, hit):
    case.damage(1)
    case.damage(6)
    number = case.snapshot.number
    done = subprocess.run([sys.executable, "-c", _CHILD, case.cache, f"repair-delete:{hit}:kill"], check=False)
    assert done.returncode in (0, -signal.SIGKILL)
    assert done.returncode or hit == 2
    found = counts(case)
    assert found.get("ok", 0) + found.get("corrupt", 0) + found.get("missing", 0) == 8
    if case.snapshot.number == number:
        assert found["corrupt"] >= 2
    repair(case)
    case.build()
    assert counts(case) == {"ok": 8}


@pytest.mark.parametrize("seed", range(6))
def test_repair_and_build_restore_any_damage(case, seed):
    draw, before = random.Random(seed), items(case)
    for _ in range(draw.randint(1, 4)):
        path = draw.choice([path for path in sorted(case.paths.shards.rglob("*")) if path.is_file()])
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        at = draw.randrange(len(data))
        if draw.random() < 0.3:
            del data[at:]
        else:
            data[at : at + 8] = draw.randbytes(len(data[at : at + 8]))
        path.write_bytes(data)
    repair(case)
    assert counts(case).keys() <= {"ok", "missing"}
    case.build()
    assert counts(case) == {"ok": 8}
    assert items(case) == before

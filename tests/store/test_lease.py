import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_entries import make_cache, publish
from store_children import __file__ as CHILDREN

from latentcache.errors import CacheDamagedError, CacheNotFoundError
from latentcache.store import lock as lock_module
from latentcache.store.lock import Lease, unleased
from latentcache.store.snapshot import open_leased


def manifest(paths, number=1):
    return paths.snapshot(number) / "manifest.json"


def free(paths, number=1):
    with unleased(manifest(paths, number)) as answer:
        return answer


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_lease_lasts_as_long_as_its_snapshot(paths):
    snapshot = open_leased(paths.root)
    assert (snapshot.number, free(paths)) == (1, False)
    del snapshot
    assert free(paths)


def test_a_pickled_snapshot_takes_its_own_lease(paths):
    snapshot = open_leased(paths.root)
    copy = pickle.loads(pickle.dumps(snapshot))
    del snapshot
    assert not free(paths)
    del copy
    assert free(paths)


def test_a_pickled_snapshot_is_not_one_of_a_cache_made_anew(paths):
    pickled = pickle.dumps(open_leased(paths.root))
    shutil.rmtree(paths.root)
    make_cache(paths.root, range(7))
    with pytest.raises(CacheNotFoundError, match="is not the cache that was opened"):
        pickle.loads(pickled)


def test_a_reader_does_not_get_a_snapshot_that_is_being_removed(paths):
    publish(paths, range(3))
    with unleased(manifest(paths)) as answer:
        assert answer
        with pytest.raises(BlockingIOError):
            Lease(manifest(paths))
        assert open_leased(paths.root).number == 2


def test_a_file_system_without_locks_is_read_without_a_lease(paths, monkeypatch):
    def reject(descriptor, operation):
        raise OSError(95, "not supported")

    monkeypatch.setattr(lock_module.fcntl, "flock", reject)
    snapshot = open_leased(paths.root)
    assert snapshot.number == 1
    assert free(paths)


def test_no_cache_and_a_damaged_one_leave_no_file_open(paths, tmp_path):
    before = open_files()
    with pytest.raises(CacheNotFoundError):
        open_leased(tmp_path / "nothing")
    (paths.snapshot(1) / "columns.safetensors").write_bytes(b"x")
    with pytest.raises(CacheDamagedError):
        open_leased(paths.root)
    manifest(paths).unlink()
    os.mkfifo(manifest(paths))
    with pytest.raises(CacheDamagedError):
        open_leased(paths.root)
    assert open_files() == before


def child(paths, mode):
    process = subprocess.Popen(
        [sys.executable, CHILDREN, mode, str(paths.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    return process, int(process.stdout.readline())


def test_a_lease_ends_with_its_process(paths):
    process, _ = child(paths, "lease")
    assert not free(paths)
    process.kill()
    process.communicate()
    assert free(paths)


def test_a_forked_child_keeps_the_lease(paths):
    process, pid = child(paths, "fork")
    assert pid != process.pid
    assert not free(paths)  # the parent has closed its lease
    process.communicate(b"end\n")
    assert free(paths)

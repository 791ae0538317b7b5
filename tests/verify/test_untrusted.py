import os
import shutil

import pytest

from latentcache.errors import CacheDamagedError
from latentcache.store.layout import CacheLayout
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Depth
from latentcache.verify.untrusted import check_foreign

FOREIGN = Depth(full=True, untrusted=True)


def test_an_honest_cache_passes_without_its_data(cache, data):
    shutil.rmtree(data)
    report = verify_cache(cache, depth=FOREIGN)
    assert (report.counts["ok"], report.exit_code()) == (4, 0)
    assert (report.checked["payloads"], report.checked["sources_stat"]) == (4, 0)


def test_with_data_sources_are_compared(cache, data):
    (data / "p0.png").unlink()
    report = verify_cache(cache, data=data, depth=FOREIGN)
    assert (report.counts["stale"], report.counts["ok"]) == (1, 3)


@pytest.mark.parametrize("place", ["shards/link", "generations/000001/key.npy", "CURRENT", "generations/000001"])
def test_links_are_refused(cache, tmp_path, place):
    target = tmp_path / "elsewhere"
    path = cache / place
    if path.exists():
        path.rename(target)
    path.symlink_to(target)
    with pytest.raises(CacheDamagedError) as caught:
        verify_cache(cache, depth=FOREIGN)
    assert caught.value.why == f"it is a link to {target}"
    assert caught.value.where == str(path)


def test_special_files_are_refused(cache):
    os.mkfifo(cache / "shards" / "pipe")
    with pytest.raises(CacheDamagedError, match="no cache should"):
        check_foreign(CacheLayout(cache))


@pytest.mark.parametrize(
    ("name", "size"),
    [("CURRENT", 100), ("generations/000001/manifest.json", 1 << 27), ("shards/*/index.npy", 1 << 24)],
)
def test_files_that_are_too_large_are_refused_unread(cache, name, size):
    (path,) = cache.glob(name)
    os.truncate(path, size)
    with pytest.raises(CacheDamagedError) as caught:
        check_foreign(CacheLayout(cache))
    assert f"it has {size:,} bytes" in caught.value.why


def test_facts_that_end_the_process_that_reads_them_are_an_error(cache):
    (cache / "generations" / "000001" / "manifest.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CacheDamagedError):
        verify_cache(cache, depth=FOREIGN)


def test_a_lock_file_that_came_along_is_ignored(cache):
    (shard,) = CacheLayout(cache).sealed_shards()
    (shard / "lock.mdb").write_bytes(b"\xff" * 8192)
    assert verify_cache(cache, depth=FOREIGN).counts["ok"] == 4

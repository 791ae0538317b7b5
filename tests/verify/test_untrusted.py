import os
import subprocess
import sys

import pytest

from latentcache.errors import CacheDamagedError, CacheNotFoundError
from latentcache.verify.entries import Depth
from latentcache.verify.verify import check_cache

FULL = Depth(full=True, untrusted=True)
#: One kind is enough: the same check is tested for every kind.
pytestmark = pytest.mark.parametrize("case", ["lines"], indirect=True)


def check(case, depth=FULL, **more):
    return check_cache(case.cache, depth, **more)[0]


def test_data_is_read_only_when_named(case):
    case.damage(2)
    case.write(3, "other")
    report = check(case)
    assert report.counts["corrupt"] == case.sharing(2)
    assert report.counts["stale"] == 0
    assert check(case, data=case.data).counts["stale"] == 1
    assert check(case, Depth(slice=(1, 1), untrusted=True)).checked["samples"] == 8


def test_links_pipes_and_huge_files_are_rejected(case):
    (case.cache / "CURRENT").write_text("nothing to parse")
    made = case.cache / "shards" / "x"
    for make in (lambda: made.symlink_to("/etc/passwd"), lambda: os.mkfifo(made)):
        make()
        with pytest.raises(CacheDamagedError) as caught:
            check(case)
        assert str(made) in str(caught.value)
        made.unlink()
    with (case.cache / "BUILDING").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CacheDamagedError, match="no cache should"):
        check(case)


def test_a_crafted_snapshot_is_an_error_without_a_traceback(case):
    manifest = case.paths.snapshot(1) / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text('{"format": {"name": "latentcache", "version": 2}}')
    with pytest.raises(CacheDamagedError):
        check(case)
    (case.cache / "CURRENT").unlink()
    (case.cache / "BUILDING").write_text("{}")
    with pytest.raises(CacheNotFoundError):
        check(case)


def test_the_memory_of_the_command_has_a_limit(case):
    code = (
        "import sys; from pathlib import Path; from latentcache.verify.verify import limited_memory\n"
        "with limited_memory(Path(sys.argv[1])): bytearray(3 << 30)"
    )
    done = subprocess.run([sys.executable, "-c", code, case.cache], check=False, capture_output=True, text=True)
    assert done.stderr.strip().endswith("MemoryError")

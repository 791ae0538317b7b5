import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.identity.stat import RACY_NS, StatMemo
from latentcache.sources.known import racy

HOUR = 3_600_000_000_000
moments = st.integers(0, 2**62)
memos = st.builds(
    StatMemo, size=moments, mtime_ns=moments, ctime_ns=moments, inode=moments, device=moments, seen_ns=moments
)


def trusts(memo, now):
    return not racy(np.array([memo], dtype=np.uint64))[0] and memo.identity == now.identity


def old_memo(path):
    """A memo taken an hour after the last write, by the file's own times."""
    result = path.stat()
    return StatMemo.of(result, seen_ns=max(result.st_mtime_ns, result.st_ctime_ns) + HOUR)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"pixels")
    return path


def test_restored_mtime_is_detected(file):
    memo = old_memo(file)
    file.write_bytes(b"PIXELS")
    os.utime(file, ns=(memo.mtime_ns, memo.mtime_ns))
    now = StatMemo.of(file.stat())
    assert (now.size, now.mtime_ns) == (memo.size, memo.mtime_ns)
    assert not trusts(memo, now._replace(ctime_ns=memo.ctime_ns + 1))
    assert trusts(memo, now) is (now.ctime_ns == memo.ctime_ns)


def test_a_file_hashed_right_after_it_was_written_is_not_trusted(file):
    result = file.stat()
    latest = max(result.st_mtime_ns, result.st_ctime_ns)
    now = StatMemo.of(result)
    assert not trusts(StatMemo.of(result, seen_ns=latest), now)
    assert not trusts(StatMemo.of(result, seen_ns=latest + RACY_NS - 1), now)
    assert trusts(StatMemo.of(result, seen_ns=latest + RACY_NS), now)


@given(memos, st.sampled_from(["size", "mtime_ns", "ctime_ns", "inode", "device"]), st.sampled_from([-1, 1, HOUR]))
def test_any_single_difference_is_a_change(memo, name, difference):
    memo = memo._replace(seen_ns=max(memo.mtime_ns, memo.ctime_ns) + RACY_NS)
    assert trusts(memo, memo._replace(seen_ns=0))
    assert not trusts(memo, memo._replace(**{name: getattr(memo, name) + difference}))

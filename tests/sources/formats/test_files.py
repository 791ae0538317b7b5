"""Source files: only regular ones, read completely, with a matching memo."""

import os
import time
from pathlib import Path

import pytest

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import StatMemo
from latentcache.sources.formats import files
from latentcache.sources.formats.files import read_source, stat_source


def cause_of_reading(path: Path, **limits: int) -> str:
    with pytest.raises(UnusableSampleError) as caught:
        read_source(path, **limits)
    assert caught.value.where == str(path)
    assert caught.value.what
    assert caught.value.fix
    return caught.value.slug


def test_bytes_and_memo_are_those_of_the_file(tmp_path):
    path = tmp_path / "a.jpg"
    data = os.urandom(3_000_001)
    path.write_bytes(data)
    before = time.time_ns()
    read, memo = read_source(path)
    assert read == data
    assert memo == StatMemo.of(path.stat(), seen_ns=memo.seen_ns)
    assert before <= memo.seen_ns <= time.time_ns()
    assert stat_source(path) == StatMemo.of(path.stat())


def test_the_access_time_is_left_alone(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"x")
    os.utime(path, (1, 2))
    read_source(path)
    assert (path.stat().st_atime, path.stat().st_mtime) == (1, 2)


def test_a_huge_sparse_file_is_rejected_unread(tmp_path):
    path = tmp_path / "giant.jpg"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnusableSampleError) as caught:
        read_source(path)
    assert caught.value.slug == "too-large"
    assert caught.value.what == f"it has {1 << 40} bytes, at most {1 << 30} are read"


def test_a_file_that_changes_while_it_is_read_is_rejected(tmp_path, monkeypatch):
    path, true_read = tmp_path / "a.jpg", os.read
    path.write_bytes(b"start")

    def read(descriptor: int, size: int) -> bytes:
        path.write_bytes(b"started")
        return true_read(descriptor, size)

    monkeypatch.setattr(files.os, "read", read)
    assert cause_of_reading(path) == "changing"

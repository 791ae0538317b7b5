"""A file has its old or its new content; system errors become package errors."""

import errno
import os

import pytest

from latentcache.errors import CacheDamagedError, CacheReadOnlyError, DiskFullError, StoreError
from latentcache.store import atomic_io as atomic_io_module
from latentcache.store.atomic_io import (
    as_store_error,
    read_file,
    read_json,
    unreadable,
    write_atomically,
)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((atomic_io_module.os, call) if call == "fsync" else (atomic_io_module.Path, call)), fail)
    with pytest.raises(DiskFullError, match="disk is full"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("data", [None, b"", b"{", b"[1]", b"\xff", b"null", b"[" * 100_000])
def test_a_file_without_a_json_object_is_damaged(tmp_path, data):
    path = tmp_path / "manifest.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CacheDamagedError, match=r"manifest\.json") as caught:
        read_json(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(("code", "kind", "words"), [
    (errno.ENOSPC, DiskFullError, "disk is full"),
    (errno.EDQUOT, DiskFullError, "disk is full"),
    (errno.EFBIG, DiskFullError, "disk is full"),
    (errno.EROFS, CacheReadOnlyError, "read-only"),
    (errno.EACCES, CacheReadOnlyError, "read-only"),
    (errno.EPERM, CacheReadOnlyError, "read-only"),
    (errno.ENOTDIR, CacheReadOnlyError, "not usable"),
    (errno.EIO, StoreError, "Input/output error"),
])  # fmt: skip
def test_os_errors_are_classified(tmp_path, code, kind, words):
    error = as_store_error(OSError(code, os.strerror(code)), tmp_path)
    assert type(error) is kind
    assert words in str(error)
    assert error.exit_code == 3


@pytest.mark.parametrize(("code", "kind", "fix"), [
    (errno.EACCES, StoreError, "chmod -R u+rX"),
    (errno.EIO, StoreError, "check the disk"),
    (errno.ELOOP, StoreError, "check the disk"),
    (errno.ENOSPC, DiskFullError, "free some space"),
    (errno.ENOENT, CacheDamagedError, "verify --full"),
    (errno.ENOTDIR, CacheDamagedError, "verify --full"),
    (errno.EISDIR, CacheDamagedError, "verify --full"),
])  # fmt: skip
def test_an_unreadable_file_is_damaged_only_if_there_is_none(tmp_path, code, kind, fix):
    error = unreadable(tmp_path / "data.mdb", OSError(code, os.strerror(code)))
    assert type(error) is kind
    assert fix in error.fix


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "zero"):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert read_file(tmp_path / "file") == b"x" * 100_000

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from latentcache.errors import CacheLockedError, CacheReadOnlyError, DiskFullError, StoreError
from latentcache.store import lock as lock_module
from latentcache.store.lock import builder_lock, builder_name, check_owner

CHILD = [sys.executable, str(Path(__file__).with_name("store_children.py")), "lock"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "builder.lock"


@pytest.fixture
def holder(path):
    with subprocess.Popen([*CHILD, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


def test_a_second_builder_fails_with_the_owner(path, holder):
    start, host = time.monotonic(), socket.gethostname()
    with pytest.raises(CacheLockedError) as caught, builder_lock(path):
        pytest.fail("two builders hold one cache")
    assert time.monotonic() - start < 10
    error = caught.value
    assert (error.holder["pid"], error.holder["host"]) == (holder.pid, host)
    assert datetime.fromisoformat(error.holder["since"]).tzinfo is not None
    assert error.what == f"another build holds this cache: process {holder.pid} on {host}"
    assert (error.slug, error.exit_code, error.where) == ("locked", 3, str(path))
    assert error.as_json()["holder"] == error.holder
    assert builder_name(path).startswith(f"process {holder.pid} on {host} since 2")
    holder.kill()
    holder.wait()
    assert builder_name(path) == ""
    with builder_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_released_lock_keeps_its_file(path):
    with builder_lock(path):
        assert builder_name(path)
    with pytest.raises(RuntimeError, match="of the build"), builder_lock(path):
        raise RuntimeError("of the build")
    assert builder_name(path) == ""  # a dead builder may have had our process id
    with builder_lock(path):
        assert path.exists()


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xff", b'{"pid": 5}'])
def test_a_lock_without_an_owner_name(path, text, monkeypatch):
    monkeypatch.setattr(lock_module, "_WAIT_S", 0)
    path.write_bytes(text)
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(CacheLockedError) as caught, builder_lock(path):
            pytest.fail("held twice")
    finally:
        os.close(descriptor)
    assert caught.value.holder["host"] == "unknown"
    assert caught.value.holder["pid"] == (5 if b"5" in text else "unknown")


@pytest.mark.parametrize(("call", "code", "expected"), [
    ("pwrite", errno.ENOSPC, DiskFullError),
    ("ftruncate", errno.EROFS, CacheReadOnlyError),
    *(("flock", code, StoreError) for code in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)),
])  # fmt: skip
def test_disk_errors_are_package_errors(path, monkeypatch, call, code, expected):
    """A file system without locks is reported, not called read-only."""

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock_module.fcntl if call == "flock" else lock_module.os, call, fail)
    with pytest.raises(expected) as caught, builder_lock(path):
        pytest.fail("nothing was written")
    assert type(caught.value) is expected
    assert call != "flock" or ("cannot lock files" in caught.value.what and "--out" in caught.value.fix)


def test_a_process_that_was_forked_meanwhile_does_not_hold_the_lock(path):
    code = f"""
import os, pathlib, sys
from latentcache.store.lock import builder_lock
with builder_lock(pathlib.Path({str(path)!r})):
    if not os.fork():
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", code]  # a program without threads
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "forked\n"
        child.wait()
        with builder_lock(path):
            assert json.loads(path.read_text())["pid"] == os.getpid()
        child.stdin.close()


def test_a_link_as_lock_file_harms_no_file(tmp_path):
    (tmp_path / "precious").write_text("words")
    (tmp_path / "builder.lock").symlink_to("precious")
    with pytest.raises(CacheReadOnlyError), builder_lock(tmp_path / "builder.lock"):
        pass
    assert (tmp_path / "precious").read_text() == "words"


@pytest.mark.parametrize(("text", "expected"), [
    ('{"owner": "ours"}', None), ('{"owner": "theirs"}', CacheLockedError), ("[" * 9_999, CacheLockedError),
    (None, CacheLockedError),
])  # fmt: skip
def test_the_owner_of_open_shards(tmp_path, text, expected):
    building = tmp_path / "BUILDING"
    if text is not None:
        building.write_text(text)
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        check_owner(building, "ours")
    building.unlink(missing_ok=True)
    building.symlink_to(building.name)  # a link loop: no answer, so nobody has taken the cache over
    with pytest.raises(StoreError, match="BUILDING cannot be read") as caught:
        check_owner(building, "ours")
    assert type(caught.value) is StoreError


@pytest.mark.parametrize(("host", "age", "waits"), [("elsewhere", 0, True), ("elsewhere", 9, False), ("", 0, False)])
def test_open_shards_of_another_host_are_taken_over_after_silence(path, monkeypatch, host, age, waits):
    building = path.with_name("BUILDING")
    building.write_text(json.dumps({"host": host or os.uname().nodename}))
    path.write_text("")
    os.utime(building, ns=(0, path.stat().st_mtime_ns - age * 10**9))
    monkeypatch.setattr(lock_module, "SILENCE_S", 0.2)
    start = time.monotonic()
    lock_module.wait_for_silence(building, path, is_stopped=lambda: False)
    assert (time.monotonic() - start >= 0.2) == waits


def test_open_shards_of_another_host_that_goes_on_are_left_alone(path, monkeypatch):
    building = path.with_name("BUILDING")
    building.write_text('{"host": "elsewhere"}')
    path.write_text("")
    monkeypatch.setattr(lock_module.time, "sleep", lambda seconds: os.utime(building, (1, 1)))
    with pytest.raises(CacheLockedError, match="on elsewhere") as caught:
        lock_module.wait_for_silence(building, path, is_stopped=lambda: False)
    assert caught.value.holder["host"] == "elsewhere"

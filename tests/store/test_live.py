import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_entries import flat_entry, flip, key_of, open_shard

from latentcache.errors import StoreError
from latentcache.store import live as live_module
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.live import live_entries

CHILD = [sys.executable, str(Path(__file__).with_name("shard_children.py"))]


def test_a_damaged_payload_is_told_from_whole_ones(tmp_path):
    data = open_shard(tmp_path / "one.open")
    flip(data, data.read_bytes().rindex(flat_entry(3, 3000).value[HEADER_BYTES:]) + 5)
    damaged = [live.key for live in live_entries(tmp_path / "one.open") if not live.intact]
    assert damaged == [key_of(3)]
    assert all(live.intact for live in live_entries(tmp_path / "one.open", payloads=False))


def test_live_entries_beside_a_builder(tmp_path):
    """The listing of another process, again and again while it commits: whole, and never behind what it said."""
    folder, said = tmp_path / "one.open", 0
    with subprocess.Popen([*CHILD, "write", str(folder), "0"], stdout=subprocess.PIPE, text=True) as child:
        try:
            for _ in range(25):
                said = int(child.stdout.readline())
                found = {live.key: live.intact for live in live_entries(folder)}
                assert found.items() >= dict.fromkeys((key_of(n) for n in range(said)), True).items()
                assert all(found.values())
        finally:
            child.kill()
    assert said >= 25


def test_listing_a_live_shard_touches_nothing(tmp_path):
    open_shard(tmp_path / "one.open")
    before = {path: path.stat() for path in (tmp_path / "one.open").iterdir()}
    assert len(list(live_entries(tmp_path / "one.open"))) == 30
    after = {path: path.stat() for path in (tmp_path / "one.open").iterdir()}
    assert {path: (s.st_mtime_ns, s.st_size) for path, s in before.items()} == {
        path: (s.st_mtime_ns, s.st_size) for path, s in after.items()
    }


def test_a_builder_that_commits_all_the_time_is_made_to_keep_a_state(tmp_path, monkeypatch):
    monkeypatch.setattr(live_module, "_SNAPSHOT_TRIES", 0)
    folder = tmp_path / "one.open"
    with subprocess.Popen([*CHILD, "write", str(folder), "0"], stdout=subprocess.PIPE, text=True) as child:
        try:
            for _ in range(25):
                said = int(child.stdout.readline())
                found = {live.key: live.intact for live in live_entries(folder)}
                assert found.items() >= dict.fromkeys((key_of(n) for n in range(said)), True).items()
        finally:
            child.kill()


def test_a_lock_file_that_cannot_be_used_is_an_error_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(live_module, "_SNAPSHOT_TRIES", 0)
    open_shard(tmp_path / "one.open")
    (tmp_path / "one.open" / "lock.mdb").unlink()
    (tmp_path / "one.open" / "lock.mdb").mkdir()
    with pytest.raises(StoreError, match="cannot be written or read"):
        list(live_entries(tmp_path / "one.open"))


def test_a_pipe_put_there_while_it_is_listed_is_not_waited_for(tmp_path, monkeypatch):
    data, settled = open_shard(tmp_path / "one.open"), live_module._settled_rows

    def replaced(path, payloads):
        found = settled(path, payloads)
        data.unlink()
        os.mkfifo(data)
        return found

    monkeypatch.setattr(live_module, "_settled_rows", replaced)
    with pytest.raises(OSError, match="not a regular file"):
        list(live_entries(tmp_path / "one.open"))

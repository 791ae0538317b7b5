import json
import os
import resource

import pytest

from latentcache.errors import DiskFullError
from latentcache.pipeline.workers.results import EventLog

KEYS = [bytes([number]) * 32 for number in range(3)]


def test_a_commit_is_one_line_in_one_write(tmp_path, monkeypatch):
    writes, real = [], os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: writes.append(data) or real(descriptor, data))
    with EventLog(tmp_path / "events") as events:
        events.commit(KEYS[:2])
        events.commit(KEYS[2:])
    assert (tmp_path / "events").read_bytes() == b"".join(writes)
    assert [json.loads(line) for line in writes] == [
        {"event": "commit", "keys": [KEYS[0].hex(), KEYS[1].hex()]},
        {"event": "commit", "keys": [KEYS[2].hex()]},
    ]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in writes)


@pytest.mark.parametrize("room", [0, 20])
def test_a_line_that_does_not_fit_is_a_full_disk(tmp_path, room):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(tmp_path / "events") as events:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(DiskFullError):
                events.commit(KEYS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_partial_line_is_removed(tmp_path, monkeypatch):
    """Other workers commit until the build ends."""
    real = os.write
    with EventLog(tmp_path / "events") as events, monkeypatch.context() as patch:
        events.commit(KEYS)
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:20]))
        with pytest.raises(DiskFullError):
            events.commit(KEYS[:1])
        patch.undo()
        events.commit(KEYS[1:])
    lines = (tmp_path / "events").read_text().splitlines()
    assert [len(json.loads(line)["keys"]) for line in lines] == [3, 2]

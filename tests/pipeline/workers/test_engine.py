"""Messages between a build and its worker processes."""

import errno
import json
import os
import resource
from multiprocessing import Pipe

import numpy as np
import pytest

from latentcache import errors
from latentcache.errors import CacheLockedError, DiskFullError, InterruptedBuildError, LatentcacheError
from latentcache.fields.protocol import Failure, Group, Job, Output
from latentcache.pipeline.workers.engine import Committed, Ended, EventLog, Task, Work, portable


def sent(message):
    here, there = Pipe()
    with here, there:
        here.send(message)
        return there.recv()


def subclasses(kind):
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in subclasses(child))]


OF_THE_BUILD = (CacheLockedError, InterruptedBuildError)  # no worker raises them
SENT = [kind for kind in subclasses(LatentcacheError) if hasattr(errors, kind.__name__) and kind not in OF_THE_BUILD]


def test_work_and_results_arrive_as_they_were():
    outputs = (Output(item=3, group=0, variant=1), Output(item=4, group=2))
    inputs = {"image": {"path": "a\udcff.png"}}
    job = Job(sample=1, name="a\udcff.png", inputs=inputs, content=bytes(16), outputs=outputs, cost=7)
    failure = Failure(reason="empty", content=b"\x01" * 16, stat=(1, 2, 3, 4, 5, 6))
    groups = (Group(label="8x8", shape=(4, -1), dims=(1, 8, 8)),)
    task = Task(field="f", recipe={"a": 1}, producer={}, groups=groups, root="/data", cache="/cache", shard="s")
    committed = Committed(keys=bytes(32), num_bytes=1, done=[1], failed=[(2, failure)], read=[(1, (), bytes(16))])
    for message in (Work(7, {5: job}, known=bytes(32)), task, committed):
        assert sent(message) == message


@pytest.mark.parametrize("kind", SENT)
def test_errors_keep_class_message_and_status(kind):
    error = kind("what", where="where", why="why", fix="fix", slug="slug")
    found = sent(Ended(error=portable(error))).error
    assert type(found) is kind
    assert (found.as_json(), found.exit_code) == (error.as_json(), error.exit_code)


def test_errors_of_libraries_are_sent_without_their_classes():
    assert sent(portable(OSError(errno.EIO, "broken", "/file"))).errno == errno.EIO
    assert isinstance(sent(portable(MemoryError("all"))), MemoryError)
    found = sent(portable(np.linalg.LinAlgError("singular")))
    assert type(found) is RuntimeError
    assert str(found) == "LinAlgError: singular"
    assert "singular" in found.__notes__[0]


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

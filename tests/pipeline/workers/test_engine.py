"""Messages between a build and its worker processes."""

import errno
import json
import os
from multiprocessing import Pipe

import numpy as np
import pytest

from latentcache import errors
from latentcache.errors import CacheLockedError, DiskFullError, InterruptedBuildError, LatentcacheError
from latentcache.pipeline.workers.engine import Ended, EventLog, portable


def sent(message):
    here, there = Pipe()
    with here, there:
        here.send(message)
        return there.recv()


def subclasses(kind):
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in subclasses(child))]


OF_THE_BUILD = (CacheLockedError, InterruptedBuildError)  # no worker raises them
SENT = [kind for kind in subclasses(LatentcacheError) if hasattr(errors, kind.__name__) and kind not in OF_THE_BUILD]


@pytest.mark.parametrize("kind", SENT)
def test_errors_keep_class_message_and_status(kind):
    error = kind("what", where="where", why="why", fix="fix", slug="slug")
    received = sent(Ended(error=portable(error))).error
    assert type(received) is kind
    assert (received.as_json(), received.exit_code) == (error.as_json(), error.exit_code)


def test_errors_of_libraries_are_sent_without_their_classes():
    assert sent(portable(OSError(errno.EIO, "broken", "/file"))).errno == errno.EIO
    assert isinstance(sent(portable(MemoryError("all"))), MemoryError)
    received = sent(portable(np.linalg.LinAlgError("singular")))
    assert type(received) is RuntimeError
    assert str(received) == "LinAlgError: singular"
    assert "singular" in received.__notes__[0]


KEYS = [bytes([number]) * 32 for number in range(3)]


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

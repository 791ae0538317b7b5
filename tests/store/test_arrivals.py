"""Waiting for rows of any kind, with rows in memory in the place of a build."""

import pickle
import threading
import time

import numpy as np
import pytest

from latentcache.errors import MissingEntryError, NotYetEncodedError
from latentcache.store.arrivals import ABSENT, GONE, Arrivals
from latentcache.store.coming import ArrivalLog, log_path
from latentcache.store.layout import CacheLayout

MANIFEST = {"before": 0, "source": {"root": "/some data"}, "log": "1"}


class Counted:
    """Each sealed folder is one row more, by its name; samples are rows."""

    opener, advice = "open_this", ""

    def __init__(self, count):
        self.place, self.shards, self.finished = np.full(count, ABSENT, dtype=np.int32), [], False

    def told(self, sample, content):
        self.place[sample] = GONE if content is None else self.place[sample]

    def take(self, folder):
        if folder.name != "unreadable":
            self.shards.append(folder.name)
            self.place[int(folder.name)] = len(self.shards) - 1

    def finish(self):
        self.place[self.place == ABSENT] = GONE
        self.finished = True
        return True

    def name(self, row):
        return f"row {row}"


@pytest.fixture
def layout(tmp_path):
    found = CacheLayout(tmp_path)
    found.shards.mkdir()
    found.coming.mkdir()
    return found


def waiting(layout, count=3, timeout_s=0.0):
    expected = Counted(count)
    return expected, Arrivals(layout, expected, MANIFEST, timeout_s=timeout_s)


def test_rows_are_there_as_their_shards_are_sealed(layout):
    expected, arrivals = waiting(layout)
    (layout.shards / "2").mkdir()
    (layout.shards / "unreadable").mkdir()
    arrivals.wait([2])
    assert (arrivals.arrived, arrivals.shards) == (1, ["2"])
    (layout.shards / "0").mkdir()
    arrivals.wait(np.array([0, 2]))
    assert expected.place.tolist() == [1, ABSENT, 0]


def test_a_row_that_is_late_says_who_builds_and_how_to_wait(layout):
    _, arrivals = waiting(layout)
    with pytest.raises(NotYetEncodedError, match="row 1 was not encoded within 0 s") as caught:
        arrivals.wait([1])
    assert "0 of 3 entries are there, and the build is not running" in caught.value.why
    assert caught.value.fix == f"latentcache build '/some data' --out {layout.root} --stream"


def test_it_waits(layout):
    _, arrivals = waiting(layout, timeout_s=30.0)

    def seal():
        time.sleep(0.1)
        (layout.shards / "1").mkdir()

    thread = threading.Thread(target=seal)
    thread.start()
    arrivals.wait([1])
    thread.join()


def test_what_was_refused_or_will_never_come_is_an_error_at_once(layout):
    expected, arrivals = waiting(layout, timeout_s=30.0)
    with ArrivalLog(log_path(layout, "1")) as log:
        log.refused([1])
    with pytest.raises(MissingEntryError, match="row 1 could not be used"):
        arrivals.wait([1])
    layout.current.write_text("000001\n")
    with pytest.raises(MissingEntryError, match="row 0"):
        arrivals.wait([0])
    assert expected.finished


def test_a_copy_looks_for_itself(layout):
    _, arrivals = waiting(layout)
    again = pickle.loads(pickle.dumps(arrivals))
    (layout.shards / "0").mkdir()
    again.wait([0])
    assert (again.arrived, arrivals.arrived) == (1, 0)

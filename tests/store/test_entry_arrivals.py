import pickle
import threading
import time

import pytest
from made_entries import content_of, key_of, make_shard, new_entry
from test_coming import coming

from latentcache.errors import MissingEntryError, NotYetEncodedError
from latentcache.store.coming import ArrivalLog, announce, withdraw
from latentcache.store.entry_arrivals import follow
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader


@pytest.fixture
def layout(tmp_path):
    found = CacheLayout(tmp_path)
    found.shards.mkdir()
    return found


def seal(layout, numbers):
    """A sealed shard of these entries, named so that shards are listed in another order."""
    name = f"{90 - len(layout.all_sealed())}"
    make_shard(layout.shards / name, [new_entry(number, shape=(4, 8, 8)) for number in numbers])


def test_entries_come_in_any_order(layout):
    with ArrivalLog(announce(layout, coming(3, known={2}))) as log:
        generation = follow(layout, timeout_s=0.0)
        arrivals = generation.arrivals
        with pytest.raises(NotYetEncodedError, match=r"p2\.png was not encoded within 0 s"):
            arrivals.wait([2])
        seal(layout, [0, 2])
        arrivals.wait([2])
        log.usable([(0, content_of(0)), (1, content_of(1))])
        arrivals.wait([0, 2])
        assert arrivals.arrived == 2
        seal(layout, [1])
        arrivals.wait([0, 1, 2])
    assert [generation.rows.key[i].tobytes() for i in range(3)] == [key_of(i) for i in range(3)]
    reader = EntryReader(layout, generation)
    for row in range(3):
        assert reader.header(row).content == content_of(row)
    reader.close()


def test_a_batch_waits_until_it_is_there(layout):
    path = announce(layout, coming(1))
    arrivals = follow(layout, timeout_s=30.0).arrivals

    def build():
        time.sleep(0.3)
        seal(layout, [0])
        with ArrivalLog(path) as log:
            log.usable([(0, content_of(0))])

    thread = threading.Thread(target=build)
    thread.start()
    arrivals.wait([0])
    thread.join()
    assert arrivals.arrived == 1


def test_what_is_refused_is_named(layout):
    with ArrivalLog(announce(layout, coming(2))) as log:
        arrivals = follow(layout, timeout_s=30.0).arrivals
        log.refused([1])
        with pytest.raises(MissingEntryError, match=r"p1\.png could not be used"):
            arrivals.wait([1])


def test_an_older_log_is_not_taken_for_the_newer(layout):
    announce(layout, coming(2))
    arrivals = follow(layout, timeout_s=0.0).arrivals
    with ArrivalLog(announce(layout, coming(1))) as log:
        log.usable([(0, content_of(5))])
    seal(layout, [5])
    with pytest.raises(NotYetEncodedError, match="not running"):
        arrivals.wait([0])


def test_nobody_builds(layout):
    assert follow(layout, timeout_s=1.0) is None
    announce(layout, coming(1))
    withdraw(layout)
    assert follow(layout, timeout_s=1.0) is None


def test_a_copy_in_another_process_looks_for_itself(layout):
    announce(layout, coming(2, known={0, 1}))
    generation = follow(layout, timeout_s=0.0)
    seal(layout, [0])
    generation.arrivals.wait([0])
    again = pickle.loads(pickle.dumps(generation))
    seal(layout, [1])
    again.arrivals.wait([0, 1])
    assert again.rows.shard.tolist() == [0, 1]
    assert list(again.shards) == again.arrivals.shards
    assert generation.rows.shard.tolist() == [0, -1]

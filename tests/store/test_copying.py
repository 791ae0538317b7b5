import numpy as np
import pytest
from made_entries import flip, key_of, make_shard, new_entry, open_shard

from latentcache.store.copying import PLACE_DTYPE, copy_entries
from latentcache.store.index import load_index
from latentcache.store.shard import ShardWriter

NO_HINTS = np.empty(0, dtype=PLACE_DTYPE)


@pytest.fixture
def writer(tmp_path):
    return ShardWriter(tmp_path / "new.open")


def copied(source, writer, **more):
    given = {"skip": set(), "hints": NO_HINTS, "only": False} | more
    found = copy_entries(source, writer, **given)
    return found, set(load_index(writer.seal()).keys())


def test_values_are_the_same_bytes(tmp_path, writer):
    entries = [new_entry(number) for number in range(5)]
    source = make_shard(tmp_path / "old", entries)
    found, keys = copied(source, writer)
    assert (found.saved, found.lost, keys) == (5, 0, {entry.key for entry in entries})
    index = load_index(tmp_path / "new")
    raw = index.data.read_bytes()
    for entry in entries:
        offset = int(index.rows["offset"][index.keys().index(entry.key)])
        assert raw[offset : offset + len(entry.value)] == entry.value


def test_a_header_of_another_key_is_not_copied(tmp_path, writer):
    source = make_shard(tmp_path / "old", [new_entry(number) for number in range(5)])
    rows = load_index(source).rows
    hints = np.empty(2, dtype=PLACE_DTYPE)
    hints["key"], hints["facts"], hints["offset"] = rows["key"][:2], rows["facts"][:2], rows["offset"][1]
    found, keys = copied(source, writer, hints=hints, only=True)
    assert (found.saved, found.lost, keys) == (1, 1, {rows["key"][1].tobytes()})


def test_places_beyond_the_file_are_no_places(tmp_path, writer):
    source = make_shard(tmp_path / "old", [new_entry(0), new_entry(1)])
    rows = load_index(source).rows
    hints = np.empty(1, dtype=PLACE_DTYPE)
    hints["key"], hints["facts"], hints["offset"] = rows["key"][0], rows["facts"][0], 2**63
    found, keys = copied(source, writer, hints=hints)
    assert (found.saved, keys) == (2, {key_of(0), key_of(1)})


def test_an_open_shard_is_walked(tmp_path, writer):
    data = open_shard(tmp_path / "old.open", count=10)
    flip(data, data.read_bytes().index(key_of(2)) + 70)
    found, keys = copied(data.parent, writer)
    assert found.saved == 9
    assert keys < {key_of(number) for number in range(10)}
    assert len(keys) == 9


def test_no_file_no_entries(tmp_path, writer):
    found = copy_entries(tmp_path / "nothing", writer, skip=set(), hints=NO_HINTS, only=False)
    assert (found.saved, found.lost) == (0, 0)
    writer.close()

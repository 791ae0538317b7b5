import os
import shutil

import numpy as np
import pytest
from damaged import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import KINDS, entries_of, item_of, items_of, keys_of, make_cache, make_shard, open_shard, publish

from latentcache.identity.content import checksum
from latentcache.store.atomic_io import make_folder, read_json
from latentcache.store.catalog import load_catalog
from latentcache.store.garbage import (
    copy_entries,
    mend_shards,
    relocate,
    salvage,
    shard_use,
    stored_catalog,
    stored_entries,
    tombstone,
)
from latentcache.store.index import INDEX, load_index
from latentcache.store.paths import CachePaths
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import open_snapshot


def all_items(numbers):
    return [item for name in KINDS for item in items_of(name, numbers)]


def found(paths, items):
    return load_catalog(paths).find(keys_of(items)) >= 0


def read_everything(paths, numbers):
    snapshot = open_snapshot(paths.root)
    reader = EntryReader(paths, snapshot)
    for name, rows in snapshot.fields.items():
        for row, sample in enumerate(np.asarray(rows.sample).tolist()):
            assert reader.read(name, row).tobytes() == item_of(name, numbers[sample]).array.tobytes()


def payload_place(paths, name, row):
    rows = open_snapshot(paths.root).fields[name]
    entry = int(rows.entry[row])
    return paths.data(rows.shards[int(rows.shard[entry])]), int(rows.offset[entry])


def test_a_shard_that_is_sealed_while_it_is_listed_is_not_called_damaged(tmp_path):
    """Workers of a killed build seal their shards at exit."""
    paths = CachePaths(tmp_path)
    make_folder(paths.shards)
    open_shard(paths.shards / "one.open", entries_of("plane", range(2)))
    catalog = stored_catalog(tmp_path)
    (paths.shards / "one.open").rename(paths.shards / "one")
    assert all(catalog.stored(place) for place in range(2))


def test_a_damaged_entry_is_left_behind_and_the_others_move(paths):
    data, place = payload_place(paths, "plane", 4)
    flip(data, place)
    shard, before = data.parent.name, open_snapshot(paths.root)
    copied = salvage(paths, data.parent)
    assert (copied.source, copied.lost, copied.saved) == (shard, 1, load_index(paths.shard(copied.shard)).entries)
    tombstone(paths, shard, "damaged")
    lost = relocate(paths, before, {shard: copied.shard})
    assert {name: int(mask.sum()) for name, mask in lost.items()} == {"plane": 1, "words": 0, "vector": 0}
    after = open_snapshot(paths.root)
    assert (len(after.fields["plane"]), len(after.fields["words"]), after.complete) == (11, 12, False)
    assert shard not in after.shards
    read_everything(paths, range(12))
    assert not paths.scratch.exists()
    assert found(paths, all_items(range(12))).sum() == 35
    assert EntryReader(paths, before).read("words", 4).tobytes() == item_of("words", 4).array.tobytes()


@pytest.mark.parametrize("spoil", ["index", "metas"])
def test_a_shard_is_repaired_after_any_damage(tmp_path, spoil):
    paths = make_cache(tmp_path / "cache", range(100), shards=2)
    data = paths.data("shard-1")
    data.chmod(0o644)
    if spoil == "index":
        (data.parent / INDEX).write_bytes(b"nothing")
    else:
        data.write_bytes(bytes(8192) + data.read_bytes()[8192:])
    assert load_catalog(paths).damaged == ("shard-1",)
    (made,) = mend_shards(paths)
    assert (made.source, made.lost) == ("shard-1", 0)
    assert load_catalog(paths).damaged == ()
    assert found(paths, all_items(range(100))).all()
    assert paths.tombstoned() == {"shard-1"}
    relocate(paths, open_snapshot(paths.root), {"shard-1": made.shard})
    read_everything(paths, range(100))


@settings(max_examples=25)
@given(st.data())
def test_salvaged_items_are_intact(tmp_path_factory, data):
    paths = CachePaths(tmp_path_factory.mktemp("salvage"))
    make_folder(paths.shards)
    items = {item.key: item for item in all_items(range(40))}
    folder = make_shard(paths.shard("one"), [entry for name in KINDS for entry in entries_of(name, range(40))])
    file = folder / "data.mdb"
    file.chmod(0o644)
    damaged = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.sampled_from([1, 8, 64, 4096]))
        at = data.draw(st.integers(0, len(damaged) - length))
        damaged[at : at + length] = data.draw(st.sampled_from([bytes(length), b"\xff" * length, os.urandom(length)]))
    file.write_bytes(damaged[: data.draw(st.integers(len(damaged) // 2, len(damaged)))])
    if data.draw(st.booleans()):
        (folder / INDEX).unlink()
    made = salvage(paths, folder)
    shutil.rmtree(folder)
    catalog = load_catalog(paths)
    assert (len(catalog) > 0) == bool(made.saved)
    for place in range(len(catalog)):
        item = catalog.item(place)
        assert item.array.tobytes() == items[item.key].array.tobytes()


def test_a_dead_build_is_sealed_and_its_damaged_shards_are_set_aside(paths):
    open_shard(paths.shards / "good.open", entries_of("plane", range(20, 25)))
    data = open_shard(paths.shards / "bad.open", entries_of("words", range(20, 800)))
    os.truncate(data, data.stat().st_size - 5000)
    (made,) = mend_shards(paths)
    assert (made.source, paths.open_shards()) == ("bad.open", [])
    assert len(list(paths.quarantine.iterdir())) == 1
    assert found(paths, items_of("plane", range(20, 25))).all()
    assert made.saved == 0
    assert mend_shards(paths) == []


def test_entries_are_copied_from_another_cache(paths, tmp_path):
    other = CachePaths(tmp_path / "other")
    make_folder(other.shards)
    rows = open_snapshot(paths.root).fields["words"]
    places = rows.entry_places(np.flatnonzero(np.asarray(rows.shard) == 0))
    made = copy_entries(other, paths.shard("shard-0"), places)
    assert (made.saved, made.lost) == (len(places), 0)
    assert found(other, items_of("words", range(0, 12, 2))).all()
    wrong = places.copy()
    wrong["offset"] += np.uint64(64)
    assert copy_entries(other, paths.shard("shard-0"), wrong).lost == len(wrong)
    assert copy_entries(other, paths.shard("gone"), places).lost == len(places)


def test_a_tombstone_takes_a_shard_out_of_use(paths):
    tombstone(paths, "shard-0", "compacted")
    tombstone(paths, "shard-0", "again")
    assert read_json(paths.tombstone("shard-0"))["reason"] == "compacted"
    assert [path.name for path in paths.sealed_shards()] == ["shard-1"]
    assert found(paths, all_items(range(12))).sum() == 18
    read_everything(paths, range(12))


def test_use_of_shards(paths):
    publish(paths, range(0, 12, 4))
    tombstone(paths, "shard-1", "damaged")
    (paths.shard("shard-0") / INDEX).write_bytes(b"x")
    found = {use.name: use for use in shard_use(paths, [open_snapshot(paths.root)])}
    assert (found["shard-0"].entries, found["shard-1"].tombstoned) == (-1, True)
    assert found["shard-0"].needed > found["shard-1"].needed == found["shard-1"].needed_bytes == 0


def test_every_item_is_listed_once(paths):
    make_shard(paths.shard("twice"), entries_of("plane", range(5)))
    open_shard(paths.shards / "left.open", entries_of("words", range(20, 24)))
    items = {item.key: item for item in [*all_items(range(12)), *items_of("words", range(20, 24))]}
    listed = list(stored_entries(stored_catalog(paths.root)))
    assert (stored_catalog(paths.root).find(keys_of(list(items.values()))) >= 0).all()
    assert sorted(one.key for one in listed) == sorted(items)
    for one in listed:
        array = items[one.key].array
        assert (one.shape, one.checksum, one.intact) == (array.shape, checksum(array.tobytes()), True)

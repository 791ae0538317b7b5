import errno
import os

import numpy as np
import pytest
from made_entries import KINDS, entries_of, item_of, items_of, keys_of, make_shard, open_shard

from latentcache.errors import StoreError
from latentcache.identity.content import checksum
from latentcache.store import shard as shard_module
from latentcache.store.atomic_io import make_folder
from latentcache.store.catalog import load_catalog, mend_shards, stored_entries
from latentcache.store.paths import CachePaths
from latentcache.store.reader import EntryReader
from latentcache.store.shard import INDEX, copy_entries, load_index, remove_entries
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


def test_a_shard_that_is_sealed_while_it_is_listed_is_not_called_damaged(tmp_path):
    """Workers of a killed build seal their shards at exit."""
    paths = CachePaths(tmp_path)
    make_folder(paths.shards)
    open_shard(paths.shards / "one.open", entries_of("plane", range(2)))
    catalog = load_catalog(paths, open_shards=True)
    (paths.shards / "one.open").rename(paths.shards / "one")
    assert all(catalog.stored(item) for item in range(2))


def test_a_shard_without_index_and_pages_is_left_out(paths):
    for file in (INDEX, "data.mdb"):
        path = paths.shard("shard-1") / file
        path.chmod(0o644)
        path.write_bytes(b"nothing")
    assert mend_shards(paths) == ([], ["shard-1"])
    assert load_catalog(paths).damaged == ()
    assert found(paths, all_items(range(12))).sum() == 18


def test_a_dead_build_is_sealed_and_its_damaged_shards_are_set_aside(paths):
    open_shard(paths.shards / "good.open", entries_of("plane", range(20, 25)))
    data = open_shard(paths.shards / "bad.open", entries_of("words", range(20, 800)))
    os.truncate(data, data.stat().st_size - 5000)
    assert mend_shards(paths) == ([], ["bad.open"])
    assert paths.open_shards() == []
    assert found(paths, items_of("plane", range(20, 25))).all()
    assert mend_shards(paths) == ([], [])


def test_a_disk_that_fails_while_entries_are_copied_is_not_damage(paths, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    other = CachePaths(tmp_path / "other")
    rows = open_snapshot(paths.root).fields["words"]
    spans = rows.entry_spans(np.flatnonzero(np.asarray(rows.shard) == 0))
    monkeypatch.setattr(shard_module, "read_at", fail)
    with pytest.raises(StoreError, match=r"data\.mdb cannot be read") as caught:
        copy_entries(other, paths.shard("shard-0"), spans)
    assert (type(caught.value), other.sealed_shards()) == (StoreError, [])


def test_removed_entries_are_used_by_readers_alone(paths):
    words = open_snapshot(paths.root).fields["words"]
    before = found(paths, all_items(range(12))).sum()
    index = load_index(paths.shard("shard-1"))
    columns = {name: np.asarray(index.columns[name]) for name in index.columns if "/" in name}
    remove_entries(index.folder, np.asarray(words.key).view("S32")[int(words.entry[1])])
    assert before - 12 < found(paths, all_items(range(12))).sum() < before
    assert not load_catalog(paths).is_whole(["shard-1"])
    assert load_catalog(paths).is_whole(["shard-0"])
    after = load_index(index.folder)
    assert after.entries == index.entries - 1
    assert all(
        len(after.columns[name]) < len(values) or "plane" in name for name, values in columns.items() if len(values)
    )
    read_everything(paths, range(12))
    remove_entries(index.folder, np.asarray(index.key).view("S32")[:, 0])
    assert load_index(index.folder).items == 0


def test_a_shard_that_is_cut_short_keeps_the_entries_that_are_there(paths):
    index = load_index(paths.shard("shard-1"))
    paths.data("shard-1").chmod(0o644)
    os.truncate(paths.data("shard-1"), int(np.sort(np.asarray(index.offset))[-1]) + 1)
    assert load_catalog(paths).damaged == ("shard-1",)
    assert mend_shards(paths) == (["shard-1"], [])
    assert load_index(paths.shard("shard-1")).entries == index.entries - 1
    assert load_catalog(paths).damaged == ()


def test_every_item_is_listed_once(paths):
    make_shard(paths.shard("twice"), entries_of("plane", range(5)))
    open_shard(paths.shards / "left.open", entries_of("words", range(20, 24)))
    items = {item.key: item for item in [*all_items(range(12)), *items_of("words", range(20, 24))]}
    listed = list(stored_entries(load_catalog(paths, open_shards=True)))
    assert (load_catalog(paths, open_shards=True).find(keys_of(list(items.values()))) >= 0).all()
    assert sorted(entry.key for entry in listed) == sorted(items)
    for entry in listed:
        array = items[entry.key].array
        assert (entry.shape, entry.checksum, entry.intact) == (array.shape, checksum(array.tobytes()), True)

import os
import random
from contextlib import contextmanager

import numpy as np
import pytest
from made_entries import flip, key_of, make_cache, make_shard, new_entry, open_shard

from latentcache.errors import DiskFullError, StoreError
from latentcache.store import salvage as salvage_module
from latentcache.store.catalog import load_catalog
from latentcache.store.generation import load_generation
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.salvage import mend_shards, places_in, salvage

_NOBODY = 65534


@pytest.fixture
def layout(tmp_path):
    return make_cache(tmp_path / "cache", count=8)


def keys(layout, shard):
    return set(load_index(layout.shards / shard).keys())


def every(count=8):
    return {key_of(number) for number in range(count)}


def test_a_whole_shard_is_copied_whole(layout):
    found = salvage(layout, layout.shards / "one")
    assert (found.source, found.saved, found.lost, found.died) == ("one", 8, 0, False)
    assert keys(layout, found.shard) == every()
    catalog = load_catalog(layout)
    assert all(catalog.payload(catalog.locate(key)) is not None for key in every())
    assert not layout.scratch.exists()


def test_a_damaged_payload_stays_behind(layout):
    located = load_catalog(layout).locate(key_of(3))
    flip(layout.shards / "one" / "data.mdb", located.offset + 130)
    found = salvage(layout, layout.shards / "one")
    assert (found.saved, found.lost) == (7, 1)
    assert keys(layout, found.shard) == every() - {key_of(3)}


def test_what_is_not_wanted_is_not_copied(layout):
    found = salvage(layout, layout.shards / "one", skip=[key_of(0), key_of(1)])
    assert keys(layout, found.shard) == every() - {key_of(0), key_of(1)}
    assert salvage(layout, layout.shards / "one", skip=every()).shard == ""
    assert len(layout.all_sealed()) == 2


def test_only_what_is_named(layout):
    generation = load_generation(layout.root)
    hints = places_in(generation, "one")[[2, 5]]
    found = salvage(layout, layout.shards / "one", hints=hints, only=True)
    named = {hints["key"][row].tobytes() for row in range(2)}
    assert keys(layout, found.shard) == named


def test_places_are_those_of_the_index(layout):
    generation = load_generation(layout.root)
    rows = load_index(layout.shards / "one").rows
    places = np.sort(places_in(generation, "one"), order="offset")
    by_offset = rows[np.argsort(rows["offset"])]
    for name in ("key", "facts", "offset"):
        np.testing.assert_array_equal(places[name], by_offset[name])
    assert len(places_in(generation, "another")) == len(places_in(None, "one")) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_broken_page_costs_what_is_in_it(tmp_path, seed):
    """A page of an open shard is overwritten: what is on the others is saved, and nothing wrong."""
    layout = CacheLayout(tmp_path)
    data = open_shard(layout.shards / "one.open", count=40)
    page = random.Random(seed).randrange(2, data.stat().st_size // 4096)
    with data.open("r+b") as file:
        file.seek(page * 4096)
        file.write(random.Random(seed).randbytes(4096))
    found = salvage(layout, layout.shards / "one.open")
    assert not found.died
    if found.shard:
        catalog = load_catalog(layout)
        assert all(catalog.payload(catalog.locate(key)) is not None for key in catalog.keys())  # noqa: SIM118
        assert keys(layout, found.shard) <= {key_of(number) for number in range(40)}


def test_an_open_shard_with_one_damaged_record_loses_one_entry(tmp_path):
    layout = CacheLayout(tmp_path)
    make_shard(layout.shards / "good", [new_entry(100)])
    data = open_shard(layout.shards / "one.open", count=40)
    flip(data, data.read_bytes().index(key_of(7)) + 60)  # in the record of some entry
    (found,) = mend_shards(layout, None)
    assert (found.source, found.saved) == ("one.open", 39)
    assert layout.open_shards() == []
    assert len(list(layout.quarantine.iterdir())) == 1
    found = set(load_catalog(layout).keys())
    assert found < {key_of(number) for number in (*range(40), 100)}
    assert len(found) == 40


def test_a_damaged_sealed_shard_is_retired(layout):
    (layout.shards / "one" / "index.npy").write_bytes(b"")
    (found,) = mend_shards(layout, load_generation(layout.root))
    assert (found.saved, layout.retired()) == (8, {"one"})
    assert set(load_catalog(layout).keys()) == every()
    assert mend_shards(layout, None) == []


@contextmanager
def without_rights(folder):
    """The block runs as the owner of a folder, who is not root: root could read everything."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, _NOBODY, -1)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_shard_that_cannot_be_read_now_is_left_alone(open_folder):
    layout = make_cache(open_folder / "cache", count=8)
    (layout.shards / "one" / "index.npy").chmod(0)
    with without_rights(layout.root), pytest.raises(StoreError, match="refuses to read") as caught:
        mend_shards(layout, None)
    assert caught.value.fix.startswith("chmod -R u+rX")
    assert layout.retired() == set()


def test_a_child_that_dies_leaves_what_it_had_committed(layout, monkeypatch):
    code = salvage_module._CHILD.replace(
        "from latentcache.store.copying import serve; serve()",
        "import os, latentcache.store.copying as c; c._COMMIT_BYTES = 1; w = c.ShardWriter.write\n"
        "def write(self, entries):\n    w(self, entries)\n    self.num_entries >= 3 and os.kill(os.getpid(), 11)\n"
        "c.ShardWriter.write = write; c.serve()",
    )
    monkeypatch.setattr(salvage_module, "_CHILD", code)
    found = salvage(layout, layout.shards / "one")
    assert (found.died, found.saved) == (True, 3)
    assert keys(layout, found.shard) < every()
    assert not layout.scratch.exists()


def test_a_child_that_cannot_start(layout, monkeypatch):
    monkeypatch.setattr(salvage_module, "_CHILD", "import sys; sys.exit(1)")
    found = salvage(layout, layout.shards / "one")
    assert (found.died, found.saved, found.shard) == (True, 0, "")


def test_a_full_disk_is_said_and_changes_nothing(layout, monkeypatch):
    code = salvage_module._CHILD.replace(
        "serve()", "serve; import resource; resource.setrlimit(1, (20000, 20000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); serve()", 1
    )  # fmt: skip
    assert "setrlimit" in code
    monkeypatch.setattr(salvage_module, "_CHILD", code.replace("import serve; ;", "import serve;"))
    with pytest.raises(DiskFullError):
        salvage(layout, layout.shards / "one")
    assert [path.name for path in layout.all_sealed()] == ["one"]
    assert not layout.scratch.exists()

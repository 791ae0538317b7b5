import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from made_entries import key_of, make_cache, make_shard, new_entry

from latentcache.errors import StoreError
from latentcache.store.catalog import load_catalog
from latentcache.store.durable import read_json
from latentcache.store.generation import load_generation
from latentcache.store.inventory import stored_entries
from latentcache.store.reader import EntryReader
from latentcache.store.retire import check_one_disk, moved, republish, retire, to_scratch


@pytest.fixture
def layout(tmp_path):
    return make_cache(tmp_path / "cache")


def test_a_retired_shard_is_out_of_use_and_still_read(layout):
    generation = load_generation(layout.root)
    retire(layout, "one", "damaged")
    facts = read_json(layout.retired_mark("one"))
    retire(layout, "one", "compacted")
    assert read_json(layout.retired_mark("one")) == facts
    assert facts["reason"] == "damaged"
    assert (layout.sealed_shards(), [path.name for path in layout.all_sealed()]) == ([], ["one"])
    assert len(load_catalog(layout)) == 0
    assert list(stored_entries(layout.root, payloads=False)) == []
    reader = EntryReader(layout, generation)
    assert reader.read(0)[1].shape == (4, 8, 8)
    reader.close()


def test_rows_move_and_go(layout):
    generation = load_generation(layout.root)
    make_shard(layout.shards / "another", [new_entry(2), new_entry(3)])
    catalog = load_catalog(layout)
    # the first shard by name has them now: the catalogue takes an entry from the first it meets
    rows = {row: catalog.locate(generation.rows.key[row].tobytes()) for row in range(6)}
    placed = {row: found for row, found in rows.items() if found.shard == "another"}
    assert len(placed) == 2
    columns, shards = moved(generation, {0}, placed)
    assert shards == ("another", "one")
    number = republish(layout, generation, rows=columns, shards=shards, complete=False)
    found = load_generation(layout.root)
    assert (found.number, number, found.complete, found.manifest["replaces"]) == (2, 2, False, 1)
    assert found.manifest["provenance"] == generation.manifest["provenance"]
    assert [key.tobytes() for key in found.rows.key] == [key_of(number) for number in range(1, 6)]
    reader = EntryReader(layout, found)
    for row in range(5):
        reader.read(row)
    reader.close()
    np.testing.assert_array_equal(found.samples.content, generation.samples.content)


def test_a_generation_published_twice_says_whom_it_replaces(layout):
    for number in (1, 2):
        generation = load_generation(layout.root)
        republish(layout, generation, rows=generation.rows, shards=generation.shards, complete=True)
        assert load_generation(layout.root).manifest["replaces"] == number


def test_all_rows_may_go(layout):
    generation = load_generation(layout.root)
    rows, shards = moved(generation, set(range(6)), {})
    assert (len(rows.shard), shards) == (0, ())
    republish(layout, generation, rows=rows, shards=shards, complete=False)
    assert len(load_generation(layout.root).samples.names) == 6


def test_what_is_removed_goes_in_one_step(layout):
    place = to_scratch(layout, layout.shards / "one")
    assert place.parent == layout.scratch
    assert (place / "data.mdb").exists()
    assert not (layout.shards / "one").exists()


@pytest.fixture
def elsewhere(tmp_path):
    """A folder on another file system."""
    if not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system to write to")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("part", ["shards", "generations"])
def test_a_part_on_another_disk_is_named_before_anything_moves(layout, elsewhere, part):
    check_one_disk(layout)
    folder = layout.root / part
    shutil.move(folder, elsewhere / part)
    folder.symlink_to(elsewhere / part)
    before = sorted(layout.root.rglob("*"))
    with pytest.raises(StoreError, match=f"{part}/ of this cache lies on another file system") as caught:
        check_one_disk(layout)
    assert caught.value.fix.startswith(f"cp -a {layout.root} ")
    assert sorted(layout.root.rglob("*")) == before
    assert not list(elsewhere.rglob("probe-*"))

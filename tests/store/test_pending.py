"""Readers of a streaming build: sealed items, named failures and fixed positions."""

import pickle
import threading
import time

import numpy as np
import pytest
from made_entries import (
    GROUPS,
    KINDS,
    RECIPES,
    entries_of,
    group_of,
    item_of,
    items_of,
    keys_of,
    make_shard,
    publish,
    samples_of,
)

from latentcache.errors import CacheNotFoundError, MissingEntryError, NotYetEncodedError
from latentcache.fields.table import Rejected
from latentcache.store.atomic_io import make_folder
from latentcache.store.lock import builder_lock, unleased
from latentcache.store.paths import CachePaths
from latentcache.store.pending import end_pending, open_pending, pending_field, publish_pending, reject_pending
from latentcache.store.publish import NewSnapshot
from latentcache.store.reader import EntryReader

NUMBERS = range(60)


@pytest.fixture
def building(tmp_path):
    paths = CachePaths(tmp_path / "cache")
    make_folder(paths.shards)
    with builder_lock(paths.lock):
        announce(paths)
        yield paths


def announce(paths):
    fields = tuple(
        pending_field(
            KINDS[name], RECIPES[name], groups=GROUPS[name], sample=np.arange(len(NUMBERS)),
            group=np.array([group_of(name, n) for n in NUMBERS]), variant=np.zeros(len(NUMBERS), np.uint8),
            key=keys_of(items_of(name, NUMBERS)),
        )
        for name in KINDS
    )  # fmt: skip
    new = NewSnapshot(samples=samples_of(NUMBERS), fields=fields, shards=(), source={"root": "/x"})
    publish_pending(paths, new)


def seal(paths, name, numbers):
    make_shard(paths.shard(name), [entry for field in KINDS for entry in entries_of(field, numbers)])


@pytest.mark.parametrize("pickled", [False, True])
def test_items_are_read_as_their_shards_are_sealed(building, pickled):
    seal(building, "before", range(5))
    snapshot = open_pending(building.root, timeout_s=60)
    snapshot = pickle.loads(pickle.dumps(snapshot)) if pickled else snapshot
    reader = EntryReader(building, snapshot)
    assert len(snapshot.samples) == len(snapshot.fields["words"]) == 60
    for name in KINDS:
        assert reader.read(name, 3).tobytes() == item_of(name, 3).array.tobytes()
    assert snapshot.pending.places["plane"].at.shard[7] == -1

    def later():
        for part in range(3):
            time.sleep(0.1)
            seal(building, f"part-{part}", range(5 + part, 60, 3))

    thread = threading.Thread(target=later)
    thread.start()
    for name in KINDS:
        rows = np.random.default_rng(0).permutation(60)
        arrays = [item_of(name, row).array for row in rows.tolist()]
        sizes = np.array([array.nbytes for array in arrays])
        out = np.zeros(sizes.sum(), dtype=np.uint8)
        if RECIPES[name].spec.ragged:
            reader.ready(name, rows)
            np.testing.assert_array_equal(snapshot.pending.length(name, rows), [len(array) for array in arrays])
        reader.gather(name, rows, out, np.cumsum(sizes) - sizes)
        assert out.tobytes() == b"".join(array.tobytes() for array in arrays)
        assert reader.header(name, 50).items >= 1
    thread.join()


def test_an_item_that_failed_is_named_with_its_reason(building):
    snapshot = open_pending(building.root, timeout_s=5)
    rejected = Rejected(name="x", reason="truncated", detail="after 100 bytes")
    reject_pending(building, [(7, "plane", rejected), (9, "", rejected)])
    for field, row in (("plane", 7), ("plane", 9), ("words", 9)):
        with pytest.raises(MissingEntryError, match="truncated after 100 bytes") as caught:
            snapshot.pending.ready(field, np.array([row]))
        assert f"{row:04d}.png" in caught.value.what
    assert snapshot.pending.places["plane"].failed[7:9].tolist() == [True, False]
    assert not snapshot.pending.places["words"].failed[7]


def test_an_item_that_times_out(building):
    snapshot = open_pending(building.root, timeout_s=0.3)
    with pytest.raises(NotYetEncodedError, match="not encoded within"):
        snapshot.pending.ready("plane", np.array([1]))


def test_the_end_of_the_build(tmp_path):
    paths = CachePaths(tmp_path / "cache")
    make_folder(paths.shards)
    with builder_lock(paths.lock):
        announce(paths)
        snapshot = open_pending(paths.root, timeout_s=60)
        seal(paths, "all", range(50))
        why = Rejected(name="im\u00e4ge-0054.png", reason="truncated", target="plane")
        publish(paths, list(range(50)), rejected=[why])
        end_pending(paths)
    reader = EntryReader(paths, snapshot)
    assert reader.read("plane", 49).tobytes() == item_of("plane", 49).array.tobytes()
    with unleased(paths.snapshot(1) / "manifest.json") as free:
        assert not free
    with pytest.raises(NotYetEncodedError, match="not running and has not made it"):
        reader.read("plane", 55)
    with pytest.raises(MissingEntryError, match="truncated"):
        reader.read("plane", 54)
    assert open_pending(paths.root) is None
    with pytest.raises(CacheNotFoundError, match="no streaming build"):
        open_pending(tmp_path / "none", timeout_s=0.3)

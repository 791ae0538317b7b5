"""Readers return the written bytes, or an error with sample, entry and file."""

import gc
import os
import pickle
import random
import resource
from pathlib import Path

import numpy as np
import pytest
from damaged import flip
from made_entries import KINDS, item_of, make_cache

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError, StoreError, UsageError
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import open_snapshot


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("many") / "cache", range(300), shards=3)


def reader_of(paths, **more):
    return EntryReader(paths, open_snapshot(paths.root), **more)


def gathered(reader, name, rows):
    """Read rows with a gap of three bytes before each."""
    items = [item_of(name, row).array for row in rows]
    sizes = np.array([item.nbytes for item in items])
    at = np.cumsum(sizes + 3) - sizes
    out = np.full(int(at[-1] + sizes[-1]), 0xAA, dtype=np.uint8)
    reader.gather(name, np.array(rows), out, at)
    return out, at, items


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("checksum", ["first", "always"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [1, 5, 200])
def test_items_are_read_into_buffers(many, name, count, checksum):
    reader = reader_of(many, checksum=checksum)
    for order in (random.Random(count).sample(range(300), count), list(range(count))):
        for _ in range(2):
            out, at, items = gathered(reader, name, order)
            for begin, item in zip(at.tolist(), items, strict=True):
                assert out[begin : begin + item.nbytes].tobytes() == item.tobytes()
                assert (out[begin - 3 : begin] == 0xAA).all()


def test_parts_of_ragged_items(many):
    reader, rows = reader_of(many), np.array([3, 3, 9, 200])
    items = [item_of("words", row).array for row in rows.tolist()]
    length = np.array([min(5, len(item) - len(item) // 2) for item in items])
    start = np.array([len(item) // 2 for item in items])
    at = np.array([0, 100, 200, 300])
    out = np.zeros(400, dtype=np.uint8)
    reader.located("words", rows, at, len(out), start, length).read(out)
    for byte, item, begin, count in zip(at, items, start, length, strict=True):
        assert out[byte : byte + 2 * count].tobytes() == item[begin : begin + count].tobytes()


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("checksum", ["first", "always"])
def test_a_flipped_bit_is_found_before_its_bytes_are_used(paths, name, checksum):
    reader = reader_of(paths, checksum=checksum)
    rows = reader.snapshot.fields[name]
    shard, offset, _ = (int(part[0]) for part in reader._field(name).segments(np.array([5])))
    data = paths.data(reader.snapshot.shards[shard])
    flip(data, offset + 1)
    for read in (lambda: reader.read(name, 5), lambda: gathered(reader, name, [5])):
        with pytest.raises(CorruptEntryError, match="checksum") as caught:
            read()
        entry = int(rows.entry[5])
        owners = [f"im\u00e4ge-{n:04d}.png" for n in range(12) if int(rows.entry[n]) == entry]
        assert caught.value.sample in owners
        assert caught.value.key == rows.key[entry].tobytes().hex()
        assert str(data) in caught.value.where
    flip(data, offset + 1)
    assert reader.read(name, 5).tobytes() == item_of(name, 5).array.tobytes()


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("keep", [0, 100, 9000])
def test_a_truncated_shard_is_an_error(paths, name, keep):
    reader = reader_of(paths)
    for shard in reader.snapshot.shards:
        paths.data(shard).chmod(0o644)
        os.truncate(paths.data(shard), keep)
    with pytest.raises(CorruptEntryError, match="ends early"):
        [reader.read(name, row) for row in range(12)]


def test_too_many_open_files_are_no_damage(paths):
    reader, limits = reader_of(paths), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"data\.mdb cannot be read") as caught:
            reader.read("plane", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(caught.value, CacheDamagedError)
    assert caught.value.fix.startswith("ulimit -n")


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("name", KINDS)
def test_an_entry_that_the_disk_does_not_give_is_no_damage(paths, name, tmp_path):
    reader = reader_of(paths)
    (tmp_path / "unread").touch()
    os.truncate(tmp_path / "unread", 1 << 30)
    unread = os.open(tmp_path / "unread", os.O_WRONLY)  # each read of it fails
    for shard in range(2):
        os.dup2(unread, reader.file(shard).descriptor)
    os.close(unread)
    with pytest.raises(CorruptEntryError, match=f"the {name} of .* cannot be read") as caught:
        reader.read(name, 5)
    assert (caught.value.reason, caught.value.fix.startswith("check the disk")) == ("io-error", True)


def test_a_shard_that_is_gone_is_missing(paths):
    for shard in ("shard-0", "shard-1"):
        paths.data(shard).unlink()
    with pytest.raises(MissingEntryError) as caught:
        reader_of(paths).read("plane", 0)
    assert "shard-" in caught.value.where
    paths.data("shard-0").symlink_to("data.mdb")
    paths.data("shard-1").symlink_to("data.mdb")
    with pytest.raises(StoreError, match="cannot be read"):
        reader_of(paths).read("plane", 0)


def test_the_fields_that_exist_are_named(paths):
    with pytest.raises(UsageError, match="plane, vector, words"):
        reader_of(paths).read("latents", 0)


def test_a_collected_reader_leaves_no_file_open(paths):
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = pickle.loads(pickle.dumps(reader_of(paths)))
    reader.read("plane", 0)
    located = reader.located("plane", np.array([2]), np.array([0]), 1 << 20)
    reader.close()
    reader.read("plane", 1)
    located.read(np.empty(1 << 20, np.uint8))  # its file stays open until then
    del reader, located
    assert len(list(Path("/proc/self/fd").iterdir())) == before

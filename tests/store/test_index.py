"""The index walk equals LMDB; damage raises a package error."""

import contextlib
import os
import random
import struct

import lmdb
import numpy as np
import pytest
from damaged import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import entries_of, flat_entry, items_of, make_shard, open_shard

from latentcache.errors import CacheDamagedError, CorruptEntryError
from latentcache.store.shard import INDEX, collect_index, load_index, read_meta, walk

PAGE = os.sysconf("SC_PAGESIZE")


def opened(folder):
    return lmdb.open(str(folder), readonly=True, lock=False, create=False)


def pairs(folder):
    with opened(folder) as environment, environment.begin() as transaction:
        return list(transaction.cursor())


def walked(data):
    file = data.read_bytes()
    descriptor = os.open(data, os.O_RDONLY)
    try:
        values = walk(descriptor, read_meta(data))
        found = [(key, file[offset : offset + length]) for key, offset, length in values]
    finally:
        os.close(descriptor)
    return found


def environment_of(folder, values, batches=1):
    with lmdb.open(str(folder), map_size=1 << 30, lib_version=0, sync=False) as environment:
        for start in range(batches):
            with environment.begin(write=True) as transaction:
                for number in range(start, len(values), batches):
                    transaction.put(b"%032d" % number, values[number])
    return folder / "data.mdb"


@settings(max_examples=25)
@given(st.integers(1, 3000), st.integers(0, 2**32), st.integers(1, 4))
def test_the_walk_finds_what_lmdb_finds(tmp_path_factory, count, seed, batches):
    rng = random.Random(seed)
    most = min(300_000, 6_000_000 // count)
    values = [rng.randbytes(rng.randint(1, max(most, 200))) for _ in range(count)]
    data = environment_of(tmp_path_factory.mktemp("walk"), values, batches)
    assert walked(data) == pairs(data.parent)
    with opened(data.parent) as environment:
        info, meta = environment.info(), read_meta(data)
        assert (meta.last_page, meta.transaction) == (info["last_pgno"], info["last_txnid"])
        assert meta.page_size == environment.stat()["psize"]
    assert meta.file_bytes <= data.stat().st_size


@pytest.mark.parametrize("size", [1, 99, 2019, 2020, 2021, 4079, 4080, 4081, 8176, 8177, 70_000])
def test_sizes_at_the_edges_of_pages(tmp_path, size):
    data = environment_of(tmp_path, [random.Random(number).randbytes(size) for number in range(20)])
    assert walked(data) == pairs(tmp_path)


def test_uncommitted_and_replaced_pages_are_not_walked(tmp_path):
    """LMDB keeps old pages in the file; a scan in page order would read them."""
    with lmdb.open(str(tmp_path), map_size=1 << 30, lib_version=0) as environment:
        for round_ in range(3):
            with environment.begin(write=True) as transaction:
                for number in range(300):
                    transaction.put(b"%032d" % number, b"%d" % round_ * 3000)
        with contextlib.suppress(ZeroDivisionError), environment.begin(write=True) as transaction:
            for number in range(300, 600):
                transaction.put(b"%032d" % number, b"uncommitted" * 300)
            raise ZeroDivisionError
    found = walked(tmp_path / "data.mdb")
    assert found == pairs(tmp_path)
    assert len(found) == 300


@pytest.mark.parametrize("names", [("plane",), ("words",), ("vector",), ("plane", "words", "vector")])
def test_the_index_locates_every_item(tmp_path, names):
    """Items and entries of one kind, and of several in one shard."""
    numbers = range(700)
    folder = make_shard(tmp_path / "one", [entry for name in names for entry in entries_of(name, numbers)])
    index = load_index(folder)
    made = {item.key: item for name in names for item in items_of(name, numbers)}
    keys = index.keys()
    entry, start, length = (np.asarray(index.columns[f"item.{name}"]) for name in ("entry", "start", "length"))
    assert index.items == len(keys) == len(made)
    data = (folder / "data.mdb").read_bytes()
    offset, size = np.asarray(index.offset).astype(int), np.asarray(index.bytes).astype(int)
    same = np.asarray(index.columns["item.same"])
    for row, key in enumerate(keys):
        item = made[key.tobytes()]
        payload = data[offset[entry[row]] : offset[entry[row]] + size[entry[row]]]
        array = np.frombuffer(payload, dtype=item.array.dtype)
        unit = 1 if length[row] else item.array.size
        begin = int(start[row]) * unit
        assert array[begin : begin + item.array.size].tobytes() == item.array.tobytes()
        assert same[row].tobytes() == (item.same or bytes(16))
    entry_keys = [key.tobytes() for key in np.asarray(index.key)]
    assert entry_keys == sorted(entry_keys)


def test_an_index_of_another_shard_is_rejected(tmp_path):
    first = make_shard(tmp_path / "a", entries_of("plane", range(3)))
    two = make_shard(tmp_path / "b", entries_of("plane", range(3, 6)))
    (first / INDEX).write_bytes((two / INDEX).read_bytes())
    with pytest.raises(CacheDamagedError, match="the index of shard b"):
        load_index(first)


def test_a_damaged_head_is_named(tmp_path):
    entries = entries_of("words", range(600))
    data = open_shard(tmp_path / "one.open", entries)
    offset = data.read_bytes().index(bytes(entries[1].value[:200]))
    flip(data, offset + 120)
    with pytest.raises(CorruptEntryError, match="header checksum") as caught:
        collect_index(data)
    assert (caught.value.key, caught.value.where) == (entries[1].key.hex(), str(data))


# damaged pages


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = make_shard(tmp_path_factory.mktemp("whole") / "one", [flat_entry(n, 5000) for n in range(60)])
    return (folder / "data.mdb").read_bytes()


def read_meta_of(folder, data):
    path = folder / "data.mdb"
    path.write_bytes(data)
    return read_meta(path)


def test_the_other_meta_page_is_read_if_one_is_zeroed(tmp_path, whole):
    both = read_meta_of(tmp_path, whole)
    first = read_meta_of(tmp_path, whole[:PAGE] + bytes(PAGE) + whole[2 * PAGE :])
    second = read_meta_of(tmp_path, bytes(PAGE) + whole[PAGE:])
    assert both in (first, second)
    assert first != second
    with pytest.raises(CacheDamagedError, match=r"no LMDB 0\.9 file"):
        read_meta_of(tmp_path, bytes(2 * PAGE) + whole[2 * PAGE :])


def test_a_file_of_the_newer_engine_is_rejected(tmp_path):
    with lmdb.open(str(tmp_path), lib_version=1) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"k" * 32, b"value")
    with pytest.raises(CacheDamagedError, match=r"no LMDB 0\.9 file"):
        read_meta(tmp_path / "data.mdb")


@settings(max_examples=200)
@given(st.data())
def test_damaged_pages_are_an_error_or_harmless(tmp_path_factory, whole, data):
    """Any bytes anywhere raise no other exception, end, and read nothing outside the file."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.sampled_from([1, 2, 8, 64, PAGE]))
        at = data.draw(st.integers(0, len(whole) - length))
        damaged[at : at + length] = data.draw(st.sampled_from([bytes(length), b"\xff" * length, os.urandom(length)]))
    path = tmp_path_factory.mktemp("damaged") / "data.mdb"
    path.write_bytes(damaged)
    try:
        found = collect_index(path)
    except (CacheDamagedError, CorruptEntryError):
        return
    assert (found["offset"] + found["bytes"] <= len(damaged)).all()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file of small values: only meta, branch and leaf pages."""
    folder = make_shard(tmp_path_factory.mktemp("small") / "one", [flat_entry(n, 100) for n in range(300)])
    return (folder / "data.mdb").read_bytes()


def tree_pages(data, flag):
    """Page numbers of branches (1) or leaves (2)."""
    flags = [struct.unpack_from("<H", data, page * PAGE + 10)[0] for page in range(len(data) // PAGE)]
    return [page for page in range(2, len(flags)) if flags[page] & 0xFF == flag]


def test_a_loop_of_pages_ends(tmp_path, small):
    damaged, pages = bytearray(small), tree_pages(small, 1)
    assert pages
    for branch in pages:
        (lower,) = struct.unpack_from("<H", damaged, branch * PAGE + 12)
        for (pointer,) in struct.iter_unpack("<H", bytes(damaged[branch * PAGE + 16 : branch * PAGE + lower])):
            struct.pack_into("<HHH", damaged, branch * PAGE + pointer, branch & 0xFFFF, branch >> 16, 0)
    path = tmp_path / "data.mdb"
    path.write_bytes(damaged)
    with pytest.raises(CacheDamagedError, match="damaged") as caught:
        collect_index(path)
    assert "met twice" in caught.value.why


def test_a_swapped_page_is_found(tmp_path, small):
    damaged, leaves = bytearray(small), tree_pages(small, 2)
    first, other = (page * PAGE for page in leaves[1:3])
    damaged[first : first + PAGE] = damaged[other : other + PAGE]
    path = tmp_path / "data.mdb"
    path.write_bytes(damaged)
    with pytest.raises(CacheDamagedError, match="damaged") as caught:
        collect_index(path)
    assert "in the place of another" in caught.value.why

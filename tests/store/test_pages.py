import os
import random
import struct

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import flat_entry, make_shard, payload_of

from latentcache.errors import CacheDamagedError
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.pages import read_meta, slots

PAGE = os.sysconf("SC_PAGESIZE")
MAP_BYTES = 1 << 30


def opened(folder, **options):
    return lmdb.open(str(folder), readonly=True, lock=False, create=False, max_dbs=4, **options)


def pairs(folder, name):
    """What LMDB itself says is in a database."""
    with opened(folder) as environment:
        database = environment.open_db(name, create=False)
        with environment.begin(db=database) as transaction:
            return list(transaction.cursor())


def read_slots(data, name):
    file = data.read_bytes()
    return [(slot.key, file[slot.offset : slot.offset + slot.length]) for slot in slots(data, name)]


def environment_of(folder, values, batches=1):
    """An LMDB file with a database ``blob`` that got its values in several transactions."""
    with lmdb.open(str(folder), map_size=MAP_BYTES, max_dbs=4, lib_version=0, sync=False) as environment:
        database = environment.open_db(b"blob")
        for start in range(batches):
            with environment.begin(write=True, db=database) as transaction:
                for number in range(start, len(values), batches):
                    transaction.put(b"%032d" % number, values[number])
    return folder / "data.mdb"


@settings(max_examples=30)
@given(st.integers(1, 3000), st.integers(0, 2**32), st.integers(1, 4))
def test_the_walk_finds_what_lmdb_finds(tmp_path_factory, count, seed, batches):
    rng = random.Random(seed)
    most = min(300_000, 6_000_000 // count)
    values = [payload_of(rng.random(), rng.randint(100, max(most, 200))) for _ in range(count)]
    data = environment_of(tmp_path_factory.mktemp("walk"), values, batches)
    assert read_slots(data, "blob") == pairs(data.parent, b"blob")
    with opened(data.parent) as environment:
        facts, meta = environment.info(), read_meta(data)
        assert (meta.last_page, meta.transaction) == (facts["last_pgno"], facts["last_txnid"])
        assert (meta.page_size, meta.map_size) == (environment.stat()["psize"], MAP_BYTES)
    assert meta.file_bytes <= data.stat().st_size


@pytest.mark.parametrize("size", [1, 99, 2019, 2020, 2021, 4079, 4080, 4081, 8176, 8177, 70_000])
def test_sizes_at_the_edges_of_pages(tmp_path, size):
    data = environment_of(tmp_path, [payload_of(number, size) for number in range(20)])
    assert read_slots(data, "blob") == pairs(tmp_path, b"blob")


def test_a_payload_begins_on_a_64_byte_boundary(tmp_path):
    sizes = [2048, 2049, 3000, 4096, 8192, 32_768, 65_537, 131_072, 262_144, 1 << 20, 2 << 20]
    entries = sorted((flat_entry(number, size) for number, size in enumerate(sizes)), key=lambda entry: entry.key)
    folder = make_shard(tmp_path / "aligned", entries)
    found = list(slots(folder / "data.mdb", "blob"))
    assert [slot.length for slot in found] == [len(entry.value) for entry in entries]
    assert [(slot.offset + HEADER_BYTES) % 64 for slot in found] == [0] * len(sizes)


def test_a_database_that_was_never_made_is_empty(tmp_path):
    data = environment_of(tmp_path, [b"value"])
    assert list(slots(data, "head")) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = make_shard(tmp_path_factory.mktemp("whole") / "one", [flat_entry(n, 5000) for n in range(60)])
    return (folder / "data.mdb").read_bytes()


@pytest.mark.parametrize("length", ["0", "100", "PAGE", "2 * PAGE", "size // 2", "size - PAGE", "size - 1"])
def test_a_truncated_file_is_refused(tmp_path, whole, length):
    size = read_meta_of(tmp_path, whole).file_bytes
    with pytest.raises(CacheDamagedError) as caught:
        read_meta_of(tmp_path, whole[: eval(length, {"PAGE": PAGE, "size": size})])
    assert str(tmp_path) in caught.value.where
    assert "verify" in caught.value.fix


@given(st.data())
def test_any_truncation_is_refused(tmp_path_factory, whole, data):
    folder = tmp_path_factory.mktemp("cut")
    size = read_meta_of(folder, whole).file_bytes
    with pytest.raises(CacheDamagedError):
        read_meta_of(folder, whole[: data.draw(st.integers(0, size - 1))])


def read_meta_of(folder, data):
    path = folder / "data.mdb"
    path.write_bytes(data)
    return read_meta(path)


def test_the_other_meta_page_is_read_where_one_is_zeroed(tmp_path, whole):
    both = read_meta_of(tmp_path, whole)
    first = read_meta_of(tmp_path, whole[:PAGE] + bytes(PAGE) + whole[2 * PAGE :])
    second = read_meta_of(tmp_path, bytes(PAGE) + whole[PAGE:])
    assert both in (first, second)
    assert first != second
    with pytest.raises(CacheDamagedError, match=r"no LMDB 0\.9 file"):
        read_meta_of(tmp_path, bytes(2 * PAGE) + whole[2 * PAGE :])


def test_a_missing_file_is_damage(tmp_path):
    with pytest.raises(CacheDamagedError, match="cannot be read"):
        read_meta(tmp_path / "data.mdb")


def test_a_file_of_the_newer_engine_is_refused(tmp_path):
    with lmdb.open(str(tmp_path), lib_version=1, max_dbs=4) as environment:
        environment.open_db(b"blob")
    with pytest.raises(CacheDamagedError, match=r"no LMDB 0\.9 file"):
        read_meta(tmp_path / "data.mdb")


@settings(max_examples=300)
@given(st.data())
def test_damaged_pages_are_an_error_of_ours_or_do_no_harm(tmp_path_factory, whole, data):
    """Any bytes anywhere: no other exception, no endless walk, nothing outside the file."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.sampled_from([1, 2, 8, 64, PAGE]))
        at = data.draw(st.integers(0, len(whole) - length))
        damaged[at : at + length] = data.draw(st.sampled_from([bytes(length), b"\xff" * length, os.urandom(length)]))
    path = tmp_path_factory.mktemp("damaged") / "data.mdb"
    path.write_bytes(damaged)
    try:
        found = list(slots(path, "blob"))
    except CacheDamagedError:
        return
    assert all(0 <= slot.offset <= slot.offset + slot.length <= len(damaged) for slot in found)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file of small values, whose pages are all metas, branches and leaves."""
    folder = make_shard(tmp_path_factory.mktemp("small") / "one", [flat_entry(n, 100) for n in range(300)])
    return (folder / "data.mdb").read_bytes()


def tree_pages(data, flag):
    """Page numbers of branches (1) or leaves (2)."""
    count = len(data) // PAGE
    flags = [struct.unpack_from("<H", data, page * PAGE + 10)[0] for page in range(count)]
    return [page for page in range(2, count) if flags[page] & 0xFF == flag]


def test_a_loop_of_pages_ends(tmp_path, small):
    damaged = bytearray(small)
    pages = tree_pages(small, 1)
    assert pages
    for branch in pages:
        (lower,) = struct.unpack_from("<H", damaged, branch * PAGE + 12)
        for (pointer,) in struct.iter_unpack("<H", bytes(damaged[branch * PAGE + 16 : branch * PAGE + lower])):
            struct.pack_into("<HHH", damaged, branch * PAGE + pointer, branch & 0xFFFF, branch >> 16, 0)
    path = tmp_path / "data.mdb"
    path.write_bytes(damaged)
    with pytest.raises(CacheDamagedError, match="damaged") as caught:
        list(slots(path, "blob"))
    assert "met twice" in caught.value.why


def test_a_zeroed_leaf_is_named(tmp_path, small):
    path = tmp_path / "data.mdb"
    messages = set()
    for leaf in tree_pages(small, 2):
        path.write_bytes(small[: leaf * PAGE] + bytes(PAGE) + small[(leaf + 1) * PAGE :])
        for name in ("head", "blob"):
            try:
                list(slots(path, name))
            except CacheDamagedError as error:
                messages.add(error.why.split(" ", 2)[2])
    assert messages == {"is neither branch nor leaf"}

import os
import random
import struct

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import flat_entry, make_shard, payload_of

from latentcache.errors import CacheDamagedError
from latentcache.store.entry import RECORD_BYTES
from latentcache.store.leaves import leaf_blocks
from latentcache.store.pages import read_meta, slots

PAGE = os.sysconf("SC_PAGESIZE")


def by_blocks(path, name, value_bytes=0):
    """(key, offset, length) as the blocks have them."""
    found = []
    for block in leaf_blocks(path, name, read_meta(path), key_bytes=32, value_bytes=value_bytes):
        keys = [front[:32].tobytes() for front in block.fronts]
        found += zip(keys, block.offsets.tolist(), block.lengths.tolist(), strict=True)
    return found


def by_slots(path, name):
    return [(slot.key, slot.offset, slot.length) for slot in slots(path, name)]


def environment_of(folder, values, batches=1, key="%032d"):
    """An LMDB file with a database ``blob`` that got its values in several transactions."""
    with lmdb.open(str(folder), map_size=1 << 30, max_dbs=4, lib_version=0, sync=False) as environment:
        database = environment.open_db(b"blob")
        for start in range(batches):
            with environment.begin(write=True, db=database) as transaction:
                for number in range(start, len(values), batches):
                    transaction.put((key % number).encode(), values[number])
    return folder / "data.mdb"


@settings(max_examples=20)
@given(st.integers(1, 3000), st.integers(0, 2**32), st.integers(1, 4))
def test_blocks_hold_what_the_walk_finds(tmp_path_factory, count, seed, batches):
    rng = random.Random(seed)
    most = min(100_000, 3_000_000 // count)
    values = [payload_of(rng.random(), rng.randint(1, max(most, 200))) for _ in range(count)]
    data = environment_of(tmp_path_factory.mktemp("walk"), values, batches)
    assert by_blocks(data, "blob") == by_slots(data, "blob")


def test_values_of_one_length_come_with_their_keys(tmp_path):
    data = make_shard(tmp_path / "one", [flat_entry(n, 300) for n in range(500)]) / "data.mdb"
    file = data.read_bytes()
    assert by_blocks(data, "head", RECORD_BYTES) == by_slots(data, "head")
    for block in leaf_blocks(data, "head", read_meta(data), key_bytes=32, value_bytes=RECORD_BYTES):
        starts = block.offsets.tolist()
        assert [file[start - 32 : start + RECORD_BYTES] for start in starts] == [
            front.tobytes() for front in block.fronts
        ]
        assert block.fronts.shape == (len(starts), 32 + RECORD_BYTES)


def test_a_database_that_was_never_made_has_no_blocks(tmp_path):
    assert by_blocks(environment_of(tmp_path, [b"value"]), "head") == []


@pytest.mark.parametrize("values", [[b"x" * 9, b"x" * 10], [b"x" * 5000], [b""]])
def test_values_that_are_not_as_asked_are_unusual(tmp_path, values):
    data = environment_of(tmp_path, values)
    with pytest.raises(ValueError, match="length"):
        by_blocks(data, "blob", 10)


def test_keys_of_another_length_are_unusual(tmp_path):
    data = environment_of(tmp_path, [b"value"] * 3, key="%031d")
    with pytest.raises(ValueError, match="key"):
        by_blocks(data, "blob")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of small values, whose pages are metas, branches and leaves, and of some large ones."""
    sizes = [5000 if n % 20 == 0 else 100 for n in range(400)]
    return (
        make_shard(tmp_path_factory.mktemp("whole") / "one", list(map(flat_entry, range(400), sizes)))
    ) / "data.mdb"


@settings(max_examples=300)
@given(st.data())
def test_of_damaged_pages_nothing_is_yielded_that_the_walk_would_not(whole, tmp_path_factory, data):
    damaged = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.sampled_from([1, 2, 8, 64, PAGE]))
        at = data.draw(st.integers(0, len(damaged) - length))
        damaged[at : at + length] = data.draw(st.sampled_from([bytes(length), b"\xff" * length, os.urandom(length)]))
    path = tmp_path_factory.mktemp("damaged") / "data.mdb"
    path.write_bytes(damaged)
    try:
        found = by_blocks(path, "blob")
    except (CacheDamagedError, ValueError):
        return
    assert found == by_slots(path, "blob")


def pages_of(data, flag):
    flags = [struct.unpack_from("<H", data, page * PAGE + 10)[0] for page in range(len(data) // PAGE)]
    return [page for page in range(2, len(flags)) if flags[page] & 0xFF == flag]


def test_every_byte_of_a_leaf_that_matters_is_looked_at(whole, tmp_path):
    """Header fields and nodes of leaves, one word after the other: a change is found, or the walk has it the same."""
    file, path, rng = whole.read_bytes(), tmp_path / "data.mdb", np.random.default_rng(0)
    unusual = 0
    for page in pages_of(file, 2)[:6]:
        for at in (10, 12, 16, 18, *(2 * rng.integers(8, PAGE // 2, 12)).tolist()):
            damaged = bytearray(file)
            struct.pack_into("<H", damaged, page * PAGE + at, rng.integers(0, 1 << 16))
            path.write_bytes(damaged)
            try:
                assert by_blocks(path, "blob") == by_slots(path, "blob")
            except (CacheDamagedError, ValueError):
                unusual += 1
    assert unusual > 6


@pytest.mark.parametrize("to", ["itself", "a leaf twice"])
def test_a_page_met_twice_is_unusual(whole, tmp_path, to):
    damaged = bytearray(whole.read_bytes())
    branches = pages_of(damaged, 1)
    assert branches
    for branch in branches:
        (lower,) = struct.unpack_from("<H", damaged, branch * PAGE + 12)
        pointers = [
            p for (p,) in struct.iter_unpack("<H", bytes(damaged[branch * PAGE + 16 : branch * PAGE + lower]))
        ]
        first = struct.unpack_from("<H", damaged, branch * PAGE + pointers[0])[0]
        for pointer in pointers:
            target = branch if to == "itself" else first
            struct.pack_into("<HHH", damaged, branch * PAGE + pointer, target & 0xFFFF, target >> 16, 0)
    path = tmp_path / "data.mdb"
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="met twice"):
        by_blocks(path, "blob")

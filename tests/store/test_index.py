import json

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import flip, key_of, make_shard, new_entry, payload_of

from latentcache.errors import CacheDamagedError, CorruptEntryError
from latentcache.store.entry import HEADER_BYTES, pack_record
from latentcache.store.index import INDEX_DTYPE, collect_rows, load_index, load_rows, write_index
from latentcache.store.pages import read_meta


@pytest.fixture
def shard(tmp_path):
    return make_shard(tmp_path / "one", [new_entry(number) for number in range(20)])


def raw_shard(folder, pairs):
    """A closed shard with whatever lies in its databases: ``(database, key, value)``."""
    with lmdb.open(str(folder), max_dbs=4, lib_version=0, map_size=1 << 26) as environment:
        databases = {name: environment.open_db(name) for name in (b"head", b"blob")}
        with environment.begin(write=True) as transaction:
            for name, key, value in pairs:
                transaction.put(key, value, db=databases[name])
    return folder


def parts(number):
    """Record and value of an entry."""
    made = new_entry(number)
    return made.key, pack_record(made.value[:HEADER_BYTES], made.facts, made.key), made.value


@settings(max_examples=10)
@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=80))
def test_the_index_holds_every_entry_in_the_order_of_keys(tmp_path_factory, numbers):
    entries = {key_of(number): new_entry(number) for number in numbers}
    folder = make_shard(tmp_path_factory.mktemp("index") / "one", list(entries.values()))
    index = load_index(folder)
    assert index.keys() == sorted(entries)
    assert index.rows.dtype == INDEX_DTYPE
    file = index.data.read_bytes()
    for row, key in zip(index.rows, index.keys(), strict=True):
        start = int(row["offset"])
        assert file[start : start + len(entries[key].value)] == entries[key].value
        assert row["header"].tobytes() == entries[key].value[:HEADER_BYTES]
        assert row["facts"].tobytes() == entries[key].facts


def test_the_facts_of_a_shard_are_its_own(shard):
    facts, meta = json.loads((shard / "shard.json").read_text()), read_meta(shard / "data.mdb")
    found = {name: facts[name] for name in ("schema", "entries", "data_bytes", "page_size", "transaction")}
    assert found == {
        "schema": 1,
        "entries": 20,
        "data_bytes": meta.file_bytes,
        "page_size": meta.page_size,
        "transaction": meta.transaction,
    }
    assert load_index(shard).transaction == meta.transaction


def test_indexing_again_changes_nothing(shard):
    before = (shard / "index.npy").read_bytes()
    assert write_index(shard) == 20
    assert (shard / "index.npy").read_bytes() == before


def test_every_changed_byte_of_an_index_is_refused(tmp_path):
    shard = make_shard(tmp_path / "one", [new_entry(1)])
    path = shard / "index.npy"
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 8]) + good[position + 1 :])
        with pytest.raises(CacheDamagedError, match=r"index\.npy is damaged"):
            load_index(shard)


@pytest.mark.parametrize("name", ["data_bytes", "page_size", "transaction", "index_checksum", "entries"])
def test_an_index_of_another_shard_is_refused(shard, name):
    path = shard / "shard.json"
    facts = json.loads(path.read_text())
    for value in (None, 1, "x"):
        path.write_text(json.dumps(facts | {name: value}))
        with pytest.raises(CacheDamagedError) as caught:
            load_index(shard)
        assert str(shard) in caught.value.where


@pytest.mark.parametrize("name", ["data.mdb", "index.npy", "shard.json"])
def test_a_missing_file_is_damage(shard, name):
    (shard / name).unlink()
    with pytest.raises(CacheDamagedError, match="cannot be read"):
        load_index(shard)


def test_a_shard_that_was_written_after_sealing_is_refused(shard):
    (shard / "data.mdb").chmod(0o644)
    with lmdb.open(str(shard), max_dbs=4, map_size=1 << 26) as environment:
        blob = environment.open_db(b"blob")
        with environment.begin(write=True, db=blob) as transaction:
            transaction.put(bytes(32), b"foreign")
    with pytest.raises(CacheDamagedError, match="not the one its index was made from"):
        load_index(shard)


def test_the_rows_of_a_truncated_shard_are_still_known(shard):
    whole = load_index(shard)
    (shard / "data.mdb").chmod(0o644)
    (shard / "data.mdb").write_bytes(b"")
    with pytest.raises(CacheDamagedError):
        load_index(shard)
    np.testing.assert_array_equal(load_rows(shard).rows, whole.rows)


def test_a_zeroed_meta_page_is_refused_where_it_was_the_newer(shard):
    path = shard / "data.mdb"
    size = read_meta(path).page_size
    path.chmod(0o644)
    good = path.read_bytes()
    refused = []
    for page in (0, 1):
        path.write_bytes(good[: page * size] + bytes(size) + good[(page + 1) * size :])
        try:
            load_index(shard)
        except CacheDamagedError as error:
            refused.append(error.why)
    assert len(refused) == 1
    assert "expected" in refused[0]


def test_databases_that_disagree_are_refused(tmp_path):
    key, record, value = parts(1)
    other, _, _ = parts(2)
    for number, pairs in enumerate(
        [
            [(b"head", key, record)],
            [(b"blob", key, value)],
            [(b"head", other, record), (b"blob", key, value)],
        ]
    ):
        with pytest.raises(CacheDamagedError, match="two databases disagree"):
            collect_rows(raw_shard(tmp_path / str(number), pairs) / "data.mdb")


def test_swapped_values_are_refused(tmp_path):
    (one, record, value), (two, second_record, second_value) = parts(1), parts(2)
    swapped = [
        (b"head", one, second_record),
        (b"head", two, record),
        (b"blob", one, second_value),
        (b"blob", two, value),
    ]
    with pytest.raises(CorruptEntryError, match="header"):
        collect_rows(raw_shard(tmp_path / "swapped", swapped) / "data.mdb")


@pytest.mark.parametrize("length", [1, 31, 33, 200])
def test_a_foreign_key_is_refused(tmp_path, length):
    pairs = [(b"head", b"k" * length, b"r"), (b"blob", b"k" * length, b"v")]
    with pytest.raises(CacheDamagedError, match="none of ours"):
        collect_rows(raw_shard(tmp_path / "foreign", pairs) / "data.mdb")


@pytest.mark.parametrize("cut", [-1, 1])
def test_a_value_of_another_length_is_refused(tmp_path, cut):
    key, record, value = parts(1)
    longer = value[:cut] if cut < 0 else value + b"\0"
    folder = raw_shard(tmp_path / "longer", [(b"head", key, record), (b"blob", key, longer)])
    with pytest.raises(CorruptEntryError, match="length is wrong") as caught:
        collect_rows(folder / "data.mdb")
    assert caught.value.key == key.hex()


def test_a_flipped_bit_in_a_record_is_found_before_the_shard_is_sealed(tmp_path):
    key, record, value = parts(1)
    for position in (3, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 20, len(record) - 1):
        folder = raw_shard(tmp_path / str(position), [(b"head", key, record), (b"blob", key, value)])
        at = (folder / "data.mdb").read_bytes().rindex(record)
        flip(folder / "data.mdb", at + position)
        with pytest.raises(CorruptEntryError):
            write_index(folder)
        assert not (folder / "index.npy").exists()


def test_a_payload_is_not_read_to_index_a_shard(tmp_path):
    """Damage of a payload is the business of readers, who check it every time."""
    made = new_entry(5, shape=(4, 64, 64))
    folder = raw_shard(tmp_path / "payload", [(b"head", made.key, parts_of(made)), (b"blob", made.key, made.value)])
    at = (folder / "data.mdb").read_bytes().rindex(payload_of(5, 64))
    flip(folder / "data.mdb", at)
    assert write_index(folder) == 1


def parts_of(made):
    return pack_record(made.value[:HEADER_BYTES], made.facts, made.key)

import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from latentcache.errors import CacheDamagedError
from latentcache.identity.content import checksum
from latentcache.store.columns import (
    ROW_SHAPES,
    SAMPLE_SHAPES,
    StringColumn,
    check_columns,
    checked_bytes,
    load_columns,
    npy_array,
    npy_bytes,
    save_columns,
)

any_bytes = st.lists(st.binary(max_size=40), max_size=30)
columns = st.dictionaries(
    st.sampled_from(["key", "shard", "names_bytes", "stat"]),
    arrays.arrays(st.sampled_from(["<u1", "<i4", "<u8", "<f4"]), arrays.array_shapes(max_dims=2, min_side=0)),
)


@given(any_bytes)
def test_names_come_back_to_the_byte(raw):
    column = StringColumn.of(os.fsdecode(name) for name in raw)
    assert [os.fsencode(name) for name in column] == raw
    assert [os.fsencode(column[position]) for position in range(len(column))] == raw
    assert [os.fsencode(name) for name in column[:]] == raw


@given(st.lists(st.text(), min_size=1, max_size=30), st.data())
def test_a_column_is_a_sequence_of_its_strings(strings, data):
    encodable = [text.encode("utf-8", "replace").decode() for text in strings]
    column = StringColumn.of(encodable)
    assert len(column) == len(encodable)
    position = data.draw(st.integers(-len(encodable), len(encodable) - 1))
    assert column[position] == encodable[position]
    assert column[np.int64(position)] == encodable[position]
    assert column[position::2] == encodable[position::2]
    assert encodable[position] in column
    for outside in (len(encodable), -len(encodable) - 1):
        with pytest.raises(IndexError):
            column[outside]


@pytest.mark.parametrize(
    "strings", [["a", "", "bc"], ["a", "", "é"], ["a", "", "\udcff"]], ids=["ascii", "utf-8", "raw"]
)
def test_the_bytes_and_a_copy_are_the_same_with_any_text(strings):
    column = StringColumn.of(strings)
    again = pickle.loads(pickle.dumps(column))
    assert column.data.tobytes() == again.data.tobytes() == os.fsencode("".join(strings))
    assert list(again) == [again[place] for place in range(3)] == strings
    assert not column.data.flags.writeable


def test_no_strings_at_all():
    column = StringColumn.of([])
    assert (len(column), list(column), column[:]) == (0, [], [])


@given(columns)
def test_columns_come_back(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("columns")
    facts = save_columns(folder, made)
    found = load_columns(folder, facts)
    assert set(found) == set(made)
    for name, array in made.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert facts[name]["bytes"] == (folder / facts[name]["file"]).stat().st_size


def test_every_changed_byte_of_a_column_is_refused(tmp_path):
    facts = save_columns(tmp_path, {"shard": np.arange(5, dtype=np.int32)})
    path = tmp_path / "shard.npy"
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CacheDamagedError, match="damaged") as caught:
            load_columns(tmp_path, facts)
        assert caught.value.where == str(path)
    path.write_bytes(good[:-1])
    with pytest.raises(CacheDamagedError):
        load_columns(tmp_path, facts)
    path.unlink()
    with pytest.raises(CacheDamagedError, match="cannot be read"):
        load_columns(tmp_path, facts)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/column"])
def test_a_manifest_cannot_name_a_file_elsewhere(tmp_path, name):
    inside = tmp_path / "generation"
    inside.mkdir()
    save_columns(tmp_path, {"outside": np.zeros(3)})
    fact = {"file": f"{name}.npy", "checksum": f"{checksum((tmp_path / 'outside.npy').read_bytes()):016x}"}
    with pytest.raises(CacheDamagedError, match="no column"):
        load_columns(inside, {name: fact})
    with pytest.raises(CacheDamagedError, match="no column"):
        load_columns(inside, {"key": fact})


def test_pickles_are_never_loaded(tmp_path):
    path = tmp_path / "key.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    fact = {"file": "key.npy", "checksum": f"{checksum(path.read_bytes()):016x}"}
    with pytest.raises(CacheDamagedError, match="no column"):
        load_columns(tmp_path, {"key": fact})


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x10\x00{'descr': '<u1'}", b"x" * 200])
def test_what_is_no_array_is_refused(tmp_path, data):
    with pytest.raises(CacheDamagedError, match="is no column"):
        npy_array(data, tmp_path / "key.npy")


def test_a_header_that_promises_too_much_is_refused(tmp_path):
    data = npy_bytes(np.zeros(4, np.uint8)).replace(b"(4,)", b"(9" + b"0" * 13 + b",)").replace(b" " * 12, b"", 1)
    with pytest.raises(CacheDamagedError, match="is no column"):
        npy_array(data, tmp_path / "key.npy")


def test_checked_bytes_compares_the_whole_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert checked_bytes(path, f"{checksum(b'content'):016x}") == b"content"
    for expected in ("0" * 16, None, 5):
        with pytest.raises(CacheDamagedError, match="file is damaged"):
            checked_bytes(path, expected)


def sound(rows=3, samples=2):
    """Columns of a generation in which everything fits."""
    shapes = {name: (rows, *shape) for name, shape in ROW_SHAPES.items()}
    shapes |= {name: (samples, *shape) for name, shape in SAMPLE_SHAPES.items()}
    made = {name: np.zeros((n, width) if width else n, dtype) for name, (n, dtype, width) in shapes.items()}
    for name in ("names", "captions"):
        column = StringColumn.of("ab" for _ in range(samples))
        made |= {f"{name}_bytes": column.data, f"{name}_ends": column.ends}
    return made


LIMITS = {"shard": 1, "bucket": 1}


def test_sound_columns_pass():
    check_columns(sound(), LIMITS)
    check_columns(sound(0, 0), LIMITS)


@pytest.mark.parametrize("name", [*ROW_SHAPES, *SAMPLE_SHAPES])
def test_columns_of_another_shape_or_type_are_refused(name):
    for spoil in (lambda c: c[:-1], lambda c: c[..., None], lambda c: c.astype(np.float64)):
        made = sound()
        made[name] = spoil(made[name])
        with pytest.raises(ValueError, match="expected"):
            check_columns(made, LIMITS)
    made = sound()
    del made[name]
    with pytest.raises(KeyError):
        check_columns(made, LIMITS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("shard", 1), ("shard", -1), ("bucket", 1), ("sample", 2), ("sample", -1), ("offset", 1 << 63)],
)
def test_positions_that_point_nowhere_are_refused(name, value):
    made = sound()
    made[name][1] = value
    with pytest.raises(ValueError, match=name):
        check_columns(made, LIMITS)


@pytest.mark.parametrize("ends", [[2, 5], [2, 3], [3, 2], [5, 4], [0, 0]])
def test_strings_that_do_not_fit_their_bytes_are_refused(ends):
    made = sound()
    made["captions_ends"] = np.array(ends, np.uint64)
    with pytest.raises(ValueError, match="captions"):
        check_columns(made, LIMITS)


@given(st.lists(st.text()), st.data())
def test_many_strings_at_once_are_those_one_by_one(strings, data):
    column = StringColumn.of(strings)
    chosen = data.draw(st.lists(st.sampled_from(range(len(strings))))) if strings else []
    assert column.take(chosen) == [strings[position] for position in chosen]
    assert StringColumn.of(["a", "\udcff", ""]).take([2, 1, 0, 1]) == ["", "\udcff", "a", "\udcff"]


@pytest.mark.parametrize("count", [4095, 4096, 4097, 9000])
def test_many_strings_come_back_in_order(count):
    strings = [f"{number}{'é' * (number % 3)}" for number in range(count)]
    assert list(StringColumn.of(strings)) == strings

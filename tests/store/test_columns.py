"""Columns round trip in every encoding, whole or by position; damage is detected."""

import json
import pickle

import numpy as np
import pytest
from damaged import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from latentcache.errors import CacheDamagedError
from latentcache.fields.strings import Strings
from latentcache.store import columns as columns_module
from latentcache.store.columns import ColumnFile, write_columns

TYPES = ["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8"]


def written(path, **columns):
    write_columns(path, columns, {"of": "tests"})
    return ColumnFile(path)


arrays = st.sampled_from(TYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, st.tuples(st.integers(0, 60)) | st.tuples(st.integers(0, 40), st.just(3)))
)
equal_rows = st.tuples(st.integers(-9, 9), st.integers(1, 40)).map(lambda row: np.full(row[1], row[0], dtype="<i4"))


@settings(max_examples=150)
@given(arrays | equal_rows, st.data())
def test_columns_round_trip(tmp_path_factory, values, data):
    path = tmp_path_factory.mktemp("columns") / "one.safetensors"
    column = written(path, one=values)["one"]
    assert (column.dtype, column.shape, len(column), column.ndim) == (
        values.dtype, values.shape, len(values), values.ndim,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(column), values)
    begin, stop = (data.draw(st.integers(-3, len(values) + 3)) for _ in range(2))
    np.testing.assert_array_equal(column[begin:stop], values[begin:stop])
    np.testing.assert_array_equal(column[::3], values[::3])
    if len(values):
        positions = np.array(data.draw(st.lists(st.integers(-len(values), len(values) - 1), max_size=9)), dtype=int)
        np.testing.assert_array_equal(column[positions], values[positions])
        np.testing.assert_array_equal(column[-1], values[-1])
        mask = np.arange(len(values)) % 2 == 0
        np.testing.assert_array_equal(column[mask], values[mask])
    column.check()
    copy = pickle.loads(pickle.dumps(column))
    np.testing.assert_array_equal(np.asarray(copy), values)


@pytest.mark.parametrize(("values", "most"), [
    (np.full(10_000, 7, dtype="<u8"), 8), (np.zeros((10_000, 16), dtype="<u1"), 16), (np.full(9, -0.0), 72),
])  # fmt: skip
def test_a_column_of_equal_rows_is_stored_as_one_row(tmp_path, values, most):
    column = written(tmp_path / "one", one=values)["one"]
    assert column.form.num_bytes == most
    np.testing.assert_array_equal(np.signbit(np.asarray(column)), np.signbit(values))
    np.testing.assert_array_equal(np.asarray(column), values)


@given(st.lists(st.text() | st.just("n\udcff"), max_size=40), st.data())
def test_strings_round_trip(tmp_path_factory, strings, data):
    made = Strings.of(strings)
    stored = written(tmp_path_factory.mktemp("strings") / "one", names=made).strings("names")
    assert (list(stored), len(stored), stored == made) == (strings, len(strings), True)
    assert pickle.loads(pickle.dumps(stored)) == made
    assert stored[2:9] == strings[2:9]
    if strings:
        positions = data.draw(st.lists(st.integers(0, len(strings) - 1)))
        assert stored.take(positions) == [strings[position] for position in positions]
        assert stored[-1] == strings[-1]


def test_few_positions_read_few_bytes(tmp_path, monkeypatch):
    values = np.random.default_rng(0).integers(0, 1 << 60, 100_000).astype("<u8")
    column = written(tmp_path / "one", one=values)["one"]
    monkeypatch.setattr(ColumnFile, "read", lambda *_: pytest.fail("it is read whole"))
    np.testing.assert_array_equal(column[np.array([99_999, 5, 6, 50_000])], values[[99_999, 5, 6, 50_000]])


def test_equal_columns_are_known_without_writing_them(tmp_path):
    columns = {"one": np.arange(9) ** 3, "twin": np.arange(9) ** 3, "names": Strings.of(["a", "b"])}
    file = written(tmp_path / "file", **columns)
    assert file.holds(columns)
    assert file.holds({"one": file["one"], "twin": file["twin"], "names": file.strings("names")})
    for change in (
        {"one": np.arange(9) ** 2},
        {"one": columns["one"].astype("<i4")},
        {"names": Strings.of(["a", "c"])},
    ):
        assert not file.holds(columns | change)
    assert not file.holds({"one": columns["one"]})


def fails(work):
    try:
        work()
    except CacheDamagedError:
        return True
    return False


def test_damage_is_found_when_a_column_is_read_whole(tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "plain": rng.integers(0, 1 << 60, 500).astype("<u8"),
        "equal": np.full((90, 300), 7, dtype="<i4"),
        "rising": np.cumsum(rng.integers(0, 9, 500)).astype("<i8"),
    }
    path = tmp_path / "one"
    size = written(path, **columns)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for offset in [*range(begin, len(whole) - 8, 97), len(whole) - 9]:
        flip(path, offset)
        file, damaged = ColumnFile(path), 0
        for name in columns:
            stored = fails(lambda: np.asarray(file[name]))  # noqa: B023
            damaged += stored
            assert fails(file[name].check) == stored
        assert damaged == 1
        path.write_bytes(whole)
    assert size.num_bytes == len(whole)


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_header_is_one_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("header") / "one"
    written(path, one=np.arange(99, dtype="<u8") ** 3, names=Strings.of(["a", "b"]))
    whole = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(whole[:8], "little")
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, length - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    with pytest.raises(CacheDamagedError):
        ColumnFile(path)


def test_a_crafted_header_is_rejected(tmp_path):
    path = tmp_path / "one"
    written(path, one=np.arange(99, dtype="<u8") ** 3)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for change in ({"shape": [1 << 40]}, {"dtype": "F9"}, {"data_offsets": [-8, 0]}, {"data_offsets": [1 << 50, 0]}):
        header = json.loads(whole[8 : 8 + length])
        header["one"] |= change
        text = json.dumps(header).encode()
        signed = columns_module.checksum(text).to_bytes(8, "little")
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length : -8] + signed)
        with pytest.raises(CacheDamagedError):
            ColumnFile(path)["one"]
    text = b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text + columns_module.checksum(text).to_bytes(8, "little"))
    with pytest.raises(CacheDamagedError):
        ColumnFile(path)


def test_another_file_than_the_expected_one_is_rejected(tmp_path):
    write_columns(tmp_path / "one", {"a": np.arange(3)})
    with pytest.raises(CacheDamagedError, match="header checksum"):
        ColumnFile(tmp_path / "one", 5)
    with pytest.raises(CacheDamagedError, match="column b is missing"):
        ColumnFile(tmp_path / "one")["b"]
    with pytest.raises(CacheDamagedError, match="cannot be read"):
        ColumnFile(tmp_path / "two")

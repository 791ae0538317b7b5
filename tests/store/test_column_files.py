import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cache import build, draw_four

from latentcache.errors import CacheDamagedError
from latentcache.store import column_files
from latentcache.store.column_files import FileColumn, FileStrings, open_columns, parts
from latentcache.store.columns import StringColumn, load_columns, save_columns
from latentcache.store.generation import load_generation, open_generation


def saved(folder, **arrays):
    return save_columns(folder, {name: np.asarray(array) for name, array in arrays.items()})


def opened(folder, **arrays):
    return open_columns(folder, saved(folder, **arrays))


@pytest.mark.parametrize("shape", [(50_000,), (50_000, 2), (0,), (0, 16), (1, 6)])
def test_a_column_on_disk_gives_what_an_array_gives(tmp_path, shape):
    array = np.random.default_rng(1).integers(0, 1 << 30, shape).astype("<u4")
    column = opened(tmp_path, some=array)["some"]
    assert (len(column), column.shape, column.dtype) == (len(array), array.shape, array.dtype)
    for index in (slice(None), slice(3, 40), slice(40, 3), slice(0, 40_000, 7), slice(-5, None)):
        assert np.array_equal(column[index], array[index])
    positions = np.random.default_rng(2).integers(0, len(array), 9000) if len(array) else np.empty(0, np.intp)
    for index in (positions, np.sort(positions), positions[:1], np.arange(len(array)) % 3 == 0):
        assert np.array_equal(column[index], array[index])
    for position in (0, -1, len(array) // 2) if len(array) else ():
        assert np.array_equal(column[position], array[position])
    assert np.array_equal(np.asarray(column), array)
    assert np.array_equal(column == 3, array == 3)
    with pytest.raises(IndexError):
        column[len(array)]
    with pytest.raises(IndexError):
        column[np.array([len(array)])]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=6), max_size=80), st.data())
def test_strings_on_disk_are_those_in_memory(tmp_path_factory, raw, data):
    folder = tmp_path_factory.mktemp("strings")
    strings = StringColumn.of(name.decode("utf-8", "surrogateescape") for name in raw)
    columns = opened(folder, names_bytes=strings.data, names_ends=strings.ends)
    found = FileStrings(columns["names_bytes"], columns["names_ends"])
    assert list(found) == list(strings)
    assert found[1:5] == strings[1:5]
    if raw:
        chosen = data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=20))
        assert found.take(chosen) == strings.take(chosen)
        assert found[-1] == strings[-1]


def test_strings_far_apart_are_read_one_by_one(tmp_path):
    strings = StringColumn.of(f"name {number}" for number in range(5000))
    columns = opened(tmp_path, data=strings.data, ends=strings.ends)
    assert FileStrings(columns["data"], columns["ends"]).take([4999, 0]) == ["name 4999", "name 0"]


@pytest.mark.parametrize(
    "change",
    [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:200] + b"\1" + raw[201:], lambda raw: b"PK" + raw],
)
def test_a_file_that_is_not_what_was_written_is_refused(tmp_path, change):
    facts = saved(tmp_path, some=np.arange(40))
    (tmp_path / "some.npy").write_bytes(change((tmp_path / "some.npy").read_bytes()))
    for load in (open_columns, load_columns):
        with pytest.raises(CacheDamagedError, match=r"some\.npy is damaged"):
            load(tmp_path, facts)
    (tmp_path / "some.npy").unlink()
    with pytest.raises(CacheDamagedError, match="cannot be read"):
        open_columns(tmp_path, facts)


def test_a_file_that_is_cut_short_later_is_an_error_in_words(tmp_path):
    column = opened(tmp_path, some=np.arange(4000))["some"]
    with (tmp_path / "some.npy").open("r+b") as file:
        file.truncate(1000)
    assert column[3] == 3
    for index in (3999, slice(0, 4000), np.array([3999])):
        with pytest.raises(CacheDamagedError, match="is damaged"):
            column[index]


def test_its_file_is_closed_with_the_last_reference(tmp_path):
    column = opened(tmp_path, some=np.arange(4))["some"]
    descriptor = column._file
    os.fstat(descriptor)
    del column
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_columns_cannot_be_files_of_another_name(tmp_path):
    facts = saved(tmp_path, some=np.arange(4))
    with pytest.raises(CacheDamagedError, match="names a file"):
        open_columns(tmp_path, {"other": facts["some"]})


def test_slices_cover_a_column(monkeypatch):
    monkeypatch.setattr(column_files, "_PART", 4)
    assert list(parts(9)) == [slice(0, 4), slice(4, 8), slice(8, 9)]
    assert list(parts(0)) == []
    assert list(parts(5, 3)) == [slice(0, 3), slice(3, 5)]


def test_a_generation_on_disk_is_the_one_in_memory(tmp_path):
    build(draw_four(tmp_path / "data"), tmp_path / "cache", flip=True)
    one, other = load_generation(tmp_path / "cache"), open_generation(tmp_path / "cache")
    for name in type(one.rows).__dataclass_fields__:
        assert isinstance(getattr(other.rows, name), FileColumn)
        assert np.array_equal(getattr(one.rows, name), getattr(other.rows, name)[:])
    assert (list(one.samples.names), list(one.samples.captions)) == (
        list(other.samples.names),
        list(other.samples.captions),
    )
    assert one.samples.memo(2) == other.samples.memo(2)

"""Source files: only regular ones, read completely, with a matching memo."""

import os
import time
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import StatMemo
from latentcache.sources.formats import files
from latentcache.sources.formats.files import LineReader, open_source, parse_json, read_source, stat_source


def cause_of_reading(path: Path, **limits: int) -> str:
    with pytest.raises(UnusableSampleError) as caught:
        read_source(path, **limits)
    assert caught.value.where == str(path)
    assert caught.value.what
    assert caught.value.fix
    return caught.value.slug


def test_bytes_and_memo_are_those_of_the_file(tmp_path):
    path = tmp_path / "a.jpg"
    data = os.urandom(3_000_001)
    path.write_bytes(data)
    before = time.time_ns()
    read, memo = read_source(path)
    assert read == data
    assert memo == StatMemo.of(path.stat(), seen_ns=memo.seen_ns)
    assert before <= memo.seen_ns <= time.time_ns()
    assert stat_source(path) == StatMemo.of(path.stat())


def test_the_access_time_is_left_alone(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"x")
    os.utime(path, (1, 2))
    read_source(path)
    assert (path.stat().st_atime, path.stat().st_mtime) == (1, 2)


def test_a_huge_sparse_file_is_rejected_unread(tmp_path):
    path = tmp_path / "giant.jpg"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnusableSampleError) as caught:
        read_source(path)
    assert caught.value.slug == "too-large"
    assert caught.value.what == f"it has {1 << 40} bytes, at most {1 << 30} are read"


def test_a_file_that_changes_while_it_is_read_is_rejected(tmp_path, monkeypatch):
    path, true_read = tmp_path / "a.jpg", os.read
    path.write_bytes(b"start")

    def read(descriptor: int, size: int) -> bytes:
        path.write_bytes(b"started")
        return true_read(descriptor, size)

    monkeypatch.setattr(files.os, "read", read)
    assert cause_of_reading(path) == "changing"


# lines and JSON


@settings(max_examples=40, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"\r", b"bcd", b"\xff", b""]), min_size=1).map(b"".join),
    chunk=st.integers(1, 7),
)
def test_lines_do_not_depend_on_chunks(tmp_path_factory, data, chunk):
    if not data:
        return
    path = tmp_path_factory.mktemp("lines") / "a"
    path.write_bytes(data)
    before, files._CHUNK_BYTES = files._CHUNK_BYTES, chunk
    try:
        with open_source(path) as file:
            reader = LineReader(file, path)
            lines = list(reader.lines())
            stat, content = reader.finish()
    finally:
        files._CHUNK_BYTES = before
    wanted = data.split(b"\n")
    kept = [
        (number, line.removesuffix(b"\r")) for number, line in enumerate(wanted, start=1) if line.strip(b" \t\r\n")
    ]
    assert lines == kept
    assert content == xxhash.xxh3_128_digest(data)
    assert (stat.size, stat.inode) == (len(data), path.stat().st_ino)


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_a_line_that_is_too_long_is_reported_and_the_next_one_is_read(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 5)
    path = tmp_path / "a"
    path.write_bytes(b"abc\n" + b"x" * 100 + b"\nabcde\n" + b"y" * 6)
    with open_source(path) as file:
        reader = LineReader(file, path)
        assert list(reader.lines()) == [(1, b"abc"), (2, None), (3, b"abcde"), (4, None)]
        assert reader.finish()[1] == xxhash.xxh3_128_digest(path.read_bytes())


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"\xff\xfeh\x00", "not-utf8"),
        (b"\x1f\x8b\x08\x00", "compressed"),
        (b"\x28\xb5\x2f\xfd", "compressed"),
        (b"", "empty"),
    ],
)
def test_files_that_are_no_text_are_rejected_at_once(tmp_path, data, cause):
    path = tmp_path / "a"
    path.write_bytes(data)
    with pytest.raises(UnusableSampleError) as caught, open_source(path) as file:
        LineReader(file, path)
    assert caught.value.slug == cause


def test_a_file_that_grows_is_an_error_at_its_end(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"a\nb\n")
    with open_source(path) as file:
        reader = LineReader(file, path)
        for _ in reader.lines():
            with path.open("ab") as file:
                file.write(b"c\n")
        with pytest.raises(UnusableSampleError, match="changed"):
            reader.finish()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{"a": {"b": 1, "b": 2}}', "'b' is there twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": ', "column"),
        ("[" * 100_000, "deep"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of thousands of digits"),
    ],
)
def test_invalid_json_is_rejected_with_its_error(text, words):
    with pytest.raises(UnusableSampleError, match=words) as caught:
        parse_json(text)
    assert caught.value.slug == "no-json"

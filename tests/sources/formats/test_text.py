import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.errors import UnusableSampleError
from latentcache.sources.formats import text as lines_module
from latentcache.sources.formats.files import open_source
from latentcache.sources.formats.text import LineReader, parse_json


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
    before, lines_module._CHUNK_BYTES = lines_module._CHUNK_BYTES, chunk
    try:
        with open_source(path) as file:
            reader = LineReader(file, path)
            found = list(reader.lines())
            stat, content = reader.finish()
    finally:
        lines_module._CHUNK_BYTES = before
    wanted = data.split(b"\n")
    kept = [
        (number, line.removesuffix(b"\r")) for number, line in enumerate(wanted, start=1) if line.strip(b" \t\r\n")
    ]
    assert found == kept
    assert content == xxhash.xxh3_128_digest(data)
    assert (stat.size, stat.inode) == (len(data), path.stat().st_ino)


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_a_line_that_is_too_long_is_reported_and_the_next_one_is_read(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(lines_module, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 5)
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

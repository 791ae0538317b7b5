import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import xxhash

from latentcache.errors import UnusableSampleError
from latentcache.sources import record_files
from latentcache.sources.record_files import RecordReader, Way


def read(path, data, kind="json", **options):
    path = path / "a"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    reader = RecordReader(path, "a", Way(kind=kind, **options))
    return list(reader), reader


def test_lines_with_everything_that_goes_wrong(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + b'{"text": "one"}\r',
        b"",
        b"   ",
        b'{"text": "two", "text": "three"}',
        b'{"text": NaN}',
        b'{"text": "caf\xe9"}',
        b'{"text": ["a"]}',
        b'{"body": "a"}',
        b"{",
        b"[1]",
        b'{"text": "\\ud800"}',
        b'{"text": "last"}',
    ]
    records, log = read(tmp_path, b"\n".join(lines))
    assert [(r.line, r.text) for r in records] == [(1, "one"), (12, "last")]
    assert [(item.line, item.reason, item.field) for item in log.rejected] == [
        (4, "no-json", ""),
        (5, "no-json", ""),
        (6, "not-utf8", ""),
        (7, "record-field", "text"),
        (8, "record-field", "text"),
        (9, "no-json", ""),
        (10, "record-field", ""),
        (11, "record-unicode", ""),
    ]
    assert all(item.name == "a" and f"a:{item.line}" not in item.detail and item.hint for item in log.rejected)
    assert log.content == xxhash.xxh3_128_digest(b"\n".join(lines))


@pytest.mark.parametrize("spelling", ["[{0},{1},{2}]", "\n[\n {0},\n {1} ,\n\n {2}\n]\n"])
def test_a_list_gives_its_items_with_their_lines(tmp_path, spelling):
    items = [
        '{"instruction": "a", "output": "b"}',
        '{"instruction": 5, "output": "b"}',
        '{"instruction": "c", "output": "d"}',
    ]
    records, log = read(tmp_path, spelling.replace("{0}", items[0]).replace("{1}", items[1]).replace("{2}", items[2]))
    lines = [3, 4, 6] if "\n" in spelling else [1, 1, 1]
    assert [r.line for r in records] == [lines[0], lines[2]]
    assert [(item.line, item.field) for item in log.rejected] == [(lines[1], "instruction")]


@pytest.mark.parametrize("text", ["[", "[1", "[1 2]", "[1,]", "[1] x", '[{"a": 1}\n{"a": 2}]'])
def test_a_list_that_is_broken_is_an_error(tmp_path, text):
    with pytest.raises(UnusableSampleError) as caught:
        read(tmp_path, text)
    assert caught.value.slug == "no-json"


def test_an_object_over_several_lines_is_no_file_of_records(tmp_path):
    with pytest.raises(UnusableSampleError) as caught:
        read(tmp_path, '{\n "a": 1\n}\n')
    assert caught.value.slug == "not-records"


def test_a_text_that_is_too_large_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 3)
    with pytest.raises(UnusableSampleError) as caught:
        read(tmp_path, b"abcd", "text")
    assert caught.value.slug == "text-too-large"


def test_rows_of_parquet_stream_in_order(tmp_path):
    rows = [{"text": f"text {n}"} for n in range(2500)] + [{"text": None}]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=900)
    reader = RecordReader(path, "a.parquet", Way(kind="parquet"))
    assert [(r.line, r.text) for r in reader] == [(n, f"text {n - 1}") for n in range(1, 2501)]
    assert [(item.line, item.field) for item in reader.rejected] == [(2501, "text")]
    assert reader.content == xxhash.xxh3_128_digest(path.read_bytes())


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_turns_that_datasets_wrote_as_json(tmp_path, kind):
    """Turns of which some have calls have several forms: ``datasets`` makes its feature ``Json`` of them."""
    call = {"type": "function", "function": {"name": "a", "arguments": {"b": 1}}}
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "{}"},
    ]
    feature = datasets.Features({"messages": datasets.List(datasets.Json())})
    made = datasets.Dataset.from_list([{"messages": turns}, {"messages": turns[::3]}], features=feature)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    path = tmp_path / ("a.parquet" if kind == "parquet" else "saved/data-00000-of-00001.arrow")
    lines, _ = read(tmp_path, "".join(json.dumps(row) + "\n" for row in made))
    reader = RecordReader(path, "a", Way(kind=kind))
    assert [(r.messages, r.content) for r in reader] == [(r.messages, r.content) for r in lines]
    assert not reader.rejected
    assert len(lines) == 2


@pytest.mark.parametrize(("kind", "data"), [("parquet", b"PAR1 no"), ("arrow", b"nothing")])
def test_a_damaged_file_of_columns_is_an_error(tmp_path, kind, data):
    with pytest.raises(UnusableSampleError, match="pyarrow cannot read it"):
        read(tmp_path, data, kind)

"""Scans of record files: rows, trusted files and records that are read again."""

import json
from dataclasses import replace

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import xxhash

from latentcache.errors import SourceError, UnusableSampleError
from latentcache.fields.table import Rejected
from latentcache.sources import known, records
from latentcache.sources.options import SourceOptions
from latentcache.sources.records import RecordReader
from latentcache.sources.scan import listing_of, scan

RECORDS = SourceOptions(kind="records")


@pytest.fixture(autouse=True)
def _trusting(monkeypatch):
    monkeypatch.setattr(known, "RACY_NS", 0)  # trust every file at once


def write(path, *texts):
    """Write texts one per line; bytes unchanged."""
    lines = [text if isinstance(text, bytes) else json.dumps({"text": text}).encode() for text in texts]
    path.write_bytes(b"\n".join(lines) + b"\n")


def rows_of(listing):
    held = listing.samples.inputs["record"]
    return list(zip(listing.samples.names, (row.tobytes()[:2] for row in held.content), strict=True))


def texts_of(listing, rows=None, **options):
    rows = range(len(listing.samples)) if rows is None else rows
    return [value["record"] and value["record"].text for _, value in listing.job_inputs(rows, ("record",), **options)]


def same(first, second):
    assert rows_of(first) == rows_of(second)
    for name, column in first.samples.columns.items():
        assert np.array_equal(column, second.samples.columns[name]), name
    assert np.array_equal(first.samples.files.content, second.samples.files.content)
    assert [(item.name, item.line) for item in first.rejected] == [(item.name, item.line) for item in second.rejected]


@pytest.fixture
def opened(monkeypatch):
    names = []

    class Reader(RecordReader):
        def __iter__(self):
            names.append(self.name)
            return super().__iter__()

    monkeypatch.setattr("latentcache.sources.readers.records.RecordReader", Reader)
    return names


@pytest.mark.parametrize("change", ["other", "shorter", "gone", "broken"])
def test_a_file_that_changed_meanwhile_is_an_error(tmp_path, change):
    write(tmp_path / "a.jsonl", "one", "two", "three")
    listing = scan(tmp_path)
    after = {"other": ["one", "2", "three"], "shorter": ["one"], "broken": ["one", b"\xff"], "gone": []}[change]
    write(tmp_path / "a.jsonl", *after)
    if change == "gone":
        (tmp_path / "a.jsonl").unlink()
    with pytest.raises(SourceError, match="changed"):
        texts_of(listing)
    left = listing_of(listing.root, listing.samples, listing.options)
    wanted = [text if text in after else None for text in ("one", "two", "three")]
    assert texts_of(left, strict=False) == wanted


def test_a_list_with_several_records_on_a_line(tmp_path, opened):
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "b"}, {"text": "a"}, {"text": "c"}]')
    listing = scan(tmp_path)
    assert texts_of(listing) == ["a", "b", "a", "c"]
    assert texts_of(listing, [1, 3]) == ["b", "c"]
    opened.clear()
    assert rows_of(scan(tmp_path, RECORDS, listing.samples)) == rows_of(listing)
    assert opened == []


def test_trusted_files_are_not_opened(tmp_path, opened):
    write(tmp_path / "a.jsonl", "one", b"{bad", "two", "one")
    write(tmp_path / "b.jsonl", b"\xff", "x")
    write(tmp_path / "c.jsonl", b"{bad", b"[]")
    first = scan(tmp_path)
    opened.clear()
    again = scan(tmp_path, RECORDS, first.samples, rejected=first.rejected)
    assert opened == []
    same(again, first)
    write(tmp_path / "b.jsonl", "x", "y")
    write(tmp_path / "aa.jsonl", "z")
    (tmp_path / "c.jsonl").unlink()
    changed = scan(tmp_path, RECORDS, first.samples, rejected=first.rejected)
    assert opened == ["aa.jsonl", "b.jsonl"]
    same(changed, scan(tmp_path))
    opened.clear()
    scan(
        tmp_path,
        RECORDS,
        first.samples,
        rejected=first.rejected,
        full=True,
        chosen=np.array([True, False, True, False]),
    )
    assert opened == ["a.jsonl", "aa.jsonl", "b.jsonl"]


@pytest.mark.parametrize("keep_rest", [True, False])
def test_records_that_every_field_rejected_are_still_samples(tmp_path, keep_rest, opened):
    """The snapshot's table omits them; the rejected list names them."""
    write(tmp_path / "a.jsonl", "one", b"{bad", "two", "two", "three")
    write(tmp_path / "b.jsonl", "four")
    (tmp_path / "c.json").write_text('[{"text": "a"}, {"text": "b"}]')
    first = scan(tmp_path)
    table, held = first.samples, first.samples.inputs["record"]
    names = table.files.names.take(held.file)
    out = [1, 2, 4, 6] if keep_rest else list(range(len(table)))
    items = [
        Rejected(name=names[row], reason="template", line=int(held.line[row]), content=held.content[row].tobytes())
        for row in out
    ]
    rest = np.array([row for row in range(len(table)) if row not in out], dtype=np.intp)
    kept = {name: column[rest] for name, column in table.columns.items()}
    record = replace(held, content=held.content[rest], file=held.file[rest], line=held.line[rest])
    left = replace(table, names=table.names.select(rest), inputs={"record": record}, columns=kept)
    opened.clear()
    again = scan(tmp_path, RECORDS, left, rejected=[*first.rejected, *items])
    assert rows_of(again) == rows_of(first)
    assert [(item.name, item.line) for item in again.rejected] == [("a.jsonl", 2)]
    assert opened == ["a.jsonl", "b.jsonl", "c.json"]


# one file


def read(path, data, name="a.jsonl", **options):
    path = path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    reader = RecordReader(path, "a", **options)
    return list(reader), reader


def test_faults_of_lines(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + b'{"text": "one"}\r', b"", b"   ", b'{"text": "two", "text": "three"}', b'{"text": NaN}',
        b'{"text": "caf\xe9"}', b'{"text": ["a"]}', b'{"body": "a"}', b"{", b"[1]", b'{"text": "\\ud800"}',
        b'{"text": "last"}',
    ]  # fmt: skip
    records, log = read(tmp_path, b"\n".join(lines))
    assert [(r.line, r.text) for r in records] == [(1, "one"), (12, "last")]
    assert sorted((item.line, item.reason, item.field) for item in log.rejected.all()) == [
        (4, "no-json", ""),
        (5, "no-json", ""),
        (6, "not-utf8", ""),
        (7, "record-field", "text"),
        (8, "record-field", "text"),
        (9, "no-json", ""),
        (10, "record-field", ""),
        (11, "record-unicode", ""),
    ]
    assert log.content == xxhash.xxh3_128_digest(b"\n".join(lines))


ONE, TWO = '{"text": "one"}', '{"text": "two"}'


def test_a_list_loses_an_item_that_is_no_record_alone(tmp_path):
    records, log = read(tmp_path, f"[{ONE},\n5, {TWO}]")
    assert [record.line for record in records] == [1, 3]
    assert [(item.line, item.reason, item.detail) for item in log.rejected.all()] == [
        (2, "record-field", "expected an object, found 5")
    ]


@pytest.mark.parametrize(
    ("item", "reason", "words"),
    [
        ('{"text": NaN}', "no-json", "NaN is not a JSON value, in the item at line 2, column 1"),
        ('{"text": "a", "text": "b"}', "no-json", "'text' is there twice, in the item at line 2, column 1"),
        ('{"text": 1' + 5000 * "0" + "}", "no-json", "thousands of digits"),
        ('{"text": "a\tb"}', "no-json", "Invalid control character at line 2, column 12"),
        (b'{"text": "caf\xe9"}', "not-utf8", "found 0xe9 at line 2, column 14"),
    ],
)
def test_a_list_is_read_up_to_an_item_that_is_no_json(tmp_path, item, reason, words):
    item = item if isinstance(item, bytes) else item.encode()
    (tmp_path / "a.json").write_bytes(b"[" + ONE.encode() + b",\n" + item + b", " + TWO.encode() + b"]")
    listing = scan(tmp_path / "a.json")
    assert list(listing.samples.names) == ["a.json:1"]
    (rejected,) = listing.rejected
    assert (rejected.line, rejected.reason) == (2, reason)
    assert words in rejected.detail


@pytest.mark.parametrize("text", ["[", "[1", "[1 2]", "[1,]", "[1] x", '[{"a": 1}\n{"a": 2}]'])
def test_a_list_that_is_broken_is_an_error(tmp_path, text):
    with pytest.raises(UnusableSampleError, match=r"line \d, column \d") as caught:
        read(tmp_path, text)
    assert caught.value.slug == "no-json"


def test_a_record_over_several_lines_is_one(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "one"}, indent=2) + "\n")
    listing = scan(tmp_path / "a.json")
    assert (list(listing.samples.names), texts_of(listing), listing.rejected) == (["a.json:1"], ["one"], ())


@pytest.mark.parametrize("text", ["3", '"text"', "null"])
def test_a_json_file_that_is_one_value_has_no_record(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert [(item.line, item.reason) for item in scan(tmp_path / "a.json").rejected] == [(1, "record-field")]


def cut_rows(folder):
    rows = pyarrow.Table.from_pylist([{"text": f"{number} " + 999 * "x"} for number in range(2000)])
    pyarrow.parquet.write_table(
        rows, folder / "b.parquet", row_group_size=1000, compression="none", use_dictionary=False
    )
    data = bytearray((folder / "b.parquet").read_bytes())
    start = pyarrow.parquet.ParquetFile(folder / "b.parquet").metadata.row_group(1).column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    (folder / "b.parquet").write_bytes(data)


@pytest.mark.parametrize("beside", [True, False])
def test_a_file_that_cannot_be_read_to_its_end_keeps_what_comes_before(tmp_path, beside):
    cut_rows(tmp_path)
    data = tmp_path / "b.parquet"
    if beside:
        write(tmp_path / "a.jsonl", "three")
        data = tmp_path
    first = scan(data)
    assert len(first.samples) == 1000 + beside
    (item,) = first.rejected
    assert (item.name, item.line, item.reason) == ("b.parquet", 1001, "rows-damaged")
    assert item.detail.startswith("rest unread: pyarrow cannot read it")
    assert len(texts_of(first)) == len(first.samples)
    again = scan(data, RECORDS, first.samples, rejected=first.rejected, notes=first.notes)
    same(again, first)
    assert again.rejected == first.rejected


def test_a_list_alone_that_is_broken_in_its_first_item_is_an_error(tmp_path):
    (tmp_path / "a.json").write_text(f"[{{, {ONE}]")
    with pytest.raises(SourceError, match="line 1, column 3"):
        scan(tmp_path / "a.json")


def test_a_text_that_is_too_large_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 3)
    with pytest.raises(UnusableSampleError) as caught:
        read(tmp_path, b"abcd", "a.txt")
    assert caught.value.slug == "text-too-large"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_turns_that_datasets_wrote_as_json(tmp_path, kind):
    """``datasets`` stores turns with different fields as ``Json``."""
    call = {"type": "function", "function": {"name": "a", "arguments": {"b": 1}}}
    messages = ("user", "1"), ("assistant", ""), ("tool", "2"), ("assistant", "{}")
    turns = [{"role": role, "content": content} for role, content in messages]
    turns[1]["tool_calls"] = [call]
    feature = datasets.Features({"messages": datasets.List(datasets.Json())})
    rows = datasets.Dataset.from_list([{"messages": turns}, {"messages": turns[::3]}], features=feature)
    rows.to_parquet(tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    path = tmp_path / ("a.parquet" if kind == "parquet" else "saved/data-00000-of-00001.arrow")
    lines, _ = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    reader = RecordReader(path, "a")
    assert [(r.messages, r.content) for r in reader] == [(r.messages, r.content) for r in lines]
    assert not reader.rejected.all()
    assert len(lines) == 2

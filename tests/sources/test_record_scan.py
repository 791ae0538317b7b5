"""Records in columns: what is read, what is believed, and records that are read again."""

import json
from dataclasses import replace

import numpy as np
import pytest

from latentcache.errors import SourceError
from latentcache.fields.table import Rejected
from latentcache.identity import stat as stat_rule
from latentcache.sources import record_scan
from latentcache.sources.part import Part
from latentcache.sources.record_files import RecordReader
from latentcache.sources.scan import SourceOptions, listing_of, scan

RECORDS = SourceOptions(kind="records")


@pytest.fixture(autouse=True)
def _trusting(monkeypatch):
    monkeypatch.setattr(stat_rule, "RACY_NS", 0)  # every file can be trusted at once


def write(path, *texts):
    """Texts one a line; bytes as they are."""
    lines = [one if isinstance(one, bytes) else json.dumps({"text": one}).encode() for one in texts]
    path.write_bytes(b"\n".join(lines) + b"\n")


def rows_of(listing):
    held = listing.samples.inputs["record"]
    return list(zip(listing.samples.names, (one.tobytes()[:2] for one in held.content), strict=True))


def texts_of(listing, rows=None, **options):
    rows = range(len(listing.samples)) if rows is None else rows
    return [value["record"] and value["record"].text for _, value in listing.job_inputs(rows, ("record",), **options)]


def same(one, other):
    assert rows_of(one) == rows_of(other)
    for name, column in one.samples.columns.items():
        assert np.array_equal(column, other.samples.columns[name]), name
    assert np.array_equal(one.samples.files.content, other.samples.files.content)
    assert [(item.name, item.line) for item in one.rejected] == [(item.name, item.line) for item in other.rejected]


@pytest.fixture
def opened(monkeypatch):
    """Names of files that a scan reads."""
    names = []

    class Reader(RecordReader):
        def __iter__(self):
            names.append(self.name)
            return super().__iter__()

    monkeypatch.setattr("latentcache.sources.record_scan.RecordReader", Reader)
    return names


def test_the_columns(tmp_path):
    write(tmp_path / "a.jsonl", "one", b"", b"{bad", "three")
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    write(tmp_path / "b.jsonl", json.dumps(chat).encode())
    found = scan(tmp_path)
    assert (found.data_kind, list(found.samples.names)) == ("records", ["a.jsonl:1", "a.jsonl:4", "b.jsonl:1"])
    assert found.samples.inputs["record"].line.tolist() == [1, 4, 1]
    assert found.samples.columns["characters"].tolist() == [3, 5, 4]
    assert found.samples.columns["form"].tolist() == [0, 0, 1]
    assert [(item.name, item.line, item.reason) for item in found.rejected] == [("a.jsonl", 3, "no-json")]
    assert found.no_caption == 0


@pytest.mark.parametrize("change", ["other", "shorter", "gone", "broken"])
def test_a_file_that_changed_meanwhile_is_an_error(tmp_path, change, monkeypatch):
    monkeypatch.setattr(record_scan, "_KEPT", 10)
    write(tmp_path / "a.jsonl", "one", "two", "three")
    found = scan(tmp_path)
    after = {"other": ["one", "2", "three"], "shorter": ["one"], "broken": ["one", b"\xff"], "gone": []}[change]
    write(tmp_path / "a.jsonl", *after)
    if change == "gone":
        (tmp_path / "a.jsonl").unlink()
    with pytest.raises(SourceError, match="changed"):
        texts_of(found)
    left = listing_of(found.root, found.samples, found.options)
    wanted = [text if text in after else None for text in ("one", "two", "three")]
    assert texts_of(left, strict=False) == wanted


def test_small_files_are_parsed_once(tmp_path, opened):
    write(tmp_path / "a.jsonl", "one", b"not json", "two")
    found = scan(tmp_path)
    opened.clear()
    assert texts_of(found) == ["one", "two"]
    assert texts_of(found, [1]) == ["two"]
    assert not opened
    write(tmp_path / "b.jsonl", "three")
    assert texts_of(scan(tmp_path, known=found.samples)) == ["one", "two", "three"]
    assert opened


def test_a_list_with_several_records_on_a_line(tmp_path, opened):
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "b"}, {"text": "a"}, {"text": "c"}]')
    found = scan(tmp_path)
    assert texts_of(found) == ["a", "b", "a", "c"]
    assert texts_of(found, [1, 3]) == ["b", "c"]
    opened.clear()
    assert rows_of(scan(tmp_path, RECORDS, found.samples)) == rows_of(found)
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
    scan(tmp_path, RECORDS, first.samples, rejected=first.rejected, reread=np.array([True, False, False]))
    assert opened == ["a.jsonl", "aa.jsonl", "b.jsonl"]


@pytest.mark.parametrize("keep_rest", [True, False])
def test_records_that_every_field_rejected_are_still_samples(tmp_path, keep_rest, opened):
    """A build leaves them out of the snapshot's table and names them among the rejected."""
    write(tmp_path / "a.jsonl", "one", b"{bad", "two", "two", "three")
    write(tmp_path / "b.jsonl", "four")
    (tmp_path / "c.json").write_text('[{"text": "a"}, {"text": "b"}]')
    first = scan(tmp_path)
    table, held = first.samples, first.samples.inputs["record"]
    out = [1, 2, 4, 6] if keep_rest else list(range(len(table)))
    made = [
        Rejected(
            name=table.files.names[int(held.file[row])],
            reason="template",
            line=int(held.line[row]),
            content=held.content[row].tobytes(),
        )
        for row in out
    ]
    rest = np.array([row for row in range(len(table)) if row not in out], dtype=np.intp)
    kept = {name: column[rest] for name, column in table.columns.items()}
    record = replace(held, content=held.content[rest], file=held.file[rest], line=held.line[rest])
    left = replace(table, names=table.names.select(rest), inputs={"record": record}, columns=kept)
    opened.clear()
    again = scan(tmp_path, RECORDS, left, rejected=[*first.rejected, *made])
    assert rows_of(again) == rows_of(first)
    assert [(item.name, item.line) for item in again.rejected] == [("a.jsonl", 2)]
    assert opened == ["a.jsonl", "b.jsonl", "c.json"]


def test_options_travel_as_json():
    options = SourceOptions(kind="records", datasets=("a",), text_lines=True, part=Part.parse("1/3"))
    assert SourceOptions.from_json(json.loads(json.dumps(options.as_json()))) == options
    assert (SourceOptions().as_json(), SourceOptions.from_json({})) == ({}, SourceOptions())

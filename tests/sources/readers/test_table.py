import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from latentcache.errors import TableError
from latentcache.sources.causes import Findings
from latentcache.sources.layout import CAPTION_COLUMNS, FILE_COLUMNS, CaptionRule
from latentcache.sources.readers.table import Row, image_named, make_row, match_rows, read_table

CSV, JSONL = "metadata.csv", "metadata.jsonl"
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def rows_of(root, data, name=CSV):
    (root / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return [
        (row.name, row.error.slug if row.error else row.caption)
        for row in read_table(root, name, "", CaptionRule())[0]
    ]


def error_of(root, data, name=CSV):
    """Return what, line, why and fix of the error, without the path."""
    with pytest.raises(TableError) as caught:
        rows_of(root, data, name)
    error = caught.value
    path, _, line = error.where.partition(f"{name}:")
    assert path in (f"{root}/", f"{root}/{name}")
    assert error.what.startswith(f"{name}: ")
    assert error.fix
    return error.what.removeprefix(f"{name}: "), int(line or 0), error.why, error.fix


@pytest.mark.parametrize("file", FILE_COLUMNS)
@pytest.mark.parametrize("caption", CAPTION_COLUMNS)
def test_each_column_name(tmp_path, file, caption):
    rows = [("a.jpg", "a cat")]
    assert rows_of(tmp_path, f"{file},{caption}\na.jpg,a cat\n") == rows
    assert rows_of(tmp_path, f"id,{caption.upper()}, {file.title()} ,w\n1,a cat,a.jpg,5\n") == rows
    assert rows_of(tmp_path, f'{{"{caption}": "a cat", "w": 5, "{file}": "a.jpg"}}\n', JSONL) == rows


@pytest.mark.parametrize("first", ["a.jpg,a cat", "gone.PNG,a cat", "1, sub/a.jpg,a cat"])
def test_a_table_needs_a_header(tmp_path, first):
    name = next(cell.strip() for cell in first.split(",") if "." in cell)
    problem, line, why, fix = error_of(tmp_path, f"\n{first}\nb.jpg,a dog\n")
    assert (problem, line) == ("it has no header line", 2)
    assert why == f"its first line names the image {name!r}, not the columns"
    assert fix == "put a header line above it that names the columns, such as file_name,text"


@pytest.mark.parametrize(
    ("name", "data"),
    [(CSV, b"file_name,text\na.jpg,x\n"), (JSONL, b'{"file_name": "a.jpg", "text": "x"}')],
)
def test_a_bom_is_skipped(tmp_path, name, data):
    assert rows_of(tmp_path, b"\xef\xbb\xbf" + data, name) == [("a.jpg", "x")]


def test_empty_lines_and_every_line_end(tmp_path):
    data = "\r\nfile_name,text\r\n\r\na.jpg,x\rb.jpg,y\n\n"
    assert rows_of(tmp_path, data) == [("a.jpg", "x"), ("b.jpg", "y")]
    data = '\n{"file_name": "a.jpg", "text": "x\u2028\x0b"}\r\n  \n'.replace("\x0b", "\\u000b")
    assert rows_of(tmp_path, data, JSONL) == [("a.jpg", "x\u2028\x0b")]


COLUMNS = "expected a column of images; found columns: "
HEAD, LENGTH, NO_CSV = "file_name,text\n", "a row of another length", "a row that is not CSV"


@pytest.mark.parametrize(
    ("data", "problem", "line", "why"),
    [
        (HEAD + "a.jpg,one, two\n", LENGTH, 2, "expected 2 fields as in the first line, found 3: a.jpg, one,  two"),
        (HEAD + 'a.jpg,"x\ny"\nb.jpg\n', LENGTH, 4, "expected 2 fields as in the first line, found 1: b.jpg"),
        (HEAD + 'a.jpg,x\nb.jpg,"y\nc.jpg,z\n', NO_CSV, 3,
         "unexpected end of data; the row begins on line 3, this is line 4"),
        (HEAD + 'a.jpg,"x" y\n', NO_CSV, 2, "',' expected after '\"'; the row begins on line 2, this is line 2"),
        ("name,text\na.jpg,x\n", "a column is missing", 0, COLUMNS + "name, text"),
        (HEAD, "the table has no rows", 1, "expected one row per image, found none"),
        ("\n\n", "the table has no rows", 1, "expected one row per image, found none"),
        ("", "the table cannot be read", 0, "it has 0 bytes"),
        (HEAD.encode() + b"a.jpg,caf\xe9\n", "the table is not UTF-8", 2,
         "expected UTF-8, found 0xe9 at byte 10"),
        (HEAD.encode("utf-16"), "the table is not UTF-8", 1, "expected UTF-8, found 0xff at byte 1"),
    ],
)  # fmt: skip
def test_a_csv_that_cannot_be_read(tmp_path, data, problem, line, why):
    assert error_of(tmp_path, data)[:3] == (problem, line, why)


GOOD = '{"file_name": "a.jpg", "text": "x"}\n'


@pytest.mark.parametrize(
    ("line", "problem", "why"),
    [
        ("{", "a line that is not a JSON object", "Expecting property name enclosed in double quotes at column 2"),
        ("[1]", "a line that is not a JSON object", "found [1]"),
        ('"text"', "a line that is not a JSON object", "found 'text'"),
        ("\0\0\0{", "a line that is not a JSON object", "Expecting value at column 1"),
        (b'{"file_name": "\xe9"}', "a line that is not a JSON object", "found 0xe9 at byte 16"),
        ('{"text": "x"}', "a row without a file name", "in the first row; found columns: text"),
        ('{"file_name": null, "text": "x"}', "a row without a file name", "in the first row; found None"),
    ],
)
def test_a_jsonl_line_that_cannot_be_read(tmp_path, line, problem, why):
    raw = line if isinstance(line, bytes) else line.encode()
    error = error_of(tmp_path, GOOD.encode() + b"\n" + raw + b"\n" + GOOD.encode(), JSONL)
    assert error[:2] == (problem, 3)
    assert why in error[2]


def test_a_row_without_a_usable_caption_is_rejected_alone(tmp_path):
    none = '{"file_name": "b.jpg"}\n{"file_name": "c.jpg", "text": null}\n'
    (tmp_path / JSONL).write_text(GOOD + none + '{"file_name": "d.jpg", "text": "\\ud800"}')
    rows, *_ = read_table(tmp_path, JSONL, "", CaptionRule())
    half = "metadata.jsonl:4: the caption has half a surrogate pair (U+D800) at character 0"
    assert [(row.name, row.error.slug, row.error.what) for row in rows[1:]] == [
        ("b.jpg", "table-row", "metadata.jsonl:2: expected text as the caption, found None"),
        ("c.jpg", "table-row", "metadata.jsonl:3: expected text as the caption, found None"),
        ("d.jpg", "caption-unicode", half),
    ]
    assert rows_of(tmp_path, "file_name,text\na.jpg,x\0y\n") == [("a.jpg", "caption-unicode")]


@given(st.lists(TEXTS, min_size=1, max_size=5), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), st.booleans())
@example(["\r", "\n", '"', ",", "\r\n", "\ufeff", "\u2028", " a ", "NA", "001"], csv.QUOTE_MINIMAL, False)
def test_captions_round_trip(tmp_path_factory, captions, quoting, ascii_only):
    text, root = io.StringIO(newline=""), tmp_path_factory.mktemp("table")
    rows = [(f"{i}.jpg", caption) for i, caption in enumerate(captions)]
    csv.writer(text, quoting=quoting).writerows([("file_name", "text"), *rows])
    (root / CSV).write_bytes(text.getvalue().encode())
    lines = [json.dumps({"file_name": name, "text": caption}, ensure_ascii=ascii_only) for name, caption in rows]
    (root / JSONL).write_bytes("\n".join(lines).encode())
    for name in (CSV, JSONL):
        assert [row.caption for row in read_table(root, name, "", CaptionRule())[0]] == captions


def test_captions_of_later_rows_alone_reject_the_others(tmp_path):
    rows = rows_of(tmp_path, '{"file_name": "a.jpg", "id": 1}\n{"file_name": "b.jpg", "text": "x"}\n', JSONL)
    assert rows == [("a.jpg", "table-row"), ("b.jpg", "x")]


# rows against images


def matched(images, *rows, handled=(), root=Path("/nowhere")):
    """Match rows with images; return captions and the result. The first row is on line 2."""
    table_rows = [
        row if isinstance(row, Row) else make_row(Path(CSV), line, *row) for line, row in enumerate(rows, start=2)
    ]
    findings = Findings()
    first = match_rows(CSV, table_rows, dict.fromkeys(images), handled, root, findings)
    bad, notes = findings.rejected, findings.notes.all()
    assert all(item.hint for item in (*bad, *notes))
    return {name: row.caption for name, row in first.items() if name in images and row.error is None}, bad, notes


def words(items):
    return [(item.name, item.reason, item.detail) for item in items]


@pytest.mark.parametrize("raw", ["./a.jpg", ".//a.jpg", "sub/./b.jpg", "sub//b.jpg", ".\\a.jpg", "sub\\b.jpg"])
def test_harmless_spellings_are_the_same_file(raw):
    assert matched(["a.jpg", "sub/b.jpg"], (raw, "x"))[0] == {"a.jpg" if "a" in raw else "sub/b.jpg": "x"}


OUT = "metadata.csv:2 names a file outside the data folder"
GONE = "metadata.csv:2 names it, and there is no such file"


@pytest.mark.parametrize(
    ("raw", "reason", "detail"),
    [
        *((raw, "outside-root", OUT) for raw in (
            "../a.jpg", "sub/../a.jpg", "C:\\pics\\a.jpg", "..\\a.jpg", "\\\\host\\a.jpg", "/etc/x.jpg", "..",
            "c:x.jpg")),
        *((raw, "not-found", GONE) for raw in ("gone.jpg", "A.JPG", "other/a.png ", "cafe\u0301.jpg")),
        ("b.psd", "unknown", "metadata.csv:2 names it, and its extension is not that of a supported image"),
    ],
)  # fmt: skip
def test_a_name_that_is_no_image_is_rejected(tmp_path, raw, reason, detail):
    (tmp_path / "b.psd").touch()
    images = ["sub/a.jpg", "caf\u00e9.jpg"]
    assert image_named(raw, set(images)) == ""
    samples, bad, _ = matched(images, (raw, "x"), root=tmp_path)
    assert (samples, words(bad)) == ({}, [(raw, reason, detail)])
    assert raw == ".." or not matched(images, ("pipe.jpg", "x"), handled={"pipe.jpg"})[1], "it has an item"


def test_two_rows_for_one_file_and_a_row_without_a_usable_caption():
    of_a, gone = (("a.jpg", "one"), ("./a.jpg", "one"), ("a.jpg", "two")), ("gone.jpg", "")
    samples, bad, notes = matched(["a.jpg", "b.jpg"], *of_a, gone, gone, ("b.jpg", "\0"))
    assert samples == {"a.jpg": "one"}
    assert words(notes) == [
        (CSV, "duplicate-row", "lines 2 and 3 are both for a.jpg, with the same caption; the first is used"),
        (CSV, "duplicate-row", "lines 2 and 4 are both for a.jpg, with another caption; the first is used"),
        (CSV, "duplicate-row", "lines 5 and 6 are both for gone.jpg, with the same caption; the first is used"),
    ]
    detail = "metadata.csv:7: the caption has a NUL at character 0"
    assert ("b.jpg", "caption-unicode", detail) in words(bad)


@given(st.lists(st.text("ab./\\:\0\ud800C", max_size=8), max_size=8))
def test_every_row_is_used_noted_or_rejected(raws):
    names = [f"{raw}.jpg" for raw in raws]
    samples, bad, notes = matched(["a.jpg", "b/a.jpg", "b/b.png"], *((name, "x") for name in names))
    assert len(samples) + len(bad) + len(notes) == len(names)
    assert len({item.name for item in bad}) == len(bad)


def test_a_parquet_table_that_is_none(tmp_path):
    error = error_of(tmp_path, b"no parquet", "metadata.parquet")
    assert error[:2] == ("it is not a parquet file", 0)

"""Tables: exactly what is written, or an error with file and line."""

import csv
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from latentcache.errors import TableError
from latentcache.sources.layouts.listed import match_rows
from latentcache.sources.table import (
    CAPTION_COLUMNS,
    FILE_COLUMNS,
    Row,
    choose_columns,
    image_named,
    leads_out,
    make_row,
    read_table,
)

CSV, JSONL = "metadata.csv", "metadata.jsonl"
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def rows_of(root, data, name=CSV, images=("a.jpg", "b.jpg")):
    (root / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    rows, _, _, notes = read_table(root, name, set(images))
    return [(row.name, row.cause or row.caption) for row in rows], [note.reason for note in notes]


def error_of(root, data, name=CSV):
    """What, line, why and fix of the error; the path is cut off."""
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
    rows = [("a.jpg", "a cat")], []
    assert rows_of(tmp_path, f"{file},{caption}\na.jpg,a cat\n") == rows
    assert rows_of(tmp_path, f"id,{caption.upper()}, {file.title()} ,w\n1,a cat,a.jpg,5\n") == rows
    assert rows_of(tmp_path, f'{{"{caption}": "a cat", "w": 5, "{file}": "a.jpg"}}\n', JSONL) == rows


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_the_header_says_the_delimiter(tmp_path, mark):
    data = f'"file_name"{mark}text\na.jpg{mark}"one, two; three\tfour"\n'
    assert rows_of(tmp_path, data) == ([("a.jpg", "one, two; three\tfour")], [])


def test_a_table_without_header_begins_with_an_image_that_is_there(tmp_path):
    assert rows_of(tmp_path, "a.jpg,a cat\nb.jpg,a dog\n")[0] == [("a.jpg", "a cat"), ("b.jpg", "a dog")]
    assert rows_of(tmp_path, ".\\a.jpg,a cat\n")[0] == [(".\\a.jpg", "a cat")]


def test_a_bom_is_read_over_and_noted(tmp_path):
    bom = b"\xef\xbb\xbf"
    assert rows_of(tmp_path, bom + b"file_name,text\na.jpg,x\n") == ([("a.jpg", "x")], ["bom"])
    assert rows_of(tmp_path, bom + b"a.jpg,x\n") == ([("a.jpg", "x")], ["bom"])
    assert rows_of(tmp_path, bom + b'{"file_name": "a.jpg", "text": "x"}', JSONL) == ([("a.jpg", "x")], ["bom"])


def test_nothing_is_converted(tmp_path):
    words = ["NA", "None", "null", "001", "1e5", "", " x ", "nan", "True"]
    data = "file_name,text\n" + "".join(f"{i}.jpg,{word}\n" for i, word in enumerate(words))
    assert [caption for _, caption in rows_of(tmp_path, data)[0]] == words


def test_empty_lines_and_every_line_end(tmp_path):
    data = "\r\nfile_name,text\r\n\r\na.jpg,x\rb.jpg,y\n\n"
    assert rows_of(tmp_path, data)[0] == [("a.jpg", "x"), ("b.jpg", "y")]
    data = '\n{"file_name": "a.jpg", "text": "x\u2028\x0b"}\r\n  \n'.replace("\x0b", "\\u000b")
    assert rows_of(tmp_path, data, JSONL)[0] == [("a.jpg", "x\u2028\x0b")]


def test_a_long_caption_and_the_limit_of_the_process(tmp_path):
    before = csv.field_size_limit()
    long = "x" * 5_000_000
    assert rows_of(tmp_path, f"file_name,text\na.jpg,{long}\n")[0] == [("a.jpg", long)]
    what, line, why, _ = error_of(tmp_path, f"file_name,text\na.jpg,{long}{long}{long}\n")
    assert (what, line) == ("a row that is no CSV", 2)
    assert why == "field larger than field limit (10000000) (the row begins on line 2, this is line 2)"
    assert csv.field_size_limit() == before


QUOTE = 'put a caption that holds a comma, a quote or a line end in double quotes, and write " inside it as ""'
COLUMNS = "expected a column named file_name, image, file, filename or path; found columns: "
CAPTIONS = "expected a column named text, caption or prompt; found columns: "


@pytest.mark.parametrize(
    ("data", "what", "line", "why", "fix"),
    [
        (
            "file_name,text\na.jpg,one, two\n",
            "a row of another length",
            2,
            "expected 2 fields as in the first line, found 3: a.jpg, one,  two",
            QUOTE,
        ),
        (
            'file_name,text\na.jpg,"x\ny"\nb.jpg\n',
            "a row of another length",
            4,
            "expected 2 fields as in the first line, found 1: b.jpg",
            QUOTE,
        ),
        (
            'file_name,text\na.jpg,x\nb.jpg,"y\nc.jpg,z\n',
            "a quote is not closed",
            3,
            "a double quote is opened in the row of line 3 and never closed until line 4",
            QUOTE,
        ),
        (
            'file_name,text\na.jpg,"x" y\n',
            "a row that is no CSV",
            2,
            "',' expected after '\"' (the row begins on line 2, this is line 2)",
            QUOTE,
        ),
        ("name,text\na.jpg,x\n", "no column of file names", 1, COLUMNS + "name, text", None),
        ("gone.jpg,a cat\n", "no column of file names", 1, COLUMNS + "gone.jpg, a cat", None),
        ("file_name,size\na.jpg,5\n", "no column of captions", 1, CAPTIONS + "file_name, size", None),
        (
            "file_name,text\n",
            "the table has no rows",
            1,
            "expected one row per image, found none",
            "add one row per image, or remove the table to use all images",
        ),
        (
            b"file_name,text\na.jpg,caf\xe9\n",
            "the table is not UTF-8",
            2,
            "expected UTF-8, found byte 0xe9 at byte 10 of the line",
            None,
        ),
        (
            "file_name,text\na.jpg,x\n".encode("utf-16"),
            "the table is not UTF-8",
            1,
            "expected UTF-8, found the byte order mark of UTF-16",
            None,
        ),
        ("", "the table cannot be read", 0, "it has 0 bytes", None),
        ("\n\n", "the table has no rows", 1, "expected one row per image, found none", None),
    ],
)
def test_a_csv_that_cannot_be_read(tmp_path, data, what, line, why, fix):
    found = error_of(tmp_path, data)
    assert found[:3] == (what, line, why)
    assert fix is None or found[3] == fix


def test_the_fix_of_an_encoding_is_a_command_that_works(tmp_path):
    _, _, _, fix = error_of(tmp_path, "file_name,text\na.jpg,\u00e9\n".encode("utf-16"))
    path = tmp_path / CSV
    assert fix == f"`iconv -f UTF-16 -t UTF-8 {path} > {path}.utf8 && mv {path}.utf8 {path}`"
    if shutil.which("iconv"):
        subprocess.run(["sh", "-c", fix.strip("`")], check=True)
        assert read_table(tmp_path, CSV, set())[0][0].caption == "\u00e9"


GOOD = '{"file_name": "a.jpg", "text": "x"}\n'


@pytest.mark.parametrize(
    ("line", "what", "why"),
    [
        ("{", "a line that is no JSON object", "Expecting property name enclosed in double quotes at column 2"),
        ("[1]", "a line that is no JSON object", "found [1]"),
        ('"text"', "a line that is no JSON object", "found 'text'"),
        ("\0\0\0{", "a line that is no JSON object", "Expecting value at column 1"),
        ("x" * 10_000_001, "a line that is too long", "expected at most 10000000 bytes, found 10000001"),
        (b'{"file_name": "\xe9"}', "the table is not UTF-8", "found byte 0xe9 at byte 16 of the line"),
        ('{"text": "x"}', "a row without a file name", "in the first row; found columns: text"),
        ('{"file_name": null, "text": "x"}', "a row without a file name", "in the first row; found None"),
    ],
)
def test_a_jsonl_line_that_cannot_be_read(tmp_path, line, what, why):
    raw = line if isinstance(line, bytes) else line.encode()
    found = error_of(tmp_path, GOOD.encode() + b"\n" + raw + b"\n" + GOOD.encode(), JSONL)
    assert found[:2] == (what, 3)
    assert why in found[2]


def test_a_jsonl_without_the_columns_or_rows(tmp_path):
    found = error_of(tmp_path, '{"name": "a.jpg", "text": "x"}\n', JSONL)
    assert found[:3] == ("no column of file names", 1, COLUMNS + "name, text")
    assert found[3] == 'give every line of metadata.jsonl the form {"file_name": "a.jpg", "text": "a caption"}'
    assert error_of(tmp_path, '{"file_name": "a.jpg"}\n', JSONL)[:2] == ("no column of captions", 1)
    assert error_of(tmp_path, "\n", JSONL)[:2] == ("the table has no rows", 1)
    assert error_of(tmp_path, GOOD.encode("utf-16"), JSONL)[:2] == ("the table is not UTF-8", 1)


def test_a_row_without_a_usable_caption_is_rejected_alone(tmp_path):
    lines = [
        '{"file_name": "b.jpg"}',
        '{"file_name": "c.jpg", "text": null}',
        '{"file_name": "d.jpg", "text": "\\ud800"}',
    ]
    (tmp_path / JSONL).write_text(GOOD + "\n".join(lines))
    rows, *_ = read_table(tmp_path, JSONL, set())
    assert [(row.name, row.cause, row.detail) for row in rows[1:]] == [
        ("b.jpg", "table-row", "metadata.jsonl:2 has no 'text'; found columns: file_name"),
        ("c.jpg", "table-row", "metadata.jsonl:3 has None as the caption, expected text"),
        (
            "d.jpg",
            "caption-unicode",
            "the caption in metadata.jsonl:4 has half a surrogate pair (U+D800) at character 0",
        ),
    ]
    assert rows_of(tmp_path, "file_name,text\na.jpg,x\0y\n")[0] == [("a.jpg", "caption-unicode")]


def test_a_table_that_is_not_a_file_of_the_folder(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "secret.csv").write_text("file_name,text\na.jpg,x\n")
    (root / CSV).symlink_to(tmp_path / "secret.csv")
    with pytest.raises(TableError) as caught:
        read_table(root, CSV, set())
    assert caught.value.why == f"it is a link to {tmp_path / 'secret.csv'}, outside the data folder"
    (root / CSV).unlink()
    (root / CSV).symlink_to(CSV)
    with pytest.raises(TableError, match="Too many levels of symbolic links"):
        read_table(root, CSV, set())
    (root / CSV).unlink()
    (root / CSV).mkdir()
    with pytest.raises(TableError, match="it is a folder, not a regular file"):
        read_table(root, CSV, set())


@given(st.lists(TEXTS, min_size=1, max_size=5), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
@example(["\r", "\n", '"', ",", "\r\n", "\ufeff", "\u2028", " a "], csv.QUOTE_MINIMAL)
def test_any_captions_come_back_from_a_csv(tmp_path_factory, captions, quoting):
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=quoting)
    writer.writerows([["file_name", "text"], *((f"{i}.jpg", caption) for i, caption in enumerate(captions))])
    root = tmp_path_factory.mktemp("csv")
    (root / CSV).write_bytes(text.getvalue().encode())
    assert [row.caption for row in read_table(root, CSV, set())[0]] == captions


@given(st.lists(TEXTS, min_size=1, max_size=5), st.booleans())
def test_any_captions_come_back_from_a_jsonl(tmp_path_factory, captions, ascii_only):
    rows = [{"file_name": f"{i}.jpg", "text": caption} for i, caption in enumerate(captions)]
    root = tmp_path_factory.mktemp("jsonl")
    data = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    (root / JSONL).write_bytes(data.encode())
    assert [row.caption for row in read_table(root, JSONL, set())[0]] == captions


@given(st.binary(max_size=60), st.sampled_from([CSV, JSONL]))
@example(b'a.jpg,x\n"', CSV)
def test_any_bytes_are_rows_or_a_table_error(tmp_path_factory, data, name):
    root = tmp_path_factory.mktemp("any")
    (root / name).write_bytes(b"file_name,text\n" * (name == CSV) + data)
    try:
        outcome = bool(read_table(root, name, {"a.jpg"})[0])
    except TableError as error:
        outcome = str(root / name) in error.where
    assert outcome


# columns

OTHER = st.text().filter(lambda name: name.strip().lower() not in (*FILE_COLUMNS, *CAPTION_COLUMNS))


@given(st.lists(OTHER, max_size=5), st.sampled_from(FILE_COLUMNS), st.sampled_from(CAPTION_COLUMNS), st.data())
def test_other_columns_change_nothing(others, file, caption, data):
    columns = list(others)
    for name in (file, caption):
        spelling = data.draw(st.sampled_from([name, name.upper(), f" {name}"]))
        columns.insert(data.draw(st.integers(0, len(columns))), spelling)
    positions = choose_columns(Path(CSV), 1, columns)
    assert [columns[position].strip().lower() for position in positions] == [file, caption]


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        (["file", "text", "caption", "prompt"], "3 columns of captions"),
        (["file", "file", "text"], "2 columns of file names"),
    ],
)
def test_columns_that_could_both_be_meant_are_an_error(columns, what):
    with pytest.raises(TableError, match=what) as caught:
        choose_columns(Path(CSV), 3, columns)
    assert (caught.value.where, caught.value.fix) == (f"{CSV}:3", "keep one of them")


@pytest.mark.parametrize("caption", ["", " x ", "NA", "a\nb", "\u2028", "\U0001f431"])
def test_a_caption_is_kept_as_it_is(caption):
    assert make_row("t.csv", 4, "a.jpg", caption) == Row(name="a.jpg", caption=caption, line=4)


# rows against images


def matched(images, *rows, said=(), root=Path("/nowhere")):
    """What the rows come to; the first one is on line 2."""
    made = [row if isinstance(row, Row) else make_row(CSV, line, *row) for line, row in enumerate(rows, start=2)]
    return match_rows(CSV, made, dict.fromkeys(images), said, root)


def words(items):
    assert all(item.hint for item in items)
    return [(item.name, item.reason, item.detail) for item in items]


def test_rows_are_samples_and_other_images_are_noted():
    result = matched(["a.jpg", "sub/b.jpg", "c.jpg"], ("sub/b.jpg", "two"), ("a.jpg", ""))
    assert [(name, row.caption) for name, row in result.samples.items()] == [("sub/b.jpg", "two"), ("a.jpg", "")]
    assert words(result.notes) == [("c.jpg", "unlisted", "metadata.csv has no row for it")]
    assert result.rejected == []


@pytest.mark.parametrize("raw", ["./a.jpg", ".//a.jpg", "sub/./b.jpg", "sub//b.jpg", ".\\a.jpg", "sub\\b.jpg"])
def test_harmless_spellings_are_the_same_file(raw):
    result = matched(["a.jpg", "sub/b.jpg"], (raw, "x"))
    assert list(result.samples) == ["a.jpg" if "a" in raw else "sub/b.jpg"]
    assert ("backslash" in {note.reason for note in result.notes}) == ("\\" in raw)


def test_backslashes_are_counted_in_one_note_and_belong_to_a_name_that_has_them():
    result = matched(["sub/a.jpg", "sub/b.jpg"], ("sub\\a.jpg", "x"), ("sub\\b.jpg", "y"))
    detail = "2 rows have paths with \\, the first on line 2; read as /"
    assert words(result.notes) == [(CSV, "backslash", detail)]
    result = matched(["sub\\a.jpg", "sub/a.jpg"], ("sub\\a.jpg", "x"))
    assert (list(result.samples), [note.reason for note in result.notes]) == (["sub\\a.jpg"], ["unlisted"])


@pytest.mark.parametrize(
    "raw",
    ["/etc/x.jpg", "../a.jpg", "sub/../a.jpg", "..", "C:\\pics\\a.jpg", "c:x.jpg", "..\\a.jpg", "\\\\host\\a.jpg"],
)
def test_a_name_that_leads_out_is_rejected(raw):
    assert leads_out(raw)
    assert image_named(raw, {"a.jpg", "x.jpg"}) == ""
    detail = "metadata.csv:2 names a file outside the data folder"
    assert words(matched(["b.jpg"], (raw, "y")).rejected)[0] == (raw, "outside-root", detail)


@pytest.mark.parametrize(
    ("raw", "question"),
    [
        ("gone.jpg", ""),
        ("A.JPG", "; did you mean sub/a.jpg?"),
        ("other/a.png ", "; did you mean sub/a.jpg?"),
        ("cafe\u0301.jpg", "; did you mean caf\u00e9.jpg?"),
    ],
)
def test_a_file_that_is_not_there_is_rejected_with_the_nearest_name(raw, question):
    detail = f"metadata.csv:2 names it, and there is no such file{question}"
    assert words(matched(["sub/a.jpg", "caf\u00e9.jpg"], (raw, "x")).rejected) == [(raw, "not-found", detail)]


def test_a_file_of_another_kind_is_rejected_and_one_that_was_rejected_has_one_item(tmp_path):
    (tmp_path / "a.psd").touch()
    detail = "metadata.csv:2 names it, but its extension is none of an image that is read"
    assert words(matched([], ("a.psd", "x"), root=tmp_path).rejected) == [("a.psd", "unknown", detail)]
    result = matched([], ("pipe.jpg", "x"), said={"pipe.jpg"})
    assert (result.samples, result.rejected, result.notes) == ({}, [], [])


def test_two_rows_for_one_file_and_a_row_without_a_usable_caption():
    rows = [
        ("a.jpg", "one"),
        ("./a.jpg", "one"),
        ("a.jpg", "two"),
        ("gone.jpg", ""),
        ("gone.jpg", ""),
        ("b.jpg", "x\0"),
    ]
    result = matched(["a.jpg", "b.jpg"], *rows)
    assert [(name, row.caption) for name, row in result.samples.items()] == [("a.jpg", "one")]
    assert words(result.notes) == [
        (CSV, "duplicate-row", "lines 2 and 3 are both for a.jpg, with the same caption"),
        (CSV, "duplicate-row", "lines 2 and 4 are both for a.jpg, with another caption; that of line 2 is used"),
        (CSV, "duplicate-row", "lines 5 and 6 are both for gone.jpg, with the same caption"),
    ]
    detail = "the caption in metadata.csv:7 has a NUL at character 1"
    assert ("b.jpg", "caption-unicode", detail) in words(result.rejected)


@pytest.mark.parametrize("raw", ["\ud800.jpg", "a\0.jpg", "", ".", "x" * 5000 + ".jpg"])
def test_names_that_no_file_can_have(raw, tmp_path):
    (item,) = matched([], (raw, "x"), root=tmp_path).rejected
    assert item.reason == "not-found"
    assert 0 < len(os.fsencode(item.name)) <= 1000
    json.dumps(item.name)


@given(st.lists(st.text("ab./\\:\0\ud800C", max_size=8), max_size=8))
def test_every_row_and_every_image_ends_somewhere(raws):
    images = ["a.jpg", "b/a.jpg", "b/b.png"]
    names = [f"{raw}.jpg" for raw in raws]
    result = matched(images, *((name, "x") for name in names))
    duplicates = sum(note.reason == "duplicate-row" for note in result.notes)
    assert len(result.samples) + len(result.rejected) + duplicates == len(names)
    unlisted = [note.name for note in result.notes if note.reason == "unlisted"]
    assert sorted([*unlisted, *result.samples]) == images
    assert len({item.name for item in result.rejected}) == len(result.rejected)

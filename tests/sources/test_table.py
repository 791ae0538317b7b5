"""Tables: exactly what is written, or an error with file and line."""

import csv
import io
import json
import shutil
import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from latentcache.errors import TableError
from latentcache.sources.rows import CAPTION_COLUMNS, FILE_COLUMNS
from latentcache.sources.table import find_table, read_table

CSV, JSONL = "metadata.csv", "metadata.jsonl"
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def rows_of(root, data, name=CSV, pictures=("a.jpg", "b.jpg")):
    (root / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    rows, notes = read_table(root, name, set(pictures))
    return [(row.name, row.cause or row.caption) for row in rows], [note.cause for note in notes]


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


def test_a_table_without_header_begins_with_a_picture_that_is_there(tmp_path):
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
            "expected one row per picture, found none",
            "add one row per picture, or remove the table to use all pictures",
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
        ("\n\n", "the table has no rows", 1, "expected one row per picture, found none", None),
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
        ('{"file_name": "b.jpg", "text": "x", "s": NaN}', "a line that is no JSON object", "NaN is no JSON value"),
        ('{"file_name": "b.jpg", "s": -Infinity}', "a line that is no JSON object", "-Infinity is no JSON value"),
        ('{"text": "x", "text": "y"}', "a line that is no JSON object", "the name 'text' is there twice"),
        ("[" * 100_000, "a line that is no JSON object", "it is nested too deeply"),
        ('{"x":' * 100_000, "a line that is no JSON object", "it is nested too deeply"),
        ("9" * 5000, "a line that is no JSON object", "Exceeds the limit (4300 digits) for integer string"),
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


def test_a_row_without_a_usable_caption_is_refused_alone(tmp_path):
    lines = [
        '{"file_name": "b.jpg"}',
        '{"file_name": "c.jpg", "text": null}',
        '{"file_name": "d.jpg", "text": "\\ud800"}',
    ]
    (tmp_path / JSONL).write_text(GOOD + "\n".join(lines))
    rows, _ = read_table(tmp_path, JSONL, set())
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


def test_which_table(tmp_path):
    assert find_table(tmp_path) == ""
    (tmp_path / JSONL).touch()
    assert find_table(tmp_path) == JSONL
    (tmp_path / CSV).touch()
    with pytest.raises(TableError) as caught:
        find_table(tmp_path)
    assert caught.value.what == "the data folder has two tables: metadata.csv and metadata.jsonl"
    off = tmp_path / "metadata.jsonl"
    assert caught.value.fix == f"remove or rename one, e.g. `mv {off} {off}.off`"


def test_a_table_that_is_no_file_of_the_folder(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "secret.csv").write_text("file_name,text\na.jpg,x\n")
    (root / CSV).symlink_to(tmp_path / "secret.csv")
    with pytest.raises(TableError) as caught:
        read_table(root, find_table(root), set())
    assert caught.value.why == f"it is a link to {tmp_path / 'secret.csv'}, outside the data folder"
    (root / CSV).unlink()
    (root / CSV).symlink_to(CSV)
    with pytest.raises(TableError, match="Too many levels of symbolic links"):
        read_table(root, find_table(root), set())
    (root / CSV).unlink()
    (root / CSV).mkdir()
    with pytest.raises(TableError, match="it is a folder, not a regular file"):
        read_table(root, find_table(root), set())


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

"""Which columns of a row count, and what a row is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import TableError
from latentcache.sources.rows import (
    CAPTION_COLUMNS,
    FILE_COLUMNS,
    Row,
    choose_columns,
    has_columns,
    listed,
    make_row,
    shown,
    table_error,
)

CSV, JSONL = Path("data/metadata.csv"), Path("data/metadata.jsonl")
ANY_OF_FILES = "expected a column named file_name, image, file, filename or path; found columns: "
ANY_OF_CAPTIONS = "expected a column named text, caption or prompt; found columns: "
OTHER = st.text().filter(lambda name: name.strip().lower() not in (*FILE_COLUMNS, *CAPTION_COLUMNS))


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        (["file_name", "text"], (0, 1)),
        (["caption", "image"], (1, 0)),
        (["id", "Prompt", "w", " PATH "], (3, 1)),
        (["File", "file names", "texts", "TEXT"], (0, 3)),
        (["filename", "", "", "text"], (0, 3)),
    ],
)
def test_columns_are_chosen_by_name(columns, chosen):
    assert has_columns(columns)
    assert choose_columns(CSV, 1, columns) == chosen


@given(st.lists(OTHER, max_size=5), st.sampled_from(FILE_COLUMNS), st.sampled_from(CAPTION_COLUMNS), st.data())
def test_other_columns_change_nothing(others, file, caption, data):
    columns = list(others)
    for name in (file, caption):
        spelling = data.draw(st.sampled_from([name, name.upper(), f" {name}"]))
        columns.insert(data.draw(st.integers(0, len(columns))), spelling)
    positions = choose_columns(CSV, 1, columns)
    assert [columns[position].strip().lower() for position in positions] == [file, caption]


@pytest.mark.parametrize(
    ("path", "columns", "what", "why", "fix"),
    [
        (
            CSV,
            ["name", "text"],
            "no column of file names",
            ANY_OF_FILES + "name, text",
            "name the columns in the first line of metadata.csv, e.g. `file_name,text`",
        ),
        (
            CSV,
            ["file", "size"],
            "no column of captions",
            ANY_OF_CAPTIONS + "file, size",
            "name the columns in the first line of metadata.csv, e.g. `file_name,text`",
        ),
        (
            JSONL,
            ["file"],
            "no column of captions",
            ANY_OF_CAPTIONS + "file",
            'give every line of metadata.jsonl the form {"file_name": "a.jpg", "text": "a caption"}',
        ),
        (
            JSONL,
            ["file", "text", "caption", "prompt"],
            "3 columns of captions",
            "each of text, caption, prompt could be meant; found columns: file, text, caption, prompt",
            "keep one of them",
        ),
        (
            CSV,
            ["file", "file", "text"],
            "2 columns of file names",
            "each of file, file could be meant; found columns: file, file, text",
            "keep one of them",
        ),
    ],
)
def test_columns_that_cannot_be_chosen(path, columns, what, why, fix):
    with pytest.raises(TableError) as caught:
        choose_columns(path, 3, columns)
    error = caught.value
    assert (error.what, error.where, error.why, error.fix) == (f"{path.name}: {what}", f"{path}:3", why, fix)


@pytest.mark.parametrize("columns", [[], ["file"], ["text"], ["a.jpg", "a cat"], ["file_name text"]])
def test_cells_that_are_no_header(columns):
    assert not has_columns(columns)


def test_two_of_a_kind_are_a_header_and_an_error():
    assert has_columns(["file", "path", "text"])
    with pytest.raises(TableError):
        choose_columns(CSV, 1, ["file", "path", "text"])


def test_an_error_of_the_whole_file_has_no_line():
    assert table_error(CSV, 0, "x", "y", "z").where == str(CSV)
    assert table_error(CSV, 7, "x", "y", "z").where == f"{CSV}:7"


@pytest.mark.parametrize("caption", ["", " x ", "NA", "a\nb", "\u2028", "\U0001f431"])
def test_a_caption_is_kept_as_it_is(caption):
    assert make_row("t.csv", 4, "a.jpg", caption) == Row(name="a.jpg", caption=caption, line=4)


@pytest.mark.parametrize(
    ("caption", "cause", "detail"),
    [
        (None, "table-row", "t.jsonl:4 has None as the caption, expected text"),
        (5, "table-row", "t.jsonl:4 has 5 as the caption, expected text"),
        (["a"], "table-row", "t.jsonl:4 has ['a'] as the caption, expected text"),
        ("ab\ud800", "caption-unicode", "half a surrogate pair (U+D800) at character 2"),
        ("a\0", "caption-unicode", "the caption in t.jsonl:4 has "),
    ],
)
def test_a_caption_that_is_refused(caption, cause, detail):
    row = make_row("t.jsonl", 4, "a.jpg", caption)
    assert (row.name, row.caption, row.line, row.cause) == ("a.jpg", "", 4, cause)
    assert detail in row.detail


@given(st.text(max_size=1000) | st.lists(st.integers(), max_size=200))
def test_values_are_shown_on_one_short_line(value):
    text = shown(value)
    assert text.isprintable()
    assert len(text) <= 203
    assert text == repr(value) or text == repr(value)[:200] + "..."


@given(st.lists(st.text(max_size=40), max_size=20))
def test_columns_are_listed_on_one_short_line(columns):
    text = listed(columns)
    assert text.isprintable()
    assert len(text) <= 203


def test_columns_are_listed_as_they_are_written():
    assert listed(["file name", "b\tc", "\ufeffd"]) == "file name, 'b\\tc', '\\ufeffd'"

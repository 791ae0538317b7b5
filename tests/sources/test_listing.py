"""Rows against files: every row and every picture ends somewhere."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.sources.listing import leads_out, picture_named, use_table
from latentcache.sources.rows import Row, make_row
from latentcache.sources.walk import walk_pictures

TABLE = "metadata.csv"


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def listed(root: Path, *rows: tuple[str, str] | Row):
    """What the rows come to; the first one is on line 2."""
    made = [row if isinstance(row, Row) else make_row(TABLE, line, *row) for line, row in enumerate(rows, start=2)]
    return use_table(TABLE, made, walk_pictures(root))


def words(refusals):
    assert all(item.hint for item in refusals)
    return [(item.name, item.cause, item.detail) for item in refusals]


def test_rows_are_samples_and_other_pictures_are_noted(tmp_path):
    put(tmp_path, "a.jpg", "sub/b.jpg", "c.jpg")
    result = listed(tmp_path, ("sub/b.jpg", "two"), ("a.jpg", ""))
    assert [(sample.name, sample.caption) for sample in result.samples] == [("sub/b.jpg", "two"), ("a.jpg", "")]
    assert words(result.notes) == [("c.jpg", "unlisted", "metadata.csv has no row for it")]
    assert result.notes[0].stat == dict(walk_pictures(tmp_path).pictures)[result.notes[0].name]
    assert result.refused == []


@pytest.mark.parametrize("raw", ["./a.jpg", ".//a.jpg", "sub/./b.jpg", "sub//b.jpg", ".\\a.jpg", "sub\\b.jpg"])
def test_harmless_spellings_are_the_same_file(tmp_path, raw):
    put(tmp_path, "a.jpg", "sub/b.jpg")
    result = listed(tmp_path, (raw, "x"))
    assert [sample.name for sample in result.samples] == ["a.jpg" if "a" in raw else "sub/b.jpg"]
    assert ("backslash" in {note.cause for note in result.notes}) == ("\\" in raw)


def test_backslashes_are_counted_in_one_note(tmp_path):
    put(tmp_path, "sub/a.jpg", "sub/b.jpg")
    result = listed(tmp_path, ("sub\\a.jpg", "x"), ("sub\\b.jpg", "y"))
    detail = "2 rows have paths with \\, the first on line 2; read as /"
    assert words(result.notes) == [(TABLE, "backslash", detail)]


def test_a_backslash_in_a_file_name_is_part_of_it(tmp_path):
    put(tmp_path, "sub\\a.jpg", "sub/a.jpg")
    result = listed(tmp_path, ("sub\\a.jpg", "x"))
    assert [sample.name for sample in result.samples] == ["sub\\a.jpg"]
    assert [note.cause for note in result.notes] == ["unlisted"]


@pytest.mark.parametrize(
    "raw",
    [
        "/etc/passwd.jpg",
        "../a.jpg",
        "sub/../a.jpg",
        "..",
        "C:\\pics\\a.jpg",
        "c:a.jpg",
        "..\\a.jpg",
        "\\\\host\\a.jpg",
    ],
)
def test_a_name_that_leads_out_is_refused(tmp_path, raw):
    put(tmp_path, "a.jpg", "sub/x.png")
    assert leads_out(raw)
    question = "; did you mean a.jpg?" if "a.jpg" in raw.replace("c:", "/") else ""
    question = question if raw != "c:a.jpg" else ""
    detail = f"metadata.csv:2 names a file outside the data folder{question}"
    assert words(listed(tmp_path, (raw, "x")).refused) == [(raw, "outside-root", detail)]


def test_an_absolute_path_into_the_folder_is_refused_with_the_right_name(tmp_path):
    put(tmp_path, "sub/a.jpg")
    result = listed(tmp_path, (str(tmp_path / "sub/a.jpg"), "x"))
    assert result.refused[0].detail.endswith("; did you mean sub/a.jpg?")
    assert result.refused[0].hint.endswith("write its path relative to that folder")
    assert [note.name for note in result.notes] == ["sub/a.jpg"]


@pytest.mark.parametrize(
    ("raw", "question"),
    [
        ("gone.jpg", ""),
        ("A.JPG", "; did you mean sub/a.jpg?"),
        ("a.jpg", "; did you mean sub/a.jpg?"),
        ("other/a.jpg ", "; did you mean sub/a.jpg?"),
        ("a", "; did you mean sub/a.jpg?"),
        ("a.png", "; did you mean sub/a.jpg?"),
        ("cafe\u0301.jpg", "; did you mean caf\u00e9.jpg?"),
    ],
)
def test_a_file_that_is_not_there_is_refused_with_the_nearest_name(tmp_path, raw, question):
    put(tmp_path, "sub/a.jpg", "caf\u00e9.jpg")
    detail = f"metadata.csv:2 names it, and there is no such file{question}"
    assert words(listed(tmp_path, (raw, "x")).refused) == [(raw, "not-found", detail)]


def test_a_file_of_another_kind_is_refused(tmp_path):
    put(tmp_path, "a.psd")
    detail = "metadata.csv:2 names it, but its extension is none of a picture that is read"
    assert words(listed(tmp_path, ("a.psd", "x")).refused) == [("a.psd", "unknown", detail)]


def test_a_picture_that_the_walk_refused_or_noted_has_one_item(tmp_path):
    put(tmp_path, ".hidden.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    walk = walk_pictures(tmp_path)
    result = listed(tmp_path, ("pipe.jpg", "x"), (".hidden.jpg", "x"))
    assert (result.samples, result.refused, result.notes) == ([], [], [])
    assert [item.cause for item in (*walk.refused, *walk.notes)] == ["not-regular", "hidden"]


def test_two_rows_for_one_file(tmp_path):
    put(tmp_path, "a.jpg")
    result = listed(
        tmp_path, ("a.jpg", "one"), ("./a.jpg", "one"), ("a.jpg", "two"), ("gone.jpg", ""), ("gone.jpg", "")
    )
    assert [(sample.name, sample.caption) for sample in result.samples] == [("a.jpg", "one")]
    assert words(result.notes) == [
        (TABLE, "duplicate-row", "lines 2 and 3 are both for a.jpg, with the same caption"),
        (TABLE, "duplicate-row", "lines 2 and 4 are both for a.jpg, with another caption; that of line 2 is used"),
        (TABLE, "duplicate-row", "lines 5 and 6 are both for gone.jpg, with the same caption"),
    ]
    assert [item.cause for item in result.refused] == ["not-found"]


def test_a_row_without_a_usable_caption_refuses_its_picture(tmp_path):
    put(tmp_path, "a.jpg")
    result = listed(tmp_path, ("a.jpg", "x\0"))
    assert words(result.refused) == [
        ("a.jpg", "caption-unicode", "the caption in metadata.csv:2 has a NUL at character 1")
    ]
    assert result.refused[0].stat is not None
    assert (result.samples, result.notes) == ([], [])


@pytest.mark.parametrize("raw", ["\ud800.jpg", "a\0.jpg", "", ".", "x" * 5000 + ".jpg"])
def test_names_that_no_file_can_have(tmp_path, raw):
    (item,) = listed(tmp_path, (raw, "x")).refused
    assert item.cause == "not-found"
    assert 0 < len(os.fsencode(item.name)) <= 1000
    json.dumps(item.name)


def test_a_name_that_is_not_utf8_is_found_by_its_escapes(tmp_path):
    raw = b"caf\xe9.jpg"
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + raw)).touch()
    assert [os.fsencode(sample.name) for sample in listed(tmp_path, (os.fsdecode(raw), "x")).samples] == [raw]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab./\\:\0\ud800C", max_size=8), max_size=8))
def test_every_row_and_every_picture_ends_somewhere(tmp_path_factory, raws):
    root = tmp_path_factory.getbasetemp() / "ends"
    put(root, "a.jpg", "b/a.jpg", "b/b.png")
    names = [f"{raw}.jpg" for raw in raws]
    result = listed(root, *((name, "x") for name in names))
    duplicates = sum(note.cause == "duplicate-row" for note in result.notes)
    assert len(result.samples) + len(result.refused) + duplicates == len(names)
    unlisted = {note.name for note in result.notes if note.cause == "unlisted"}
    used = {sample.name for sample in result.samples}
    assert unlisted | used == {"a.jpg", "b/a.jpg", "b/b.png"}
    assert not unlisted & used
    assert len({item.name for item in result.refused}) == len(result.refused)


def test_looking_up_never_leaves_the_folder():
    assert picture_named("../a.jpg", {"a.jpg"}) == ""
    assert picture_named("/a.jpg", {"a.jpg"}) == ""
    assert not leads_out("a..b/..c/d...jpg")

"""One name of a folder: what it is taken for."""

import os
from collections import Counter

import pytest

from latentcache.sources.sorting import Folder, Level, Said, extension_of, is_inside, sort_out, stateless


def sorted_out(root, **more):
    """Level and words after all names of a folder."""
    level, said = Level(), Said(str(root), os.path.realpath(root))
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            sort_out(entry, Folder(str(root), "", **more), level, said)
    return level, said


def test_every_name_has_its_place(tmp_path):
    for name in ("a.jpg", "b.PNG", "c.txt", "d.Caption", "e.xyz"):
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "mine.latentcache").mkdir()
    level, said = sorted_out(tmp_path)
    assert list(level.pictures) == ["a.jpg", "b.PNG"]
    assert level.folders == [Folder(f"{tmp_path}/sub", "sub/")]
    assert level.texts == {"c.txt": "c.txt", "d.caption": "d.Caption"}
    assert said.others == Counter({".txt": 1, ".caption": 1, ".xyz": 1})
    assert [(note.name, note.cause) for note in said.notes] == [("mine.latentcache/", "cache-folder")]


def test_in_a_hidden_folder_pictures_are_noted(tmp_path):
    (tmp_path / "a.jpg").touch()
    level, said = sorted_out(tmp_path, hidden=True)
    assert (level.pictures, [note.cause for note in said.notes]) == ({}, ["hidden"])


@pytest.mark.parametrize("linked_first", [True, False])
def test_a_loop_keeps_its_own_name(tmp_path, linked_first):
    (tmp_path / "up").symlink_to(".")
    said = Said(str(tmp_path), os.path.realpath(tmp_path))
    for linked in (linked_first, not linked_first):
        with os.scandir(tmp_path) as entries:
            for entry in entries:
                prefix = "linked/" if linked else ""
                (tmp_path / "linked").mkdir(exist_ok=True)
                sort_out(entry, Folder(str(tmp_path), prefix, linked=linked), Level(), said)
    (known,) = said.loops.values()
    assert (known[0], known[1].name) == (False, "up")


def test_words_on_what_has_no_state():
    assert stateless("a.jpg", FileNotFoundError(2, "gone")).cause == "vanished"
    assert stateless("a.jpg", PermissionError(13, "Permission denied")).cause == "permission"


def test_extensions_and_places(tmp_path):
    assert [extension_of(name) for name in ("a.JPG", "a", "a.b.Png")] == [".jpg", "", ".png"]
    assert is_inside(f"{tmp_path}/x", os.path.realpath(tmp_path))
    assert not is_inside(f"{tmp_path}x", os.path.realpath(tmp_path))

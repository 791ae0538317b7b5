"""The inventory lists, rejects or notes every file, and ends."""

import subprocess
from pathlib import Path

import pytest
from made_folders import put
from small_cache import SMALL, as_nobody, draw

from latentcache.errors import SourceError, SourceNotFoundError
from latentcache.fields.table import Rejected
from latentcache.sources.causes import Notes
from latentcache.sources.inventory import Inventory


def walked(root: Path) -> tuple[list[str], tuple[Rejected, ...]]:
    """Names of files, and notes."""
    names, notes = list[str](), Notes()
    for folder in Inventory(root).below():
        names += [folder.prefix + name for name in folder.names]
        notes.add(*folder.notes)
    return names, notes.all()


def test_deep_folders_are_listed_as_far_as_the_system_has_names_for_them(tmp_path):
    path = root = tmp_path / "deep"
    root.mkdir()
    try:
        for _ in range(1200):
            path /= "a"
            path.mkdir()
        (path / "a.jpg").write_bytes(b"x")
        assert walked(root)[0] == ["a/" * 1200 + "a.jpg"]
    finally:  # pytest removes old folders by recursion
        subprocess.run(["rm", "-rf", root], check=True)


def test_many_notes_of_one_reason_are_counted(tmp_path):
    put(tmp_path, {f".{number:03d}.jpg": "x" for number in range(250)})
    *first, last = walked(tmp_path)[1]
    assert (len(first), {note.count for note in first}) == (100, {1})
    assert (last.name, last.reason, last.count) == (".100.jpg", "hidden", 150)


def test_a_root_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(SourceNotFoundError) as caught:
        walked(tmp_path / "gone")
    assert (caught.value.what, caught.value.why) == (
        f"no such folder: {tmp_path / 'gone'}",
        "No such file or directory",
    )
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceError, match="Too many levels of symbolic links"):
        walked(tmp_path / "loop")


def test_a_folder_that_cannot_be_listed_is_rejected_for_another_user(open_folder, tmp_path):
    for name in ("open/a.png", "closed/b.png", "nostat/c.png"):
        draw(open_folder / "data" / name)
    draw(tmp_path / "warm" / "a.png")
    (open_folder / "data/closed").chmod(0)
    (open_folder / "data/nostat").chmod(0o444)
    done = as_nobody(["inspect", tmp_path / "warm", *SMALL], ["inspect", open_folder / "data", *SMALL, "--json"])
    rejected = [
        (item["path"], item["reason"], item["found"])
        for item in done.json["items"]
        if item["category"] == "quarantined"
    ]
    assert rejected == [
        ("closed/", "permission", "the folder cannot be listed: Permission denied"),
        ("nostat/c.png", "permission", "its state cannot be read: Permission denied"),
    ]
    assert done.json["counts"]["samples"] == 3


def test_the_digest_is_of_names_and_sizes_alone(tmp_path):
    for root in ("a", "b"):
        put(tmp_path / root, {"x.jpg": "x", "deep/y.txt": "x"})
    digests = [Inventory(tmp_path / root).digest() for root in ("a", "b")]
    assert digests[0] == digests[1]
    (tmp_path / "b" / "x.jpg").write_bytes(b"xx")
    assert Inventory(tmp_path / "b").digest() != digests[0]
    assert Inventory(tmp_path / "b").digest(("deep",)) == Inventory(tmp_path / "a").digest(("deep",))

"""The inventory lists, rejects or notes every file, and ends."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from latentcache.errors import SourceError
from latentcache.fields.table import Rejected
from latentcache.identity.content import StatMemo
from latentcache.sources.causes import Notes, in_order
from latentcache.sources.inventory import Inventory, count_unused

NOBODY = 65534


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


class WalkResult:
    def __init__(self, root: Path, **options: bool) -> None:
        self.inventory = Inventory(root, **options)
        self.names, self.stats, self.rejected = list[str](), dict[str, list[int]](), list[Rejected]()
        notes = Notes()
        for folder in self.inventory.below():
            names = [folder.prefix + name for name in folder.names]
            self.names = sorted([*self.names, *names], key=os.fsencode)
            self.stats |= dict(zip(names, folder.stats.tolist(), strict=True))
            self.rejected += folder.rejected.values()
            notes.add(*folder.notes)
            count_unused(notes, (folder.prefix + name for name in folder.loose))
        assert sorted(self.stats) == sorted(self.names)
        self.rejected = in_order(self.rejected)
        self.notes = notes.all()


def causes(items: tuple[Rejected, ...]) -> list[tuple[str, str]]:
    assert all(item.detail and item.hint for item in items)
    return [(item.name, item.reason) for item in items]


def test_suffixes_match_in_any_case_and_byte_order(tmp_path):
    put(tmp_path, "b.JPG", "a/z.png", "a.jpg", "a-b.WebP", "Z.tiff", "é.avif", "notes.txt", "x.psd", "jpg", "c.Heic")
    walk = WalkResult(tmp_path)
    names = ["Z.tiff", "a-b.WebP", "a.jpg", "a/z.png", "b.JPG", "c.Heic", "jpg", "notes.txt", "x.psd", "é.avif"]
    assert walk.names == names
    assert walk.rejected == ()
    assert walk.inventory.top.counts[".heic"] == 1
    assert walk.inventory.top.others == ("jpg", "x.psd")
    assert walk.stats["a.jpg"] == list(StatMemo.of((tmp_path / "a.jpg").stat()).identity)


def test_links_inside_the_root_are_followed_and_others_rejected(tmp_path):
    root, outside = tmp_path / "data", tmp_path / "outside"
    put(root, "real/a.jpg")
    put(outside, "b.jpg")
    os.mkfifo(root / "pipe")
    (root / "link.jpg").symlink_to("real/a.jpg")
    (root / "out.jpg").symlink_to(outside / "b.jpg")
    (root / "out-folder").symlink_to(outside)
    (root / "broken.jpg").symlink_to("nowhere.jpg")
    (root / "broken").symlink_to("nowhere")
    (root / "self.jpg").symlink_to("self.jpg")
    (root / "pipe.jpg").symlink_to("pipe")
    (root / "zero.jpg").symlink_to("/dev/zero")
    walk = WalkResult(root)
    assert walk.names == ["link.jpg", "real/a.jpg"]
    assert walk.stats["link.jpg"] == walk.stats["real/a.jpg"]
    assert causes(walk.rejected) == [
        ("broken.jpg", "not-found"),
        ("out-folder", "outside-root"),
        ("out.jpg", "outside-root"),
        ("pipe.jpg", "not-regular"),
        ("self.jpg", "symlink-loop"),
        ("zero.jpg", "outside-root"),
    ]
    assert causes(walk.notes) == [("broken", "not-found"), ("pipe", "unused")]
    assert walk.rejected[2].detail == f"the link leads to {outside / 'b.jpg'}"


def test_deep_folders_are_listed_as_far_as_the_system_has_names_for_them(tmp_path):
    path = root = tmp_path / "deep"
    root.mkdir()
    try:
        for _ in range(1200):
            path /= "a"
            path.mkdir()
        (path / "a.jpg").write_bytes(b"x")
        assert WalkResult(root).names == ["a/" * 1200 + "a.jpg"]
    finally:  # pytest removes old folders by recursion
        subprocess.run(["rm", "-rf", root], check=True)


def test_many_notes_of_one_reason_are_counted(tmp_path):
    put(tmp_path, *(f".{number:03d}.jpg" for number in range(250)))
    *first, last = WalkResult(tmp_path).notes
    assert (len(first), {note.count for note in first}) == (100, {1})
    assert (last.name, last.reason, last.count) == (".100.jpg", "hidden", 150)


def test_a_root_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(SourceError) as caught:
        WalkResult(tmp_path / "gone")
    assert caught.value.what == f"the data folder cannot be listed: {tmp_path / 'gone'}"
    assert caught.value.why == "No such file or directory"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceError, match="Too many levels of symbolic links"):
        WalkResult(tmp_path / "loop")


def test_a_folder_that_cannot_be_listed_is_rejected_for_another_user(tmp_path):
    put(tmp_path, "open/a.jpg", "closed/b.jpg", "nostat/c.jpg")
    tmp_path.chmod(0o755)
    (tmp_path / "closed").chmod(0)
    (tmp_path / "nostat").chmod(0o444)
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from latentcache.errors import SourceError
        from latentcache.sources.inventory import Inventory
        os.chdir(sys.argv[1])
        if os.geteuid() == 0:
            os.setgid(int(sys.argv[2]))
            os.setuid(int(sys.argv[2]))
        folders = list(Inventory(Path(".")).below())
        names = [folder.prefix + name for folder in folders for name in folder.names]
        rejected = [item for folder in folders for item in folder.rejected.values()]
        result = [names, [(item.name, item.reason, item.detail) for item in rejected]]
        try:
            Inventory(Path("closed")).top
        except SourceError as error:
            result.append(error.why)
        sys.stdout.write(repr(result))
    """)
    command = [sys.executable, "-c", script, str(tmp_path), str(NOBODY)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    (tmp_path / "closed").chmod(0o755)
    (tmp_path / "nostat").chmod(0o755)
    assert answer.returncode == 0, answer.stderr
    rejected = [
        ("closed/", "permission", "the folder cannot be listed: Permission denied"),
        ("nostat/c.jpg", "permission", "its state cannot be read: Permission denied"),
    ]
    assert answer.stdout == repr([["open/a.jpg"], rejected, "Permission denied"])


def test_the_digest_is_of_names_and_sizes_alone(tmp_path):
    for root in ("a", "b"):
        put(tmp_path / root, "x.jpg", "deep/y.txt")
    digests = [Inventory(tmp_path / root).digest() for root in ("a", "b")]
    assert digests[0] == digests[1]
    (tmp_path / "b" / "x.jpg").write_bytes(b"xx")
    assert Inventory(tmp_path / "b").digest() != digests[0]
    assert Inventory(tmp_path / "b").digest(("deep",)) == Inventory(tmp_path / "a").digest(("deep",))

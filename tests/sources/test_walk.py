"""The walk: every picture file is listed, refused or noted, and the walk ends."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.errors import SourceError
from latentcache.identity.stat import StatMemo
from latentcache.sources.sample import Refusal
from latentcache.sources.sorting import PICTURE_EXTENSIONS
from latentcache.sources.walk import Walk, walk_pictures

NOBODY = 65534


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names(walk: Walk) -> list[str]:
    return [name for name, _ in walk.pictures]


def causes(refusals: tuple[Refusal, ...]) -> list[tuple[str, str]]:
    assert all(item.detail and item.hint for item in refusals)
    return [(item.name, item.cause) for item in refusals]


def test_pictures_by_extension_in_any_case_in_byte_order(tmp_path):
    put(tmp_path, "b.JPG", "a/z.png", "a.jpg", "a-b.WebP", "Z.tiff", "é.avif", "notes.txt", "x.psd", "jpg", "c.heic")
    walk = walk_pictures(tmp_path)
    assert names(walk) == ["Z.tiff", "a-b.WebP", "a.jpg", "a/z.png", "b.JPG", "c.heic", "é.avif"]
    assert walk.others == {".txt": 1, ".psd": 1, "": 1}
    assert walk.texts == {"notes.txt": "notes.txt"}
    assert (walk.refused, walk.notes) == ((), ())
    assert dict(walk.pictures)["a.jpg"] == StatMemo.of((tmp_path / "a.jpg").stat())


@pytest.mark.parametrize("extension", sorted(PICTURE_EXTENSIONS))
def test_each_extension_is_a_picture(tmp_path, extension):
    put(tmp_path, f"a{extension}", f"b{extension.upper()}")
    assert names(walk_pictures(tmp_path)) == [f"a{extension}", f"b{extension.upper()}"]


def test_odd_names_come_back_as_their_bytes(tmp_path):
    raw = [b"caf\xe9.jpg", b"line\nbreak.jpg", "sn\u00f6w \U0001f40d.jpg".encode(), b"\xff\xfe/\x80.png"]
    for name in raw:
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert [os.fsencode(name) for name in names(walk_pictures(tmp_path))] == sorted(raw)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.binary(min_size=1, max_size=12).filter(lambda raw: not set(raw) & set(b"\0/."))))
def test_any_file_names_are_found_in_byte_order(tmp_path_factory, stems):
    root = tmp_path_factory.mktemp("names")
    for stem in stems:
        Path(os.fsdecode(os.fsencode(root) + b"/" + stem + b".jpg")).touch()
    assert [os.fsencode(name) for name in names(walk_pictures(root))] == sorted(stem + b".jpg" for stem in stems)


def test_what_is_no_regular_file_is_refused_but_a_folder_is_walked(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    put(tmp_path, "folder.jpg/a.jpg", "tail.txt")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.png"))
        walk = walk_pictures(tmp_path)
    assert names(walk) == ["folder.jpg/a.jpg"]
    assert causes(walk.refused) == [("pipe.jpg", "not-regular"), ("socket.png", "not-regular")]
    assert [item.detail for item in walk.refused] == [
        "it is a named pipe, not a regular file",
        "it is a socket, not a regular file",
    ]


def test_links_inside_the_root_are_followed_and_others_refused(tmp_path):
    root, outside = tmp_path / "data", tmp_path / "outside"
    put(root, "real/a.jpg")
    put(outside, "b.jpg", "b.txt")
    os.mkfifo(root / "pipe")
    (root / "link.jpg").symlink_to("real/a.jpg")
    (root / "out.jpg").symlink_to(outside / "b.jpg")
    (root / "out.txt").symlink_to(outside / "b.txt")
    (root / "out-folder").symlink_to(outside)
    (root / "broken.jpg").symlink_to("nowhere.jpg")
    (root / "broken").symlink_to("nowhere")
    (root / "self.jpg").symlink_to("self.jpg")
    (root / "pipe.jpg").symlink_to("pipe")
    (root / "zero.jpg").symlink_to("/dev/zero")
    walk = walk_pictures(root)
    assert names(walk) == ["link.jpg", "real/a.jpg"]
    assert dict(walk.pictures)["link.jpg"] == dict(walk.pictures)["real/a.jpg"]
    assert causes(walk.refused) == [
        ("broken.jpg", "not-found"),
        ("out-folder", "outside-root"),
        ("out.jpg", "outside-root"),
        ("pipe.jpg", "not-regular"),
        ("self.jpg", "symlink-loop"),
        ("zero.jpg", "outside-root"),
    ]
    assert causes(walk.notes) == [("broken", "not-found")]
    assert walk.outside_texts == {"out.txt"}
    assert walk.refused[2].detail == f"the link leads to {outside / 'b.jpg'}"


def test_a_root_that_is_a_link_is_its_target(tmp_path):
    put(tmp_path / "data", "a.jpg")
    (tmp_path / "data" / "b.jpg").symlink_to("a.jpg")
    (tmp_path / "link").symlink_to("data")
    assert names(walk_pictures(tmp_path / "link")) == ["a.jpg", "b.jpg"]


def test_a_loop_of_folders_is_reported_once(tmp_path):
    put(tmp_path, "a.jpg", "deep/er/b.jpg")
    (tmp_path / "deep" / "er" / "up").symlink_to("../..")
    (tmp_path / "again").symlink_to("deep")
    walk = walk_pictures(tmp_path)
    assert names(walk) == ["a.jpg", "again/er/b.jpg", "deep/er/b.jpg"]
    assert causes(walk.refused) == [("deep/er/up", "symlink-loop")]
    assert walk.refused[0].detail == "the link leads to ../.., a folder above it"


def test_folders_that_link_to_each_other_end(tmp_path):
    count = 12
    for i in range(count):
        put(tmp_path, f"d{i:02d}/p.jpg")
        for j in range(count):
            (tmp_path / f"d{i:02d}" / f"to{j:02d}").symlink_to(f"../d{j:02d}")
    walk = walk_pictures(tmp_path)
    assert len(names(walk)) == count + count * (count - 1)
    assert {item.cause for item in walk.refused} == {"symlink-loop"}
    assert {item.cause for item in walk.notes} == {"nested-link"}


def test_hidden_pictures_are_noted(tmp_path):
    put(tmp_path, "a.jpg", "._a.jpg", ".thumbs/deep/b.jpg", ".git/config", ".jpg")
    (tmp_path / ".link.jpg").symlink_to("a.jpg")
    walk = walk_pictures(tmp_path)
    assert names(walk) == ["a.jpg"]
    assert causes(walk.notes) == [
        ("._a.jpg", "hidden"),
        (".jpg", "hidden"),
        (".link.jpg", "hidden"),
        (".thumbs/deep/b.jpg", "hidden"),
    ]


def test_links_into_a_hidden_store_are_followed(tmp_path):
    put(tmp_path, ".store/objects/0001")
    (tmp_path / "a.jpg").symlink_to(".store/objects/0001")
    assert names(walk_pictures(tmp_path)) == ["a.jpg"]


def test_caches_are_passed_over(tmp_path):
    put(
        tmp_path,
        "a.jpg",
        "set.latentcache/x.jpg",
        "mine/CURRENT",
        "mine/generations/1/x.png",
        "CURRENT",
        "my/CURRENT",
    )
    put(tmp_path, "my/b.jpg", "generations/c.jpg")
    walk = walk_pictures(tmp_path)
    assert names(walk) == ["a.jpg", "generations/c.jpg", "my/b.jpg"]
    assert causes(walk.notes) == [("mine/", "cache-folder"), ("set.latentcache/", "cache-folder")]


def make_deep(root: Path, part: str, depth: int) -> None:
    """Folders in folders, made from within, because the whole path may be longer than the system takes."""
    here = os.open(".", os.O_RDONLY)
    os.chdir(root)
    try:
        for _ in range(depth):
            Path(part).mkdir()
            os.chdir(part)
        Path("a.jpg").touch()
    finally:
        os.fchdir(here)
        os.close(here)


def walk_and_remove(root: Path) -> Walk:
    """Removed at once: the tree is deeper than ``shutil.rmtree`` goes."""
    walk = walk_pictures(root)
    subprocess.run(["rm", "-r", str(root)], check=True)
    return walk


def test_depth_is_no_limit_of_the_stack(tmp_path):
    make_deep(tmp_path, "d", 1200)
    assert names(walk_and_remove(tmp_path)) == ["d/" * 1200 + "a.jpg"]


def test_a_path_longer_than_the_system_takes_is_refused_by_name(tmp_path):
    put(tmp_path, "a.jpg")
    make_deep(tmp_path, "d" * 200, 21)
    walk = walk_and_remove(tmp_path)
    assert names(walk) == ["a.jpg"]
    assert [item.cause for item in walk.refused] == ["io-error"]
    assert walk.refused[0].detail == "the folder cannot be listed: File name too long"


def test_caption_files_in_any_case_with_the_lower_one_first(tmp_path):
    put(tmp_path, "a.TXT", "b.txt", "b.TXT", "c.Caption")
    assert walk_pictures(tmp_path).texts == {"a.txt": "a.TXT", "b.txt": "b.txt", "c.caption": "c.Caption"}


def test_a_root_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(SourceError) as caught:
        walk_pictures(tmp_path / "gone")
    assert caught.value.what == f"the data folder cannot be listed: {tmp_path / 'gone'}"
    assert caught.value.why == "No such file or directory"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceError, match="Too many levels of symbolic links"):
        walk_pictures(tmp_path / "loop")


def test_a_folder_that_cannot_be_listed_is_refused_for_another_user(tmp_path):
    put(tmp_path, "open/a.jpg", "closed/b.jpg", "nostat/c.jpg")
    tmp_path.chmod(0o755)
    (tmp_path / "closed").chmod(0)
    (tmp_path / "nostat").chmod(0o444)
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from latentcache.errors import SourceError
        from latentcache.sources.walk import walk_pictures
        os.chdir(sys.argv[1])
        if os.geteuid() == 0:
            os.setgid(int(sys.argv[2]))
            os.setuid(int(sys.argv[2]))
        walk = walk_pictures(Path("."))
        said = [[n for n, _ in walk.pictures], [(r.name, r.cause, r.detail) for r in walk.refused]]
        try:
            walk_pictures(Path("closed"))
        except SourceError as error:
            said.append(error.why)
        sys.stdout.write(repr(said))
    """)
    command = [sys.executable, "-c", script, str(tmp_path), str(NOBODY)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    (tmp_path / "closed").chmod(0o755)
    (tmp_path / "nostat").chmod(0o755)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == repr(
        [
            ["open/a.jpg"],
            [
                ("closed/", "permission", "the folder cannot be listed: Permission denied"),
                ("nostat/c.jpg", "permission", "its state cannot be read: Permission denied"),
            ],
            "Permission denied",
        ]
    )


def test_a_table_below_the_data_folder_is_not_overlooked_in_silence(tmp_path):
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "metadata.csv").write_text("file_name,text\n")
    (note,) = walk_pictures(tmp_path).notes
    assert (note.name, note.cause) == ("sub/metadata.csv", "nested-table")
    assert "move it to the top" in note.hint

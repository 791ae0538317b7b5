"""Folders of images: every file is a sample, rejected or noted; captions, tables and known samples."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_folders import put, reasons

from latentcache.errors import EmptySourceError, SourceError, SourceNotFoundError, UsageError
from latentcache.fields.table import Rejected
from latentcache.identity.content import content_hash
from latentcache.sources import known
from latentcache.sources.options import Part, SourceOptions
from latentcache.sources.scan import Listing, scan

LOOKED_FOR = "looked for .avif .bmp .gif .heic .heif .jfif .jpe .jpeg .jpg .jxl .mkv .mov .mp4 .png .svg .tif .tiff"
LOOKED_FOR += " .webm .webp; "
IMAGES = SourceOptions(kind="images")


def captions(listing: Listing) -> list[tuple[str, str]]:
    return list(zip(listing.samples.names, listing.samples.inputs["caption"].text, strict=True))


@pytest.fixture
def trusting(monkeypatch):
    monkeypatch.setattr(known, "RACY_NS", 0)  # trust every file at once


def test_a_lost_caption_file_that_is_not_used_leaves_its_image(tmp_path):
    put(tmp_path, {"a.jpg": "x", "b.jpg": "x", "b.txt": "used"})
    (tmp_path / "a.txt").symlink_to("nowhere")
    (tmp_path / "b.caption").symlink_to("nowhere")
    assert captions(scan(tmp_path, SourceOptions(caption_ext="cap"))) == [("a.jpg", ""), ("b.jpg", "")]
    listing = scan(tmp_path)
    assert captions(listing) == [("b.jpg", "used")]
    assert reasons(listing.rejected) == [("a.jpg", "not-found"), ("b.caption", "not-found")]
    put(tmp_path, {"metadata.csv": "file_name,text\na.jpg,one\nb.jpg,two\n"})
    assert captions(scan(tmp_path)) == [("a.jpg", "one"), ("b.jpg", "two")]


def test_other_names_of_caption_files(tmp_path):
    put(tmp_path, dict.fromkeys(("a.jpg", "b.jpg", "c.png", "d.jpg", "e.jpg", "f.jpg"), "x"))
    put(tmp_path, {"a.jpg.txt": "beside", "b.json": '{"tags": 1, "text": " in json "}', "c.json": '{"url": "x"}'})
    put(tmp_path, {"d.json": '{"caption": 3}', "e.json": "{", "f.txt": "f", "f.json": "{}"})
    put(tmp_path, {"f.jpg.txt": "other", "info.json": "{}"})
    listing = scan(tmp_path)
    assert captions(listing) == [("a.jpg", "beside"), ("b.jpg", "in json"), ("c.png", ""), ("f.jpg", "f")]
    assert reasons(listing.rejected) == [("d.jpg", "caption-json"), ("e.jpg", "caption-json")]
    assert "caption file d.json: expected text as the caption, found 3" in listing.rejected[0].detail
    assert [(note.name, note.reason, note.count) for note in listing.notes] == [
        ("c.png", "no-caption", 1),
        ("f.jpg.txt", "caption-conflict", 1),
        ("f.json", "unused", 2),
    ]
    assert listing.images.captions == {"sidecar .txt": 2, "sidecar .json": 1, "none": 1}
    assert (listing.images.first_without, listing.images.set_samples) == ("c.png", (4,))


def paired_files(listing, name):
    files, positions = list(listing.samples.files.names), listing.samples.inputs[name].file.tolist()
    return [files[at] if at >= 0 else "" for at in positions]


def test_folders_of_masks_and_control_images_have_the_names_of_the_images(tmp_path):
    put(tmp_path, {"img/a.jpg": "x", "img/sub/a.jpg": "y", "img/c.jpg": "z"})
    put(tmp_path, dict.fromkeys(("masks/a.png", "masks/sub/a.webp", "edges/img/a.png", "edges/c.jpg"), "m"))
    put(tmp_path, dict.fromkeys(("depth/c.png", "depth/d.png"), "m"))
    listing = scan(tmp_path, SourceOptions(masks="masks", controls=("edges", str(tmp_path / "depth"))))
    assert list(listing.samples.names) == ["img/a.jpg", "img/c.jpg", "img/sub/a.jpg"]
    assert paired_files(listing, "mask") == ["masks/a.png", "", "masks/a.png"], "by file name: the set is all of DATA"
    assert paired_files(listing, "control") == ["edges/img/a.png", "edges/c.jpg", ""]
    assert paired_files(listing, "control_2") == ["", "depth/c.png", ""]
    assert [(note.name, note.reason, note.detail) for note in listing.notes] == [
        ("depth/d.png", "control", "1 control image belongs to no image, the first is depth/d.png"),
        ("masks/sub/a.webp", "mask", "1 mask belongs to no image, the first is masks/sub/a.webp"),
    ]
    alpha = scan(tmp_path / "img", SourceOptions(masks="alpha"))
    assert paired_files(alpha, "mask") == list(alpha.samples.names) == ["a.jpg", "c.jpg", "sub/a.jpg"]
    with pytest.raises(UsageError, match="no such folder"):
        scan(tmp_path / "img", SourceOptions(masks="../masks"))
    with pytest.raises(UsageError, match="4 folders"):
        scan(tmp_path, SourceOptions(controls=("edges", "depth", "masks", "img")))


def test_a_missing_folder_and_a_file_as_folder(tmp_path):
    put(tmp_path, {"a.jpg": "x"})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a.jsonl.gz").touch()
    for name, kind, why in (
        ("gone", SourceNotFoundError, "No such file or directory"),
        ("a.jpg", UsageError, "expected a folder of images, found a file"),
        ("pipe", UsageError, "expected a folder of images, found a named pipe"),
        ("a.jsonl.gz", UsageError, ""),
        ("loop", SourceError, "Too many levels of symbolic links"),
    ):
        with pytest.raises(kind) as caught:
            scan(tmp_path / name)
        assert (caught.value.where, caught.value.why) == (str(tmp_path / name), why)


def nothing_in(root: Path) -> str:
    with pytest.raises(EmptySourceError) as caught:
        scan(root, IMAGES)
    assert (caught.value.what, caught.value.where) == (f"no images in {root}", str(root))
    return caught.value.why.removeprefix(LOOKED_FOR)


def test_folders_without_images(tmp_path):
    assert nothing_in(tmp_path) == "found no files"
    put(tmp_path, {"a.txt": "x", "sub/b.txt": "x", "c.zip": "x", "train.npz": "x", "README": "x"})
    assert nothing_in(tmp_path) == "found 2 .txt, 1 without ending, 1 .npz, 1 .zip"
    put(tmp_path, {"CURRENT": "1"})
    assert nothing_in(tmp_path).endswith("; there is a cache in it, which is not read as data")


# known samples


def contents(listing: Listing) -> list[bytes]:
    return [row.tobytes() for row in listing.samples.inputs["image"].content]


def remembered(root: Path) -> Listing:
    listing = scan(root, IMAGES, hash_all=True)
    number = np.arange(len(listing.samples), dtype=np.uint32)
    table = replace(listing.samples, columns={"original_size": np.stack([number + 1, number + 2], axis=1)})
    return scan(root, IMAGES, table)


def test_trusted_files_are_not_opened_and_keep_all_that_is_known(tmp_path, trusting, monkeypatch):
    put(tmp_path, {"b.jpg": "x", "b.txt": "two", "a/c.png": "y", "a/c.txt": "three", "d.jpg": "z"})
    first = remembered(tmp_path)
    true_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags: pytest.fail(path) if Path(path).is_file() else true_open(path, flags)
    )
    again = scan(tmp_path, IMAGES, first.samples)
    assert captions(again) == captions(first)
    assert np.array_equal(again.samples.columns["original_size"], [[1, 2], [2, 3], [3, 4]])
    assert np.array_equal(again.samples.files.stat, first.samples.files.stat)
    assert contents(again) == [content_hash(data) for data in (b"y", b"x", b"z")]


def test_files_that_are_to_be_read_again_and_contents_of_rejected_ones(tmp_path, trusting):
    put(tmp_path, {"a.jpg": "x", "b.jpg": "y"})
    first = remembered(tmp_path)
    again = scan(tmp_path, IMAGES, first.samples, full=True, chosen=np.array([True, False]))
    assert again.hashed == 1
    stat = tuple(first.samples.files.stat[1].tolist())
    item = Rejected(name="b.jpg", reason="truncated", content=content_hash(b"y"), stat=stat)
    listing = scan(tmp_path, IMAGES, rejected=[item])
    assert contents(listing) == [bytes(16), content_hash(b"y")]
    assert not listing.hashed


def test_masks_stay_with_their_images_if_a_caption_is_rejected(tmp_path):
    put(tmp_path, dict.fromkeys(("a.jpg", "a-masklabel.png", "b.jpg", "c.jpg", "c-masklabel.png"), "x"))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xfd")
    listing = scan(tmp_path)
    files = list(listing.samples.files.names)
    assert list(listing.samples.names) == ["a.jpg", "c.jpg"]
    assert [files[at] for at in listing.samples.inputs["mask"].file] == ["a-masklabel.png", "c-masklabel.png"]


def test_a_snapshot_without_files_is_compared_with_new_ones(tmp_path):
    put(tmp_path, {"notes.txt": "no image"})
    empty = scan(tmp_path, SourceOptions(kind="images", part=Part.parse("1/2")))
    assert not len(empty.samples.files)
    put(tmp_path, {"a.png": "x"})
    listing = scan(tmp_path, IMAGES, empty.samples, full=True)
    assert list(listing.samples.names) == ["a.png"]

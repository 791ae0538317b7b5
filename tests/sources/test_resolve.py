"""``scan``: what a data folder holds, and what is said when it holds nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from latentcache.errors import EmptySourceError, SourceError, SourceNotFoundError, TableError, UsageError
from latentcache.sources.resolve import scan

LOOKED_FOR = "looked for .avif .bmp .gif .heic .heif .jfif .jpe .jpeg .jpg .jxl .png .svg .tif .tiff .webp; "


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_sidecars(tmp_path):
    put(tmp_path, b_jpg="x", b_txt="two\n", a__c_png="x", a__c_caption="three", d_jpg="x")
    found = scan(tmp_path)
    assert [(sample.name, sample.caption) for sample in found.samples] == [
        ("a/c.png", "three"),
        ("b.jpg", "two"),
        ("d.jpg", ""),
    ]
    assert (found.root, found.caption_source, found.refused, found.notes) == (tmp_path, "sidecar", (), ())


def test_no_captions_at_all(tmp_path):
    put(tmp_path, a_jpg="x", readme_txt="x")
    assert scan(tmp_path).caption_source == "none"


def test_a_sample_with_a_broken_caption_is_refused(tmp_path):
    put(tmp_path, a_jpg="x", b_jpg="x")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    found = scan(tmp_path)
    assert [sample.name for sample in found.samples] == ["b.jpg"]
    (item,) = found.refused
    assert (item.name, item.cause) == ("a.jpg", "caption-encoding")
    assert item.detail == "caption file a.txt: expected UTF-8, found byte 0xe9 at offset 3"
    assert item.stat.size == 1


def test_captions_can_be_left_closed(tmp_path):
    put(tmp_path, a_jpg="x", b_jpg="x", b_txt="text")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    found = scan(tmp_path, captions=False)
    assert [(sample.name, sample.caption) for sample in found.samples] == [("a.jpg", ""), ("b.jpg", "")]
    assert (found.caption_source, found.refused) == ("sidecar", ())


def test_a_table_decides_when_there_is_one(tmp_path):
    put(tmp_path, b_jpg="x", b_txt="beside", a_jpg="x", c_jpg="x")
    put(tmp_path, metadata_csv="\ufefffile_name,text\nb.jpg,two\na.jpg,one\ngone.jpg,x\nb.jpg,two\n")
    found = scan(tmp_path)
    assert [(sample.name, sample.caption) for sample in found.samples] == [("a.jpg", "one"), ("b.jpg", "two")]
    assert [(item.name, item.cause) for item in found.refused] == [("gone.jpg", "not-found")]
    assert [(item.name, item.cause) for item in found.notes] == [
        ("c.jpg", "unlisted"),
        ("metadata.csv", "bom"),
        ("metadata.csv", "duplicate-row"),
        ("metadata.csv", "sidecar-unused"),
    ]
    assert found.notes[-1].detail == "1 caption files beside pictures are not used, the first is b.txt"
    assert found.caption_source == "metadata.csv"
    assert scan(tmp_path, captions=False) == found


def test_a_broken_table_is_an_error(tmp_path):
    put(tmp_path, a_jpg="x", metadata_jsonl="{")
    with pytest.raises(TableError) as caught:
        scan(tmp_path)
    assert caught.value.where == f"{tmp_path / 'metadata.jsonl'}:1"


def test_samples_are_in_the_byte_order_of_their_names(tmp_path):
    raw = [b"\xff.jpg", b"a.jpg", b"a/b.jpg", "\U0001f40d.jpg".encode(), "\uffee.jpg".encode()]
    for name in raw:
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert [os.fsencode(sample.name) for sample in scan(tmp_path).samples] == sorted(raw)


def test_a_folder_that_is_not_there(tmp_path):
    path = tmp_path / "gone"
    with pytest.raises(SourceNotFoundError) as caught:
        scan(path)
    error = caught.value
    assert error.what == f"no such folder: {path}"
    assert (error.where, error.why) == (str(path), "No such file or directory")
    assert error.fix == "check the path; `latentcache build DATA` takes a folder of pictures"


def test_a_file_is_no_data(tmp_path):
    put(tmp_path, a_jpg="x")
    with pytest.raises(UsageError) as caught:
        scan(tmp_path / "a.jpg")
    error = caught.value
    assert error.what == f"DATA is no folder: {tmp_path / 'a.jpg'}"
    assert error.why == "expected a folder of pictures, found a file"
    assert error.fix == f"give the folder that holds the pictures: `latentcache build {tmp_path}`"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="found a named pipe"):
        scan(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceError, match="Too many levels of symbolic links"):
        scan(tmp_path / "loop")


def nothing_in(root: Path) -> str:
    with pytest.raises(EmptySourceError) as caught:
        scan(root)
    assert caught.value.what == f"no pictures in {root}"
    assert caught.value.where == str(root)
    assert caught.value.fix == "give the folder that holds the pictures: `latentcache build FOLDER`"
    return caught.value.why.removeprefix(LOOKED_FOR)


def test_an_empty_folder(tmp_path):
    assert nothing_in(tmp_path) == "found no files"


def test_a_folder_without_pictures(tmp_path):
    put(tmp_path, a_txt="x", sub__b_txt="x", c_tar="x", train_parquet="x", README="x")
    files = "found 5 other files (2 .txt, 1 without ending, 1 .parquet, 1 .tar)"
    assert nothing_in(tmp_path) == f"{files}; this version does not read .parquet .tar"


def test_a_folder_with_hidden_pictures_only(tmp_path):
    (tmp_path / "._a.jpg").touch()
    assert nothing_in(tmp_path) == "found no files; 1 with names that begin with a dot are not used"


def test_a_cache_is_no_data(tmp_path):
    put(tmp_path, CURRENT="1", generations__1__manifest_json="{}")
    assert nothing_in(tmp_path).endswith("; there is a cache in it, which is not read as data")


def test_refusals_alone_are_a_result(tmp_path):
    os.mkfifo(tmp_path / "x.jpg")
    found = scan(tmp_path)
    assert (found.samples, [item.cause for item in found.refused]) == ((), ["not-regular"])


def test_a_table_whose_files_are_all_missing_is_a_result(tmp_path):
    put(tmp_path, metadata_csv="file_name,text\na.jpg,x\n")
    assert [item.cause for item in scan(tmp_path).refused] == ["not-found"]


def test_sources_are_only_looked_at(tmp_path):
    put(tmp_path, a_jpg="x", a_txt="x", sub__b_jpg="x")
    before = {path: path.stat() for path in tmp_path.rglob("*")}
    scan(tmp_path)
    assert {path: path.stat() for path in tmp_path.rglob("*")} == before


def test_a_hundred_files_are_scanned_without_reading_pictures(tmp_path, monkeypatch):
    for i in range(100):
        (tmp_path / f"{i:03d}.jpg").touch()
    (tmp_path / "007.txt").write_text("x")
    opened = []
    true_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(path) or true_open(path, *rest))
    assert len(scan(tmp_path).samples) == 100
    assert opened == [f"{tmp_path}/007.txt"]


def test_nothing_heavy_is_imported():
    script = "import sys, latentcache.sources.resolve; print({'torch', 'PIL', 'lmdb'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"

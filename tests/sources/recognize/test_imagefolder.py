"""Metadata tables in folders, read by the rules of the Hugging Face image folder builder."""

import csv
import json

import pyarrow
import pyarrow.parquet
import pytest
from made_folders import notes, put

from latentcache.errors import SourceAmbiguousError, TableError
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import scan


def rows(found):
    return list(zip(found.samples.names, found.samples.inputs["caption"].text, strict=True))


def test_a_table_per_split_folder(tmp_path):
    table = '{"file_name": "a.jpg", "text": "%s"}\n{"file_name": "./deep/b.jpg", "text": "b"}\n'
    files = {f"data/{split}/{name}": "x" for split in ("train", "test") for name in ("a.jpg", "deep/b.jpg", "c.jpg")}
    put(tmp_path, files | {f"data/{split}/metadata.jsonl": table % split for split in ("train", "test")})
    put(tmp_path, {"data/train/a.txt": "beside", "data/other/d.jpg": "x", "data/test/a.txt": "beside"})
    found = scan(tmp_path)
    assert rows(found) == [("data/train/a.jpg", "train"), ("data/train/deep/b.jpg", "b")]
    assert (found.layout.word, [one.split for one in found.layout.sets]) == ("imagefolder", ["train"])
    assert found.samples.inputs["caption"].line.tolist() == [1, 2]
    assert notes(found) == [
        ("data/other/d.jpg", "outside-sets"),
        ("data/test/a.jpg", "split-unused"),
        ("data/train/c.jpg", "unlisted"),
        ("data/train/metadata.jsonl", "sidecar-unused"),
    ]
    assert [note.count for note in found.notes if note.reason == "outside-sets"] == [1]
    assert found.images.captions == {"data/train/metadata.jsonl": 2}
    other = scan(tmp_path, SourceOptions(split="test"))
    assert rows(other) == [("data/test/a.jpg", "test"), ("data/test/deep/b.jpg", "b")]


def test_tables_above_each_other(tmp_path):
    put(tmp_path, {"a.jpg": "x", "sub/b.jpg": "x", "sub/c.jpg": "x"})
    put(tmp_path, {"metadata.csv": "file_name,text\nsub/b.jpg,top\n"})
    put(tmp_path, {"sub/metadata.csv": "b.jpg,deep\nc.jpg,c\ngone.jpg,x\n"})
    found = scan(tmp_path)
    assert rows(found) == [("sub/b.jpg", "deep"), ("sub/c.jpg", "c")]
    assert [(item.name, item.reason) for item in found.rejected] == [("sub/gone.jpg", "not-found")]
    assert notes(found) == [("a.jpg", "unlisted"), ("metadata.csv", "in-two-sets")]


def test_a_parquet_table(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    put(tmp_path, {"sub/a.jpg": "x", "sub/b.jpg": "x"})
    table = pa.table({"file_name": ["b.jpg", "a.jpg"], "text": ["b", None]})
    pq.write_table(table, tmp_path / "sub/metadata.parquet")
    found = scan(tmp_path)
    assert rows(found) == [("sub/b.jpg", "b")]
    assert [(item.name, item.reason) for item in found.rejected] == [("sub/a.jpg", "table-row")]
    (tmp_path / "sub/metadata.parquet").write_text("no parquet")
    with pytest.raises(TableError, match="it is no parquet file"):
        scan(tmp_path)


def test_two_tables_in_one_folder(tmp_path):
    put(tmp_path, {"metadata.csv": "", "metadata.jsonl": ""})
    with pytest.raises(TableError) as caught:
        scan(tmp_path)
    assert caught.value.what == "a data folder has two tables: metadata.csv and metadata.jsonl"
    off = tmp_path / "metadata.jsonl"
    assert caught.value.fix == f"rename one, e.g. `mv {off} {off}.off`"


def write_rows(folder, kind, rows):
    if kind == "csv":
        with (folder / "metadata.csv").open("w") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    elif kind == "jsonl":
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "metadata.parquet")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_columns_of_every_table(tmp_path, kind):
    put(tmp_path, {"a.jpg": "x", "b.jpg": "x"})

    def found(columns, **options):
        write_rows(tmp_path, kind, [dict(zip(columns.split(), (f"{stem}.jpg", f"{stem}1", f"{stem}2"), strict=False))
                                    for stem in "ab"])  # fmt: skip
        listing = scan(tmp_path, SourceOptions(**options))
        return list(listing.samples.inputs["caption"].text), listing

    captions, listing = found("file_name label")
    caption = listing.samples.inputs["caption"]
    assert (captions, caption.content.any(), caption.file.tolist()) == (["", ""], False, [-1, -1])
    assert [(note.name, note.reason, note.detail) for note in listing.notes] == [
        (f"metadata.{kind}", "text-column", "it has no column of captions; label not used")
    ]
    assert found("file_name label", default_caption="x")[0] == ["x", "x"]
    assert found("file_name label", caption_column="Label")[0] == ["a1", "b1"]
    for columns, fix in (
        ("file_name text prompt", "--caption-column=text"),
        ("image path text", "--image-column=image"),
    ):
        with pytest.raises(SourceAmbiguousError) as caught:
            found(columns)
        assert caught.value.fix == f"name it: {fix}"
    assert found("file_name text prompt", caption_column="prompt")[0] == ["a2", "b2"]
    assert found("id text prompt", image_column="id", caption_column="text")[0] == ["a1", "b1"]
    for option in "caption_column", "image_column":
        with pytest.raises(TableError, match="no column of"):
            found("file_name text", **{option: "other"})

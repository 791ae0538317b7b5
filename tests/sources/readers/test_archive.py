"""Archives as samples: unchanged archives are not opened again."""

import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_archives import as_tars, png, some_images, write_tar

from latentcache.sources import known
from latentcache.sources.options import SourceOptions
from latentcache.sources.readers import archive
from latentcache.sources.scan import scan


def test_only_archives_that_changed_are_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(known, "RACY_NS", 0)
    images = some_images(6)
    as_tars(tmp_path, images, each=3)
    first = scan(tmp_path, hash_all=True)
    opened = []
    entries = archive._Archive.entries
    monkeypatch.setattr(archive._Archive, "entries", lambda self: opened.append(self._name) or entries(self))
    again = scan(tmp_path, known=first.samples, notes=first.notes)
    assert (opened, again.notes) == ([], first.notes)
    assert again.samples.inputs["caption"].line.tolist() == first.samples.inputs["caption"].line.tolist()
    changed = {**images, "0001": (png(200), "new")}
    as_tars(tmp_path / "new", changed, each=3)
    (tmp_path / "new/shard-000.tar").replace(tmp_path / "shard-000.tar")
    (tmp_path / "new/shard-001.tar").unlink()
    listing = scan(tmp_path, known=first.samples)
    assert opened == ["shard-000.tar"]
    assert list(listing.samples.names) == list(first.samples.names)
    kept = (listing.samples.inputs["image"].content == first.samples.inputs["image"].content).all(axis=1)
    assert kept.tolist() == [True, False, True, True, True, True]
    assert list(listing.samples.inputs["caption"].text)[:2] == ["caption 0", "new"]


def test_captions_of_rejected_images_are_not_unused(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.png", png(1)), ("a.webp", b"x"), ("a.txt", b"a"), ("b.png", png(2))])
    listing = scan(tmp_path)
    assert [item.reason for item in listing.rejected] == ["two-images"]
    assert "caption-unused" not in [note.reason for note in listing.notes]


def test_links_in_a_tar_are_noted(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.png", png(1)), ("a.txt", b"a")])
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        for name, kind in ("b.png", tarfile.LNKTYPE), ("c.png", tarfile.SYMTYPE), ("d", tarfile.DIRTYPE):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.png"
            tar.addfile(info)
    listing = scan(tmp_path)
    assert list(listing.samples.names) == ["a.tar/a.png"]
    assert [(note.name, note.reason, note.count) for note in listing.notes] == [("a.tar/b.png", "unused", 2)]


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()])
def test_captions_of_every_type_of_text(tmp_path, kind):
    pq.write_table(pa.table({"image": [png(1)], "text": pa.array(["a"]).cast(kind)}), tmp_path / "a.parquet")
    assert list(scan(tmp_path).samples.inputs["caption"].text) == ["a"]


def test_captions_that_are_no_text_are_said(tmp_path):
    pq.write_table(pa.table({"image": [png(1)], "text": [{"en": "a"}], "other": ["b"]}), tmp_path / "a.parquet")
    (note,) = scan(tmp_path).notes
    assert note.reason == "text-column"
    assert note.detail == "it has no column of captions; other columns: text, other"
    pq.write_table(pa.table({"image": [png(1)], "text": [["a", None]]}), tmp_path / "a.parquet")
    assert [(item.line, item.reason) for item in scan(tmp_path).rejected] == [(1, "table-row")]


def test_an_empty_caption_is_one_and_json_without_a_caption_is_none(tmp_path):
    members = [(f"{stem}.png", png(number)) for number, stem in enumerate("abc")]
    write_tar(tmp_path / "a.tar", [*members, ("a.txt", b""), ("b.json", b'{"url": 1}')])
    caption = scan(tmp_path).samples.inputs["caption"]
    assert (list(caption.text), caption.content.any(axis=1).tolist()) == ([""] * 3, [True, False, False])


def test_captions_beside_a_key_that_is_asked_for_are_noted(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.png", png(1)), ("a.txt", b"a"), ("a.json", b'{"alt": "b"}')])
    listing = scan(tmp_path, SourceOptions(caption_column="alt"))
    assert list(listing.samples.inputs["caption"].text) == ["b"]
    assert [(note.name, note.reason) for note in listing.notes] == [("a.tar/a.txt", "member-unused")]


def test_a_tar_without_the_key_that_is_asked_for_is_rejected(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.png", png(1)), ("a.json", b'{"alt": "a"}'), ("b.png", png(2))])
    write_tar(tmp_path / "b.tar", [("c.png", png(3)), ("c.json", b'{"caption": "c"}')])
    listing = scan(tmp_path, SourceOptions(caption_column="alt"))
    assert list(listing.samples.names) == ["a.tar/a.png", "a.tar/b.png"]
    (item,) = listing.rejected
    assert (item.name, item.reason) == ("b.tar", "no-caption-column")
    assert item.detail == "no JSON member of an image has a caption called alt"


def cut_parquet(path, table):
    pq.write_table(table, path, row_group_size=2, compression="none", use_dictionary=False)
    data, column = bytearray(path.read_bytes()), pq.ParquetFile(path).metadata.row_group(1).column(1)
    data[column.data_page_offset : column.data_page_offset + 20] = b"\xff" * 20
    path.write_bytes(data)


def cut_arrow(path, table):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    path.write_bytes(path.read_bytes()[:-300])
    (path.parent / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')


@pytest.mark.parametrize(("damage", "name"), [(cut_parquet, "a.parquet"), (cut_arrow, "a.arrow")])
def test_rows_before_the_damage_are_kept(tmp_path, damage, name):
    damage(tmp_path / name, pa.table({"image": [png(number) for number in range(4)], "text": [9 * "a"] * 4}))
    first = scan(tmp_path, hash_all=True)
    assert list(first.samples.names) == [f"{name}:1", f"{name}:2"]
    (item,) = first.rejected
    assert (item.name, item.line, item.reason, item.detail[:13]) == (name, 3, "rows-damaged", "rest unread: ")
    again = scan(tmp_path, known=first.samples, rejected=first.rejected, notes=first.notes)
    assert (list(again.samples.names), again.rejected) == (list(first.samples.names), first.rejected)


def test_shards_that_are_missing_are_noted(tmp_path):
    for number in 0, 2:
        write_tar(tmp_path / f"train-0000{number}-of-00005.tar", [(f"{number}.png", png(number))])
    (note,) = scan(tmp_path).notes
    assert (note.name, note.reason, note.count) == ("train-00001-of-00005.tar", "shard-missing", 3)
    again = scan(tmp_path, known=scan(tmp_path).samples, notes=(note,))
    assert again.notes == (note,)
    assert scan(tmp_path / "train-00000-of-00005.tar").notes == ()

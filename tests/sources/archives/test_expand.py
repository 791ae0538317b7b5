"""Archives as samples: those that did not change are not opened again."""

from made_archives import as_tars, png, some_images, write_tar

from latentcache.identity import stat as stat_rule
from latentcache.sources.archives.entries import Archives
from latentcache.sources.scan import scan


def test_only_archives_that_changed_are_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(stat_rule, "RACY_NS", 0)
    images = some_images(6)
    as_tars(tmp_path, images, each=3)
    first = scan(tmp_path, hash_all=True)
    opened = []
    of_tar = Archives._of_tar
    monkeypatch.setattr(Archives, "_of_tar", lambda *own: opened.append(own[1]) or of_tar(*own))
    again = scan(tmp_path, known=first.samples, notes=first.notes)
    assert (opened, again.notes) == ([], first.notes)
    assert again.samples.inputs["caption"].line.tolist() == first.samples.inputs["caption"].line.tolist()
    changed = {**images, "0001": (png(200), "new")}
    as_tars(tmp_path / "new", changed, each=3)
    (tmp_path / "new/shard-000.tar").replace(tmp_path / "shard-000.tar")
    (tmp_path / "new/shard-001.tar").unlink()
    found = scan(tmp_path, known=first.samples)
    assert opened == ["shard-000.tar"]
    assert list(found.samples.names) == list(first.samples.names)
    kept = (found.samples.inputs["image"].content == first.samples.inputs["image"].content).all(axis=1)
    assert kept.tolist() == [True, False, True, True, True, True]
    assert list(found.samples.inputs["caption"].text)[:2] == ["caption 0", "new"]


def test_the_caption_of_a_rejected_image_is_no_unused_one(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.png", png(1)), ("a.webp", b"x"), ("a.txt", b"a"), ("b.png", png(2))])
    found = scan(tmp_path)
    assert [item.reason for item in found.rejected] == ["two-images"]
    assert "caption-unused" not in [note.reason for note in found.notes]


def test_an_archive_without_images_is_noted(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.png", png(1))])
    write_tar(tmp_path / "b.tar", [])
    assert [(note.name, note.reason) for note in scan(tmp_path).notes] == [("b.tar", "unused")]

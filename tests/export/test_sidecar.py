import errno
import json

import pytest

from latentcache.errors import CacheReadOnlyError, DiskFullError, UsageError
from latentcache.export import folder as folder_module
from latentcache.export.folder import FILES, File, Folder
from latentcache.export.run import Export
from latentcache.export.settings import ExportSettings


class Rows(Export):
    """An export that writes two files, or fails."""

    resumes, bytes = False, 14

    def __init__(self, out, error=None):
        self.settings = ExportSettings(cache=out.with_name("cache"), out=out, format="megatron")
        self.error = error

    def write(self, folder, on_progress):
        assert [path.name for path in folder.root.iterdir()] == [FILES]
        (folder.root / "a").write_bytes(b"onetwo")
        (folder.root / "sub").mkdir()
        (folder.root / "sub/b").write_bytes(b"from elsewhere")
        if self.error:
            raise self.error
        folder.add_all()
        return {"kind": 5}, {"json": 1}


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_the_folder_is_renamed_when_complete(tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is taken
    assert Rows(out).run() == {"json": 1}
    assert json.loads((out / "latentcache.json").read_text()) == {"schema": 4, "kind": 5}
    assert {name: file.size for name, file in Folder(out).files.items()} == {"a": 6, "sub/b": 14}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UsageError, match="exists"):
        Rows(out).run()
    with pytest.raises(UsageError, match="exists"):
        Rows(out / "a").run()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ValueError("no"), ValueError),
        (OSError(errno.ENOSPC, "no"), DiskFullError),
        (OSError(errno.EACCES, "no"), CacheReadOnlyError),
    ],
)
def test_a_failed_export_of_rows_leaves_nothing(tmp_path, error, raised):
    with pytest.raises(raised):
        Rows(tmp_path / "out", error).run()
    assert not files_below(tmp_path)


def test_what_a_killed_export_left_is_replaced_and_what_is_not_ours_is_kept(tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine").write_text("kept")
    with pytest.raises(UsageError, match=r"out\.partial exists"):
        Rows(tmp_path / "out").run()
    assert files_below(partial) == ["mine"]
    (partial / FILES).touch()
    Rows(tmp_path / "out").run()
    assert files_below(tmp_path / "out") == ["a", FILES, "latentcache.json", "sub", "sub/b"]


def test_everything_is_synced_before_the_rename(tmp_path, monkeypatch):
    out, synced = tmp_path / "out", []

    def note(path):
        synced.append((path.name, out.exists()))

    monkeypatch.setattr(folder_module, "sync_file", note)
    Rows(out).run()
    assert synced == [("a", False), ("b", False)]


def test_a_file_that_the_trainer_writes_to_is_not_compared(tmp_path):
    folder = Folder(tmp_path)
    with folder.writing():
        for name in ("a", "b"):
            folder.put(File(name=name, origin="1", is_changing=name == "a"), lambda path: path.write_text("x") and "")
        folder.finish({})
    for name in ("a", "b"):
        (tmp_path / name).write_text("longer")
    folder = Folder(tmp_path)
    assert [finding["path"] for finding in folder.findings()] == ["b"]
    assert folder.changing == ["a"]
    assert folder.undo() == (1, ["b"])

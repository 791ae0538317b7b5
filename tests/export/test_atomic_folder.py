import errno
import json

import pytest

from latentcache.errors import CacheReadOnlyError, DiskFullError, UsageError
from latentcache.export import run
from latentcache.export.run import atomic_folder, seal


def test_the_folder_is_renamed_when_complete(tmp_path):
    with atomic_folder(tmp_path / "out") as folder:
        assert not (tmp_path / "out").exists()
        (folder / "a").write_bytes(b"onetwo")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_bytes(b"from elsewhere")
        seal(folder, {"kind": 5})
    assert json.loads((tmp_path / "out/latentcache.json").read_text()) == {
        "schema": 3, "kind": 5, "bytes": {"a": 6, "sub/b": 14},
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")])
def test_a_failed_export_leaves_nothing(tmp_path, error):
    """A folder named OUT.partial is kept, too."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("kept")

    def export():
        with atomic_folder(tmp_path / "out") as folder:
            assert not list(folder.iterdir())
            (folder / "new").touch()
            raise error

    with pytest.raises(type(error)):
        export()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "out.partial",
        "out.partial/mine",
    ]


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_two_exports_to_one_name(tmp_path, first):
    """One export fails, the other is complete."""

    def both():
        with atomic_folder(tmp_path / "out") as outer:
            (outer / "outer").touch()
            with atomic_folder(tmp_path / "out") as inner:
                (inner / "inner").touch()
                if first == "outer":
                    (tmp_path / "out").mkdir()

    with pytest.raises(UsageError, match="exists"):
        both()
    assert files_below(tmp_path) == ["out", "out/inner"]


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EACCES, CacheReadOnlyError)])
def test_disk_errors_are_package_errors(tmp_path, number, kind):
    with pytest.raises(kind), atomic_folder(tmp_path / "out"):
        raise OSError(number, "no")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept(tmp_path):
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out") as folder:  # an empty folder is taken
        (folder / "a").touch()
    for place in (tmp_path / "out", tmp_path / "out" / "a"):
        with pytest.raises(UsageError, match="exists"), atomic_folder(place):
            pytest.fail("it was entered")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_everything_is_synced_before_the_rename(tmp_path, monkeypatch):
    out, synced = tmp_path / "out", []

    def note(path):
        synced.append((path.relative_to(tmp_path).as_posix(), out.exists()))

    monkeypatch.setattr(run, "sync_file", note)
    monkeypatch.setattr(run, "sync_folder", note)
    with atomic_folder(out) as folder:
        (folder / "train").mkdir()
        (folder / "train" / "a").write_bytes(b"one")
        seal(folder, {})
    assert [(path.partition("/")[2] if "partial" in path else path, there) for path, there in synced] == [
        ("train/a", False), ("train", False), (".", True),
    ]  # fmt: skip

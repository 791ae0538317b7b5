import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.errors import CacheDamagedError, CacheNotFoundError, CacheReadOnlyError, DiskFullError, StoreError
from latentcache.store import layout as layout_module
from latentcache.store.layout import (
    CacheLayout,
    as_store_error,
    make_folder,
    read_file,
    read_json,
    refuse_unreadable,
    remove_durably,
    write_atomically,
    write_json,
    writing,
)

TORN = [b"", b"0", b"00000", b"000000\n", b"000001", b"00001\n", b"xyz\n", b"-00001\n", b"000001\n\n", b" 00001\n"]
TORN += [b"\xff\xfe\x00", b"\x00" * 7, "\u0661".encode() * 6]


@pytest.fixture
def layout(tmp_path):
    return CacheLayout(tmp_path)


def test_shards_are_told_apart_by_their_names(layout):
    for name in ("b", "a", "c.open", "a.open"):
        make_folder(layout.shards / name)
    (layout.shards / "file").touch()
    assert [path.name for path in layout.sealed_shards()] == ["a", "b"]
    assert [path.name for path in layout.open_shards()] == ["a.open", "c.open"]


def test_a_folder_without_shards_has_none(layout):
    assert layout.sealed_shards() == layout.open_shards() == layout.generations() == []


def test_current_names_the_generation(layout):
    layout.current.write_bytes(b"000041\n")
    assert layout.current_generation() == 41
    assert layout.generation(41).name == "000041"
    layout.current.write_bytes(b"1234567\n")
    assert layout.current_generation() == 1234567


@pytest.mark.parametrize("text", TORN)
def test_a_torn_current_is_damage_and_says_what_to_do(layout, text):
    layout.current.write_bytes(text)
    with pytest.raises(CacheDamagedError, match="CURRENT names no generation") as caught:
        layout.current_generation()
    assert caught.value.fix == f"rm {layout.current}, then build again"
    make_folder(layout.generation(7))
    write_json(layout.generation(7) / "manifest.json", {})
    with pytest.raises(CacheDamagedError) as caught:
        layout.current_generation()
    assert caught.value.fix == f"echo 000007 > {layout.current}"
    layout.current.write_text("000007\n")
    assert layout.current_generation() == 7


def test_the_fix_for_a_torn_current_works_in_a_shell(layout):
    make_folder(layout.generation(12))
    write_json(layout.generation(12) / "manifest.json", {})
    layout.current.write_bytes(b"\0\0")
    with pytest.raises(CacheDamagedError) as caught:
        layout.current_generation()
    assert os.system(caught.value.fix) == 0
    assert layout.current_generation() == 12


def test_a_current_that_cannot_be_read_is_damage(layout):
    layout.current.mkdir()
    with pytest.raises(CacheDamagedError, match="cannot be read"):
        layout.current_generation()


def test_only_whole_generations_count(layout):
    for number in (3, 12):
        make_folder(layout.generation(number))
        write_json(layout.generation(number) / "manifest.json", {})
    make_folder(layout.generation(99))
    make_folder(layout.root / "generations" / "notes")
    (layout.root / "generations" / "notes" / "manifest.json").touch()
    assert layout.generations() == [3, 12]


@pytest.mark.parametrize("sign", ["shards", "building"])
def test_a_cache_without_a_finished_build_has_generation_0(layout, sign):
    with pytest.raises(CacheNotFoundError, match="no cache at"):
        layout.current_generation()
    getattr(layout, sign).mkdir()
    assert layout.current_generation() == 0


def test_no_folder_and_a_file_are_no_cache(tmp_path):
    (tmp_path / "file").touch()
    for name, why in (("none", "no such folder"), ("file", "Not a directory")):
        with pytest.raises(CacheNotFoundError) as caught:
            CacheLayout(tmp_path / name).current_generation()
        assert why in caught.value.why


@settings(max_examples=40)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_a_file_is_replaced_as_a_whole(tmp_path_factory, first, second):
    path = tmp_path_factory.mktemp("atomic") / "file"
    for data in (first, second):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((layout_module.os, call) if call == "fsync" else (layout_module.Path, call)), fail)
    with pytest.raises(DiskFullError, match="disk is full"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text() | st.just("\udcff"), json_values, max_size=5))
def test_json_comes_back_and_is_ascii(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "file.json"
    write_json(path, value)
    assert read_json(path) == value
    assert path.read_bytes().isascii()
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("data", [None, b"", b"{", b"[1]", b"\xff", b"null", b"[" * 100_000])
def test_what_is_no_json_object_is_damage(tmp_path, data):
    path = tmp_path / "manifest.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CacheDamagedError, match=r"manifest\.json") as caught:
        read_json(path)
    assert caught.value.where == str(path)


def test_new_folders_are_made_durable_from_the_top(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(layout_module, "sync_folder", synced.append)
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}


def test_a_folder_below_a_file_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheReadOnlyError, match="cannot be written"):
            make_folder(path)


@pytest.mark.parametrize(("code", "kind", "words"), [
    (errno.ENOSPC, DiskFullError, "disk is full"),
    (errno.EDQUOT, DiskFullError, "disk is full"),
    (errno.EFBIG, DiskFullError, "disk is full"),
    (errno.EROFS, CacheReadOnlyError, "read-only"),
    (errno.EACCES, CacheReadOnlyError, "read-only"),
    (errno.EPERM, CacheReadOnlyError, "read-only"),
    (errno.ENOTDIR, CacheReadOnlyError, "not usable"),
    (errno.EIO, StoreError, "Input/output error"),
])  # fmt: skip
def test_what_the_operating_system_meant(tmp_path, code, kind, words):
    error = as_store_error(OSError(code, os.strerror(code)), tmp_path)
    assert type(error) is kind
    assert words in str(error)
    assert error.exit_code == 3


def loop(path):
    """A name that the system refuses to follow, for root too."""
    path.symlink_to(path.name)
    return path


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path):
    layout = CacheLayout(tmp_path)
    assert (layout.sealed_shards(), layout.open_shards(), layout.generations()) == ([], [], [])
    loop(layout.shards)
    loop(tmp_path / "generations")
    for look in (layout.sealed_shards, layout.open_shards, layout.generations):
        with pytest.raises(StoreError, match="refuses to read") as caught:
            look()
        assert (caught.value.slug, caught.value.exit_code) == ("store", 3)


@pytest.mark.parametrize(("code", "kind", "fix"), [
    (errno.EACCES, StoreError, "chmod -R u+rX"),
    (errno.EIO, StoreError, "check the disk"),
    (errno.ENOSPC, DiskFullError, "free some space"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_and_says_how_to_go_on(tmp_path, code, kind, fix):
    system = OSError(code, os.strerror(code))
    damaged = CacheDamagedError("a shard cannot be read")
    damaged.__cause__ = system
    for error in (system, damaged):
        with pytest.raises(kind) as caught:
            refuse_unreadable(error, tmp_path)
        assert type(caught.value) is kind
        assert fix in caught.value.fix


def test_what_is_not_there_or_is_wrong_is_not_refused(tmp_path):
    refuse_unreadable(FileNotFoundError(errno.ENOENT, "gone"), tmp_path)
    refuse_unreadable(CacheDamagedError("the checksum is wrong"), tmp_path)


def test_errors_of_ours_are_not_told_again(tmp_path):
    full = DiskFullError("the disk is full")
    with pytest.raises(DiskFullError) as caught, writing(tmp_path):
        raise full
    assert caught.value is full
    with pytest.raises(CacheReadOnlyError), writing(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_a_file_is_removed_durably(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(layout_module, "sync_folder", synced.append)
    (tmp_path / "BUILDING").touch()
    remove_durably(tmp_path / "BUILDING")
    remove_durably(tmp_path / "BUILDING")
    assert not (tmp_path / "BUILDING").exists()
    assert synced == [tmp_path]


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "zero"):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert read_file(tmp_path / "file") == b"x" * 100_000


def test_shards_that_cannot_be_listed_are_damage_and_none_are_none(tmp_path):
    layout = CacheLayout(tmp_path)
    layout.check_shards()
    layout.shards.write_text("x")
    with pytest.raises(CacheDamagedError, match="shards cannot be read"):
        layout.check_shards()

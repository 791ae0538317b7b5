import pytest

from latentcache.errors import CacheDamagedError, CacheNotFoundError, StoreError
from latentcache.store.atomic_io import make_folder, write_json
from latentcache.store.paths import CachePaths

TORN = [b"", b"0", b"00000", b"000000\n", b"000001", b"00001\n", b"xyz\n", b"-00001\n", b"000001\n\n", b" 00001\n"]
TORN += [b"\xff\xfe\x00", b"\x00" * 7, "\u0661".encode() * 6]


@pytest.fixture
def paths(tmp_path):
    return CachePaths(tmp_path)


@pytest.mark.parametrize("text", TORN)
def test_a_torn_current_file_is_damage_with_a_fix(paths, text):
    paths.current.write_bytes(text)
    with pytest.raises(CacheDamagedError, match="CURRENT names no snapshot") as caught:
        paths.current_snapshot()
    assert caught.value.fix == CacheDamagedError.default_fix, "another program may have written it"
    make_folder(paths.snapshot(7))
    write_json(paths.snapshot(7) / "manifest.json", {})
    with pytest.raises(CacheDamagedError) as caught:
        paths.current_snapshot()
    assert caught.value.fix == f"echo 000007 > {paths.current}"
    paths.current.write_text("000007\n")
    assert paths.current_snapshot() == 7


def test_only_complete_snapshots_count(paths):
    for number in (3, 12):
        make_folder(paths.snapshot(number))
        write_json(paths.snapshot(number) / "manifest.json", {})
    make_folder(paths.snapshot(99))
    make_folder(paths.root / "snapshots" / "notes")
    (paths.root / "snapshots" / "notes" / "manifest.json").touch()
    assert paths.snapshots() == [3, 12]


@pytest.mark.parametrize("sign", ["shards", "building"])
def test_a_cache_without_a_finished_build_has_snapshot_0(paths, sign):
    with pytest.raises(CacheNotFoundError, match="no cache at"):
        paths.current_snapshot()
    getattr(paths, sign).mkdir()
    assert paths.current_snapshot() == 0


def loop(path):
    """The system does not follow this link, for root too."""
    path.symlink_to(path.name)
    return path


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path):
    paths = CachePaths(tmp_path)
    assert (paths.sealed_shards(), paths.open_shards(), paths.snapshots()) == ([], [], [])
    loop(paths.shards)
    loop(tmp_path / "snapshots")
    for look in (paths.sealed_shards, paths.open_shards, paths.snapshots):
        with pytest.raises(StoreError, match="cannot be read") as caught:
            look()
        assert (caught.value.slug, caught.value.exit_code) == ("store", 3)

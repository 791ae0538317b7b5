import os

import pytest

from latentcache.errors import CacheDamagedError, CacheNotFoundError, StoreError
from latentcache.store.durable import (
    make_folder,
    write_json,
)
from latentcache.store.layout import CacheLayout

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


def test_shards_that_cannot_be_listed_are_damage_and_none_are_none(tmp_path):
    layout = CacheLayout(tmp_path)
    layout.check_shards()
    layout.shards.write_text("x")
    with pytest.raises(CacheDamagedError, match="shards cannot be read"):
        layout.check_shards()


def test_a_path_that_is_too_long_is_no_damage(tmp_path):
    with pytest.raises(CacheNotFoundError) as caught:
        CacheLayout(tmp_path / ("x" * 300)).current_generation()
    assert "rm" not in caught.value.fix


def test_a_folder_in_the_place_of_current_is_called_so(layout):
    layout.check_current()
    layout.current.mkdir()
    for call in (layout.check_current, layout.current_generation):
        with pytest.raises(CacheDamagedError, match=r"CURRENT cannot be .* there is a folder in its place"):
            call()

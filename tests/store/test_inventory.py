import os
import shutil

import pytest
from made_entries import flip, key_of, make_cache, make_shard, new_entry, open_shard, payload_offset

from latentcache.errors import CacheDamagedError, CacheFormatError, CacheNotFoundError
from latentcache.store import inventory as inventory_module
from latentcache.store.catalog import load_catalog
from latentcache.store.entry import HEADER_BYTES, unpack_header
from latentcache.store.inventory import current_or_none, digest, stored_entries
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import ShardWriter, seal_folder


@pytest.fixture
def layout(tmp_path):
    return make_cache(tmp_path / "cache", count=5)


def listed(layout, **options):
    found = list(stored_entries(layout.root, **({"payloads": True} | options)))
    assert len({stored.key for stored in found}) == len(found)
    return {stored.key: stored.intact for stored in found}


def keys(*numbers):
    return dict.fromkeys((key_of(number) for number in numbers), True)


def test_current_or_none(tmp_path, layout):
    assert current_or_none(layout.root).number == 1
    (tmp_path / "begun" / "shards").mkdir(parents=True)
    assert current_or_none(tmp_path / "begun") is None
    with pytest.raises(CacheNotFoundError):
        current_or_none(tmp_path / "none")
    layout.current.write_bytes(b"?")
    with pytest.raises(CacheDamagedError):
        current_or_none(layout.root)


def test_a_newer_cache_is_not_taken_for_none(layout):
    manifest = layout.generation(1) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": 1', b'"version": 7'))
    with pytest.raises(CacheFormatError):
        current_or_none(layout.root)


def test_entries_of_a_finished_cache(layout):
    assert listed(layout) == keys(*range(5))
    for stored in stored_entries(layout.root, payloads=False):
        assert stored.intact
    first = next(stored_entries(layout.root, payloads=True))
    number = next(n for n in range(5) if key_of(n) == first.key)
    assert first.header == unpack_header(new_entry(number).value, first.key)
    assert digest(first.header) == f"{first.header.payload_checksum:016x}"


def test_entries_of_a_build_that_has_not_ended(tmp_path):
    layout = CacheLayout(tmp_path)
    writer = ShardWriter(layout.shards / "one.open")
    writer.write([new_entry(number) for number in range(3)])
    writer.close()
    make_shard(layout.shards / "two", [new_entry(number) for number in range(2, 5)])
    assert listed(layout) == listed(layout, payloads=False) == keys(*range(5))


def test_a_shard_that_is_sealed_meanwhile_is_not_missed(tmp_path, monkeypatch):
    """The builder seals its shard between our look at the sealed shards and our look at the open ones."""
    layout = CacheLayout(tmp_path)
    open_shard(layout.shards / "one.open")
    plain = inventory_module._open

    def sealed_first(*arguments):
        seal_folder(layout.shards / "one.open")
        return plain(*arguments)

    monkeypatch.setattr(inventory_module, "_open", sealed_first)
    assert listed(layout) == keys(*range(30))


def test_a_shard_that_is_sealed_under_our_eyes_is_not_missed(tmp_path, monkeypatch):
    layout = CacheLayout(tmp_path)
    open_shard(layout.shards / "one.open")

    def gone(folder, **_):
        seal_folder(folder)
        raise FileNotFoundError(folder)

    monkeypatch.setattr(inventory_module, "live_entries", gone)
    assert listed(layout) == keys(*range(30))


def test_damaged_payloads_are_listed_as_damaged(layout):
    entry = load_catalog(layout).locate(key_of(3))
    flip(layout.shards / "one" / "data.mdb", payload_offset(entry))
    assert listed(layout) == keys(*range(5)) | {key_of(3): False}
    assert listed(layout, payloads=False) == keys(*range(5))


@pytest.mark.parametrize("damage", ["gone", "empty", "half"])
def test_entries_of_a_truncated_shard_are_listed_from_its_index(layout, damage):
    data = layout.shards / "one" / "data.mdb"
    data.chmod(0o644)
    places = {key_of(n): load_catalog(layout).locate(key_of(n)) for n in range(5)}
    size = {"gone": 0, "empty": 0, "half": data.stat().st_size // 2}[damage]
    os.truncate(data, size)
    if damage == "gone":
        data.unlink()
    expected = {key: place.offset + HEADER_BYTES + 512 <= size for key, place in places.items()}
    assert listed(layout) == expected


def test_a_whole_copy_is_preferred_to_a_damaged_one(layout):
    shutil.copytree(layout.shards / "one", layout.shards / "zwei")
    (layout.shards / "one" / "data.mdb").unlink()
    assert listed(layout) == keys(*range(5))


def test_shards_that_nothing_is_known_of_are_passed_over(layout):
    for name in ("a", "b.open", "c.open"):
        (layout.shards / name).mkdir()
    (layout.shards / "b.open" / "data.mdb").write_bytes(b"noise" * 5000)
    (layout.shards / "c.open" / "data.mdb").mkdir()
    assert listed(layout) == keys(*range(5))

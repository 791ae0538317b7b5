import pytest
from made_entries import RECIPE, SQUARE, content_of, facts_of, flip, key_of, make_shard, new_entry

from latentcache.errors import StoreError
from latentcache.geometry.sizes import Size
from latentcache.store.catalog import Catalog, index_or_none, load_catalog
from latentcache.store.entry import HEADER_BYTES, unpack_header
from latentcache.store.layout import CacheLayout

OTHER = Size(32, 96)


@pytest.fixture
def layout(tmp_path):
    layout = CacheLayout(tmp_path)
    make_shard(layout.shards / "a", [new_entry(number) for number in range(5)])
    make_shard(layout.shards / "b", [new_entry(number) for number in range(4, 9)])
    return layout


def test_every_entry_is_found_once(layout):
    catalog = load_catalog(layout)
    assert (len(catalog), catalog.damaged) == (9, ())
    assert sorted(catalog.keys()) == sorted(key_of(number) for number in range(9))
    for number in range(9):
        made, found = new_entry(number), catalog.locate(key_of(number))
        assert made.key in catalog
        assert (found.key, found.shard) == (made.key, "a" if number < 5 else "b")
        assert found.header == unpack_header(made.value, made.key)
        assert found.facts == facts_of(number)
        assert catalog.payload(found) == made.value[HEADER_BYTES:]


def test_a_key_that_is_not_there_is_none(layout):
    catalog = load_catalog(layout)
    assert key_of(99) not in catalog
    assert catalog.locate(key_of(99)) is None


def test_an_empty_cache_has_an_empty_catalog(tmp_path):
    catalog = load_catalog(CacheLayout(tmp_path))
    assert (len(catalog), catalog.keys()) == (0, [])
    assert catalog.with_pixels(bytes(16), SQUARE, RECIPE.key_part) is None


def test_entries_are_found_by_their_pixels(layout):
    catalog = load_catalog(layout)
    pixels = facts_of(7).pixel_hash
    assert catalog.with_pixels(pixels, SQUARE, RECIPE.key_part).header.content == content_of(7)
    assert catalog.with_pixels(pixels, OTHER, RECIPE.key_part) is None
    assert catalog.with_pixels(pixels, SQUARE, bytes(8)) is None
    assert catalog.with_pixels(bytes(16), SQUARE, RECIPE.key_part) is None


def test_an_entry_of_another_bucket_is_placed_in_it(tmp_path):
    make_shard(tmp_path / "shards" / "a", [new_entry(1, bucket=OTHER, shape=(4, 4, 12))])
    found = load_catalog(CacheLayout(tmp_path)).locate(key_of(1, OTHER))
    assert found.facts.placement.bucket == OTHER
    assert found.facts == facts_of(1, OTHER)


def test_a_damaged_payload_is_none(layout):
    catalog = load_catalog(layout)
    entry = catalog.locate(key_of(2))
    flip(layout.shards / "a" / "data.mdb", entry.offset + HEADER_BYTES + 17)
    assert catalog.payload(entry) is None
    assert catalog.payload(catalog.locate(key_of(3))) is not None
    (layout.shards / "a" / "data.mdb").unlink()
    assert catalog.payload(catalog.locate(key_of(3))) is None


@pytest.mark.parametrize("name", ["data.mdb", "index.npy", "shard.json"])
def test_a_damaged_shard_is_named_and_the_others_serve(layout, name):
    (layout.shards / "a" / name).chmod(0o644)
    (layout.shards / "a" / name).write_bytes(b"")
    catalog = load_catalog(layout)
    assert (catalog.damaged, len(catalog)) == (("a",), 5)
    assert catalog.locate(key_of(4)).shard == "b"
    assert index_or_none(layout.shards / "a") is None
    assert len(index_or_none(layout.shards / "b").rows) == 5


@pytest.mark.parametrize("name", ["data.mdb", "index.npy", "shard.json"])
def test_a_shard_that_the_system_refuses_to_read_is_not_taken_for_damaged(layout, name):
    """All of it would be encoded again. A link to itself is refused to root too."""
    (layout.shards / "a" / name).unlink()
    (layout.shards / "a" / name).symlink_to(name)
    with pytest.raises(StoreError, match="refuses to read") as caught:
        load_catalog(layout)
    assert type(caught.value) is StoreError


def test_open_shards_do_not_count(layout):
    (layout.shards / "c.open").mkdir()
    assert load_catalog(layout).damaged == ()


def test_a_catalog_of_chosen_shards(layout):
    index = index_or_none(layout.shards / "b")
    assert sorted(Catalog([index]).keys()) == index.keys()

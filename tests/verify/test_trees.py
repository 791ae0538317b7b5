import random
from dataclasses import replace

import pytest

from latentcache.errors import CacheDamagedError
from latentcache.geometry.placement import place_in
from latentcache.geometry.sizes import Size
from latentcache.identity.content import checksum, content_hash
from latentcache.identity.key import EntryKey
from latentcache.store.entry import EntryFacts, EntryHeader, NewEntry, pack_facts, pack_header
from latentcache.store.index import open_index
from latentcache.store.layout import CacheLayout
from latentcache.store.pages import read_meta, slots
from latentcache.store.shard import ShardWriter
from latentcache.verify import trees
from latentcache.verify.trees import pages_found

SQUARE = Size(64, 64)


def flat_entry(number, size):
    """An entry whose payload has any number of bytes."""
    payload, content = random.Random(number).randbytes(size), content_hash(b"picture %d" % number)
    key = EntryKey(content=content, bucket=SQUARE, recipe=bytes(8)).pack()
    header = EntryHeader(
        kind=1,
        dtype="uint8",
        shape=(size,),
        payload_checksum=checksum(payload),
        content=content,
        recipe_id=bytes(16),
        original_size=Size(70, 90),
    )
    facts = EntryFacts(pixel_hash=content, placement=place_in(Size(70, 90), SQUARE))
    return NewEntry(key=key, value=pack_header(header, key) + payload, facts=pack_facts(facts))


def layout_with(folder, entries):
    """A cache of one shard named ``one``, and its LMDB file, which may be written to."""
    layout = CacheLayout(folder)
    writer = ShardWriter(layout.shards / "one.open")
    writer.write(entries)
    data = writer.seal() / "data.mdb"
    data.chmod(0o644)
    return layout, data


def flip(data, offset, bit=0x04):
    with data.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


@pytest.fixture
def mixed(tmp_path):
    """Values in leaves and values with pages of their own."""
    return layout_with(tmp_path, [flat_entry(n, 6000 if n % 3 else 200) for n in range(300)])


def never():
    return False


def test_a_whole_shard_is_told_without_the_slow_walk(mixed, monkeypatch):
    monkeypatch.setattr(trees, "slots", None)
    assert pages_found(mixed[0], "one", never) == ""


@pytest.mark.parametrize("place", ["key", "header", "facts", "checksum"])
def test_every_part_of_a_record_is_held(mixed, place):
    layout, data = mixed
    head = list(slots(data, "head"))[17]
    flip(data, head.offset + {"key": -5, "header": 40, "facts": 120, "checksum": 148}[place])
    assert pages_found(layout, "one", never) == "pages and index disagree"


@pytest.mark.parametrize("number", [0, 16, 17, 299])
def test_a_changed_key_of_a_value_is_found(mixed, number):
    layout, data = mixed
    small = next(
        slot for slot in list(slots(data, "blob"))[number:] + list(slots(data, "blob")) if slot.length < 2000
    )
    flip(data, small.offset - 1)
    assert pages_found(layout, "one", never) == "pages and index disagree"


def test_entries_more_or_fewer_than_the_index_has(tmp_path):
    layout, _ = layout_with(tmp_path / "a", [flat_entry(n, 200) for n in range(50)])
    index = open_index(layout.shards / "one")
    meta = read_meta(index.data)
    fewer, more = (replace(index, entries=index.entries + change) for change in (-1, 50))
    for walk in (trees._leaves_agree, trees._slots_agree):
        assert walk(index, meta, never)
        assert not walk(fewer, meta, never)
        assert not says_yes(walk, more, meta)


def test_time_that_is_over_ends_the_walk_without_a_finding(mixed):
    layout, data = mixed
    flip(data, list(slots(data, "blob"))[299].offset - 1)
    assert pages_found(layout, "one", lambda: True) == ""


def test_a_missing_file_is_said(mixed):
    layout, data = mixed
    data.unlink()
    assert "data.mdb" in pages_found(layout, "one", never) or "cannot be read" in pages_found(layout, "one", never)


def test_the_quick_walk_never_says_yes_where_the_slow_one_would_not(tmp_path):
    """Small values, so that almost every page belongs to a tree; seeds are fixed."""
    layout, data = layout_with(tmp_path, [flat_entry(n, 100) for n in range(200)])
    index, whole, rng = open_index(layout.shards / "one"), data.read_bytes(), random.Random(0)
    meta, disagreed = read_meta(index.data), 0
    for _ in range(150):
        at, length = rng.randrange(8192, meta.file_bytes - 64), rng.choice([1, 2, 8, 64])
        data.write_bytes(whole[:at] + rng.randbytes(length) + whole[at + length :])
        slow, quick = (says_yes(walk, index, meta) for walk in (trees._slots_agree, trees._leaves_agree))
        assert slow or not quick, (at, length)
        disagreed += not slow
    assert disagreed > 20


def says_yes(walk, index, meta):
    try:
        return walk(index, meta, never)
    except CacheDamagedError:
        return False

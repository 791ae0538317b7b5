import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import RECIPE, SQUARE, make_cache, make_shard, memo_of, new_entry, publish_entries

from latentcache.errors import CacheDamagedError, CacheFormatError, CacheNotFoundError
from latentcache.identity.stat import StatMemo
from latentcache.store import publication as generation_module
from latentcache.store.columns import ROW_SHAPES
from latentcache.store.durable import write_json
from latentcache.store.generation import Rows, load_generation, pack_memo, unpack_memo
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import FORMAT_VERSION, own_checksum

names_of_files = st.binary(min_size=1, max_size=30).map(os.fsdecode)
facts_made = st.fixed_dictionaries(
    {
        "source": st.fixed_dictionaries({"root": st.text()}),
        "demo": st.booleans(),
        "provenance": st.dictionaries(st.text(), st.text() | st.integers() | st.floats(allow_nan=False) | st.none()),
    }
)


@pytest.fixture
def layout(tmp_path):
    return make_cache(tmp_path / "cache")


@settings(max_examples=15)
@given(st.lists(names_of_files, min_size=3, max_size=3), st.lists(st.text(), min_size=3, max_size=3), facts_made)
def test_a_generation_comes_back(tmp_path_factory, names, captions, facts):
    captions = [caption.encode("utf-8", "replace").decode() for caption in captions]
    layout = CacheLayout(tmp_path_factory.mktemp("generation"))
    make_shard(layout.shards / "one", [new_entry(number) for number in range(3)])
    refused = [{"name": names[0], "cause": "truncated", "content": "ab" * 16, "stat": pack_memo(memo_of(1))}]
    notes = [{"name": names[1], "cause": "unlisted"}]
    number = publish_entries(
        layout, range(3), names=names, captions=captions, refused=refused, notes=notes, facts=facts
    )
    found = load_generation(layout.root)
    assert (found.number, number) == (1, 1)
    assert (list(found.samples.names), list(found.samples.captions)) == (names, captions)
    assert (list(found.refused), list(found.notes)) == (refused, notes)
    assert (found.recipe, found.buckets, found.shards) == (RECIPE, (SQUARE,), ("one",))
    assert (found.source_root, found.demo) == (facts["source"]["root"], facts["demo"])
    assert found.manifest["provenance"] == facts["provenance"]
    assert [found.samples.memo(index) for index in range(3)] == [memo_of(n) for n in range(3)]
    assert found.manifest["counts"] == {"samples": 3, "rows": 3, "quarantined": 1}


def test_the_schema_of_columns_names_the_fields_of_rows():
    assert set(ROW_SHAPES) == set(Rows.__dataclass_fields__)


@given(st.builds(
    StatMemo,
    size=st.integers(0, 2**63 - 1),
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    ctime_ns=st.integers(-(2**63), 2**63 - 1),
    inode=st.integers(0, 2**64 - 1),
    device=st.integers(0, 2**64 - 1),
    seen_ns=st.integers(0, 2**63 - 1),
))  # fmt: skip
def test_memos_come_back(memo):
    packed = np.array([pack_memo(memo)], dtype=np.uint64)
    assert unpack_memo(packed[0].tolist()) == memo


def test_generations_count_upwards_and_old_ones_stay(layout):
    make_shard(layout.shards / "two", [new_entry(number) for number in range(6, 9)])
    assert publish_entries(layout, range(9)) == 2
    assert (load_generation(layout.root).number, len(load_generation(layout.root).rows.shard)) == (2, 9)
    old = load_generation(layout.root, 1)
    assert (old.number, len(old.rows.shard), old.shards) == (1, 6, ("one",))


def test_a_pinned_generation_does_not_change_when_another_is_published(layout):
    pinned = load_generation(layout.root)
    before = (list(pinned.samples.names), pinned.rows.offset.tolist(), pinned.rows.key.tobytes())
    publish_entries(layout, [1], names=["other.png"])
    assert (list(pinned.samples.names), pinned.rows.offset.tolist(), pinned.rows.key.tobytes()) == before


def test_a_number_is_never_used_twice(layout):
    publish_entries(layout, range(2))
    layout.current.unlink()
    assert publish_entries(layout, range(3)) == 3
    assert len(load_generation(layout.root, 1).rows.shard) == 6


@pytest.mark.parametrize("step", ["save_columns", "write_json", "write_atomically", "sync_folder"])
def test_a_publication_that_is_killed_leaves_the_old_generation(layout, monkeypatch, step):
    class KilledError(BaseException):
        pass

    def kill(*_):
        raise KilledError

    monkeypatch.setattr(generation_module, step, kill)
    with pytest.raises(KilledError):
        publish_entries(layout, range(2))
    monkeypatch.undo()
    assert load_generation(layout.root).number == 1
    number = publish_entries(layout, range(4))
    assert load_generation(layout.root).number == number > 1
    assert len(load_generation(layout.root).rows.shard) == 4


def test_no_rows_at_all(tmp_path):
    layout = CacheLayout(tmp_path)
    layout.shards.mkdir()
    publish_entries(layout, [], names=[], captions=[])
    found = load_generation(tmp_path)
    assert (len(found.rows.shard), len(found.samples.names), found.shards) == (0, 0, ())


# What is not as it was written.


def changed(layout, change, *, signed=True):
    """Rewrite the manifest; with ``signed`` its checksum holds, as if a program of ours had written it."""
    path = layout.generation(1) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    if signed:
        unsigned = {name: value for name, value in manifest.items() if name != "checksum"}
        manifest["checksum"] = own_checksum(unsigned)
    write_json(path, manifest)


def test_a_newer_format_is_refused_in_words(layout):
    changed(layout, lambda m: m["format"].update(version=FORMAT_VERSION + 1), signed=False)
    with pytest.raises(CacheFormatError) as caught:
        load_generation(layout.root)
    assert caught.value.slug == "cache-format"
    assert (
        caught.value.what
        == f"this cache has format {FORMAT_VERSION + 1}; this version of latentcache reads up to {FORMAT_VERSION}"
    )
    assert "pip install -U latentcache" in caught.value.fix


@pytest.mark.parametrize("form", [None, 1, {}, {"version": "1"}, {"version": None}])
def test_what_is_no_manifest_is_no_cache(layout, form):
    changed(layout, lambda m: m.update(format=form))
    with pytest.raises(CacheFormatError, match="not a latentcache manifest"):
        load_generation(layout.root)


@pytest.mark.parametrize("name", ["recipe", "buckets", "shards", "counts", "columns", "lists", "source", "demo"])
def test_a_changed_manifest_is_damage(layout, name):
    changed(layout, lambda m: m.update({name: [["x", 5]]}), signed=False)
    with pytest.raises(CacheDamagedError, match="manifest is damaged") as caught:
        load_generation(layout.root)
    assert caught.value.where.endswith("manifest.json")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache whose manifest is damaged in turn, and the manifest as it was."""
    layout = make_cache(tmp_path_factory.mktemp("manifest"), count=2)
    return layout, (layout.generation(1) / "manifest.json").read_bytes()


@given(st.data())
def test_any_changed_byte_of_a_manifest_is_refused_or_says_the_same(kept, data):
    layout, good = kept
    path = layout.generation(1) / "manifest.json"
    path.write_bytes(good)
    whole = load_generation(layout.root)
    position = data.draw(st.integers(0, len(good) - 1))
    path.write_bytes(good[:position] + bytes([data.draw(st.integers(0, 255))]) + good[position + 1 :])
    try:
        found = load_generation(layout.root)
    except (CacheDamagedError, CacheFormatError):
        return
    assert found.manifest == whole.manifest


@pytest.mark.parametrize("change", [
    lambda m: m.update(generation=2),
    lambda m: m.update(shards=[]),
    lambda m: m.update(shards=["../../elsewhere"]),
    lambda m: m.update(shards=[5]),
    lambda m: m.update(buckets=[]),
    lambda m: m.update(buckets=[[64]]),
    lambda m: m.update(buckets=[[0, 64]]),
    lambda m: m.update(recipe={}),
    lambda m: m.update(columns=[]),
    lambda m: m.pop("columns"),
    lambda m: m.pop("lists"),
    lambda m: m["columns"].pop("offset"),
    lambda m: m["columns"].update(offset=m["columns"]["key"]),
    lambda m: m["columns"].update(offset=dict(m["columns"]["offset"], file="../000001/offset.npy")),
    lambda m: m["columns"].update(key="key.npy"),
])  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_damage_although_its_checksum_holds(layout, change):
    changed(layout, change)
    with pytest.raises(CacheDamagedError) as caught:
        load_generation(layout.root)
    assert str(layout.root) in caught.value.where
    assert caught.value.why


@pytest.mark.parametrize("name", ["key.npy", "offset.npy", "names_bytes.npy", "stat.npy", "refused.json"])
def test_a_damaged_file_is_named(layout, name):
    path = layout.generation(1) / name
    good = path.read_bytes()
    for bad in (good[:-1], good[:-3] + bytes([good[-3] ^ 1]) + good[-2:], b""):
        path.write_bytes(bad)
        with pytest.raises(CacheDamagedError, match=f"{name} is damaged"):
            load_generation(layout.root)
    path.unlink()
    with pytest.raises(CacheDamagedError, match=f"{name} cannot be read"):
        load_generation(layout.root)


@pytest.mark.parametrize("text", [b"", b"00000", b"xyz\n"])
def test_a_torn_current_is_damage(layout, text):
    layout.current.write_bytes(text)
    with pytest.raises(CacheDamagedError, match="CURRENT names no generation"):
        load_generation(layout.root)


def test_a_current_that_names_nothing_is_damage(layout):
    layout.current.write_text("000009\n")
    with pytest.raises(CacheDamagedError, match=r"manifest\.json cannot be read"):
        load_generation(layout.root)


def test_a_build_that_has_not_ended_is_told_from_no_cache(tmp_path):
    with pytest.raises(CacheNotFoundError) as caught:
        load_generation(tmp_path)
    assert caught.value.slug == "cache-not-found"
    CacheLayout(tmp_path).shards.mkdir()
    with pytest.raises(CacheNotFoundError, match="no finished build") as caught:
        load_generation(tmp_path)
    assert caught.value.slug == "cache-unfinished"
    assert "latentcache build" in caught.value.fix

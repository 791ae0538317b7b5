import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import (
    GROUPS,
    KINDS,
    RECIPES,
    entries_of,
    items_of,
    keys_of,
    make_cache,
    make_shard,
    publish,
    samples_of,
)

from latentcache.errors import CacheDamagedError, CacheFormatError
from latentcache.store import snapshot as snapshot_module
from latentcache.store.atomic_io import write_json
from latentcache.store.snapshot import load_manifest, open_snapshot, own_checksum


def check_rows(snapshot, numbers):
    """Check that every row of every field belongs to its sample."""
    for name, rows in snapshot.fields.items():
        items = items_of(name, numbers)
        assert (len(rows), type(rows.kind), rows.recipe) == (len(items), type(KINDS[name]), RECIPES[name])
        assert rows.groups == GROUPS[name]
        np.testing.assert_array_equal(rows.row_keys(), keys_of(items))
        np.testing.assert_array_equal(rows.row_keys(np.arange(len(items))[::-2]), keys_of(items)[::-2])
        np.testing.assert_array_equal(np.asarray(rows.sample), np.arange(len(items)))
        lengths = [len(item.array) if rows.spec.ragged else 0 for item in items]
        np.testing.assert_array_equal(np.asarray(rows.length), lengths)
        for column in KINDS[name].columns:
            expected = [item.columns[column] for item in items]
            np.testing.assert_array_equal(np.asarray(rows.columns[column]), expected)
        for column in KINDS[name].ragged_columns:
            ends, values = (np.asarray(part) for part in rows.ragged_columns[column])
            for row, item in enumerate(items):
                begin = ends[row - 1] if row else 0
                np.testing.assert_array_equal(values[begin : ends[row]], item.columns[column])


def test_a_snapshot_equals_the_published_one(paths):
    snapshot = open_snapshot(paths.root)
    check_rows(snapshot, range(12))
    samples = samples_of(range(12))
    assert list(snapshot.samples.names) == list(samples.names)
    assert list(snapshot.samples.inputs["caption"].text) == list(samples.inputs["caption"].text)
    np.testing.assert_array_equal(np.asarray(snapshot.samples.files.stat), samples.files.stat)
    sizes = (np.asarray(table.columns["original_size"]) for table in (snapshot.samples, samples))
    np.testing.assert_array_equal(*sizes)
    assert (snapshot.number, snapshot.complete, snapshot.part) == (1, True, "")
    assert snapshot.shards == ("shard-0", "shard-1")
    (rejected,), (note,) = snapshot.rejected, snapshot.notes
    assert (rejected.name, rejected.reason) == ("bad.png", "truncated")
    assert (rejected.content, rejected.stat) == (b"c" * 16, (1, 2, 3, 4, 5, 6))
    assert (note.name, note.line, note.stat) == ("a.txt", 3, ())
    assert snapshot.source["root"] == "/data"
    assert len(repr(snapshot)) < 300
    check_rows(pickle.loads(pickle.dumps(snapshot)), range(12))


@settings(max_examples=10)
@given(st.lists(st.integers(0, 80), unique=True, min_size=1), st.lists(st.integers(0, 80), unique=True, min_size=1))
def test_own_columns_follow_their_items_through_builds(tmp_path_factory, first, second):
    """Each build takes them from the indexes of the shards."""
    paths = make_cache(tmp_path_factory.mktemp("cache") / "one", first, shards=min(2, len(first)))
    new = [number for number in second if number not in first]
    if new:
        make_shard(paths.shard("more"), [entry for name in KINDS for entry in entries_of(name, new)])
    known = open_snapshot(paths.root)
    publish(paths, second)
    check_rows(open_snapshot(paths.root), second)
    check_rows(known, first)


def test_a_kind_that_is_not_installed_is_opened_all_the_same(paths, monkeypatch):
    monkeypatch.setattr(snapshot_module, "field_kind", lambda name: None)
    snapshot = open_snapshot(paths.root)
    for name, rows in snapshot.fields.items():
        assert (rows.kind, rows.recipe, rows.recipe_json["dtype"]) == (None, None, RECIPES[name].spec.dtype)
    np.testing.assert_array_equal(snapshot.fields["plane"].row_keys(), keys_of(items_of("plane", range(12))))
    words = snapshot.fields["words"]
    np.testing.assert_array_equal(words.row_keys(), np.asarray(words.key)[np.asarray(words.entry)])


@pytest.mark.parametrize("change", [
    {"snapshot": 2}, {"shards": ["../x", "b"]}, {"counts": {}}, {"fields": {"plane": {}}}, {"columns": None},
])  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_one_error(paths, change):
    path = paths.snapshot(1) / "manifest.json"
    manifest = json.loads(path.read_bytes()) | change
    del manifest["checksum"]
    write_json(path, manifest | {"checksum": own_checksum(manifest)})
    with pytest.raises(CacheDamagedError, match="contradicts itself"):
        open_snapshot(paths.root)


def test_a_newer_cache_is_not_called_damaged(paths):
    path = paths.snapshot(1) / "manifest.json"
    write_json(path, {"format": {"name": "latentcache", "version": 3}, "anything": 1})
    with pytest.raises(CacheFormatError, match="format 3"):
        open_snapshot(paths.root)
    write_json(path, {"something": "else"})
    with pytest.raises(CacheFormatError, match="not a latentcache manifest"):
        load_manifest(paths.snapshot(1))

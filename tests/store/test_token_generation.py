import json
import shutil

import numpy as np
import pytest
from small_tokens import build, opened, texts, write_texts

from latentcache.errors import CacheDamagedError, CacheFormatError
from latentcache.identity.content import checksum
from latentcache.store.columns import npy_bytes
from latentcache.store.generation import load_generation
from latentcache.store.manifest import own_checksum
from latentcache.store.pins import open_pinned, pinned
from latentcache.store.token_generation import load_any, load_tokens


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation")
    build(write_texts(folder / "a.jsonl", texts(30)), folder / "cache")
    return folder / "cache"


@pytest.fixture
def cache(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cache")


def rewritten(cache, name, change):
    """Change a column as somebody would who can compute checksums."""
    folder = cache / "generations" / "000001"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    column = np.load(folder / f"{name}.npy").copy()
    data = npy_bytes(change(column))
    (folder / f"{name}.npy").write_bytes(data)
    manifest["columns"][name]["checksum"] = f"{checksum(data):016x}"
    del manifest["checksum"]
    manifest["checksum"] = own_checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_it_says_its_kind_and_needs_a_reader_that_knows_it(cache):
    manifest = json.loads((cache / "generations" / "000001" / "manifest.json").read_bytes())
    assert (manifest["kind"], manifest["format"]["version"]) == ("tokens", 3)
    assert manifest["counts"] == {"samples": 30, "blocks": 1, "quarantined": 0}


def test_each_kind_is_opened_in_its_own_way(cache):
    for load in (load_generation, open_pinned):
        with pytest.raises(CacheFormatError) as caught:
            load(cache)
        assert caught.value.slug == "cache-kind"
        assert "open_tokens" in caught.value.fix
    assert load_any(cache).number == load_tokens(cache).number == pinned(cache, load_tokens).number == 1


def test_documents_know_where_they_came_from(cache):
    generation, _ = opened(cache)
    assert generation.documents.where(4) == "a.jsonl:5"
    assert generation.rows.key.shape == (1, 32)
    assert generation.source_root.endswith("a.jsonl")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("block", lambda c: c + 1),
        ("block", lambda c: c - 1),
        ("start", lambda c: c + 1),
        ("length", lambda c: c * 0),
        ("length", lambda c: c.astype("<u8")),
        ("content", lambda c: c[:, :8]),
        ("span_ends", lambda c: c[::-1]),
        ("span_ends", lambda c: c + 1),
        ("spans", lambda c: c + 1),
        ("source", lambda c: c + 1),
        ("shard", lambda c: c + 1),
        ("offset", lambda c: c - np.uint64(1 << 63)),
        ("line", lambda c: c[:-1]),
        ("control", lambda c: c[:-1]),
        ("tokens", lambda c: c - 1),
        ("sources_ends", lambda c: c + np.uint64(1)),
        ("source_stat", lambda c: c[:, :5]),
    ],
)
def test_columns_that_contradict_each_other_are_damage(cache, name, change):
    rewritten(cache, name, change)
    with pytest.raises(CacheDamagedError):
        load_tokens(cache)


def test_a_recipe_that_is_none_is_damage(cache):
    path = cache / "generations" / "000001" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["recipe"]["colour"] = "blue"
    del manifest["checksum"]
    path.write_text(json.dumps({**manifest, "checksum": own_checksum(manifest)}))
    with pytest.raises(CacheDamagedError):
        load_tokens(cache)

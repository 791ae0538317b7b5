import shutil

import pytest
from small_tokens import build, opened, tamper, texts, write_texts

from latentcache.pipeline.token_inputs import read_token_before
from latentcache.pipeline.token_recovery import known_whole, recover
from latentcache.store.layout import CacheLayout


@pytest.fixture
def cache(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", texts(200, longest=4000)), tmp_path / "cache")
    for path in (tmp_path / "cache" / "generations").glob("*/manifest.json"):
        path.write_bytes(b"x")  # so that blocks are read, not believed
    return tmp_path / "cache"


def test_damaged_blocks_are_set_aside_and_whole_ones_are_known(cache):
    whole = shutil.copytree(cache, cache.with_name("whole"))
    build(cache.with_name("a.jsonl"), whole)
    recipe = opened(whole)[0].recipe
    held = (opened(whole)[0].documents.block == 0).sum()
    shard = next((cache / "shards").iterdir())
    generation = opened(whole)[0]
    path = shard / "data.mdb"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[int(generation.blocks.offset[0]) + 200] ^= 1
    path.write_bytes(bytes(data))
    layout, said = CacheLayout(cache), []
    before = read_token_before(layout)
    recover(layout, before, said.append)
    assert "manifest was damaged" in said.pop(0)
    seen = known_whole(layout, before, recipe, None)
    assert (len(seen.damaged), len(seen.documents.length)) == (1, 200 - held)
    assert layout.sealed_shards()[0].name == shard.name
    mended = known_whole(layout, before, recipe, said.append)
    assert (len(mended.damaged), len(mended.documents.length)) == (0, 200 - held)
    assert [words.split()[-1] for words in said] == ["again"]
    assert shard.name in layout.retired()


def test_nothing_is_said_of_a_whole_cache(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", ["one"]), tmp_path / "cache")
    layout, said = CacheLayout(tmp_path / "cache"), []
    before = read_token_before(layout)
    recover(layout, before, said.append)
    assert len(known_whole(layout, before, before.recipe, said.append).documents.length) == 1
    assert said == []
    tamper(tmp_path / "cache")  # a block that the columns know whole is not read here
    assert known_whole(layout, before, before.recipe, said.append).damaged == ()

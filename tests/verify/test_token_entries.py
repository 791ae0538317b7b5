import numpy as np
import pytest
from small_tokens import build, flip, opened, tamper, texts, write_texts

from latentcache.store.layout import CacheLayout
from latentcache.verify.token_entries import check_blocks


@pytest.fixture
def cache(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", texts(200, longest=4000)), tmp_path / "cache")
    return tmp_path / "cache"


def reasons(cache, generation=None, full=True):
    checked = check_blocks(CacheLayout(cache), generation or opened(cache)[0], full=full)
    return {finding.reason for findings in checked.damage.values() for finding in findings}, checked


def test_whole_blocks_have_no_findings(cache):
    found, checked = reasons(cache)
    assert found == set()
    assert checked.headers == checked.payloads == len(opened(cache)[0].blocks) > 1
    assert checked.payload_bytes == 2 * int(opened(cache)[0].blocks.tokens.sum())
    assert reasons(cache, full=False)[1].payloads == 0


def test_each_kind_of_damage(cache):
    generation, _ = opened(cache)
    shard = cache / "shards" / generation.shards[0]
    tamper(cache, block=0)
    assert reasons(cache, full=False)[0] == set()
    assert reasons(cache)[0] == {"payload"}
    flip(shard / "index.npy", -1)
    assert reasons(cache)[0] == {"shard"}
    (shard / "data.mdb").unlink()
    assert reasons(cache)[0] == {"entry-lost"}


@pytest.mark.parametrize("name", ["length", "control", "start"])
def test_columns_that_are_not_those_of_the_blocks(cache, name):
    generation, _ = opened(cache)
    column = (generation.control if name == "control" else getattr(generation.documents, name)).copy()
    column.flags.writeable = True
    column[3] += 1
    where = generation if name == "control" else generation.documents
    object.__setattr__(where, name, column)
    found, checked = reasons(cache, generation)
    assert found == {"columns"}
    assert 3 in checked.damage


def test_headers_of_other_blocks_and_orphans(cache):
    generation, _ = opened(cache)
    object.__setattr__(generation.blocks, "tokens", generation.blocks.tokens + np.uint32(1))
    assert reasons(cache, generation, full=False)[0] == {"header"}
    object.__setattr__(generation.blocks, "key", np.roll(generation.blocks.key, 1, axis=0))
    found, checked = reasons(cache, generation, full=False)
    assert found == {"entry-lost"}
    assert checked.loose == []
    object.__setattr__(generation.blocks, "key", np.zeros_like(generation.blocks.key))
    assert [one.reason for one in reasons(cache, generation, full=False)[1].loose] == ["unreferenced"] * len(
        generation.blocks
    )

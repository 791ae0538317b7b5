import numpy as np
import pytest
from small_tokens import build, flip, opened, tamper, texts, write_texts

from latentcache.store.layout import CacheLayout
from latentcache.verify.deep import read_payloads
from latentcache.verify.entries import check_entries
from latentcache.verify.selection import Deadline, Depth


@pytest.fixture
def cache(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", texts(200, longest=4000)), tmp_path / "cache")
    return tmp_path / "cache"


def reasons(cache, generation=None, full=True):
    generation = generation or opened(cache)[0]
    layout, everything = CacheLayout(cache), np.ones(len(generation.blocks), dtype=bool)
    checked = check_entries(layout, generation)
    depth = Depth(full=full, isolate=False)  # what is changed below is changed in this process alone
    deep = read_payloads(layout, generation, checked, chosen=everything, depth=depth, deadline=Deadline(None))
    return {finding.reason for findings in checked.damage.values() for finding in findings}, checked, deep


def test_whole_blocks_have_no_findings(cache):
    found, checked, deep = reasons(cache)
    assert found == set()
    assert checked.headers == deep.payloads == len(opened(cache)[0].blocks) > 1
    assert deep.payload_bytes > 2 * int(opened(cache)[0].blocks.tokens.sum())
    assert reasons(cache, full=False)[2].payloads == 0


def test_a_damaged_block_is_a_finding_for_each_of_its_documents(cache):
    tamper(cache, block=1)
    documents = opened(cache)[0].documents
    inside = np.flatnonzero(documents.block == 1).tolist()
    checked = reasons(cache)[1]
    assert sorted(checked.damage) == inside
    assert [one.path for number in inside for one in checked.damage[number]] == [documents.where(n) for n in inside]
    assert {(one.field, one.reason) for own in checked.damage.values() for one in own} == {("input_ids", "payload")}


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
    found, checked, _ = reasons(cache, generation)
    assert found == {"columns"}
    assert 3 in checked.damage


def test_headers_of_other_blocks_and_orphans(cache):
    generation, _ = opened(cache)
    object.__setattr__(generation.blocks, "tokens", generation.blocks.tokens + np.uint32(1))
    assert reasons(cache, generation, full=False)[0] == {"header"}
    object.__setattr__(generation.blocks, "key", np.roll(generation.blocks.key, 1, axis=0))
    found, checked, _ = reasons(cache, generation, full=False)
    assert found == {"entry-lost"}
    assert checked.loose == []
    object.__setattr__(generation.blocks, "key", np.zeros_like(generation.blocks.key))
    object.__setattr__(generation.blocks, "offset", generation.blocks.offset + np.uint64(1))
    loose = reasons(cache, generation, full=False)[1].loose
    assert [(one.reason, one.field) for one in loose] == [("unreferenced", "input_ids")] * len(generation.blocks)

import numpy as np
import pytest
from small_tokens import build, opened, tamper, texts, write_texts

from latentcache.store.layout import CacheLayout
from latentcache.verify.token_payloads import DocumentsOfBlocks, scan_blocks


@pytest.fixture
def cache(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", texts(200, longest=4000)), tmp_path / "cache")
    return tmp_path / "cache"


def test_messages_are_those_of_pictures(cache):
    generation = opened(cache)[0]
    found = list(scan_blocks(CacheLayout(cache), generation, [0]))
    assert (found[0], found[-1]) == ({"shard": 0}, {"end": 0})
    assert [message["upto"] for message in found[1:-1]] == [*range(1, len(generation.blocks) + 1)]
    tamper(cache, block=0)
    (damaged,) = [message for message in scan_blocks(CacheLayout(cache), generation, [0]) if "row" in message]
    assert (damaged["row"], damaged["category"], damaged["reason"]) == (0, "corrupt", "payload")


def test_only_chosen_blocks_are_read_and_only_in_time(cache):
    layout, generation = CacheLayout(cache), opened(cache)[0]
    chosen = np.zeros(len(generation.blocks), dtype=bool)
    chosen[1] = True
    found = list(scan_blocks(layout, generation, [0], chosen=chosen))
    assert [message["upto"] for message in found if "upto" in message] == [1]
    assert list(scan_blocks(layout, generation, [0], over=lambda: True)) == [{"shard": 0}]


def test_documents_of_each_block(cache):
    generation = opened(cache)[0]
    held = DocumentsOfBlocks(generation)
    found = [held[block].tolist() for block in range(len(generation.blocks))]
    assert [document for own in found for document in own] == list(range(200))
    assert all((generation.documents.block[own] == block).all() for block, own in enumerate(found))

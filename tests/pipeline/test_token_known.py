import numpy as np
import pytest
from small_tokens import build, opened, tamper, texts, write_texts

from latentcache.pipeline.token_known import known_documents
from latentcache.store.catalog import load_catalog
from latentcache.store.layout import CacheLayout
from latentcache.token_recipe import TokenRecipe

LINES = texts(200, longest=4000)


@pytest.fixture
def cache(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", LINES), tmp_path / "cache")
    return tmp_path / "cache"


def looked_up(known, content):
    found = known.find(content)
    part = known.documents
    begins = np.concatenate([[0], part.span_ends])
    return [
        (
            known.blocks[part.block[n]].key,
            int(part.start[n]),
            int(part.length[n]),
            part.spans[begins[n] : part.span_ends[n]].tolist(),
        )
        for n in found.tolist()
    ]


def test_columns_and_blocks_say_the_same(cache):
    generation, _ = opened(cache)
    catalog = load_catalog(CacheLayout(cache))
    by_columns = known_documents(catalog, generation, generation.recipe)
    by_blocks = known_documents(catalog, None, generation.recipe)
    content = generation.documents.content[::-1]
    assert looked_up(by_columns, content) == looked_up(by_blocks, content)
    assert by_columns.find(np.zeros((2, 16), dtype=np.uint8)).tolist() == [-1, -1]


def test_another_recipe_knows_nothing(cache):
    generation, _ = opened(cache)
    other = TokenRecipe(tokenizer="00" * 16, num_ids=10)
    known = known_documents(load_catalog(CacheLayout(cache)), generation, other)
    assert len(known.blocks) == 0
    assert (known.find(generation.documents.content) == -1).all()


def test_a_damaged_block_is_not_known_where_it_is_read(cache):
    tamper(cache, block=1)
    generation, _ = opened(cache)
    known = known_documents(load_catalog(CacheLayout(cache)), None, generation.recipe)
    assert [block.key for block in known.damaged] == [generation.blocks.key[1].tobytes()]
    lost = known.find(generation.documents.content) < 0
    assert (lost == (generation.documents.block == 1)).all()

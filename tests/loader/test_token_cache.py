import pickle
from dataclasses import replace

import numpy as np
import pytest
from made_tokens import EOS, cache_of, chats, texts

from latentcache.errors import PlanError, UsageError
from latentcache.loader.token_cache import documents_fingerprint
from latentcache.store.layout import CacheLayout
from latentcache.store.plans import PlanFolder

TEXTS = texts()


def test_texts_are_split_and_conversations_refused_where_nothing_is_said():
    long = [[*range(2, 12), EOS]]
    assert len(cache_of(long).padded(8)) == len(cache_of(long).packed(8)) == 2
    chat = cache_of(long, [[(5, 6)]])
    for kind in (chat.padded, chat.packed):
        with pytest.raises(PlanError, match="1 document is longer than max_length=8") as caught:
            kind(8)
        assert caught.value.where == "memory:1 (11 tokens)"
    assert len(chat.padded(8, overflow="truncate_left")) == 1


def test_nothing_to_train_on_is_an_error_that_says_why():
    with pytest.raises(PlanError, match="no row") as caught:
        cache_of([[EOS] * 20]).padded(8, overflow="drop")
    assert "too_long: 20" in caught.value.why
    with pytest.raises(PlanError, match="no row"):
        cache_of([]).blocks(8)


def test_one_store_has_many_views():
    cache = cache_of(TEXTS)
    assert len(cache) == len(TEXTS)
    assert cache.tokens == sum(map(len, TEXTS))
    packed = {length: cache.packed(length) for length in (40, 80, 160)}
    assert all(view.tokens == cache.tokens for view in packed.values())
    assert len(packed[40]) > len(packed[80]) > len(packed[160])
    assert len({view.identity for view in (*packed.values(), cache.padded(40), cache.blocks(40))}) == 5
    assert cache.blocks(40, tail="drop").tokens == cache.tokens // 40 * 40


def test_a_kept_plan_is_used(tmp_path):
    plans = PlanFolder(CacheLayout(tmp_path))
    first = cache_of(TEXTS, plans=plans).packed(40)
    (path,) = plans.folder.glob("*.json")
    stamp = path.stat().st_mtime_ns
    again = cache_of(TEXTS, plans=plans).packed(40)
    assert path.stat().st_mtime_ns == stamp
    assert again.batch([0])["input_ids"].tolist() == first.batch([0])["input_ids"].tolist()
    cache_of(TEXTS[:-1], plans=plans).packed(40)
    cache_of(TEXTS, plans=plans).packed(40, overflow="drop")
    assert len(list(plans.folder.glob("*.json"))) == 3


def test_what_names_the_documents():
    ids, spans = chats()
    cache = cache_of(ids, spans)
    assert documents_fingerprint(cache.store, cache.recipe) == cache.fingerprint
    assert cache_of(ids).fingerprint != cache.fingerprint
    assert cache_of(ids[:-1], spans[:-1]).fingerprint != cache.fingerprint


def test_parts_do_not_cross():
    cache = cache_of(TEXTS)
    train, held = cache.split(1)
    assert (len(train), len(held)) == (0, len(TEXTS))
    assert cache.of_source("memory").tokens == cache.tokens
    with pytest.raises(UsageError, match="no source 'x'"):
        cache.of_source("x")


def test_a_file_of_two_data_sets_is_one_source():
    cache = cache_of(TEXTS)
    store = cache.store
    source = np.arange(len(TEXTS), dtype=np.int32) % 3
    store.documents = replace(store.documents, source=source, sources=("a", "b", "a"))
    assert len(cache.of_source("a")) == int((source != 1).sum())
    assert len(cache.of_source("a", "b")) == len(TEXTS)


def test_it_travels():
    cache = cache_of(TEXTS)
    again = pickle.loads(pickle.dumps(cache))
    assert again.packed(40).batch([1])["labels"].tolist() == cache.packed(40).batch([1])["labels"].tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda cache: cache.padded(8, padding_side="middle"),
        lambda cache: cache.padded(8, lengths=[4, 9]),
        lambda cache: cache.padded(8, overflow="cut"),
        lambda cache: cache.packed(1),
        lambda cache: cache.blocks(8, tail="hide"),
        lambda cache: cache.blocks(8, idle="hide"),
    ],
)
def test_settings_that_cannot_be(make):
    with pytest.raises(UsageError):
        make(cache_of(TEXTS))

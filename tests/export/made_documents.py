"""Caches of documents in memory, and what hypothesis draws them from."""

from hypothesis import strategies as st

from latentcache.loader.token_cache import TokenCache, documents_fingerprint
from latentcache.store.documents import MemoryTokens
from latentcache.token_recipe import TokenRecipe

#: Numbers of ids of both widths, and documents of such ids.
VOCABULARIES = st.sampled_from([300, 1 << 16, (1 << 16) + 1, 200_000])
CORPORA = VOCABULARIES.flatmap(
    lambda num_ids: st.tuples(
        st.just(num_ids),
        st.lists(st.lists(st.integers(0, num_ids - 1), min_size=1, max_size=9), min_size=1, max_size=12),
    )
)
FACTS = {"fingerprint": "ab" * 16}


def cache_of(ids, num_ids=300, spans=None):
    """Documents of these ids; ``spans``: the runs of each that carry loss."""
    recipe = TokenRecipe(tokenizer="ab" * 16, num_ids=num_ids, loss="all" if spans is None else "assistant")
    store = MemoryTokens(ids, spans)
    return TokenCache(store=store, recipe=recipe, fingerprint=documents_fingerprint(store, recipe))

"""``combine_caches``: several caches as one, in given shares where they are asked for.

Guarantee: shares are whole numbers that are known before training and exact in every epoch (``plan.weights``).
"""

from __future__ import annotations

from collections.abc import Sequence

from latentcache.errors import UsageError
from latentcache.loader.cache import Cache
from latentcache.plan.given_numbers import several
from latentcache.plan.names import name_of, told_apart
from latentcache.plan.weights import Repeats, Weight, mixture, refuse_without_weights
from latentcache.store.views import combine


def combine_caches(
    caches: Sequence[Cache],
    *,
    weights: Sequence[Weight] | None = None,
    samples: int | None = None,
    names: Sequence[str] | None = None,
    max_repeat: Repeats | None = None,
) -> Cache:
    """Several caches as one: a batch may hold samples of any of them, as long as it is of one size.

    Args:
        caches: Parts and repeats of caches too.
        weights: Share of the samples of an epoch that each cache gets, in any unit. Without them every entry is
            served once. Counts are exact in every epoch; over the epochs all entries of a cache are served equally
            often.
        samples: Servings in an epoch. By default the cache with the most entries for its weight is served exactly
            once, and so every entry of the others at least once.
        names: What each is called, in ``plan(...).datasets``, in ``loader.served()`` and in checkpoints; which of its
            entries have an extra turn follows from its name, and not from what else is combined. By default the
            last part of its path, without ``.latentcache``.
        max_repeat: How often an epoch may serve a cache over, at most: one number or one for each. More is refused,
            with the longest epoch that keeps to it. What fills a step (``small_buckets``) is beyond it.

    Raises:
        UsageError: No cache, or latents that cannot stand in one batch (the fields that differ are named); weights
            or names that cannot be, ``samples``, ``names`` or ``max_repeat`` without weights; more of a cache than
            ``max_repeat``; a cache that has weights itself.
    """
    caches = several("caches", caches, fix="combine_caches([one, other])")
    if not all(isinstance(cache, Cache) for cache in caches):
        raise UsageError("combine_caches of what are no caches", fix="pass what open_cache gives, or parts of it")
    for cache in caches:
        cache.refuse_weights("combine_caches")
    combined = combine([(cache.layout, cache.generation) for cache in caches])
    if weights is None:
        refuse_without_weights(samples=samples, names=names, max_repeat=max_repeat)
        return Cache(caches[0].layout, combined)
    called = names or told_apart([name_of(cache.layout.root) for cache in caches])
    counts = [len(cache) for cache in caches]
    mix = mixture(counts, weights, samples=samples, names=called, max_repeat=max_repeat)
    return Cache(caches[0].layout, combined, mix)

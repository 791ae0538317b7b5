"""Damaged samples: replaced the same way however the epoch is served, said once, counted, not read one by one."""

import warnings
from collections import Counter

import numpy as np
import pytest
from damaged import damage_payload
from hypothesis import given
from hypothesis import strategies as st
from made_caches import documents, images, opened, texts

from latentcache import combine
from latentcache.errors import CacheDamagedError, CorruptEntryError
from latentcache.loader.substitute import Substitutes
from latentcache.plan.batching import Bucket
from latentcache.plan.samples import SampleIndex


def index_of(count, buckets=1):
    return SampleIndex(bucket=np.arange(count, dtype=np.int32) % buckets, identify=str,
                       buckets=tuple(Bucket(label=f"b{n}") for n in range(buckets)))  # fmt: skip


class Store:
    """Reads rows, some of which are bad; counts what it read."""

    def __init__(self, bad):
        self.bad, self.reads = set(bad), []

    def __call__(self, rows):
        self.reads.append(len(rows))
        wrong = self.bad & set(rows.tolist())
        if wrong:
            raise CorruptEntryError(
                f"entry {min(wrong)} is damaged", sample=f"s{min(wrong)}", where="shard", why="checksum"
            )
        return rows.tolist()


def made(bad, count=400, buckets=2, on_error="substitute"):
    return Substitutes(index_of(count, buckets), lambda row: f"s{row}", on_error), Store(bad)


@pytest.mark.filterwarnings("ignore:entry")
@given(st.sets(st.integers(0, 399), max_size=4), st.integers(0, 9), st.integers(1, 16))
def test_the_substitute_depends_on_seed_epoch_and_sample_alone(bad, epoch, batch):
    bad = {row for row in bad if row % 2 == 0}
    whole, store = made(bad)
    rows = np.arange(0, 400, 2)
    found, values = whole.read(rows, store, seed=1, epoch=epoch)
    assert values == found.tolist()
    assert not bad & set(values)
    assert all(one == other for one, other in zip(rows.tolist(), values, strict=True) if one not in bad)
    assert all(other % 2 == 0 for other in values)
    parts, store = made(bad)
    again = [row for start in range(0, 200, batch)
             for row in parts.read(rows[start : start + batch], store, seed=1, epoch=epoch)[1]]  # fmt: skip
    assert again == values
    assert parts.counts == whole.counts == {f"s{row}": 1 for row in bad}


def test_a_batch_with_one_bad_sample_is_not_read_one_by_one():
    substitutes, store = made({40}, buckets=1)
    with pytest.warns(UserWarning, match="is served in place of s40"):
        substitutes.read(np.arange(64), store, seed=0, epoch=0)
    assert len(store.reads) <= 2 * 6 + 4
    assert sum(store.reads) <= 4 * 64
    store.reads.clear()
    substitutes.read(np.arange(64), store, seed=0, epoch=1)
    assert store.reads == [1, 64]  # known: replaced before it is read


def test_each_is_said_once_and_counted():
    substitutes, store = made({0, 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            substitutes.read(np.array([0, 2, 4]), store, seed=0, epoch=epoch)
    assert len(caught) == 2
    assert substitutes.counts == {"s0": 3, "s2": 3}


def test_too_many_are_an_error_after_all():
    substitutes, store = made(range(0, 20, 2), count=400)
    with pytest.raises(CacheDamagedError, match="more than 4 of 400 samples"):
        substitutes.read(np.arange(0, 40, 2), store, seed=0, epoch=0)
    substitutes, store = made({0}, count=2)
    with pytest.raises(CacheDamagedError, match="no sample of bucket b0 can be read"):
        substitutes.read(np.array([0]), store, seed=0, epoch=0)


def test_through_a_loader_of_samples(tmp_path):
    root = images(tmp_path / "c", [(64, 64)] * 12 + [(64, 96)] * 8)
    cache = opened(root)
    name = damage_payload(root, row=3)
    with pytest.raises(CorruptEntryError, match=name):
        list(cache.loader(batch_size=4))
    loader = cache.loader(batch_size=4, on_error="substitute")
    with pytest.warns(UserWarning, match=f"in place of {name}"):
        served = Counter(found for batch in loader for found in batch["names"])
    assert name not in served
    assert sum(served.values()) == 20
    assert loader.substituted == {name: 1}


def test_through_a_loader_of_rows_the_own_source_comes_first(tmp_path):
    """A bad block makes all of its documents bad; another document of the same source is served."""
    roots = [
        documents(tmp_path / name, texts(300, 40, seed=number), seal_every=2) for number, name in enumerate("ab")
    ]
    views = [opened(root).rows(pad=64) for root in roots]
    damage_payload(roots[0], field="input_ids", row=5, place=1)
    both = combine(views, weights=[1, 1])
    loader = both.loader(batch_size=5, on_error="substitute", fields=["names"])
    with pytest.warns(UserWarning, match="is served in place of row"):
        names = [name for batch in loader for name in batch["names"]]
    assert len(names) == 600
    assert sum(loader.substituted.values()) == 2
    assert all(name.startswith("row ") for name in loader.substituted)

"""Damaged samples are replaced deterministically, reported once and counted."""

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
from latentcache.plan.samples import BatchIndex, SampleIndex


def index_of(count, buckets=1):
    return SampleIndex(bucket=np.arange(count, dtype=np.int32) % buckets, identify=str,
                       names_of=lambda rows: [f"s{row}" for row in rows.tolist()],
                       buckets=tuple(Bucket(label=f"b{n}") for n in range(buckets)))  # fmt: skip


class Store:
    """Reads rows with substitutes; some rows are bad."""

    def __init__(self, bad, count=400, buckets=2):
        self.bad, self.reads, self.index = set(bad), [], index_of(count, buckets)
        self.substitutes = Substitutes("substitute")

    def read(self, rows, epoch=0):
        return self.substitutes.read(self.index, BatchIndex(epoch, 0, rows, 0, seed=1), self)

    def __call__(self, rows):
        self.reads.append(len(rows))
        wrong = self.bad & set(rows.tolist())
        if wrong:
            raise CorruptEntryError(
                f"entry {min(wrong)} is damaged", sample=f"s{min(wrong)}", where="shard", why="checksum"
            )
        return rows.tolist()


@pytest.mark.filterwarnings("ignore:entry")
@given(st.sets(st.integers(0, 399), max_size=4), st.integers(0, 9), st.integers(1, 16))
def test_the_substitute_depends_on_seed_epoch_and_sample_alone(bad, epoch, batch):
    bad = {row for row in bad if row % 2 == 0}
    whole, parts, rows = Store(bad), Store(bad), np.arange(0, 400, 2)
    values = whole.read(rows, epoch)
    assert not bad & set(values)
    assert all(row == other for row, other in zip(rows.tolist(), values, strict=True) if row not in bad)
    assert all(other % 2 == 0 for other in values)
    again = [row for start in range(0, 200, batch) for row in parts.read(rows[start : start + batch], epoch)]
    assert again == values
    assert parts.substitutes.counts == whole.substitutes.counts == {f"s{row}": 1 for row in bad}


def test_a_known_bad_sample_is_replaced_before_it_is_read():
    store = Store({40}, buckets=1)
    with pytest.warns(UserWarning, match="is served in place of s40"):
        store.read(np.arange(64))
    store.reads.clear()
    store.read(np.arange(64), epoch=1)
    assert store.reads == [64]


def test_each_substitute_is_reported_once():
    store = Store({0, 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            store.read(np.array([0, 2, 4]), epoch)
    assert len(caught) == 2
    assert store.substitutes.counts == {"s0": 3, "s2": 3}


def test_too_many_substitutes_are_an_error():
    with pytest.raises(CacheDamagedError, match="more than 4 of 400 samples"):
        Store(range(0, 20, 2)).read(np.arange(0, 40, 2))
    with pytest.raises(CacheDamagedError, match="no sample of bucket b0 can be read"):
        Store({0}, count=2).read(np.array([0]))


def test_through_a_loader_of_samples(tmp_path):
    root = images(tmp_path / "c", [(64, 64)] * 12 + [(64, 96)] * 8)
    cache = opened(root)
    name = damage_payload(root, row=3)
    with pytest.raises(CorruptEntryError, match=name):
        list(cache.loader(batch_size=4))
    loader = cache.loader(batch_size=4, on_error="substitute")
    with pytest.warns(UserWarning, match=f"in place of {name}"):
        served = Counter(name for batch in loader for name in batch["names"])
    assert name not in served
    assert sum(served.values()) == 20
    assert loader.substituted == {name: 1}


def test_every_occurrence_of_a_sample_is_counted(tmp_path):
    root = images(tmp_path / "c", [(64, 64)] * 100, repeats=[2] * 100)
    loader = opened(root).loader(batch_size=4, on_error="substitute")
    name = damage_payload(root, row=3)
    with pytest.warns(UserWarning, match=f"in place of {name}"):
        assert sum(len(batch["names"]) for batch in loader) == 200
    assert loader.substituted == {name: 2}


def test_through_a_loader_of_rows_the_own_source_comes_first(tmp_path):
    """A bad block makes all of its documents bad; a document of the same source replaces them."""
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

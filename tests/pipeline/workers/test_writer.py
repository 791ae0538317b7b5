import time

import numpy as np
import pytest

from latentcache.errors import DiskFullError
from latentcache.fields.registry import field_kinds
from latentcache.identity.content import content_hash
from latentcache.pipeline.workers import writer as writer_module
from latentcache.pipeline.workers.writer import WriterThread
from latentcache.store.catalog import load_catalog
from latentcache.store.entry import Item, pack_items
from latentcache.store.paths import CachePaths
from latentcache.store.shard import ShardWriter


def entries(count, name="squares", shape=(8, 8), dtype=np.float32):
    kind = field_kinds()[name]
    recipe = kind.recipe()
    contents = np.array([list(content_hash(bytes([seed]))) for seed in range(count)], dtype=np.uint8)
    zeros = np.zeros(count, dtype=np.int32)
    keys = kind.keys(contents, zeros, zeros.astype(np.uint8), kind.groups, recipe)
    items = [Item(key=key.tobytes(), array=np.full(shape, seed, dtype=dtype)) for seed, key in enumerate(keys)]
    return pack_items(items, recipe, kind)


def keys(items):
    return [key for entry in items for key in entry.item_keys]


class Bench:
    """A writer into a shard, with the keys of each reported commit."""

    def __init__(self, folder, **options):
        self.paths, self.commits = CachePaths(folder), []
        self.paths.shards.mkdir(parents=True)
        self.writer = WriterThread(
            self.paths.shards, "one", lambda batch, jobs: self.commits.append(keys(batch)), **options
        )

    @property
    def stored(self):
        return {key.tobytes() for key in np.asarray(load_catalog(self.paths).keys())}


def test_a_full_shard_is_sealed_and_the_next_one_begins(tmp_path, monkeypatch):
    bench, batch_entries = Bench(tmp_path, commit_every=1), entries(7)
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 3 * len(batch_entries[0].value))
    bench.writer.put(batch_entries)
    bench.writer.finish()
    assert [folder.name for folder in bench.paths.sealed_shards()] == ["one", "one-1", "one-2"]
    assert bench.stored == set(keys(batch_entries))
    assert bench.paths.open_shards() == []


@pytest.mark.parametrize("flush", [True, False])
def test_commits_happen_by_time_or_on_request(tmp_path, monkeypatch, flush):
    monkeypatch.setattr(writer_module, "COMMIT_S", 60.0 if flush else 0.05)
    bench, batch_entries = Bench(tmp_path), entries(2)
    bench.writer.put(batch_entries[:1])
    if flush:
        bench.writer.put(())
    until = time.monotonic() + 5
    while not bench.commits and time.monotonic() < until:
        time.sleep(0.01)
    assert bench.commits == [keys(batch_entries[:1])]
    bench.writer.put(batch_entries[1:])
    bench.writer.finish()
    assert bench.commits == [keys(batch_entries[:1]), keys(batch_entries[1:])]


def test_a_failure_is_raised_by_put_and_by_finish_and_earlier_commits_stay(tmp_path, monkeypatch):
    batch_entries, real, count = entries(6), ShardWriter.write, iter(range(100))

    def full_after_two(shard, batch):
        if next(count) >= 2:
            raise DiskFullError("the disk is full")
        real(shard, batch)

    monkeypatch.setattr(ShardWriter, "write", full_after_two)
    bench = Bench(tmp_path, commit_every=1)

    def put_until_it_fails():
        for _ in range(1000):
            bench.writer.put(batch_entries)

    with pytest.raises(DiskFullError):
        put_until_it_fails()
    with pytest.raises(DiskFullError):
        bench.writer.finish()
    assert bench.commits == [list(batch_entries[0].item_keys), list(batch_entries[1].item_keys)]
    assert [folder.name for folder in bench.paths.open_shards()] == ["one.open"]

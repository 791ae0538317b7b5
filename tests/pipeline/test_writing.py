import threading
import time

import pytest
from small_builds import FakeEncoder, piece, recipe_of, within

from latentcache.errors import DiskFullError
from latentcache.pipeline import writing as writing_module
from latentcache.pipeline.batch_size import BatchSizes
from latentcache.pipeline.encoding import BatchEncoder
from latentcache.pipeline.writing import WriterThread
from latentcache.store.catalog import load_catalog
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import ShardWriter

RECIPE = recipe_of()


def entries(count):
    encoder = BatchEncoder(
        encoder=FakeEncoder(), recipe=RECIPE, sizes=BatchSizes(8), refuse=lambda *words: None, warn=lambda words: None
    )
    return encoder.encode([piece(seed, RECIPE) for seed in range(count)])


def keys(items):
    return [item.key for item in items]


class Bench:
    """A writer into a shard, and the keys of each commit it reported."""

    def __init__(self, folder, **options):
        self.layout, self.commits = CacheLayout(folder), []
        self.writer = WriterThread(
            lambda: ShardWriter(self.layout.shards / "one.open"),
            lambda batch: self.commits.append(keys(batch)),
            **options,
        )

    @property
    def stored(self):
        return set(load_catalog(self.layout).keys())


def test_everything_that_was_put_is_in_the_sealed_shard(tmp_path):
    bench, made = Bench(tmp_path), entries(20)
    for start in range(0, 20, 6):
        bench.writer.put(made[start : start + 6])
    within(10, bench.writer.finish)
    assert bench.stored == set(keys(made))
    assert [key for batch in bench.commits for key in batch] == keys(made)
    assert bench.layout.open_shards() == []


@pytest.mark.parametrize("most", [1, 3, 7])
def test_commits_have_at_most_so_many_entries(tmp_path, most):
    bench, made = Bench(tmp_path, commit_every=most), entries(7)
    bench.writer.put(made)
    within(10, bench.writer.finish)
    assert [len(batch) for batch in bench.commits] == [most] * (7 // most) + [7 % most] * bool(7 % most)


def test_a_commit_comes_when_the_bytes_are_many(tmp_path, monkeypatch):
    made = entries(4)
    monkeypatch.setattr(writing_module, "COMMIT_BYTES", 2 * len(made[0].value))
    bench = Bench(tmp_path)
    for entry in made:
        bench.writer.put([entry])
    within(10, bench.writer.finish)
    assert [len(batch) for batch in bench.commits] == [2, 2]


def test_a_commit_comes_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(writing_module, "COMMIT_S", 0.05)
    bench, made = Bench(tmp_path), entries(2)
    bench.writer.put(made[:1])
    deadline = time.monotonic() + 5
    while not bench.commits and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bench.commits == [keys(made[:1])]
    bench.writer.put(made[1:])
    within(10, bench.writer.finish)
    assert bench.commits == [keys(made[:1]), keys(made[1:])]


def test_a_key_is_reported_after_its_commit_has_returned(tmp_path, monkeypatch):
    order, real = [], ShardWriter.write
    monkeypatch.setattr(ShardWriter, "write", lambda shard, batch: (real(shard, batch), order.append("written"))[0])
    bench = Bench(tmp_path, commit_every=1)
    bench.commits = order
    bench.writer._committed = lambda batch: order.append("said")
    bench.writer.put(entries(2))
    within(10, bench.writer.finish)
    assert order == ["written", "said"] * 2


def test_nothing_put_leaves_nothing(tmp_path):
    bench = Bench(tmp_path)
    within(10, bench.writer.finish)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_raised_by_put_and_by_finish_and_keeps_what_was_committed(tmp_path, monkeypatch):
    made, real, count = entries(6), ShardWriter.write, iter(range(100))

    def full_after_two(shard, batch):
        if next(count) >= 2:
            raise DiskFullError("the disk is full")
        real(shard, batch)

    monkeypatch.setattr(ShardWriter, "write", full_after_two)
    bench = Bench(tmp_path, commit_every=1)

    def put_until_it_fails():
        for _ in range(1000):
            bench.writer.put(made)

    with pytest.raises(DiskFullError):
        within(10, put_until_it_fails)
    with pytest.raises(DiskFullError):
        within(10, bench.writer.finish)
    assert bench.commits == [[made[0].key], [made[1].key]]
    (left,) = bench.layout.open_shards()  # for the next build to take over
    assert left.name == "one.open"


def test_putting_waits_while_the_disk_is_behind(tmp_path, monkeypatch):
    gate, real = threading.Event(), ShardWriter.write

    def slow(shard, batch):
        gate.wait(10)
        real(shard, batch)

    monkeypatch.setattr(ShardWriter, "write", slow)
    bench, made = Bench(tmp_path, commit_every=1), entries(1)
    putting = threading.Thread(target=lambda: [bench.writer.put(made) for _ in range(20)], daemon=True)
    putting.start()
    putting.join(0.3)
    assert putting.is_alive()  # memory is bounded: not all of it is taken in
    gate.set()
    putting.join(10)
    assert not putting.is_alive()
    within(10, bench.writer.finish)

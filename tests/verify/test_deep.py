import numpy as np
import pytest
from small_cache import build, damage_payload, draw

from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.verify.deep import read_payloads
from latentcache.verify.entries import check_entries
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Deadline, Depth, Selection


@pytest.mark.parametrize("isolate", [True, False])
def test_both_ways_of_reading_say_the_same(cache, isolate):
    name = damage_payload(cache, row=2)
    layout, generation = CacheLayout(cache), load_generation(cache)
    checked = check_entries(layout, generation)
    everything = np.ones(4, dtype=bool)
    depth = Depth(full=True, isolate=isolate)
    deep = read_payloads(layout, generation, checked, chosen=everything, depth=depth, deadline=Deadline(None))
    assert deep.read.all()
    assert deep.payloads == 4
    assert deep.payload_bytes > 4 * 112
    assert [finding.path for own in checked.damage.values() for finding in own] == [name]


def test_entries_of_a_shard_that_does_not_open_are_known_already(cache):
    (shard,) = CacheLayout(cache).sealed_shards()
    (shard / "index.npy").write_bytes(b"")
    report = verify_cache(cache, full=True)
    assert (report.counts["corrupt"], report.not_looked_at, report.checked["payloads"]) == (4, 0, 0)


def test_samples_that_were_not_chosen_are_not_looked_at(data, tmp_path):
    for number in range(10, 22):
        draw(data / f"q{number}.png", seed=number)
    cache = tmp_path / "cache"
    build(data, cache)
    report = verify_cache(cache, depth=Depth(selection=Selection(number=5, seed=3)))
    assert (report.mode, report.counts["ok"], report.not_looked_at) == ("sample", 5, 11)
    assert (report.checked["payloads"], report.checked["sources_hashed"]) == (5, 5)
    assert report.confidence == "5 clean: 95 % sure that less than 44 % are wrong"


def test_all_slices_together_find_everything(data, tmp_path):
    for number in range(10, 22):
        draw(data / f"q{number}.png", seed=number)
    cache = tmp_path / "cache"
    build(data, cache)
    name = damage_payload(cache, row=9)
    draw(data / "p0.png", seed=99)
    reports = [
        verify_cache(cache, depth=Depth(selection=Selection(slice_number=n, slices=3), isolate=False))
        for n in (1, 2, 3)
    ]
    found = {(f.path, f.category) for report in reports for f in report.findings}
    assert found == {(name, "corrupt"), ("p0.png", "stale")}
    assert sum(report.counts["ok"] for report in reports) == 14
    assert sum(report.not_looked_at for report in reports) == 32
    assert all(bool(report.confidence) == (report.exit_code() == 0) for report in reports)

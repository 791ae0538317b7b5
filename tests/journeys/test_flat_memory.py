"""A check holds no more of a large cache than of a small one, but for a few bytes an entry."""

import gc
import tracemalloc

import pytest
from bench_verify import make_cache

from latentcache.sources import resolve, walk
from latentcache.store import column_files, columns, index, leaves
from latentcache.verify import abreast, files, payloads, placements, portions
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Depth

FEW, MANY = 100, 500
#: What is taken at a time, made small, so that what grows shows in a small cache.
_AT_A_TIME = {
    (columns, "_PART"): 32,
    (columns, "_SLICE"): 32,
    (column_files, "_PART"): 32,
    (column_files, "_TOGETHER"): 32,
    (column_files, "_READ_BYTES"): 1 << 12,
    (index, "_ROWS"): 32,
    (index, "_READ_BYTES"): 1 << 12,
    (leaves, "_BLOCK_BYTES"): 1 << 12,
    (walk, "_TOGETHER"): 32,
    (resolve, "_TOGETHER"): 32,
    (abreast, "_SLICE"): 32,
    (placements, "_SLICE"): 32,
    (portions, "_ROWS"): 64,
    (portions, "_PORTIONS"): 1 << 10,
    (files, "_WINDOW"): 32,
    (files, "_PART"): 8,
    (payloads, "_BATCH"): 8,
    (payloads, "_READ_BYTES"): 1 << 12,
}


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A small cache and a larger one of tiny entries, with one file for each, 50 in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench_verify._PER_FOLDER", 50)
        return [make_cache(tmp_path_factory.mktemp("many"), count, 64)[1] for count in (FEW, MANY)]


def peak_of(cache, depth):
    """Most bytes of Python's and numpy's memory that were in use at once during a check."""
    gc.collect()
    tracemalloc.start()
    try:
        report = verify_cache(cache, depth=depth)
        return tracemalloc.get_traced_memory()[1], report
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("full", [False, True])
def test_memory_of_a_check_does_not_grow_with_the_cache(caches, monkeypatch, full):
    for (module, name), value in _AT_A_TIME.items():
        monkeypatch.setattr(module, name, value)
    depth = Depth(full=full, isolate=False)
    verify_cache(caches[0], depth=depth)  # what is imported and remembered for good
    grown = []
    for _ in range(
        4
    ):  # threads that wait for each other hold what they have; a list of all entries is there each time
        (few, _), (many, report) = (peak_of(cache, depth) for cache in caches)
        assert report.counts["ok"] == MANY
        grown.append((many - few) / (MANY - FEW))
        if grown[-1] < 32:
            return
    pytest.fail(f"a check takes {grown} bytes more for each entry")

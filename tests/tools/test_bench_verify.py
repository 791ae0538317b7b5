import pytest
from bench_verify import PLAIN, build_settings, in_own_process, made_cache, tables

from latentcache.pipeline.build import build_cache
from latentcache.verify.selection import Depth
from latentcache.verify.verify import verify_cache


def test_the_made_cache_is_one_that_a_build_would_make(tmp_path):
    data, cache = made_cache(tmp_path, 30, 64)
    assert verify_cache(cache, depth=Depth(full=True)).counts["ok"] == 30
    report = build_cache(build_settings(data, cache))
    assert (report.encoded, report.cached, report.published) == (0, 30, False)


@pytest.mark.slow
def test_small_measures():
    many = in_own_process("many", 50, 1)
    assert set(many["rates"]) == {"fast verify", "walk and stat", "headers", "second build"}
    full = in_own_process("full", 3, 1)
    assert full["ratio"][PLAIN] == 1
    text = tables([many], full)
    assert "| 50 |" in text
    assert "| payload scan |" in text

from bench_verify import in_own_process, make_cache, measure_many, settings_of, tables

from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings
from latentcache.verify.run import verify_cache


def test_the_made_cache_is_one_that_a_build_would_make(tmp_path):
    data, cache = make_cache(tmp_path, 30, 64)
    assert verify_cache(cache, full=True).counts["ok"] == 30
    report = build_cache(BuildSettings(data=data, out=cache, recipe=settings_of(64)))
    assert (report.encoded, report.cached, report.published) == (0, 30, False)


def test_small_measures(tmp_path):
    many = measure_many(50, 1, tmp_path)
    assert set(many["rates"]) == {"fast verify", "walk and stat", "stat columns compared", "headers", "second build"}
    full = in_own_process("full", 3, 1)
    assert full["share"]["plain read and xxh3"] == 1
    text = tables([many], full)
    assert "| 50 |" in text
    assert "| payloads and pages |" in text

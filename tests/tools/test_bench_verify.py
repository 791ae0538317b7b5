import numpy as np
import pytest
from bench_verify import FORMS, build_settings, checked_entries, full_checks, made_cache, many_rows, tables
from synthetic_caches import made_latents, noise

from latentcache.geometry.sizes import Size
from latentcache.pipeline.build import build_cache
from latentcache.verify.entries import scan_payloads
from latentcache.verify.verify import verify_cache


def test_the_synthetic_cache_equals_a_build(tmp_path):
    data, cache = made_cache(tmp_path, 30, 64)
    assert verify_cache(cache, full=True).counts["ok"] == 30
    report = build_cache(build_settings(data, cache))
    assert (report.encoded, report.cached, report.published) == (0, 30, False)


@pytest.mark.slow
def test_small_measures():
    many, full = many_rows(50, 1), full_checks(1, 1)
    assert set(many["rates"]) == {"fast verify", "walk and stat", "headers", "second build"}
    text = tables([many], full)
    assert "| 50 |" in text
    for form in FORMS:
        assert f"| {form} |" in text


def test_embeddings_without_padding_that_share_a_block_are_fine(tmp_path):
    embeds = [one[:length] for one, length in zip(noise(5, (8, 16)), (3, 8, 5, 1, 8), strict=True)]
    made_latents(tmp_path / "cache", [Size(64, 64)] * 5, list(noise(5, (16, 8, 8))), embeds, length=8)
    check = checked_entries(tmp_path / "cache")
    scan_payloads(check)
    assert check.payloads == 6
    assert check.findings.counts(np.ones(5, np.bool_))["ok"] == 5

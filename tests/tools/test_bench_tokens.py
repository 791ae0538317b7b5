import numpy as np
import pytest
from bench_tokens import LENGTH, PACKED_FLOOR, bench_build, bench_packed, by_hand, make_cache

from latentcache import open_cache


def test_rows_by_hand_are_the_packed_rows(tmp_path):
    cache, ids = make_cache(tmp_path, np.array([LENGTH, 7, 900, 3000]))
    rows = open_cache(cache).rows(pack=LENGTH)
    plan = [[0, 1]]
    (expected,), found = by_hand(tmp_path, ids, rows.parts[0].plan)(plan), rows.batch(plan[0])
    mask = found["seq_idx"] > 0
    assert bool((expected["attention_mask"] == mask).all())
    for name in ("input_ids", "labels", "position_ids"):
        assert bool((expected[name] * mask == found[name] * mask).all())


@pytest.mark.slow
def test_rows_and_builds_are_measured(tmp_path):
    (tmp_path / "rows").mkdir()
    assert PACKED_FLOOR in bench_packed(tmp_path / "rows", 400, 1)
    found = bench_build(tmp_path, [f"def f{n}(): return {n}" for n in range(300)], 1)
    assert found["whole build, CPU s/MB"] > 0

from bench_plan import in_own_process, measure, table


def test_a_small_plan_is_measured():
    row = measure(2000, rounds=2)
    assert row["steps"] >= 2000 // 64
    assert row["plan_s"] > 0
    assert "| 2,000 | 2,000 |" in table([row])


def test_a_small_weighted_plan_is_measured():
    row = measure(2000, rounds=1, weighted=True)
    assert row["servings"] == 3000
    assert row["steps"] >= 3000 // 64


def test_each_size_has_a_process_of_its_own():
    assert in_own_process(2000, rounds=1, weighted=True)["servings"] == 3000

import numpy as np
import pytest
from made_cache import make

from latentcache.errors import UsageError
from latentcache.verify.selection import Selection, choose, confidence, parse_selection


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1/7", {"amount": 1, "unit": "slice", "slices": 7}),
        ("0.5%", {"amount": 0.5, "unit": "percent"}),
        ("100%", {"amount": 100, "unit": "percent"}),
        ("300", {"amount": 300}),
    ],
)
def test_selection_syntax(text, expected):
    assert parse_selection(text, 3) == Selection(seed=3, **expected)


@pytest.mark.parametrize("text", ["", "0", "0/7", "8/7", "1/0", "0%", "101%", "2G", "1.5", "-1", "1/", "x", "1e3"])
def test_anything_else_is_a_usage_error(text):
    with pytest.raises(UsageError, match="sample="):
        parse_selection(text)


def test_new_inputs_keep_entries_in_their_part(tmp_path):
    case = make(tmp_path, "flat", total=20)
    before = _parts(case)
    case.write(30)
    case.build()
    after = _parts(case)
    assert {key: part for key, part in after.items() if key in before} == before


def _parts(case):
    keys = np.asarray(case.snapshot.fields["flat"].key)
    return {
        keys[entry].tobytes(): part
        for part in range(1, 8)
        for entry in np.flatnonzero(choose(case.snapshot, parse_selection(f"{part}/7")).entries["flat"])
    }


@pytest.mark.parametrize(("text", "count"), [("3", 3), ("25%", 2), ("100%", 8), ("99", 8)])
def test_samples_are_drawn_by_a_seed(case, text, count):
    first, again = (choose(case.snapshot, parse_selection(text, 1)) for _ in range(2))
    assert int(first.samples.sum()) == count
    assert (first.samples == again.samples).all()
    if count < 4:
        assert any((choose(case.snapshot, parse_selection(text, s)).samples != first.samples).any() for s in range(9))
    for name, rows in case.snapshot.fields.items():
        held = first.entries[name][np.asarray(rows.entry)]
        assert held[first.samples[np.asarray(rows.sample)]].all()


def test_the_bound_follows_the_rule_of_three():
    assert confidence(59, 10_000_000).endswith("less than 5 % of the samples are wrong")
    assert confidence(0, 10).endswith("less than 1e+02 % of the samples are wrong")
    assert confidence(4, 4) == "4 samples clean: all of them"

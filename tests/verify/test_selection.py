import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.verify.selection import Deadline, Selection, confidence, parse_selection, wrong_below

NAMES = [f"folder/p{number}.png" for number in range(1000)]


@given(st.integers(1, 40))
def test_slices_cover_all_and_overlap_nowhere(slices):
    chosen = [Selection(slice_number=n, slices=slices).choose(NAMES, 1000) for n in range(1, slices + 1)]
    assert sum(chosen).tolist() == [1] * 1000


def test_a_new_file_moves_no_other_into_another_slice():
    before = Selection(slice_number=2, slices=7).choose(NAMES, 1000)
    after = Selection(slice_number=2, slices=7).choose(["a.png", *NAMES], 1001)
    assert after[1:].tolist() == before.tolist()


def test_slices_of_names_that_are_no_text():
    assert Selection(slice_number=1, slices=1).choose(["\udcff.png"], 1).all()


@given(st.integers(1, 3000), st.integers(0, 9))
def test_a_number_draws_so_many_without_putting_back(number, seed):
    selection = Selection(number=number, seed=seed)
    chosen = selection.choose(NAMES, 1000)
    assert chosen.sum() == min(number, 1000)
    assert (selection.choose(NAMES, 1000) == chosen).all()


def test_another_seed_draws_others():
    drawn = [Selection(number=50, seed=seed).choose(NAMES, 1000).tolist() for seed in range(3)]
    assert drawn[0] != drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("text", "chosen"), [("3/10", None), ("1/1", 1000), ("2%", 20), ("0.05%", 1), ("100%", 1000), ("7", 7)]
)
def test_what_can_be_said(text, chosen):
    found = int(parse_selection(text, 0).choose(NAMES, 1000).sum())
    assert found == chosen or (chosen is None and 50 < found < 150)


@pytest.mark.parametrize("text", ["", "0", "0/3", "4/3", "1/0", "0%", "101%", "x", "-1", "1/2/3", "1.5", "½"])
def test_what_cannot(text):
    with pytest.raises(UsageError) as caught:
        parse_selection(text, 0)
    assert "--sample" in caught.value.fix


@given(st.integers(1, 5000))
def test_for_a_large_whole_the_rule_is_exact(looked):
    assert math.isclose(wrong_below(looked, 10**9), 1 - 0.05 ** (1 / looked), rel_tol=1e-2)


@given(st.integers(1, 60), st.integers(1, 60))
def test_against_counting(looked, total):
    """The least number of wrong ones that 19 of 20 draws would have shown, by exact integers."""
    if looked >= total:
        assert wrong_below(looked, total) == 0
        return
    missed = [math.comb(total - wrong, looked) / math.comb(total, looked) for wrong in range(total + 1)]
    least = next(wrong for wrong, chance in enumerate(missed) if chance <= 0.05 + 1e-12)
    assert wrong_below(looked, total) == pytest.approx(least / total)


def test_the_sentence():
    assert confidence(300, 1_000_000) == "300 clean: 95 % sure that less than 0.99 % are wrong"
    assert confidence(4, 4) == "4 clean: that is all of them"


def test_deadlines():
    never = Deadline(None)
    assert (never.over, never.left_s) == (False, None)
    assert Deadline(0).over
    assert Deadline(0).left_s == 0
    later = Deadline(60)
    assert not later.over
    assert 0 < later.left_s <= 60
    assert time.monotonic() > 0


def test_what_is_not_wanted_any_more_is_over_at_once():
    called = []
    deadline = Deadline(60)
    deadline.when_cancelled(lambda: called.append(1))
    deadline.cancel()
    assert (deadline.over, deadline.cancelled, called) == (True, True, [1])
    deadline.when_cancelled(lambda: called.append(2))
    assert called == [1, 2]

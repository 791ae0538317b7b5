import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.fields.strings import Strings
from latentcache.sources import known
from latentcache.sources.known import match_names

NAMES = st.lists(st.text("abé\udcff", max_size=2), max_size=40, unique=True)


@given(NAMES, NAMES, st.integers(1, 5), st.integers(0, 50))
def test_names_are_matched(names, others, block, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known, "_SLICE", block)
        patch.setattr(known, "_MOST_LEFT_OUT", most)
        positions = match_names(Strings.of(names), Strings.of(others)).tolist()
    for name, position in zip(names, positions, strict=True):
        assert (position < 0) == (name not in others)
        assert position < 0 or others[position] == name


@pytest.mark.parametrize("change", ["none", "front", "middle", "end", "both"])
def test_an_inserted_name_moves_the_rest_by_one(change):
    old = [f"dir/{number:06d}.jpg" for number in range(50_000)]
    positions = {"none": [], "front": [0], "middle": [777], "end": [50_000], "both": [0, 50_000]}[change]
    now, wanted = list(old), list(range(50_000))
    for position in reversed(positions):
        now.insert(position, f"new{position}")
        wanted.insert(position, -1)
    assert match_names(Strings.of(now), Strings.of(old)).tolist() == wanted

"""Several caches in shares: by name, wherever they lie and whatever else is there, and never over too often."""

import shutil
from collections import Counter

import pytest
from small_cache import build, draw

from latentcache.errors import PlanError, UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.cache_mix import combine_caches

SHAPES = [(96, 64), (64, 96), (80, 80)]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Caches a, b and c of 5, 6 and 7 pictures of several shapes; their names begin with the letter."""
    folder = tmp_path_factory.mktemp("mix")
    for letter, count in zip("abc", (5, 6, 7), strict=True):
        for number in range(count):
            shape = SHAPES[(number + ord(letter)) % 3]
            draw(folder / letter / f"{letter}{number}.png", shape, seed=ord(letter) * 10 + number)
        build(folder / letter, folder / f"{letter}.latentcache")
    return folder


def mixed(folder, letters, **words):
    caches = [open_cache(folder / f"{letter}.latentcache") for letter in letters]
    counts = {"a": "1.5", "b": "1.25", "c": "1"}  # samples of each are the same in every mix, 12 to a unit
    shares = [counts[letter] for letter in letters]
    total = sum(int(float(share) * 12) for share in shares)
    return combine_caches(caches, weights=shares, samples=total, **words)


def order(cache, epoch=0):
    loader = cache.loader(batch_size=1, small_buckets="partial")
    loader.set_epoch(epoch)
    return [batch["names"][0] for batch in loader]


def test_caches_are_called_as_their_folders(three, tmp_path):
    assert [data.name for data in mixed(three, "cab").plan(batch_size=1).datasets] == ["c", "a", "b"]
    twice = combine_caches([open_cache(three / "a.latentcache")] * 2, weights=[1, 1])
    assert [data.name for data in twice.plan(batch_size=1).datasets] == ["a", "a (2)"]
    named = mixed(three, "ab", names=["first", "second"])
    assert list(named.loader(batch_size=1).served()) == ["first", "second"]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("letters", ["abc", "cab", "bca"])
def test_another_cache_wherever_it_stands_changes_neither_turns_nor_order(three, letters, epoch):
    """Entries are served alone, so steps of different buckets are in order too; what fills steps comes at the end."""
    due = sum(data.samples for data in mixed(three, "ab").mixture.datasets)
    alone = order(mixed(three, "ab"), epoch)[:due]
    assert [name for name in order(mixed(three, letters), epoch) if name[0] != "c"][:due] == alone
    assert max(Counter(alone).values()) > 1


def test_a_cache_that_is_moved_goes_on_and_one_of_another_name_is_refused(three, tmp_path):
    loader = mixed(three, "ab").loader(batch_size=2)
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    rest = [batch["names"] for batch in passing]
    for letter in "ab":
        shutil.copytree(three / f"{letter}.latentcache", tmp_path / f"{letter}.latentcache")
    moved = mixed(tmp_path, "ab").loader(batch_size=2)
    moved.load_state_dict(state)
    assert [batch["names"] for batch in moved] == rest
    renamed = mixed(tmp_path, "ab", names=["a", "x"]).loader(batch_size=2)
    with pytest.raises(PlanError, match="other weights or names") as caught:
        renamed.load_state_dict(state)
    assert "of 6 entries of b" in caught.value.why
    assert "of 6 entries of x" in caught.value.why


def test_a_checkpoint_from_before_names_is_refused_in_words(three):
    loader = mixed(three, "ab").loader(batch_size=2)
    state = loader.state_dict()
    assert (state["version"], [name for name, _, _ in state["datasets"]]) == (2, ["a", "b"])
    old = {**state, "version": 1, "datasets": [row[1:] for row in state["datasets"]]}
    with pytest.raises(PlanError, match="position has version 1") as caught:
        loader.load_state_dict(old)
    assert caught.value.slug == "resume-version"
    assert "reads version 2 of one with weights of data sets" in caught.value.why
    plain = open_cache(three / "a.latentcache").loader(batch_size=2)
    assert plain.state_dict()["version"] == 1
    plain.load_state_dict(plain.state_dict())
    with pytest.raises(PlanError, match="position has version 2"):
        plain.load_state_dict({**plain.state_dict(), "version": 2})


def test_a_limit_is_kept_or_said(three):
    caches = [open_cache(three / f"{letter}.latentcache") for letter in "ac"]
    with pytest.raises(UsageError, match=r"serve a 4\.2 times over, max_repeat=4") as caught:
        combine_caches(caches, weights=[3, 1], max_repeat=4)
    longest = int(caught.value.fix.split("at most ")[1].split()[0])
    assert combine_caches(caches, weights=[3, 1], samples=longest, max_repeat=4).mixture.datasets[0].most == 4
    with pytest.raises(UsageError, match="max_repeat=4"):
        combine_caches(caches, weights=[3, 1], samples=longest + 2, max_repeat=4)  # 21 of 28
    with pytest.raises(UsageError, match="max_repeat=2 without weights"):
        combine_caches(caches, max_repeat=2)
    with pytest.raises(UsageError, match="without weights"):
        combine_caches(caches, names=["x", "y"])


def test_pictures_have_no_rows_that_only_fill(three):
    cache = open_cache(three / "a.latentcache")
    for ask in (cache.plan, cache.loader):
        with pytest.raises(UsageError, match="small_buckets='mask' for pictures") as caught:
            ask(batch_size=2, small_buckets="mask")
        assert "repeat, drop or partial" in caught.value.fix

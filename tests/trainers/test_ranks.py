"""DistributedDataParallel with gloo: all ranks have one bucket and equal batch sizes in each step."""

from collections import Counter

import pytest
from ranks import spawn, train_with_ddp

from latentcache import open_cache

NAMES = {f"{number:02}.png" for number in range(13)}


def sample_counts(results):
    return Counter(name for rank in results for step in rank["steps"] for name in step["names"])


def assert_in_step(results):
    """All ranks have equal steps, each with one shape."""
    for steps in zip(*(rank["steps"] for rank in results), strict=True):
        assert len({tuple(step["shape"]) for step in steps}) == 1
    for states in zip(*(rank["states"] for rank in results), strict=True):
        assert all(state == states[0] for state in states)
    weights = [rank["weights"] for rank in results]
    assert all(one == weights[0] for one in weights), "gradients were not averaged over the same steps"


@pytest.fixture(scope="module")
def two(thirteen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return spawn(train_with_ddp, 2, folder, str(thirteen / "images.latentcache"), None, 1)


def test_two_ranks_keep_step_and_serve_every_sample(two):
    assert_in_step(two)
    counts = sample_counts(two)
    assert set(counts) == NAMES
    assert sum(counts.values()) == 14  # one bucket of five: its last step repeats a sample
    assert [len(rank["steps"]) for rank in two] == [rank["length"] for rank in two] == [7, 7]


def test_three_ranks_resume_after_two(two, thirteen, tmp_path):
    """The steps before and after the stop contain every sample."""
    before = [rank | {"steps": rank["steps"][:3]} for rank in two]
    state = two[1]["states"][2]
    after = spawn(train_with_ddp, 3, tmp_path, str(thirteen / "images.latentcache"), state, 1)
    assert_in_step(after)
    first, rest = sample_counts(before), sample_counts(after)
    assert set(first) | set(rest) == NAMES
    left = open_cache(thirteen / "images.latentcache").loader(batch_size=1, rank=0, world_size=3, remainder="partial")
    left.load_state_dict(state)
    assert [len(rank["steps"]) for rank in after] == [left.remaining()] * 3
    repeated = 3 * left.remaining() + sum(first.values()) - len(NAMES)
    assert sum((first + rest).values()) - len(NAMES) == repeated


def test_the_page(working_folder, run_on_two_ranks):
    printed = run_on_two_ranks("Several ranks")
    assert sorted(printed) == ["rank 0: 8 steps", "rank 1: 8 steps"]

import numpy as np
import pytest
import torch

from latentcache.errors import UsageError
from latentcache.loader.ranks import find_ranks


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_given_ranks_are_used(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_ranks(1, 2) == (1, 2, "given")
    assert find_ranks(np.int64(0), np.int32(1)) == (0, 1, "given")
    assert find_ranks(None, None) == (3, 8, "environment")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((0, None), {}, "is missing.*pass rank and world_size"),
        ((None, 2), {}, "is missing.*pass rank and world_size"),
        *((arguments, {}, "rank=|world_size=") for arguments in ((2, 2), (-1, 2), (0, 0), (0.5, 2))),
        *(
            ((None, None), names, "in the environment")
            for names in ({"RANK": "1"}, {"WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "2"})
        ),
    ],
)
def test_incomplete_or_wrong_ranks_are_errors(monkeypatch, arguments, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        find_ranks(*arguments)


def test_torch_distributed_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert find_ranks(None, None) == (1, 2, "torch.distributed")


def test_a_loader_made_before_torch_distributed_is_not_served_on_every_rank(many, monkeypatch):
    alone, told = many.loader(batch_size=2), many.loader(batch_size=2, rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for source in (alone, alone.sampler):
        with pytest.raises(UsageError, match=r"rank 0 of 1 .one process., this is rank 1 of 2"):
            next(iter(source))
    assert len(list(told)) == len(told)

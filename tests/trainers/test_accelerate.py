"""accelerate on two processes loses no sample and mixes no shapes."""

import pytest
from ranks import spawn, use_accelerate

from latentcache import open_cache
from latentcache.errors import UsageError

NAMES = {f"{number:02}.png" for number in range(13)}


@pytest.fixture(scope="module")
def two(thirteen, tmp_path_factory):
    return spawn(use_accelerate, 2, tmp_path_factory.mktemp("two"), str(thirteen / "images.latentcache"))


def assert_whole(results, key, thirteen):
    """The batches of two ranks equal the plan, step by step."""
    for rank, result in enumerate(results):
        opened = open_cache(thirteen / "images.latentcache")
        expected = [batch["names"] for batch in opened.loader(batch_size=2, rank=rank, world_size=2)]
        assert [step["names"] for step in result[key]] == expected
    for one, other in zip(*(result[key] for result in results), strict=True):
        assert one["shape"] == other["shape"]
    assert {name for result in results for step in result[key] for name in step["names"]} == NAMES


def test_the_loader_works_beside_prepare(two, thirteen):
    assert_whole(two, "beside", thirteen)


def test_prepare_leaves_the_loader_alone(two, thirteen):
    """Fails if the loader looks like a ``DataLoader``: accelerate would shard it again."""
    assert all(result["same"] for result in two)
    assert_whole(two, "given", thirteen)


@pytest.mark.parametrize("kind", ["map", "dispatched", "sharded", "sampler"])
def test_a_prepared_data_loader_is_rejected_on_every_rank(two, kind):
    """Every mode of accelerate would lose samples; none delivers a batch."""
    for result in two:
        name, words = result["errors"][kind]
        assert name == "UsageError", words
        assert "lost" in words
        assert "accelerator.prepare" in words


@pytest.mark.parametrize("way", ["unprepared", "workers"])
def test_an_unprepared_data_loader_is_complete(two, thirteen, way):
    assert_whole(two, way, thirteen)


def test_a_prepared_data_loader_is_rejected_in_one_process(thirteen):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    loader = open_cache(thirteen / "images.latentcache").loader(batch_size=2)
    prepared = Accelerator(cpu=True).prepare(DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None))
    with pytest.raises(UsageError, match="asked for by index"):
        next(iter(prepared))


def test_the_page(working_folder, run_on_two_ranks):
    printed = run_on_two_ranks("accelerate")
    assert printed == ["8 steps"]

"""Batches on a slow CUDA device are correct and can be kept. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from small_cache import of_three_sizes

from latentcache.loader.cache import Cache, open_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

#: Clock cycles of a kernel that only waits: tens of milliseconds.
LATE = 50_000_000


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return open_cache(of_three_sizes(tmp_path_factory.mktemp("gpu"), 24))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)])
def test_all_tensors_arrive_and_are_those_of_the_cpu(opened: Cache, prefetch: int, device: str) -> None:
    here = list(opened.read(dtype=torch.float32).loader(batch_size=2))
    there = list(opened.read(dtype=torch.float32).loader(batch_size=2, device=device, prefetch=prefetch))
    for one, other in zip(here, there, strict=True):
        assert one["names"] == other["names"]
        for name in ("latents", "original_size", "crop_top_left", "target_size"):
            assert other[name].device == torch.device("cuda", 0)
            assert torch.equal(one[name], other[name].cpu())


@pytest.mark.parametrize("on_side_stream", [False, True])
def test_a_late_device_sees_whole_batches(opened: Cache, on_side_stream: bool) -> None:
    """The current stream lags behind the CPU; batches are used late and dropped at once."""
    expected = [batch["latents"].double().sum().item() for batch in opened.loader(batch_size=2)]
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    sums = []
    with torch.cuda.stream(stream):
        for batch in opened.loader(batch_size=2, device="cuda"):
            torch.cuda._sleep(LATE)
            sums.append(batch["latents"].double().sum())
            del batch
    torch.cuda.synchronize()
    assert [value.item() for value in sums] == pytest.approx(expected)


def test_every_batch_of_an_epoch_may_be_kept(opened: Cache) -> None:
    kept = list(opened.loader(batch_size=2, device="cuda"))
    again = list(opened.loader(batch_size=2, device="cuda"))
    assert all(torch.equal(a["latents"], b["latents"]) for a, b in zip(kept, again, strict=True))
    pointers = {batch["latents"].data_ptr() for batch in kept}
    assert len(pointers) == len(kept)


def test_leaving_an_epoch_in_the_middle_is_clean(opened: Cache) -> None:
    for _ in range(3):
        for batch in opened.loader(batch_size=1, device="cuda", prefetch=4):
            assert batch["latents"].is_cuda
            break
    torch.cuda.synchronize()

"""A training loop of plain torch: the steps the loader said, and a stopped run ends where it would have."""

import pytest
import torch

from latentcache import open_cache


def train(loader, epochs, grad_accum, weights=None, stop=None, begin=0):
    """Optimizer steps of a deterministic loop; gives weights, steps, and where it stands."""
    model = torch.nn.Conv2d(4, 4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(weights if weights is not None else torch.eye(4).view(4, 4, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    for epoch in range(int(loader.epoch_at(begin, grad_accum)), epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            model(batch["latents"]).pow(2).mean().backward()
            if (len(loader) - loader.remaining()) % grad_accum == 0 or not loader.remaining():
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            if step == stop:
                return model.weight.detach(), step, loader.state_dict()
    return model.weight.detach(), step, loader.state_dict()


def opened(thirteen):
    return open_cache(thirteen / "images.latentcache").read(dtype=torch.float32).loader(batch_size=2, seed=0)


@pytest.mark.parametrize("grad_accum", [1, 3])
def test_as_many_steps_as_the_loader_says(thirteen, grad_accum):
    loader = opened(thirteen)
    _, steps, _ = train(loader, 2, grad_accum)
    assert steps == loader.steps(2, grad_accum)
    assert loader.epoch_at(steps, grad_accum) == 2


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_run_that_was_stopped_ends_with_the_same_weights(thirteen, stop):
    expected, steps, _ = train(opened(thirteen), 2, 3)
    weights, _, state = train(opened(thirteen), 2, 3, stop=stop)
    loader = opened(thirteen)
    loader.load_state_dict(state)
    again, rest, _ = train(loader, 2, 3, weights, begin=stop)
    assert stop + rest == steps
    assert torch.equal(again, expected)

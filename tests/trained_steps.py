"""Training steps of a tiny model on latents."""

import math

import torch


def train(batches):
    """Train a step on each batch of latents, (B, C, H, W); returns the number of steps."""
    torch.manual_seed(0)
    model, steps = None, 0
    for latents in batches:
        model = model or torch.nn.Conv2d(latents.shape[1], latents.shape[1], 1)
        loss = torch.nn.functional.mse_loss(model(latents.float()), torch.randn_like(latents.float()))
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.zero_grad()
        assert math.isfinite(loss.item())
        steps += 1
    return steps

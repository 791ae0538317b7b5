"""Group normalization of channels-last images on the CPU is as exact as that of contiguous ones."""

import copy

import pytest
import torch
from torch import nn

from latentcache.encoders.vae.modules import exact_norms


@torch.inference_mode()
def normed(mean, *, shape=(2, 16, 64, 64), layout=torch.channels_last, dtype=torch.float32):
    """The largest errors against float64: of the plain module, and of the one that was changed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.GroupNorm(4, 16))
    nn.init.normal_(plain[0].weight)
    nn.init.normal_(plain[0].bias)
    changed = copy.deepcopy(plain)
    assert exact_norms(changed) == 1
    x = (torch.randn(shape) + mean).to(memory_format=layout)
    exact = copy.deepcopy(plain).double()(x.double())
    return [float((m.to(dtype)(x.to(dtype)) - exact).abs().max()) for m in (plain, changed)]


@pytest.mark.parametrize(
    ("shape", "layout"), [((2, 16, 64, 64), torch.channels_last), ((2, 16, 1, 64, 64), torch.channels_last_3d)]
)
def test_a_large_mean_costs_no_digits(shape, layout):
    plain, changed = normed(20.0, shape=shape, layout=layout)
    assert changed < 2e-5
    assert plain > 20 * changed, "torch's own kernel is exact here too: this module can go"


def test_no_mean_changes_nothing_to_speak_of():
    assert max(normed(0.0)) < 2e-5


def test_tokens_and_half_precision_go_the_plain_way():
    plain, changed = normed(5.0, dtype=torch.bfloat16)
    assert plain == changed
    norm = nn.GroupNorm(4, 16)
    tokens = torch.randn(2, 16, 100)
    with torch.inference_mode():
        expected = norm(tokens)
        exact_norms(norm)
        assert torch.equal(norm(tokens), expected)

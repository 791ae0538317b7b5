"""The precision of a device, as a worker tells it."""

import pytest
import torch

from latentcache.encoders.vae import encoder


def test_the_cpu_computes_bfloat16():
    assert encoder.has_bfloat16("cpu")


@pytest.mark.parametrize("emulated", [True, False])
def test_an_emulated_bfloat16_does_not_count(monkeypatch, emulated):
    monkeypatch.setattr(encoder, "choose_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or not emulated
    )
    assert encoder.has_bfloat16() is not emulated

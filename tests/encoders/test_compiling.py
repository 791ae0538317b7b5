"""Which shapes are compiled, and what happens when the compiler cannot."""

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo

from latentcache.encoders import compiling
from latentcache.encoders.attention import Attention
from latentcache.encoders.compiling import PATIENCE, Compiler
from latentcache.encoders.describe import describe_model
from latentcache.encoders.opening import open_encoder
from latentcache.encoders.vae import load_vae
from latentcache.geometry.sizes import Size


@pytest.fixture(autouse=True)
def fresh():
    before = dynamo.config.recompile_limit
    yield
    dynamo.reset()
    dynamo.config.recompile_limit = before


class Backend:
    """Runs the graph as it was traced, and counts."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


def twice(values):
    return values * 2


def test_only_full_batches_of_the_named_buckets_are_compiled_and_only_when_they_go_on_coming():
    backend, told = Backend(), []
    compiler = Compiler({Size(8, 16)}, told.append, backend)
    full, small, other = torch.ones(4, 3, 8, 16), torch.ones(1, 3, 8, 16), torch.ones(4, 3, 16, 8)
    for number in range(PATIENCE + 3):
        assert torch.equal(compiler(twice, full), full * 2)
        assert torch.equal(compiler(twice, other), other * 2)
        if number < 2:
            compiler(twice, small)
    assert (compiler.compiled, backend.graphs, told) == (1, 1, [])


def test_more_shapes_than_torch_would_compile():
    dynamo.config.recompile_limit = 2
    backend = Backend()
    buckets = {Size(8, 8 + n) for n in range(6)}
    compiler = Compiler(buckets, print, backend)
    for bucket in buckets:
        for _ in range(PATIENCE + 2):
            compiler(twice, torch.ones(1, 3, bucket.height, bucket.width))
    assert compiler.compiled == backend.graphs == 6
    assert dynamo.config.recompile_limit > 6


def test_a_compiler_that_fails_is_said_once_and_everything_is_encoded(recwarn):
    def broken(graph, example_inputs):
        raise ValueError("no C++ compiler here")

    told = []
    compiler = Compiler({Size(8, 8), Size(8, 16)}, told.append, broken)
    for width in (8, 16):
        for _ in range(PATIENCE + 3):
            values = torch.ones(2, 3, 8, width)
            assert torch.equal(compiler(twice, values), values * 2)
    assert len(told) == 1
    assert told[0].startswith("torch.compile failed, going on without it: ")
    assert "no C++ compiler here" in told[0]


def test_an_error_of_the_model_is_not_one_of_the_compiler():
    def fails(values):
        raise ValueError("sides must be even")

    compiler = Compiler({Size(8, 8)}, print, Backend())
    for _ in range(PATIENCE + 2):
        with pytest.raises(ValueError, match="sides must be even"):
            compiler(fails, torch.ones(1, 3, 8, 8))


@pytest.mark.parametrize("name", ["recompile_limit", "cache_size_limit"])
def test_the_limit_has_two_names(name, monkeypatch):
    class Config:
        pass

    config = Config()
    setattr(config, name, 8)
    monkeypatch.setattr(compiling.dynamo, "config", config)
    compiling._allow(20)
    assert getattr(config, name) == 28
    compiling._allow(2)
    assert getattr(config, name) == 28


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLWan"])
def test_traced_code_gives_the_same_latents(name, tiny, pictures, monkeypatch):
    """All that compiling does but the kernels, also while long attention is done in chunks."""
    description, backend, told = describe_model(str(tiny(name)), storage_dtype="float32"), Backend(), []
    expected = load_vae(description, device="cpu").encode(pictures).latents
    encoder = load_vae(description, device="cpu", compiler=Compiler({Size(64, 96)}, told.append, backend))
    monkeypatch.setattr("latentcache.encoders.attention.chunks_are_better", lambda *_: True)
    encoder._attention = Attention(cap_bytes=1000)
    for _ in range(PATIENCE + 2):
        np.testing.assert_allclose(encoder.encode(pictures).latents, expected, atol=2e-5, rtol=1e-4)
    assert told == []
    assert backend.graphs >= 1


def test_sizes_that_are_worth_it_reach_the_encoder(tiny):
    description = describe_model(str(tiny("AutoencoderTiny")))
    assert open_encoder(description, device="cpu")._compiler is None
    compiled = frozenset({Size(64, 96)})
    assert open_encoder(description, device="cpu", compiled=compiled)._compiler.buckets == compiled


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderTiny"])
def test_compiled_kernels_give_the_same_latents(name, tiny, pictures):
    description, told = describe_model(str(tiny(name)), storage_dtype="float32"), []
    expected = load_vae(description, device="cpu").encode(pictures).latents
    encoder = load_vae(description, device="cpu", compiler=Compiler({Size(64, 96)}, told.append))
    for _ in range(PATIENCE + 2):
        found = encoder.encode(pictures)
        np.testing.assert_allclose(found.latents, expected, atol=1e-4, rtol=1e-3)
        assert found.finite.all()
    assert (told, encoder._compiler.compiled) == ([], 1)

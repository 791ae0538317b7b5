import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentcache.loader import normalise as module
from latentcache.loader.normalise import normalise, normalise_into, patchify
from latentcache.recipe import Normalisation

Z = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))


def test_none_gives_them_as_they_are():
    assert torch.equal(normalise(Z, Normalisation(), torch.float32), Z)
    assert normalise(Z.half(), Normalisation(), torch.bfloat16).dtype == torch.bfloat16


def test_scale_and_shift_as_in_the_flux_pipeline():
    """diffusers pipeline_flux.py encodes with ``(latents - shift_factor) * scaling_factor``."""
    facts = Normalisation(kind="scale-shift", scale=0.3611, shift=0.1159)
    assert torch.equal(normalise(Z, facts, torch.float32), (Z - 0.1159) * 0.3611)


def test_mean_and_std_as_in_the_wan_pipeline():
    """diffusers pipeline_wan_i2v.py: ``(latents - mean) * (1 / std)``, both per channel."""
    mean, std = (0.1, -0.2, 0.3, 0.0), (1.5, 0.5, 2.0, 1.0)
    facts = Normalisation(kind="mean-std", mean=mean, std=std)
    expected = torch.stack([(Z[:, c] - mean[c]) / std[c] for c in range(4)], dim=1)
    assert torch.allclose(normalise(Z, facts, torch.float32), expected, rtol=1e-6, atol=1e-7)


def test_mean_and_std_with_a_scale():
    """diffusers with latents_mean in the configuration of an AutoencoderKL: ``(z - mean) * scaling_factor / std``."""
    facts = Normalisation(kind="mean-std", mean=(0.5,) * 4, std=(2.0,) * 4, scale=0.13025)
    expected = (Z - 0.5) * 0.13025 / 2.0
    assert torch.allclose(normalise(Z, facts, torch.float32), expected, rtol=1e-6, atol=1e-7)


def test_batch_norm_is_patches_then_statistics():
    mean, std = tuple(0.01 * c for c in range(16)), tuple(1 + 0.1 * c for c in range(16))
    facts = Normalisation(kind="batch-norm", mean=mean, std=std, patch=2)
    got = normalise(Z, facts, torch.float32)
    assert got.shape == (2, 16, 3, 4)
    for c in range(4):
        for i in range(2):
            for j in range(2):
                channel = 4 * c + 2 * i + j
                expected = (Z[:, c, i::2, j::2] - mean[channel]) / std[channel]
                assert torch.allclose(got[:, channel], expected, rtol=1e-6, atol=1e-7)


def diffusers_patchify():
    """``Flux2Pipeline._patchify_latents`` of the installed diffusers, taken from its source: importing takes 10 s."""
    spec = importlib.util.find_spec("diffusers")
    folder = Path(spec.submodule_search_locations[0]) if spec else Path()
    source = folder / "pipelines" / "flux2" / "pipeline_flux2.py"
    if not source.is_file():
        pytest.skip("this diffusers has no Flux2 pipeline")
    functions = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)]
    (function,) = [node for node in functions if node.name == "_patchify_latents"]
    function.decorator_list = []
    scope = {"torch": torch}
    exec(compile(ast.Module(body=[function], type_ignores=[]), str(source), "exec"), scope)
    return scope["_patchify_latents"]


def test_patches_are_those_of_diffusers():
    assert torch.equal(patchify(Z, 2), diffusers_patchify()(Z))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 2, 3]))
def test_patches_keep_every_value(batch, channels, rows, columns, patch):
    size = batch, channels, rows * patch, columns * patch
    z = torch.arange(batch * channels * rows * columns * patch**2, dtype=torch.float32).reshape(size)
    patched = patchify(z, patch)
    assert patched.shape == (batch, channels * patch**2, rows, columns)
    assert torch.equal(torch.nn.functional.pixel_shuffle(patched, patch), z)


@pytest.mark.parametrize("kind", ["scale-shift", "mean-std"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_are_rounded_once(kind, dtype):
    """Computed in float32 whatever the storage type is, and rounded to the type asked for at the end."""
    facts = Normalisation(kind=kind, scale=0.18215, shift=0.3, mean=(0.1,) * 4, std=(0.7,) * 4)
    stored = Z.half()
    exact = normalise(stored.float(), facts, torch.float32)
    assert torch.equal(normalise(stored, facts, dtype), exact.to(dtype))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown normalisation 'whiten'"):
        normalise(Z, Normalisation(kind="whiten"), torch.float32)


def test_the_input_is_left_alone():
    before = Z.clone()
    normalise(Z, Normalisation(kind="scale-shift", scale=2.0, shift=1.0), torch.float32).zero_()
    assert torch.equal(Z, before)


KINDS = {
    "none": Normalisation(),
    "scale-shift": Normalisation(kind="scale-shift", scale=0.3611, shift=0.1159),
    "mean-std": Normalisation(kind="mean-std", mean=(0.1, -0.2, 0.3, 0.0), std=(1.5, 0.5, 2.0, 1.0)),
    "batch-norm": Normalisation(kind="batch-norm", mean=(0.1,) * 16, std=(0.7,) * 16, patch=2),
}
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("pieces", [1, 200, 1 << 18])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", TYPES[:3])
@pytest.mark.parametrize("wanted", TYPES)
def test_into_given_memory_it_is_the_same_to_the_bit(monkeypatch, kind, stored, wanted, pieces):
    monkeypatch.setattr(module, "_AT_ONCE", pieces)
    latents = torch.randn(5, 4, 6, 8, generator=torch.Generator().manual_seed(1)).to(stored)
    before = latents.clone()
    expected = normalise(latents, KINDS[kind], wanted)
    assert torch.equal(latents, before)
    out = torch.empty(5, 4, 6, 8, dtype=wanted)
    got = normalise_into(latents, KINDS[kind], out)
    assert got.dtype == wanted
    assert torch.equal(got, expected)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(latents, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", TYPES[:3])
def test_in_place_it_is_the_same_to_the_bit(monkeypatch, kind, stored):
    monkeypatch.setattr(module, "_AT_ONCE", 400)
    latents = torch.randn(5, 4, 6, 8, generator=torch.Generator().manual_seed(1)).to(stored)
    expected = normalise(latents, KINDS[kind], stored)
    assert torch.equal(normalise_into(latents, KINDS[kind], latents), expected)

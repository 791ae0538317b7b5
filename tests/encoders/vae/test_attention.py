"""Chunks of queries against the plain call, inside every class that attends, and who gets chunks at all."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.encoders.vae import attention
from latentcache.encoders.vae.attention import Attention, chunks_are_better, in_chunks
from latentcache.encoders.vae.describe import describe_model
from latentcache.encoders.vae.encoder import VaeEncoder, choose_device

ATTENDING = ["AutoencoderKL", "AsymmetricAutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLQwenImage"]
ATTENDING += ["AutoencoderKLWan", "AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanImage"]


def tensors(*shape, keys=None, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    *lead, length, channels = shape
    return [torch.randn(*lead, n, channels).to(dtype) for n in (length, keys or length, keys or length)]


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 64),
    st.integers(1, 20_000),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_chunks_are_the_plain_call(batch, heads, length, keys, channels, cap):
    query, key, value = tensors(batch, heads, length, channels, keys=keys)
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(in_chunks(query, key, value, None, cap), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("channels", [64, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_dimensions_of_autoencoders(channels, dtype):
    query, key, value = tensors(2, 1, 96, channels, dtype=dtype)
    exact = F.scaled_dot_product_attention(*(t.double() for t in (query, key, value)))
    found = in_chunks(query, key, value, None, 4 * 2 * 96 * 10)
    plain = F.scaled_dot_product_attention(query, key, value)
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5


def test_a_scale_and_three_dimensions():
    query, key, value = tensors(2, 30, 8)
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.3)
    torch.testing.assert_close(in_chunks(query, key, value, 0.3, 1), expected)


def test_scores_stay_below_the_cap(monkeypatch):
    seen, real = [], attention._scores

    def watched(queries, keys):
        scores = real(queries, keys)
        seen.append(scores.nbytes)
        return scores

    monkeypatch.setattr(attention, "_scores", watched)
    in_chunks(*tensors(2, 1, 100, 16), None, 10_000)
    assert max(seen) <= 10_000
    assert len(seen) == -(-100 // (10_000 // (4 * 2 * 100)))


@pytest.mark.parametrize("name", ATTENDING)
def test_every_class_is_served(name, tiny, images, monkeypatch):
    """With a cap of one row of scores all long attention is cut up, in whatever class it is called."""
    monkeypatch.setattr(attention, "chunks_are_better", lambda *_: True)
    description = describe_model(str(tiny(name)), storage_dtype="float32")
    plain, capped = VaeEncoder(description, choose_device("cpu")), VaeEncoder(description, choose_device("cpu"))
    capped._attention = Attention(cap_bytes=1000)
    few = images[:2, :32, :32]
    expected = plain.encode(few).latents
    for _ in range(2):
        np.testing.assert_allclose(capped.encode(few).latents, expected, atol=2e-5, rtol=1e-4)
    assert capped._attention.chunked >= 2
    assert plain._attention.chunked == 0


def test_a_class_without_attention_is_not_watched_twice(tiny, images):
    encoder = VaeEncoder(describe_model(str(tiny("AutoencoderTiny"))), choose_device("cpu"))
    encoder.encode(images)
    assert len(encoder._attention._left_alone) == 1


@pytest.mark.parametrize(
    "options",
    [{"attn_mask": torch.zeros(40, 40)}, {"is_causal": True}, {"dropout_p": 0.5}],
    ids=["mask", "causal", "dropout"],
)
def test_what_chunks_cannot_do_is_left_alone(options, monkeypatch):
    monkeypatch.setattr(attention, "chunks_are_better", lambda *_: True)
    capped = Attention(cap_bytes=1)
    query, key, value = tensors(1, 1, 40, 8)
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.manual_seed(1)
    torch.testing.assert_close(capped(query, key, value, **options), expected)
    assert capped.chunked == 0


def test_short_attention_is_never_probed(monkeypatch):
    monkeypatch.setattr(attention, "chunks_are_better", None)
    capped = Attention(cap_bytes=4 * 40 * 40)
    capped(*tensors(1, 1, 40, 8))
    assert capped.chunked == 0


def test_what_was_found_is_remembered(monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "chunks_are_better", lambda query, *_: bool(asked.append(query.shape)) or True)
    capped = Attention(cap_bytes=1)
    for batch in (1, 2, 3):
        capped(*tensors(batch, 1, 40, 8))
    assert len(asked) == 1
    capped(*tensors(1, 1, 41, 8))
    assert (len(asked), capped.chunked) == (2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_fused_kernel_takes_512_channels(dtype):
    assert not chunks_are_better(*tensors(1, 1, 100, 512, dtype=dtype))


def test_without_a_fused_kernel_there_are_chunks(monkeypatch):
    def none(*_):
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")

    monkeypatch.setattr(attention, "_fused", none)
    assert chunks_are_better(*tensors(1, 1, 100, 512))


@pytest.mark.parametrize(("fused", "chunks", "better"), [(2.0, 1.0, True), (1.0, 2.0, False), (None, 1.0, True)])
def test_on_cuda_the_faster_way_is_taken(fused, chunks, better, monkeypatch):
    times = iter([fused, chunks])
    monkeypatch.setattr(attention, "_timed", lambda *_, **__: next(times))

    class OnCuda(torch.Tensor):
        device = torch.device("cuda", 0)

    query, key, value = (tensor.as_subclass(OnCuda) for tensor in tensors(1, 1, 10, 8))
    assert chunks_are_better(query, key, value) is better

"""Opening, and the one image that every encoder must pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from described_models import described_model
from made_weights import rewrite

from latentcache.encoders.protocol import EncodedBatch, Encoder
from latentcache.encoders.vae.builtin import DemoEncoder, StubEncoder, stub_spec
from latentcache.encoders.vae.encoder import VaeEncoder
from latentcache.encoders.vae.opening import checked_noise, open_encoder
from latentcache.errors import EncoderError

MODELS = [("demo", DemoEncoder), ("stub:delay_ms=1", StubEncoder)]


def opened(model, **options):
    return open_encoder(described_model(model, **options), device="cpu")


class Faulty(Encoder):
    """Gives the same value for any image."""

    def __init__(self, value, compute_dtype, *, multiple=8, precise=None):
        self.spec = replace(stub_spec("float32"), compute_dtype=compute_dtype, multiple=multiple)
        self.values, self.sizes = {False: value, True: value if precise is None else precise}, []

    def submit(self, images, *, precise=False):
        batch, height, width, _ = np.stack(images).shape
        self.sizes.append((height, width))
        latents = np.full((batch, 4, height // 8, width // 8), self.values[precise], dtype=np.float32)
        latents[0, 0, 0, 0] = 1.0
        finite = np.isfinite(latents).reshape(batch, -1).all(axis=1)
        return EncodedBatch(latents=latents, finite=finite)


@pytest.mark.parametrize(("model", "kind"), MODELS)
@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float32"])
def test_what_is_described_is_opened(model, kind, storage):
    encoder = opened(model, storage_dtype=storage)
    assert isinstance(encoder, kind)
    assert encoder.spec == described_model(model, storage_dtype=storage).spec
    checked_noise(encoder)


def test_a_model_is_opened_with_its_description(tiny):
    described = described_model(tiny("AutoencoderTiny"))
    encoder = open_encoder(described, device="cpu")
    assert isinstance(encoder, VaeEncoder)
    assert encoder.spec == described.spec
    checked_noise(encoder)


def test_values_that_no_precision_mends():
    with pytest.raises(EncoderError) as caught:
        checked_noise(Faulty(np.nan, "float16"))
    assert caught.value.what == "stub gives values that are not finite in float16"
    assert caught.value.where == "one test image, before the build"
    assert caught.value.why == "its weights are damaged, or its range is too wide"
    assert caught.value.fix == "download the weights again"


@pytest.mark.parametrize(("multiple", "side"), [(1, 64), (8, 64), (64, 64), (96, 192), (128, 128)])
def test_the_image_has_sides_that_the_model_takes(multiple, side):
    encoder = Faulty(0.5, "float32", multiple=multiple)
    checked_noise(encoder)
    assert encoder.sizes == [(side, 2 * side)] * 2


def test_overflow_in_float16_is_mended_by_precise(copied, images):
    model = copied()

    def overflow(tensors):
        tensors["encoder.conv_in.weight"] *= 6e4
        tensors["encoder.conv_in.bias"].fill_(6e4)

    rewrite(model.weights, overflow)
    encoder = opened(model.folder, compute_dtype="float16")
    assert not encoder.encode(images).finite.any()
    assert encoder.encode(images, precise=True).finite.all()
    with pytest.raises(EncoderError) as caught:
        checked_noise(encoder)
    assert caught.value.what == "AutoencoderKL gives values that are not finite in float16"
    assert caught.value.fix == "add --compute-dtype bfloat16 or float32"


def test_weights_of_zeros_are_found_by_the_preflight(copied):
    model = copied()
    rewrite(model.weights, lambda tensors: {n: torch.zeros_like(t) for n, t in tensors.items()})
    with pytest.raises(EncoderError, match="gives the same latent for every part of an image"):
        checked_noise(opened(model.folder))


def test_the_noise_of_a_real_model_is_far_below_its_latents(tiny):
    encoder = opened(tiny("AutoencoderKL"), latents="moments", storage_dtype="bfloat16")
    noise = checked_noise(encoder)
    assert 0 <= noise["mean"] <= noise["largest"] < 0.05
    assert noise["devices"] == ["cpu"]
    assert noise["scale"] > 0
    assert "scale_logvar" in noise

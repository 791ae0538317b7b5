"""Moments and draws: what a class gives, what is rejected, and that a draw belongs to its pixels alone."""

import numpy as np
import pytest
import torch

from latentcache.encoders.protocol import EncodedBatch
from latentcache.encoders.vae.builtin import StubEncoder, stub_spec
from latentcache.encoders.vae.describe import describe_model
from latentcache.encoders.vae.encoder import VaeEncoder, choose_device
from latentcache.encoders.vae.families import FAMILIES
from latentcache.encoders.vae.opening import check_encoder, open_encoder
from latentcache.encoders.vae.storage import drawn, encoded_channels, encoded_dtype
from latentcache.errors import UnsupportedModelError
from latentcache.fields.latents import GeometrySettings, LatentsRecipe, PixelProfile
from latentcache.identity.noise import gaussian

WITHOUT = ["AutoencoderTiny", "AutoencoderDC"]
WITH = sorted(set(FAMILIES) - set(WITHOUT))


def described(folder, **changes):
    return describe_model(str(folder), **{"storage_dtype": "float32"} | changes)


def recipe_of(spec):
    return LatentsRecipe(geometry=GeometrySettings(), pixels=PixelProfile(), encoder=spec)


def stub_moments(images, storage_dtype="float32"):
    encoder = StubEncoder(storage_dtype=storage_dtype, posterior="sample")
    return encoder.encode(images), recipe_of(encoder.spec)


@pytest.mark.parametrize("name", [*WITH, "AutoencoderKLMochi"])
def test_moments_are_mean_and_logvar_of_the_class_itself(name, tiny, images):
    plain = VaeEncoder(described(tiny(name)), choose_device("cpu")).encode(images).latents
    encoder = VaeEncoder(described(tiny(name), posterior="moments"), choose_device("cpu"))
    moments = encoder.encode(images)
    check_encoder(encoder)
    channels = encoder.spec.channels
    assert moments.latents.shape == (3, 2 * channels, *plain.shape[2:])
    assert moments.finite.all()
    np.testing.assert_array_equal(moments.latents[:, :channels], plain)
    logvar = moments.latents[:, channels:]
    assert logvar.min() >= -30
    assert logvar.max() <= 20


def test_the_draw_from_them_is_that_of_diffusers(tiny, images, monkeypatch):
    """``DiagonalGaussianDistribution.sample`` with our noise in place of its own gives our draw."""
    from diffusers import AutoencoderKL
    from diffusers.models.autoencoders import vae as diffusers_vae

    encoder = VaeEncoder(described(tiny("AutoencoderKL"), posterior="sample"), choose_device("cpu"))
    recipe = recipe_of(encoder.spec)
    hashes = [bytes([number]) * 16 for number in range(3)]
    found = drawn(encoder.encode(images), hashes, recipe).latents
    noise = np.stack([gaussian(found[0].size, b"sample", recipe.recipe_id, name) for name in hashes])
    monkeypatch.setattr(diffusers_vae, "randn_tensor", lambda *_, **__: torch.from_numpy(noise).view(found.shape))
    module = AutoencoderKL.from_pretrained(tiny("AutoencoderKL")).eval()
    values = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        theirs = module.encode(values).latent_dist.sample().numpy()
    np.testing.assert_allclose(found, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("posterior", ["sample", "moments"])
def test_a_class_without_a_posterior_is_rejected_before_its_weights_are_read(name, posterior, tiny):
    with pytest.raises(UnsupportedModelError) as caught:
        described(tiny(name), posterior=posterior)
    assert caught.value.slug == "no-posterior"
    assert caught.value.what == f"--latents {posterior}: {name} has no posterior"
    assert caught.value.fix.startswith("--latents mode")


def test_the_demo_encoder_has_none():
    with pytest.raises(UnsupportedModelError, match="demo has no posterior"):
        describe_model("demo", posterior="moments")


def test_a_class_nobody_knows_is_rejected_when_it_turns_out_to_have_none(tiny):
    encoder = VaeEncoder(described(tiny("AutoencoderKLCosmos"), posterior="moments"), choose_device("cpu"))
    with pytest.raises(UnsupportedModelError, match="AutoencoderKLCosmos has no posterior") as caught:
        check_encoder(encoder)
    assert "gives IdentityDistribution, without mean and logvar" in caught.value.why


@pytest.mark.parametrize(
    ("posterior", "channels", "stored", "dtype"),
    [("mode", 4, 4, "float16"), ("sample", 8, 4, "float32"), ("moments", 8, 8, "float16")],
)
def test_what_an_encoder_gives_and_what_is_stored(posterior, channels, stored, dtype, images):
    encoder = open_encoder(describe_model("stub", posterior=posterior))
    assert (encoded_channels(encoder.spec), encoder.spec.stored_channels) == (channels, stored)
    assert encoded_dtype(encoder.spec) == dtype
    assert encoder.encode(images).latents.shape[1] == channels
    check_encoder(encoder)


def test_a_draw_belongs_to_its_pixels_and_not_to_its_batch(images):
    hashes = [bytes([number]) * 16 for number in range(3)]
    encoded, recipe = stub_moments(images)
    whole = drawn(encoded, hashes, recipe).latents
    for order in ([0], [2, 0], [1, 2, 0]):
        part = EncodedBatch(latents=encoded.latents[order], finite=encoded.finite[order])
        np.testing.assert_array_equal(drawn(part, [hashes[i] for i in order], recipe).latents, whole[order])
    assert not np.array_equal(drawn(encoded, hashes[::-1], recipe).latents, whole)


def test_draws_spread_as_their_logvar_says(images):
    encoded, recipe = stub_moments(images[:1])
    draws = np.stack([drawn(encoded, [bytes([n % 256, n // 256]) * 8], recipe).latents[0] for n in range(2000)])
    mean, logvar = np.split(encoded.latents[0].astype(np.float64), 2)
    std = np.exp(logvar / 2)
    assert np.abs((draws.mean(axis=0) - mean) / std).max() < 5.5 / np.sqrt(2000)
    assert np.abs(draws.std(axis=0) / std - 1).max() < 5.5 / np.sqrt(4000)


@pytest.mark.parametrize(("storage", "dtype"), [("float16", "<f2"), ("bfloat16", "<u2"), ("float32", "<f4")])
def test_a_draw_is_rounded_once(storage, dtype, images):
    encoded, recipe = stub_moments(images, storage)
    assert encoded.latents.dtype == np.float32
    assert drawn(encoded, [b"p" * 16] * 3, recipe).latents.dtype == np.dtype(dtype)


def test_a_draw_that_is_not_finite_says_so(images):
    encoded, recipe = stub_moments(images, "float16")
    encoded.latents[1, 0, 0, 0] = 1e6
    encoded.latents[2, 4, 0, 0] = np.nan
    assert drawn(encoded, [b"p" * 16] * 3, recipe).finite.tolist() == [True, False, False]


def test_the_recipe_of_a_mode_is_what_it_was():
    assert recipe_of(stub_spec()).recipe_id == recipe_of(stub_spec(posterior="mode")).recipe_id
    ids = {recipe_of(stub_spec(posterior=name)).recipe_id for name in ("mode", "sample", "moments")}
    assert len(ids) == 3

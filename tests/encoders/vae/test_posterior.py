"""Moments: what a class gives, and what is rejected."""

import numpy as np
import pytest
from described_models import described_model

from latentcache.encoders.vae.encoder import VaeEncoder, choose_device
from latentcache.encoders.vae.families import FAMILIES
from latentcache.encoders.vae.producer import checked_noise
from latentcache.errors import UnsupportedModelError

WITHOUT = ["AutoencoderTiny", "AutoencoderDC"]
WITH = sorted(set(FAMILIES) - set(WITHOUT))


def described(folder, **changes):
    return described_model(folder, **{"storage_dtype": "float32"} | changes)


@pytest.mark.parametrize("name", [*WITH, "AutoencoderKLMochi"])
def test_moments_are_mean_and_logvar_of_the_class_itself(name, tiny, images):
    plain = VaeEncoder(described(tiny(name)), choose_device("cpu")).encode(images).latents
    encoder = VaeEncoder(described(tiny(name), latents="moments"), choose_device("cpu"))
    moments = encoder.encode(images)
    checked_noise(encoder)
    channels = encoder.spec.channels
    assert moments.latents.shape == (3, 2 * channels, *plain.shape[2:])
    assert moments.finite.all()
    np.testing.assert_array_equal(moments.latents[:, :channels], plain)
    logvar = moments.latents[:, channels:]
    assert logvar.min() >= -30
    assert logvar.max() <= 20


@pytest.mark.parametrize("name", WITHOUT)
def test_a_class_without_a_posterior_is_rejected_before_its_weights_are_read(name, tiny):
    with pytest.raises(UnsupportedModelError) as caught:
        described(tiny(name), latents="moments")
    assert caught.value.slug == "no-posterior"
    assert caught.value.what == f"--latents moments: {name} has no posterior"
    assert caught.value.fix.startswith("--latents mode")


def test_a_class_nobody_knows_is_rejected_when_it_turns_out_to_have_none(tiny):
    encoder = VaeEncoder(described(tiny("AutoencoderKLCosmos"), latents="moments"), choose_device("cpu"))
    with pytest.raises(UnsupportedModelError, match="AutoencoderKLCosmos has no posterior") as caught:
        checked_noise(encoder)
    assert "gives IdentityDistribution, without mean and logvar" in caught.value.why

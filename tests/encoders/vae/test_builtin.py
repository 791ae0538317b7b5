"""The two encoders without torch: the codec ``demo`` and the stand-in ``stub``."""

import numpy as np
import pytest

from latentcache.encoders.vae.builtin import DemoEncoder, StubEncoder, demo_spec
from latentcache.encoders.vae.opening import checked_noise
from latentcache.identity.content import content_hash

DTYPES = ("float16", "bfloat16", "float32")


def test_no_entry_of_the_basis_sits_on_a_rounding_edge():
    """The basis would depend on the machine's cosine if a value lay half way between two integers."""
    import latentcache.encoders.vae.builtin as demo

    exact = []
    for axis, count in zip(demo._AXES, demo._COEFFICIENTS, strict=True):
        color = np.array(axis) / np.sqrt(sum(v * v for v in axis))
        exact += [
            np.multiply.outer(np.outer(demo._cosine(v), demo._cosine(u)), color) for v, u in demo._ZIGZAG[:count]
        ]
    scaled = np.stack(exact) * demo._UNIT
    assert np.abs(scaled - np.floor(scaled) - 0.5).min() > 1e-6


def test_latents_are_the_same_everywhere():
    """Pinned: these bytes may never change while the version stays."""
    image = (np.arange(64 * 64 * 3) * 37 % 251).astype(np.uint8).reshape(1, 64, 64, 3)
    latents = DemoEncoder(storage_dtype="float32").encode(image).latents
    assert content_hash(latents.tobytes()).hex() == PINNED_LATENTS
    assert demo_spec().fingerprint == PINNED_BASIS


@pytest.mark.parametrize("encoder", [DemoEncoder(), *(StubEncoder(storage_dtype=d) for d in DTYPES)])
def test_any_batch_gives_the_same_bytes(images, encoder):
    checked_noise(encoder)
    whole = encoder.encode(images).latents
    for order in ([0], [1, 0], [2, 1, 0]):
        np.testing.assert_array_equal(encoder.encode(images[order]).latents, whole[order])


PINNED_LATENTS = "36ea9bc565d91eb5100de8762d5dfde5"
PINNED_BASIS = "99d1c7213a888bbf6103b5be6e8a111a"

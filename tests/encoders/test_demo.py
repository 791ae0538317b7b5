"""The embedded codec: how good, how fixed, how independent of its company."""

import numpy as np
import pytest

from latentcache.encoders.demo import DemoEncoder, _basis, decode, demo_spec
from latentcache.encoders.opening import check_encoder
from latentcache.identity.content import content_hash


def smooth_picture(side, seed):
    """Ramps, waves and a soft disc: procedural, and not what the codec was made from."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side] / side
    planes = []
    for _ in range(3):
        a, b, c, d = random.uniform(1, 6, 4)
        wave = np.sin(a * x + b * y) + 0.5 * np.cos(c * x * y * 4 + d)
        disc = 1 / (1 + np.exp(40 * (np.hypot(x - random.uniform(), y - random.uniform()) - 0.3)))
        planes.append(wave + disc)
    picture = np.stack(planes, axis=-1)
    low, high = picture.min(), picture.max()
    return np.rint(255 * (picture - low) / (high - low)).astype(np.uint8)


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(float) - b.astype(float)) ** 2))


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float32"])
def test_a_held_out_picture_comes_back(storage):
    pictures = np.stack([smooth_picture(128, seed) for seed in range(4)])
    latents = DemoEncoder(storage_dtype=storage).encode(pictures).latents
    assert latents.shape == (4, 16, 16, 16)
    assert min(psnr(a, b) for a, b in zip(pictures, decode(latents), strict=True)) >= 40


def test_rows_are_orthonormal():
    rows = _basis().reshape(16, -1) / (1 << 30)
    np.testing.assert_allclose(rows @ rows.T, np.eye(16), atol=1e-7)


def test_no_entry_of_the_basis_sits_on_a_rounding_edge():
    """The basis would depend on the machine's cosine if a value lay half way between two integers."""
    import latentcache.encoders.demo as demo

    exact = []
    for axis, count in zip(demo._AXES, demo._COEFFICIENTS, strict=True):
        colour = np.array(axis) / np.sqrt(sum(v * v for v in axis))
        exact += [
            np.multiply.outer(np.outer(demo._cosine(v), demo._cosine(u)), colour) for v, u in demo._ZIGZAG[:count]
        ]
    scaled = np.stack(exact) * demo._UNIT
    assert np.abs(scaled - np.floor(scaled) - 0.5).min() > 1e-6


def test_latents_are_the_same_everywhere():
    """Pinned: these bytes may never change while the version stays."""
    picture = (np.arange(64 * 64 * 3) * 37 % 251).astype(np.uint8).reshape(1, 64, 64, 3)
    latents = DemoEncoder(storage_dtype="float32").encode(picture).latents
    assert content_hash(latents.tobytes()).hex() == PINNED_LATENTS
    assert demo_spec().fingerprint == PINNED_BASIS


def test_any_batch_gives_the_same_bytes(pictures):
    encoder = DemoEncoder()
    whole = encoder.encode(pictures).latents
    for order in ([0], [1, 0], [2, 1, 0]):
        np.testing.assert_array_equal(encoder.encode(pictures[order]).latents, whole[order])


def test_latents_are_near_unit_scale(pictures):
    white = np.full((1, 8, 8, 3), 255, np.uint8)
    latents = DemoEncoder(storage_dtype="float32").encode(white).latents[0, :, 0, 0]
    assert latents[0] == pytest.approx(np.sqrt(3), abs=1e-6)
    np.testing.assert_allclose(latents[1:], 0, atol=1e-6)
    assert np.abs(DemoEncoder(storage_dtype="float32").encode(pictures).latents).max() < 2


def test_precise_changes_nothing_and_the_preflight_is_happy(pictures):
    encoder = DemoEncoder()
    np.testing.assert_array_equal(encoder.encode(pictures, precise=True).latents, encoder.encode(pictures).latents)
    check_encoder(encoder)
    encoder.close()


PINNED_LATENTS = "36ea9bc565d91eb5100de8762d5dfde5"
PINNED_BASIS = "99d1c7213a888bbf6103b5be6e8a111a"

"""The stand-in is what its documentation says, to the bit."""

import time

import numpy as np
import pytest

from latentcache.encoders.opening import check_encoder
from latentcache.encoders.stub import StubEncoder


def test_channels_are_block_means(pictures):
    latents = StubEncoder(storage_dtype="float32").encode(pictures).latents
    blocks = pictures.reshape(3, 8, 8, 12, 8, 3).astype(np.float64).mean(axis=(2, 4)) / 127.5 - 1
    expected = np.concatenate([blocks, blocks.mean(axis=3, keepdims=True)], axis=3).transpose(0, 3, 1, 2)
    assert latents.shape == (3, 4, 8, 12)
    np.testing.assert_allclose(latents, expected, atol=1e-6)


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float32"])
def test_any_batch_gives_the_same_bytes(pictures, storage):
    encoder = StubEncoder(storage_dtype=storage)
    whole = encoder.encode(pictures)
    assert whole.finite.tolist() == [True] * 3
    for order in ([0], [1, 0], [2, 1, 0]):
        np.testing.assert_array_equal(encoder.encode(pictures[order], precise=True).latents, whole.latents[order])


def test_black_and_white_are_the_ends_of_the_range():
    picture = np.zeros((1, 8, 16, 3), np.uint8)
    picture[:, :, 8:] = 255
    np.testing.assert_array_equal(StubEncoder().encode(picture).latents[0, :, 0], [[-1, 1]] * 4)


def test_the_delay_is_per_picture(pictures):
    encoder = StubEncoder(20)
    start = time.perf_counter()
    encoder.encode(pictures)
    assert time.perf_counter() - start >= 0.06
    assert encoder.spec == StubEncoder().spec


def test_the_preflight_is_happy():
    encoder = StubEncoder()
    check_encoder(encoder)
    encoder.close()

"""The encoder without torch."""

import numpy as np
import pytest

from latentcache.encoders.vae.builtin import StubEncoder, builtin_spec
from latentcache.encoders.vae.producer import checked_noise


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float32"])
def test_any_batch_gives_the_same_bytes(images, storage):
    encoder = StubEncoder(builtin_spec("demo", storage))
    checked_noise(encoder)
    whole = encoder.encode(images).latents
    for order in ([0], [1, 0], [2, 1, 0]):
        np.testing.assert_array_equal(encoder.encode(images[order]).latents, whole[order])

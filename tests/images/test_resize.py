import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.geometry.sizes import Placement, Size, place_in
from latentcache.images.resize import pixel_hash, resample_self_test, resize_crop, thread_setup

KERNELS = ["lanczos-pil", "lanczos-u8"]


def image(height, width):
    y, x = np.mgrid[0:height, 0:width]
    waves = 120 + 110 * np.sin(x * y / 400)
    return np.stack([waves, (x * 3 + y) % 256, 255 * ((x // 8 + y // 8) % 2)], -1).astype(np.uint8)


@pytest.mark.parametrize("resample", KERNELS)
def test_equal_sizes_are_not_resampled(resample):
    y, x = np.mgrid[0:96, 0:128]
    pixels = np.stack([y, x, y ^ x], -1).astype(np.uint8)  # every pixel encodes its position
    same = resize_crop(pixels, place_in(Size(96, 128), Size(96, 128)), resample)
    assert np.array_equal(same, pixels)
    cut = resize_crop(pixels, Placement(bucket=Size(64, 72), resize=Size(96, 128), top=17, left=40), resample)
    assert np.array_equal(cut, pixels[17:81, 40:112])
    assert cut.flags.c_contiguous
    assert cut.flags.owndata


@pytest.mark.parametrize("bucket", [Size(64, 64), Size(128, 192), Size(448, 320), Size(160, 512)])
def test_both_kernels_agree(bucket):
    assert resample_self_test()
    pixels = image(301, 257)
    first, second = (resize_crop(pixels, place_in(Size(301, 257), bucket), kernel) for kernel in KERNELS)
    apart = np.abs(first.astype(int) - second)
    assert apart.max() <= 2
    assert np.count_nonzero(apart) <= 0.01 * apart.size


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    bucket=st.builds(Size, st.integers(1, 12).map(lambda n: 8 * n), st.integers(1, 12).map(lambda n: 8 * n)),
    resample=st.sampled_from(KERNELS),
)
def test_result_has_the_size_of_the_bucket(height, width, bucket, resample):
    pixels = image(height, width)
    pixels.flags.writeable = False
    result = resize_crop(pixels, place_in(Size(height, width), bucket), resample)
    assert result.shape == (bucket.height, bucket.width, 3)
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous


@pytest.mark.parametrize("error", [NotImplementedError, ValueError, RuntimeError])
def test_self_test_fails_on_a_torch_without_the_kernel(monkeypatch, error):
    def old(*args, **kwargs):
        raise error("lanczos is not supported")

    monkeypatch.setattr(torch.nn.functional, "interpolate", old)
    assert not resample_self_test.__wrapped__()


def test_pixel_hash_is_pinned_and_knows_the_shape():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert pixel_hash(pixels).hex() == "e0ed62385ecbe980d438f08293779ae0"
    assert pixel_hash(pixels.reshape(4, 2, 3)) != pixel_hash(pixels)
    assert pixel_hash(np.asfortranarray(pixels)) == pixel_hash(pixels)
    assert pixel_hash(pixels + 1) != pixel_hash(pixels)


def test_thread_setup_limits_its_own_thread_only():
    before = torch.get_num_threads()
    seen = []

    def decode_thread():
        thread_setup()
        thread_setup()
        seen.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        for target in (decode_thread, lambda: seen.append(torch.get_num_threads())):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert seen == [1, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

"""Every class against its own encode, precision and storage, and what happens when something breaks."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_weights import rewrite

from latentcache.encoders.describe import describe_model
from latentcache.encoders.families import FAMILIES
from latentcache.encoders.opening import check_encoder, open_encoder
from latentcache.encoders.storage import from_bfloat16
from latentcache.encoders.vae import load_vae
from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError

SIX = ["AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLQwenImage", "AutoencoderKLWan"]
SIX += ["AutoencoderKLFlux2"]
GENERIC = ["AutoencoderKLCogVideoX", "AutoencoderKLCosmos", "AutoencoderKLHunyuanImage", "AutoencoderKLLTX2Video"]
GENERIC += ["AutoencoderKLMochi"]


def opened(folder, **changes):
    options = {"storage_dtype": "float32", "device": "cpu"} | changes
    return load_vae(describe_model(str(folder), **options), device="cpu")


@pytest.mark.parametrize("name", [*FAMILIES, *GENERIC])
def test_latents_are_those_of_the_class_itself(name, tiny, pictures, reference):
    encoder = opened(tiny(name))
    batch = encoder.encode(pictures)
    spec = encoder.spec
    assert batch.latents.shape == (3, spec.channels, 64 // spec.factor, 96 // spec.factor)
    assert batch.latents.dtype == np.float32
    assert batch.finite.all()
    np.testing.assert_allclose(batch.latents, reference(tiny(name), pictures), atol=1e-5, rtol=0)
    check_encoder(encoder)


def test_the_table_covers_the_six_classes_and_their_tests():
    assert set(SIX) <= set(FAMILIES)


@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_every_compute_and_storage_type(compute, storage, tiny, pictures, reference):
    encoder = opened(tiny("AutoencoderKL"), compute_dtype=compute, storage_dtype=storage)
    batch = encoder.encode(pictures)
    expected = reference(tiny("AutoencoderKL"), pictures)
    types = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    assert batch.latents.dtype == types[storage]
    floats = from_bfloat16(batch.latents) if storage == "bfloat16" else batch.latents.astype(np.float32)
    tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}
    np.testing.assert_allclose(floats, expected, atol=max(tolerance[compute], tolerance[storage]), rtol=1e-2)
    assert batch.finite.all()


def test_overflow_in_the_storage_type_is_not_finite(copied, pictures):
    model = copied()

    def enlarge(tensors):
        tensors["quant_conv.weight"] *= 1e6

    rewrite(model.weights, enlarge)
    half = opened(model.folder, storage_dtype="float16").encode(pictures)
    full = opened(model.folder, storage_dtype="float32").encode(pictures)
    assert not half.finite.any()
    assert full.finite.all()


def test_precise_is_float32_from_the_file_and_not_from_rounded_weights(tiny, pictures, reference):
    encoder = opened(tiny("AutoencoderKL"), compute_dtype="bfloat16")
    expected = reference(tiny("AutoencoderKL"), pictures)
    assert np.abs(encoder.encode(pictures).latents - expected).max() > 1e-4
    np.testing.assert_allclose(encoder.encode(pictures, precise=True).latents, expected, atol=1e-5, rtol=0)


def test_read_only_pixels_are_taken_without_a_warning(tiny, pictures):
    frozen = pictures.copy()
    frozen.flags.writeable = False
    encoder = opened(tiny("AutoencoderTiny"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        latents = encoder.encode(frozen).latents
    np.testing.assert_array_equal(latents, encoder.encode(pictures).latents)


def test_a_batch_and_its_parts_agree(tiny, pictures):
    encoder = opened(tiny("AutoencoderKLWan"))
    whole = encoder.encode(pictures).latents
    parts = np.concatenate([encoder.encode(pictures[i : i + 1]).latents for i in range(3)])
    np.testing.assert_allclose(whole, parts, atol=1e-5)


def test_a_factor_that_is_not_the_models_is_an_error_with_both_shapes(tiny, pictures):
    description = describe_model(str(tiny("AutoencoderKL")), storage_dtype="float32")
    wrong = replace(description, spec=replace(description.spec, factor=4))
    with pytest.raises(EncoderError) as caught:
        load_vae(wrong, device="cpu").encode(pictures)
    assert caught.value.what == ("AutoencoderKL gives latents of shape (3, 4, 32, 48), expected (3, 4, 16, 24)")


def test_out_of_memory_is_a_memory_error_and_leaves_nothing_behind(tiny, pictures):
    encoder = opened(tiny("AutoencoderKL"))
    (module,) = encoder._modules.values()
    hook = module.encoder.conv_in.register_forward_pre_hook(lambda *_: torch.empty(1 << 58))
    with pytest.raises(DeviceMemoryError) as caught:
        encoder.encode(pictures)
    assert caught.value.what == "no memory left on the device for 3 pictures of 64x96"
    assert caught.value.__context__ is None
    hook.remove()
    assert encoder.encode(pictures).finite.all()


def test_a_device_that_fails_is_a_device_error(tiny, pictures):
    encoder = opened(tiny("AutoencoderKL"))
    (module,) = encoder._modules.values()

    def lose_device(*_):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    module.encoder.conv_in.register_forward_pre_hook(lose_device)
    with pytest.raises(DeviceError, match="the device cpu failed on 3 pictures of 64x96"):
        encoder.encode(pictures)


def test_a_size_the_model_cannot_take_is_an_encoder_error(tiny):
    encoder = opened(tiny("AutoencoderKLWan"))
    with pytest.raises(EncoderError, match="AutoencoderKLWan cannot encode 1 pictures of 9x9"):
        encoder.encode(np.zeros((1, 9, 9, 3), np.uint8))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there(device, tiny):
    with pytest.raises(DeviceError) as caught:
        open_encoder(describe_model(str(tiny("AutoencoderTiny"))), device=device)
    assert caught.value.what == f"torch cannot use the device {device}"
    assert "--device cpu" in caught.value.fix


def test_close_gives_the_modules_back(tiny, pictures):
    encoder = opened(tiny("AutoencoderTiny"))
    encoder.close()
    assert not encoder._modules

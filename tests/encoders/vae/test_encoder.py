"""Every class against its own encode, precision and storage, and what happens when something breaks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from described_models import described_model

from latentcache.encoders.faults import Guard
from latentcache.encoders.vae.encoder import VaeEncoder, choose_device, copying
from latentcache.encoders.vae.families import FAMILIES
from latentcache.encoders.vae.producer import checked_noise, open_encoder
from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError
from latentcache.fields.dtypes import as_floats

GENERIC = ["AutoencoderKLCogVideoX", "AutoencoderKLCosmos", "AutoencoderKLHunyuanImage", "AutoencoderKLLTX2Video"]
GENERIC += ["AutoencoderKLMochi"]


def opened(folder, **changes):
    options = {"storage_dtype": "float32"} | changes
    return VaeEncoder(described_model(folder, **options), choose_device("cpu"))


@pytest.mark.parametrize("name", [*FAMILIES, *GENERIC])
def test_latents_are_those_of_the_class_itself(name, tiny, images, reference):
    encoder = opened(tiny(name))
    batch = encoder.encode(images)
    spec = encoder.spec
    assert batch.latents.shape == (3, spec.channels, 64 // spec.factor, 96 // spec.factor)
    assert batch.latents.dtype == np.float32
    assert batch.finite.all()
    np.testing.assert_allclose(batch.latents, reference(tiny(name), images), atol=1e-5, rtol=0)
    checked_noise(encoder)


@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_every_compute_and_storage_type(compute, storage, tiny, images, reference):
    encoder = opened(tiny("AutoencoderKL"), compute_dtype=compute, storage_dtype=storage)
    images = images[:1, :32, :32]
    batch = encoder.encode(images)
    expected = reference(tiny("AutoencoderKL"), images)
    types = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    assert batch.latents.dtype == types[storage]
    floats = as_floats(batch.latents)
    tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}
    np.testing.assert_allclose(floats, expected, atol=max(tolerance[compute], tolerance[storage]), rtol=1e-2)
    assert batch.finite.all()


def test_precise_is_float32_from_the_file_and_not_from_rounded_weights(tiny, images, reference):
    encoder = opened(tiny("AutoencoderKL"), compute_dtype="bfloat16")
    expected = reference(tiny("AutoencoderKL"), images)
    assert np.abs(encoder.encode(images).latents - expected).max() > 1e-4
    np.testing.assert_allclose(encoder.encode(images, precise=True).latents, expected, atol=1e-5, rtol=0)


def test_a_factor_that_is_not_the_models_is_an_error_with_both_shapes(tiny, images):
    description = described_model(tiny("AutoencoderKL"), storage_dtype="float32")
    wrong = replace(description, spec=replace(description.spec, factor=4))
    with pytest.raises(EncoderError) as caught:
        VaeEncoder(wrong, choose_device("cpu")).encode(images)
    assert caught.value.what == ("AutoencoderKL gives latents of shape (3, 4, 32, 48), expected (3, 4, 16, 24)")


def test_out_of_memory_is_a_memory_error_and_leaves_nothing_behind(tiny, images):
    encoder = opened(tiny("AutoencoderKL"))
    (module,) = encoder._modules.values()
    hook = module.encoder.conv_in.register_forward_pre_hook(lambda *_: torch.empty(1 << 58))
    with pytest.raises(DeviceMemoryError) as caught:
        encoder.encode(images)
    assert caught.value.what == "no memory left on the device for 3 images of 64x96"
    assert caught.value.__context__ is None
    hook.remove()
    assert encoder.encode(images).finite.all()


def test_a_size_the_model_cannot_take_is_an_encoder_error(tiny):
    encoder = opened(tiny("AutoencoderKLWan"))
    with pytest.raises(EncoderError, match="AutoencoderKLWan cannot encode 1 images of 9x9"):
        encoder.encode(np.zeros((1, 9, 9, 3), np.uint8))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there(device, tiny):
    with pytest.raises(DeviceError) as caught:
        open_encoder(described_model(tiny("AutoencoderTiny")), device=device)
    assert caught.value.what == f"--device {device}: torch cannot use it"
    assert "--device cpu" in caught.value.fix


class Late:
    """The end of copies on a device that fails."""

    def query(self):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    synchronize = query


def test_a_device_that_fails_later_raises_in_result():
    guard = Guard(device=torch.device("cpu"), name="A", label="a")
    pending = copying(torch.zeros(1), torch.zeros(1), Late(), guard, "3 images of 64x96")
    assert pending.done()
    with pytest.raises(DeviceError, match="failed on 3 images of 64x96") as caught:
        pending.result()
    assert caught.value.__context__ is None

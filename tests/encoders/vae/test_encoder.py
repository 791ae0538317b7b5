"""Compare every class with its own encode: precision, storage, moments, masks and faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from described_models import described_model

from latentcache.encoders.devices import Translator, choose_device
from latentcache.encoders.pixels import cell_means
from latentcache.encoders.vae.encoder import VaeEncoder, conv3d_to_conv2d, copying, load_module
from latentcache.encoders.vae.families import FAMILIES
from latentcache.encoders.vae.producer import checked_noise, open_encoder
from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError, UnsupportedModelError
from latentcache.fields.dtypes import as_floats, is_finite

GENERIC = ["AutoencoderKLCogVideoX", "AutoencoderKLCosmos", "AutoencoderKLHunyuanImage", "AutoencoderKLLTX2Video"]
GENERIC += ["AutoencoderKLMochi"]


def opened(folder, **changes):
    options = {"storage_dtype": "float32"} | changes
    return VaeEncoder(described_model(folder, **options), choose_device("cpu"))


@pytest.mark.parametrize("name", [*FAMILIES, *GENERIC])
def test_latents_equal_the_diffusers_class(name, tiny, images, reference):
    encoder = opened(tiny(name))
    batch = encoder.encode(images)
    spec = encoder.spec
    assert batch.shape == (3, spec.channels, 64 // spec.factor, 96 // spec.factor)
    assert batch.dtype == np.float32
    assert is_finite(batch)
    np.testing.assert_allclose(batch, reference(tiny(name), images), atol=1e-5, rtol=0)
    checked_noise(encoder)


@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_every_compute_and_storage_type(compute, storage, tiny, images, reference):
    encoder = opened(tiny("AutoencoderKL"), compute_dtype=compute, storage_dtype=storage)
    images = images[:1, :32, :32]
    batch = encoder.encode(images)
    expected = reference(tiny("AutoencoderKL"), images)
    types = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    assert batch.dtype == types[storage]
    floats = as_floats(batch)
    tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}
    np.testing.assert_allclose(floats, expected, atol=max(tolerance[compute], tolerance[storage]), rtol=1e-2)
    assert is_finite(batch)


def test_precise_uses_float32_weights_of_the_file(tiny, images, reference):
    encoder = opened(tiny("AutoencoderKL"), compute_dtype="bfloat16")
    expected = reference(tiny("AutoencoderKL"), images)
    assert np.abs(encoder.encode(images) - expected).max() > 1e-4
    np.testing.assert_allclose(encoder.encode(images, precise=True), expected, atol=1e-5, rtol=0)


def test_a_wrong_factor_is_an_error_with_both_shapes(tiny, images):
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
    assert is_finite(encoder.encode(images))


def test_an_unsupported_size_is_an_encoder_error(tiny):
    encoder = opened(tiny("AutoencoderKLWan"))
    with pytest.raises(EncoderError, match="AutoencoderKLWan cannot encode 1 images of 9x9"):
        encoder.encode(np.zeros((1, 9, 9, 3), np.uint8))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_missing_device(device, tiny):
    with pytest.raises(DeviceError) as caught:
        open_encoder(described_model(tiny("AutoencoderTiny")), device=device)
    assert caught.value.what == f"--device={device}: torch cannot use it"
    assert "--device=cpu" in caught.value.fix


class FailingEvent:
    """A copy event of a failing device."""

    def query(self):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    synchronize = query


def test_a_device_that_fails_later_raises_in_result():
    translator = Translator(device=torch.device("cpu"), name="A", label="a")
    pending = copying(torch.zeros(1), FailingEvent(), translator, "3 images of 64x96")
    assert pending.done()
    with pytest.raises(DeviceError, match="failed on 3 images of 64x96") as caught:
        pending.result()
    assert caught.value.__context__ is None


WITHOUT = ["AutoencoderTiny", "AutoencoderDC"]
WITH = sorted(set(FAMILIES) - set(WITHOUT))


@pytest.mark.parametrize("name", [*WITH, "AutoencoderKLMochi"])
def test_moments_equal_the_diffusers_class(name, tiny, images):
    plain = opened(tiny(name)).encode(images)
    encoder = opened(tiny(name), latents="moments")
    moments = encoder.encode(images)
    checked_noise(encoder)
    channels = encoder.spec.channels
    assert moments.shape == (3, 2 * channels, *plain.shape[2:])
    assert is_finite(moments)
    np.testing.assert_array_equal(moments[:, :channels], plain)
    logvar = moments[:, channels:]
    assert logvar.min() >= -30
    assert logvar.max() <= 20


@pytest.mark.parametrize("name", WITHOUT)
def test_a_class_without_a_posterior_is_rejected_before_its_weights_are_read(name, tiny):
    with pytest.raises(UnsupportedModelError) as caught:
        described_model(tiny(name), latents="moments")
    assert caught.value.slug == "no-posterior"
    assert caught.value.what == f"--latents=moments: {name} has no posterior"
    assert caught.value.fix.startswith("--latents=mode")


def test_an_unknown_class_without_a_posterior_is_rejected(tiny):
    encoder = opened(tiny("AutoencoderKLCosmos"), latents="moments")
    with pytest.raises(UnsupportedModelError, match="AutoencoderKLCosmos has no posterior") as caught:
        checked_noise(encoder)
    assert "gives IdentityDistribution, without mean and logvar" in caught.value.why


def test_cells_are_rounded_means():
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:4, :8] = 255
    pixels[0, 8] = 64
    assert cell_means(pixels, 8).tolist() == [[[128, 1]]]


@pytest.mark.parametrize("name", ["AutoencoderKLQwenImage", "AutoencoderKLWan", "AutoencoderKLHunyuanVideo"])
def test_every_causal_convolution_is_rewritten_with_equal_latents(name, tiny, images):
    description = described_model(tiny(name), storage_dtype="float32")
    as_conv2d = VaeEncoder(description, choose_device("cpu")).encode(images)
    as_conv3d = VaeEncoder(description, choose_device("cpu"), as_conv2d=False).encode(images)
    assert np.abs(as_conv2d - as_conv3d).max() <= 1e-4 * as_conv3d.std()
    module = load_module(description, torch.float32)
    causal = [part for part in module.modules() if "CausalConv3d" in type(part).__name__]
    before = sum(weight.numel() for weight in module.parameters())
    conv3d_to_conv2d(module)
    assert causal
    assert all("forward" in vars(part) for part in causal)
    assert sum(weight.numel() for weight in module.parameters()) < 0.6 * before
    with pytest.raises(ValueError, match="for single frames was given 2"):
        causal[0](torch.zeros(1, getattr(causal[0], "conv", causal[0]).in_channels, 2, 16, 16))

"""Float16 where it is wide enough, and what is taken where it is not. The probe runs in float16 on the CPU."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from made_weights import rewrite

from latentcache.encoders.vae import probe
from latentcache.encoders.vae.describe import describe_model
from latentcache.encoders.vae.probe import LARGEST, Range, choose_precision, find_precision, probe_images, probe_range

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Float16 is slow on a CPU: two images of 32."""
    monkeypatch.setattr(probe, "_SIDE", 32)
    monkeypatch.setattr(probe, "probe_images", lambda multiple: probe_images(multiple)[:2])


@pytest.fixture
def on_cuda(monkeypatch):
    """Have the decision made as on a CUDA device, and the probe on the CPU."""

    def use(*, bfloat16=True):
        real = probe.probe_range
        monkeypatch.setattr(probe, "choose_device", lambda device: torch.device("cuda", 0))
        monkeypatch.setattr(probe, "has_bfloat16", lambda device: bfloat16)
        monkeypatch.setattr(probe, "probe_range", lambda found, device, fold: real(found, CPU, fold=fold))

    return use


def enlarge(model, factor):
    """The model with its first layer enlarged: the norms behind it hide that from the latents."""

    def change(tensors):
        tensors["encoder.conv_in.weight"] *= factor

    rewrite(model.weights, change)
    return describe_model(str(model.folder))


def asked(description, device="cuda"):
    """The answer to the question as it travels to a worker and back."""
    return json.loads(json.dumps(find_precision(json.loads(json.dumps(description.as_json())), device)))


def test_the_whole_table():
    for on_cuda, upcast, bfloat16, fits in product([False, True], repeat=4):
        found = choose_precision(on_cuda=on_cuda, force_upcast=upcast, bfloat16=bfloat16, fits=fits)
        if not on_cuda:
            assert found == "float32"
        elif fits and not upcast:
            assert found == "float16"
        else:
            assert found == ("bfloat16" if bfloat16 else "float32")


@pytest.mark.parametrize("name", ["AutoencoderTiny", "AutoencoderKLWan"])
def test_a_usual_model_fits(name, tiny):
    found = probe_range(describe_model(str(tiny(name))), CPU)
    assert found.fits
    assert 0.5 < found.largest < 1000
    assert found.layer


def test_overflow_inside_is_found_though_a_norm_hides_it(copied):
    found = probe_range(enlarge(copied(), 3e5), CPU)
    assert (found.largest, found.fits) == (math.inf, False)
    assert "reaches infinity" in str(found)


def test_values_near_the_end_of_the_range_do_not_fit(copied):
    found = probe_range(enlarge(copied(), 2e4), CPU)
    assert LARGEST / 8 < found.largest < LARGEST
    assert not found.fits
    assert found.layer.startswith("encoder.")


def test_weights_beyond_float16_do_not_fit(copied):
    found = probe_range(enlarge(copied(), 1e7), CPU)
    assert (found.layer, found.fits) == ("its weights", False)


def test_nan_counts_as_infinite(tiny, monkeypatch):
    flat = [np.zeros((1, 64, 64, 3), np.uint8)]
    monkeypatch.setattr(probe, "probe_images", lambda multiple: flat)
    described = describe_model(str(tiny("AutoencoderTiny")))
    real = probe.VaeEncoder

    class Broken(real):
        def submit(self, images, *, precise=False):
            next(self.module.parameters()).fill_(torch.nan)
            return super().submit(images)

    monkeypatch.setattr(probe, "VaeEncoder", Broken)
    assert probe_range(described, CPU).largest == math.inf


def test_on_the_cpu_nothing_is_probed(tiny, monkeypatch):
    monkeypatch.setattr(probe, "probe_range", None)
    assert asked(describe_model(str(tiny("AutoencoderKL"))), "cpu")["compute_dtype"] == "float32"


def test_a_configuration_that_warns_is_believed_without_a_probe(tiny, on_cuda, monkeypatch):
    on_cuda()
    monkeypatch.setattr(probe, "probe_range", None)
    described = replace(describe_model(str(tiny("AutoencoderKL"))), force_upcast=True)
    assert asked(described) == {"compute_dtype": "bfloat16", "why": ""}


def test_what_the_probe_decides(copied, on_cuda):
    on_cuda()
    model = copied(force_upcast=False)
    assert asked(describe_model(str(model.folder)))["compute_dtype"] == "float16"
    narrow = asked(enlarge(model, 3e5))
    assert narrow["compute_dtype"] == "bfloat16"
    assert narrow["why"].startswith("float16 is too narrow: ")
    on_cuda(bfloat16=False)
    assert asked(describe_model(str(model.folder)))["compute_dtype"] == "float32"


@pytest.mark.parametrize("multiple", [8, 32, 96])
def test_images_of_the_probe(multiple):
    images = probe_images(multiple)
    assert len(images) == 6
    assert all(made.dtype == np.uint8 and made.shape == images[0].shape for made in images)
    assert images[0].shape[1] % multiple == 0
    assert {int(made.max()) for made in images} == {0, 255}


def test_a_range_with_headroom():
    assert Range(largest=LARGEST / 8, layer="x").fits
    assert not Range(largest=LARGEST / 7.9, layer="x").fits
    assert str(Range(largest=9000.0, layer="encoder.conv_in")) == ("encoder.conv_in reaches 9e+03 with a test image")

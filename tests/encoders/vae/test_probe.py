"""Float16 where it is wide enough, and what is taken where it is not. The test image is encoded on the CPU."""

import json
from dataclasses import replace

import pytest
import torch
from made_weights import rewrite

from latentcache.encoders.vae import probe
from latentcache.encoders.vae.describe import describe_model
from latentcache.encoders.vae.probe import find_precision, too_narrow

CPU = torch.device("cpu")


@pytest.fixture
def on_cuda(monkeypatch):
    """Have the decision made as on a CUDA device, and the test image encoded on the CPU."""

    def use(*, bfloat16=True):
        monkeypatch.setattr(probe, "choose_device", lambda device: torch.device("cuda", 0))
        monkeypatch.setattr(probe, "has_bfloat16", lambda device: bfloat16)
        monkeypatch.setattr(probe, "too_narrow", lambda found, device, fold: too_narrow(found, CPU, fold=fold))

    return use


def enlarge(model, factor):
    """The model with its first layer enlarged."""

    def change(tensors):
        tensors["encoder.conv_in.weight"] *= factor

    rewrite(model.weights, change)
    return describe_model(str(model.folder))


def asked(description, device="cuda"):
    """The answer to the question as it travels to a worker and back."""
    return json.loads(json.dumps(find_precision(json.loads(json.dumps(description.as_json())), device)))


@pytest.mark.parametrize("name", ["AutoencoderTiny", "AutoencoderKLWan"])
def test_a_usual_model_fits(name, tiny):
    assert too_narrow(describe_model(str(tiny(name))), CPU) == ""


@pytest.mark.parametrize("factor", [3e5, 1e7])
def test_values_and_weights_beyond_float16_do_not_fit(copied, factor):
    assert too_narrow(enlarge(copied(), factor), CPU).startswith("float16 is too narrow: ")


def test_on_the_cpu_nothing_is_tried(tiny, monkeypatch):
    monkeypatch.setattr(probe, "too_narrow", None)
    assert asked(describe_model(str(tiny("AutoencoderKL"))), "cpu")["compute_dtype"] == "float32"


@pytest.mark.parametrize(("bfloat16", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_a_configuration_that_warns_is_believed(tiny, on_cuda, monkeypatch, bfloat16, expected):
    on_cuda(bfloat16=bfloat16)
    monkeypatch.setattr(probe, "too_narrow", None)
    described = replace(describe_model(str(tiny("AutoencoderKL"))), force_upcast=True)
    assert asked(described) == {"compute_dtype": expected, "why": ""}


def test_what_the_test_image_decides(copied, on_cuda):
    on_cuda()
    model = copied(force_upcast=False)
    assert asked(describe_model(str(model.folder))) == {"compute_dtype": "float16", "why": ""}
    narrow = enlarge(model, 3e5)
    assert asked(narrow)["compute_dtype"] == "bfloat16"
    on_cuda(bfloat16=False)
    assert asked(narrow)["compute_dtype"] == "float32"

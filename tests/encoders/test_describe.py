"""Every spelling of --model, every wrong one with its message, and nothing of torch on the way."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from made_weights import edit
from safetensors.torch import load_file, save_file

from latentcache.encoders.describe import cuda_available, describe_model
from latentcache.errors import EncoderError, UnsupportedModelError, UsageError
from latentcache.recipe import Normalisation


def test_a_folder_is_described(tiny):
    described = describe_model(str(tiny("AutoencoderKL")))
    spec = described.spec
    assert (described.kind, described.label) == ("diffusers", str(tiny("AutoencoderKL")))
    assert described.weights == (tiny("AutoencoderKL") / "diffusion_pytorch_model.safetensors",)
    assert described.config_path == tiny("AutoencoderKL") / "config.json"
    assert (spec.family, spec.channels, spec.factor, spec.multiple) == ("AutoencoderKL", 4, 2, 2)
    assert spec.normalisation == Normalisation(kind="scale-shift", scale=0.3611, shift=0.1159)
    assert not spec.generic
    assert len(spec.fingerprint) == len(spec.config) == 32


def test_a_class_without_a_row_is_generic(tiny):
    spec = describe_model(str(tiny("AutoencoderKLCogVideoX"))).spec
    assert spec.generic
    assert (spec.channels, spec.factor, spec.multiple) == (4, 8, 16)
    assert spec.normalisation == Normalisation(kind="scale-shift", scale=1.15258426)


def test_flux2_brings_its_batch_norm(tiny):
    tensors = load_file(tiny("AutoencoderKLFlux2") / "diffusion_pytorch_model.safetensors")
    found = describe_model(str(tiny("AutoencoderKLFlux2"))).spec.normalisation
    assert (found.kind, found.patch) == ("batch-norm", 2)
    assert found.mean == pytest.approx(tensors["bn.running_mean"].tolist(), abs=1e-7)
    assert found.std == pytest.approx((tensors["bn.running_var"] + 1e-4).sqrt().tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["AutoencoderKLLTXVideo", "AutoencoderKLLTX2Video"])
def test_statistics_among_the_weights_are_used(tiny, name):
    """Also where the class has no row: its configuration only says that the scale is 1."""
    tensors = load_file(tiny(name) / "diffusion_pytorch_model.safetensors")
    found = describe_model(str(tiny(name))).spec.normalisation
    assert found.kind == "mean-std"
    assert found.mean == pytest.approx(tensors["latents_mean"].tolist())
    assert found.std == pytest.approx(tensors["latents_std"].tolist())


def test_flux2_without_its_batch_norm_is_an_error(copied):
    model = copied("AutoencoderKLFlux2")
    tensors = load_file(model.weights)
    save_file({name: t for name, t in tensors.items() if not name.startswith("bn.")}, model.weights)
    with pytest.raises(EncoderError, match=r"tensor bn\.running_var is not in diffusion_pytorch_model"):
        describe_model(str(model.folder))


def test_a_scaling_factor_is_read_time_and_no_identity(copied):
    model = copied()
    before = describe_model(str(model.folder)).spec
    edit(model.config, scaling_factor=0.5, shift_factor=0.25)
    after = describe_model(str(model.folder)).spec
    assert after.normalisation == Normalisation(kind="scale-shift", scale=0.5, shift=0.25)
    assert after.identity() == before.identity()
    edit(model.config, act_fn="relu")
    assert describe_model(str(model.folder)).spec.identity() != before.identity()


def test_means_of_another_length_are_refused(copied):
    model = copied()
    edit(model.config, latents_mean=[0.0] * 3, latents_std=[1.0] * 3)
    with pytest.raises(UnsupportedModelError) as caught:
        describe_model(str(model.folder))
    assert caught.value.what == "the latents have 4 channels, their mean has 3"


def test_saving_again_changes_nothing(tiny, tmp_path):
    from diffusers import AutoencoderKL

    AutoencoderKL.from_pretrained(tiny("AutoencoderKL")).save_pretrained(tmp_path / "again")
    assert describe_model(str(tmp_path / "again")).spec == describe_model(str(tiny("AutoencoderKL"))).spec


@pytest.mark.parametrize(
    ("asked", "options", "found"),
    [
        ("auto", {}, "float32"),
        ("auto", {"has_cuda": True}, "bfloat16"),
        ("auto", {"has_cuda": True, "device": "cpu"}, "float32"),
        ("auto", {"device": "cuda:1"}, "bfloat16"),
        ("float16", {"device": "cpu"}, "float16"),
        ("bfloat16", {}, "bfloat16"),
    ],
)
def test_compute_type(tiny, asked, options, found):
    described = describe_model(str(tiny("AutoencoderKL")), compute_dtype=asked, **options)
    assert described.force_upcast
    assert described.spec.compute_dtype == found


def test_compute_type_without_force_upcast_is_float16_on_cuda(tiny):
    described = describe_model(str(tiny("AutoencoderKL", force_upcast=False)), has_cuda=True)
    assert (described.force_upcast, described.spec.compute_dtype) == (False, "float16")


def test_demo_and_stub():
    demo = describe_model("demo")
    assert (demo.kind, demo.spec.family, demo.spec.channels, demo.spec.factor) == ("demo", "demo", 16, 8)
    stub, slow = describe_model("stub"), describe_model("stub:delay_ms=20", storage_dtype="float32")
    assert (stub.delay_ms, slow.delay_ms, stub.kind) == (0, 20, "stub")
    assert replace(slow.spec, storage_dtype="float16") == stub.spec


@pytest.mark.parametrize("option", ["", "delay=3", "delay_ms=", "delay_ms=-1", "delay_ms=1.5", "delay_ms=²"])
def test_unknown_stub_options(option):
    with pytest.raises(UsageError) as caught:
        describe_model(f"stub:{option}")
    assert caught.value.what == f"unknown option of the stub encoder: {option or '(empty)'}"
    assert caught.value.fix == "use --model stub or --model stub:delay_ms=20"


@pytest.mark.parametrize("option", ["storage_dtype", "compute_dtype"])
def test_unknown_types(option):
    with pytest.raises(UsageError, match="unknown type float8"):
        describe_model("demo", **{option: "float8"})


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "AutoencoderOobleck"])
def test_a_configuration_of_another_model(copied, name):
    model = copied()
    edit(model.config, _class_name=name)
    with pytest.raises(UnsupportedModelError) as caught:
        describe_model(str(model.folder))
    assert caught.value.what == f"{name} is no picture encoder"


def test_damaged_weights_in_a_folder(copied):
    model = copied()
    model.weights.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnsupportedModelError, match=r"diffusion_pytorch_model\.safetensors is a GGUF file"):
        describe_model(str(model.folder))


def test_weights_without_an_encoder(copied):
    model = copied()
    tensors = load_file(model.weights)
    save_file({name: t for name, t in tensors.items() if name.startswith("decoder.")}, model.weights)
    with pytest.raises(UnsupportedModelError, match="holds no encoder"):
        describe_model(str(model.folder))


def test_the_torch_free_modules_import_no_torch(tiny):
    program = (
        "import sys\n"
        "from latentcache.encoders import describe, opening, demo, stub, weights, families\n"
        f"described = describe.describe_model({str(tiny('AutoencoderKLFlux2'))!r})\n"
        "opening.check_encoder(opening.open_encoder(describe.describe_model('demo')))\n"
        "opening.check_encoder(opening.open_encoder(describe.describe_model('stub:delay_ms=1')))\n"
        "assert isinstance(describe.cuda_available(), bool)\n"
        "print(sorted({'torch', 'diffusers', 'transformers', 'safetensors'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cuda_is_not_missed_where_torch_finds_it():
    assert cuda_available() or not torch.cuda.is_available()

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from described_models import described_model
from safetensors.numpy import save_file

from latentcache.encoders.vae.families import WEIGHTS_NAME, encoder_tensors, locate
from latentcache.errors import EncoderError, ModelNotFoundError, UnsupportedModelError

HUB = "latentcache.encoders.files.download"
CONFIG = {"_class_name": "AutoencoderKL", "latent_channels": 4}
#: The smallest complete safetensors file.
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def make_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / WEIGHTS_NAME).write_bytes(NO_TENSORS)
    return SimpleNamespace(folder=folder, config=folder / "config.json", weights=folder / WEIGHTS_NAME)


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


def test_a_folder_has_a_configuration_and_weights(model):
    located = locate(str(model.folder))
    assert (located.config_path, located.config, located.weights) == (model.config, CONFIG, (model.weights,))
    assert locate(str(model.weights)) == located


def test_a_pipeline_folder_gives_its_vae(tmp_path):
    vae = make_model(tmp_path / "pipeline" / "vae")
    assert locate(str(tmp_path / "pipeline")) == locate(str(vae.folder))
    beside = make_model(tmp_path / "both")
    inside = make_model(beside.folder / "vae")
    assert locate(str(beside.folder)).weights == (beside.weights,)
    (beside.folder / "model_index.json").write_text('{"vae": ["diffusers", "AutoencoderKL"]}')
    assert locate(str(beside.folder)).weights == (inside.weights,)


def test_a_pipeline_without_a_vae(tmp_path):
    index = {"_class_name": "IFPipeline", "unet": ["diffusers", "UNet2DConditionModel"], "scheduler": []}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError) as caught:
        locate(str(tmp_path))
    assert caught.value.what == f"the pipeline in {tmp_path} has no vae/"
    assert caught.value.why == "its parts are: scheduler, unet"
    assert caught.value.fix == "give the folder of the VAE itself"


def test_a_single_file_alone_names_the_option(model, tmp_path):
    lone = tmp_path / "lone.safetensors"
    model.weights.rename(lone)
    with pytest.raises(EncoderError) as caught:
        locate(str(lone))
    assert caught.value.what == "lone.safetensors alone does not identify a model"
    assert caught.value.why == (
        "a lone file has neither its class nor its normalization; there is no config.json beside it"
    )
    assert "add --model-config=FOLDER" in caught.value.fix
    for config in (model.config, model.folder):
        assert locate(str(lone), str(config)).config_path == model.config


def test_a_configuration_of_another_kind_of_model(model):
    model.config.write_text('{"model_type": "clip"}')
    with pytest.raises(UnsupportedModelError, match=r"config.json belongs to another kind of model \(clip\)"):
        locate(str(model.folder))


def test_weights_of_another_name_are_not_chosen(model):
    for name in ("b.safetensors", "a.safetensors"):
        (model.folder / name).write_bytes(NO_TENSORS)
    assert locate(str(model.folder)).weights == (model.weights,)
    model.weights.unlink()
    with pytest.raises(UnsupportedModelError, match=f"has no {WEIGHTS_NAME} .a.safetensors, b") as caught:
        locate(str(model.folder))
    assert caught.value.fix == f"give the weights by name: --model={model.folder / 'a.safetensors'}"
    assert locate(str(model.folder / "a.safetensors")).weights == (model.folder / "a.safetensors",)


PATHS = ["/no/such", "nothing", "a/b/c", "~no-such-user/x"]


@pytest.mark.parametrize("name", [*PATHS, "org/vae.safetensors", "org/vae.gguf"])
def test_a_missing_path_is_not_a_hub_id(name, monkeypatch):
    monkeypatch.setattr(HUB, lambda *model, **words: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError) as caught:
        locate(name)
    assert caught.value.what_python == f"model={name!r}: no such file or folder"
    assert caught.value.fix.startswith("check the path; --model takes a VAE or pipeline folder")


def hub_cache(root, source, *, nested, weights=WEIGHTS_NAME):
    """Lay out the files of a model as huggingface_hub does."""
    repository = root / "models--someone--some-vae"
    snapshot = repository / "snapshots" / "0123abc"
    target = snapshot / "vae" if nested else snapshot
    target.mkdir(parents=True)
    for name in ("config.json", weights):
        (target / name).symlink_to(source / name)
    if nested:
        (snapshot / "model_index.json").write_text('{"vae": []}')
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")


PROGRAM = """
import sys
from latentcache.encoders.vae.describe import DescribeContext, LatentsSettings, describe_model
from latentcache.errors import LatentcacheError
try:
    described = describe_model(LatentsSettings(model="someone/some-vae"), DescribeContext(device="cpu"))
    print(described.spec.family, described.spec.fingerprint)
except LatentcacheError as error:
    print(error.slug, error.what, error.fix, sep="|")
print(sorted({"torch", "diffusers", "transformers"} & set(sys.modules)))
"""


def run_with_hub(cache, **environment):
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": "http://127.0.0.1:9", **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_a_hub_id_is_read_from_the_local_cache_without_torch(tiny, tmp_path):
    hub_cache(tmp_path, tiny("AutoencoderKL"), nested=True)
    spec = described_model(tiny("AutoencoderKL")).spec
    assert run_with_hub(tmp_path, HF_HUB_OFFLINE="1") == [f"AutoencoderKL {spec.fingerprint}", "[]"]


def test_an_fp16_variant_in_the_hub_cache_is_not_used(model, tmp_path):
    variant = model.folder / "diffusion_pytorch_model.fp16.safetensors"
    model.weights.rename(variant)
    hub_cache(tmp_path, model.folder, nested=False, weights=variant.name)
    line, _ = run_with_hub(tmp_path, HF_HUB_OFFLINE="1")
    assert line.startswith("model-unsupported|")


MIDDLE = "encoder.mid_block.attentions.0"
#: Name in an original latent-diffusion file, or one of old diffusers -> name in diffusers.
TRANSLATED = {
    "encoder.down.10.block.12.norm2.weight": "encoder.down_blocks.10.resnets.12.norm2.weight",
    "encoder.down.1.block.0.nin_shortcut.weight": "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
    "quant_conv.weight": "quant_conv.weight",
    f"{MIDDLE}.query.weight": f"{MIDDLE}.to_q.weight",
    f"{MIDDLE}.key.bias": f"{MIDDLE}.to_k.bias",
    f"{MIDDLE}.value.weight": f"{MIDDLE}.to_v.weight",
    f"{MIDDLE}.proj_attn.bias": f"{MIDDLE}.to_out.0.bias",
}
LEFT_OUT = ["decoder.a", "post_quant_conv.bias", "loss.logvar", "model_ema.decay", "encoder.a.num_batches_tracked"]


def test_a_full_checkpoint_gives_its_autoencoder_under_the_names_of_diffusers(tmp_path):
    names = [f"first_stage_model.{name}" for name in (*TRANSLATED, *LEFT_OUT)]
    names += ["model.diffusion_model.out.weight", "cond_stage_model.encoder.layers.0.weight", "encoder.x"]
    save_file(dict.fromkeys(names, np.zeros(1)), tmp_path / "w.safetensors")
    tensors = encoder_tensors([tmp_path / "w.safetensors"], ldm=True)
    wanted = {modern: f"first_stage_model.{original}" for original, modern in TRANSLATED.items()}
    assert {name: tensor.name for name, tensor in tensors.items()} == wanted
    assert list(tensors) == sorted(tensors)

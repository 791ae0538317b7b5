import pytest
import torch
from described_models import described_model
from diffusers import AutoencoderKL
from made_weights import edit, ldm_name, ldm_tensor, rewrite
from safetensors.torch import load_file, save_file

from latentcache.encoders.vae.encoder import load_module
from latentcache.encoders.vae.families import FAMILIES, WEIGHTS_NAME
from latentcache.errors import EncoderError


def loaded(folder, dtype=torch.float32, **options):
    return load_module(described_model(folder, **options), dtype)


def assert_equal(module, expected):
    loaded, reference = module.state_dict(), expected.state_dict()
    assert len(loaded) > 10
    assert loaded.keys() <= reference.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, reference[name]), name


@pytest.mark.parametrize("name", FAMILIES)
def test_the_decoder_is_dropped_and_weights_are_frozen(name, tiny):
    module = loaded(tiny(name))
    names = [parameter for parameter, _ in module.named_parameters()]
    assert names
    assert not [n for n in names if n.startswith(("decoder", "post_quant_conv"))]
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not module.training


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLFlux2"])
def test_original_layout_and_full_checkpoint_give_the_same_encoder(name, prefix, tiny, tmp_path):
    folder, path = tiny(name), tmp_path / "checkpoint.safetensors"
    saved = load_file(folder / WEIGHTS_NAME)
    rest = {"model.diffusion_model.out.weight": torch.ones(3)} if prefix else {}
    save_file({prefix + ldm_name(n): ldm_tensor(n, t) for n, t in saved.items()} | rest, path)
    described = described_model(path, model_config=str(folder))
    assert described.spec == described_model(folder).spec
    assert_equal(load_module(described, torch.float32), loaded(folder))


def test_conv_attention_layers_are_loaded(copied, tiny):
    """AutoencoderKLHunyuanImage calls its 1x1 convolutions as AutoencoderKL calls its linear layers."""
    model, folder = copied("AutoencoderKLHunyuanImage"), tiny("AutoencoderKLHunyuanImage")
    lone = model.weights.rename(model.folder / "lone.safetensors")
    assert loaded(folder).encoder.mid_block.attentions[0].to_q.weight.ndim == 4
    assert_equal(loaded(lone), loaded(folder))


def test_shards_are_loaded(copied, tiny):
    model = copied()
    model.weights.unlink()
    AutoencoderKL.from_pretrained(tiny("AutoencoderKL")).save_pretrained(model.folder, max_shard_size="20KB")
    assert len(list(model.folder.glob("*.safetensors"))) > 1
    assert described_model(model.folder).spec == described_model(tiny("AutoencoderKL")).spec
    assert_equal(loaded(model.folder), loaded(tiny("AutoencoderKL")))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: {n: t for n, t in tensors.items() if n != "encoder.conv_in.bias"}, "Missing key(s)"),
        (lambda tensors: {**tensors, "encoder.adapter.weight": torch.ones(2)}, "Unexpected key(s)"),
        (lambda tensors: {**tensors, "encoder.conv_in.bias": torch.ones(9)}, "size mismatch"),
    ],
)
def test_weights_of_another_class_or_configuration(copied, change, why):
    model = copied()
    rewrite(model.weights, change)
    with pytest.raises(EncoderError) as caught:
        loaded(model.folder)
    assert caught.value.what == "the weights do not fit AutoencoderKL"
    assert why in caught.value.why
    assert caught.value.fix == "download the weights again, or use the config.json that belongs to them"


def test_a_class_missing_in_diffusers(copied):
    model = copied()
    model.config.write_text(model.config.read_text().replace("AutoencoderKL", "AutoencoderOfTomorrow"))
    described = described_model(model.folder)
    with pytest.raises(EncoderError, match="has no class AutoencoderOfTomorrow"):
        load_module(described, torch.float32)


def test_an_unsupported_configuration(copied):
    model = copied()
    edit(model.config, down_block_types=["NoSuchBlock2D"])
    with pytest.raises(EncoderError) as caught:
        loaded(model.folder)
    assert caught.value.what == "AutoencoderKL cannot be made from its configuration"
    assert "NoSuchBlock2D" in caught.value.why

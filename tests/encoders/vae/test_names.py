"""Names of tensors: what is taken, what is left, what it is called afterwards."""

from pathlib import Path

import pytest

from latentcache.encoders.vae.names import PREFIXES, encoder_tensors
from latentcache.encoders.weights import TensorInfo

MIDDLE = "encoder.mid_block.attentions.0"
#: Name in an original latent-diffusion file, or one of old diffusers -> name in diffusers.
TRANSLATED = {
    "encoder.conv_in.weight": "encoder.conv_in.weight",
    "encoder.down.10.block.12.norm2.weight": "encoder.down_blocks.10.resnets.12.norm2.weight",
    "encoder.down.1.block.0.nin_shortcut.weight": "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
    "encoder.down.2.downsample.conv.bias": "encoder.down_blocks.2.downsamplers.0.conv.bias",
    "quant_conv.weight": "quant_conv.weight",
    "bn.running_mean": "bn.running_mean",
    f"{MIDDLE}.query.weight": f"{MIDDLE}.to_q.weight",
    f"{MIDDLE}.key.bias": f"{MIDDLE}.to_k.bias",
    f"{MIDDLE}.value.weight": f"{MIDDLE}.to_v.weight",
    f"{MIDDLE}.proj_attn.bias": f"{MIDDLE}.to_out.0.bias",
}
LEFT_OUT = ["decoder.conv_in.weight", "post_quant_conv.bias", "loss.logvar", "model_ema.decay"]
LEFT_OUT += ["bn.num_batches_tracked", "encoder.norm.num_batches_tracked"]


def info(name, shape=(1,)):
    return TensorInfo(path=Path("w"), name=name, dtype="F32", shape=shape, start=0, num_bytes=4)


def encoder_names(names):
    return {name: one.name for name, one in encoder_tensors({n: info(n) for n in names}, ldm=True).items()}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_original_names(prefix):
    names = [prefix + name for name in (*TRANSLATED, *LEFT_OUT)]
    found = encoder_names(names)
    assert list(found) == sorted(set(TRANSLATED.values()))
    for original, modern in TRANSLATED.items():
        assert encoder_names([prefix + original, prefix + "encoder.conv_in.weight"])[modern] == prefix + original


def test_a_full_checkpoint_gives_its_autoencoder_only():
    inside = [f"first_stage_model.{name}" for name in ("encoder.a", "quant_conv.b", "decoder.c")]
    names = [*inside, "model.diffusion_model.out.weight", "cond_stage_model.encoder.layers.0.weight", "encoder.x"]
    assert encoder_names(names) == {"encoder.a": inside[0], "quant_conv.b": inside[1]}


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        (f"{MIDDLE}.to_q.weight", (8, 8, 1, 1), (8, 8)),
        (f"{MIDDLE}.to_out.0.weight", (8, 8, 1, 1), (8, 8)),
        (f"{MIDDLE}.to_q.weight", (8, 8, 3, 3), (8, 8, 3, 3)),
        ("quant_conv.weight", (8, 8, 1, 1), (8, 8, 1, 1)),
    ],
)
def test_attention_layers_are_linear(name, shape, found):
    assert encoder_tensors({name: info(name, shape)}, ldm=False)[name].shape == found

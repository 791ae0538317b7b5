"""Names of tensors: what is taken, what is left, what it is called afterwards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_weights import ldm_name

from latentcache.encoders.vae.weights import PREFIXES, encoder_names, encoder_shape

MIDDLE = "encoder.mid_block.attentions.0"
#: Name in an original latent-diffusion file, or one of old diffusers -> name in diffusers.
TRANSLATED = {
    "encoder.conv_in.weight": "encoder.conv_in.weight",
    "encoder.down.0.block.1.conv1.bias": "encoder.down_blocks.0.resnets.1.conv1.bias",
    "encoder.down.10.block.12.norm2.weight": "encoder.down_blocks.10.resnets.12.norm2.weight",
    "encoder.down.1.block.0.nin_shortcut.weight": "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
    "encoder.down.2.downsample.conv.bias": "encoder.down_blocks.2.downsamplers.0.conv.bias",
    "encoder.mid.block_1.norm1.weight": "encoder.mid_block.resnets.0.norm1.weight",
    "encoder.mid.block_2.conv2.weight": "encoder.mid_block.resnets.1.conv2.weight",
    "encoder.mid.attn_1.norm.bias": f"{MIDDLE}.group_norm.bias",
    "encoder.mid.attn_1.q.weight": f"{MIDDLE}.to_q.weight",
    "encoder.mid.attn_1.k.bias": f"{MIDDLE}.to_k.bias",
    "encoder.mid.attn_1.v.weight": f"{MIDDLE}.to_v.weight",
    "encoder.mid.attn_1.proj_out.weight": f"{MIDDLE}.to_out.0.weight",
    "encoder.norm_out.weight": "encoder.conv_norm_out.weight",
    "encoder.conv_out.bias": "encoder.conv_out.bias",
    "quant_conv.weight": "quant_conv.weight",
    "bn.running_mean": "bn.running_mean",
    f"{MIDDLE}.query.weight": f"{MIDDLE}.to_q.weight",
    f"{MIDDLE}.key.bias": f"{MIDDLE}.to_k.bias",
    f"{MIDDLE}.value.weight": f"{MIDDLE}.to_v.weight",
    f"{MIDDLE}.proj_attn.bias": f"{MIDDLE}.to_out.0.bias",
}
LEFT_OUT = ["decoder.conv_in.weight", "post_quant_conv.bias", "loss.logvar", "model_ema.decay"]
LEFT_OUT += ["bn.num_batches_tracked", "encoder.norm.num_batches_tracked"]


@pytest.mark.parametrize(("original", "modern"), TRANSLATED.items())
@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_original_name(prefix, original, modern):
    names = [prefix + original, prefix + "encoder.conv_in.weight"]
    assert encoder_names(names, ldm=True)[modern] == prefix + original


def test_a_full_checkpoint_gives_its_autoencoder_only():
    inside = [f"first_stage_model.{name}" for name in ("encoder.a", "quant_conv.b", "decoder.c")]
    names = [*inside, "model.diffusion_model.out.weight", "cond_stage_model.encoder.layers.0.weight", "encoder.x"]
    assert encoder_names(names, ldm=True) == {"encoder.a": inside[0], "quant_conv.b": inside[1]}


def test_a_prefix_that_is_no_autoencoder_is_kept():
    assert encoder_names(["vae.loss.weight", "encoder.a"], ldm=True) == {
        "encoder.a": "encoder.a",
        "vae.loss.weight": "vae.loss.weight",
    }


@given(st.permutations(sorted(TRANSLATED)))
def test_the_order_in_the_file_does_not_matter(names):
    found = encoder_names(names[:12], ldm=True)
    assert list(found.items()) == sorted(encoder_names(sorted(names[:12]), ldm=True).items())


@pytest.mark.parametrize("modern", [name for name in TRANSLATED.values() if name.startswith("encoder.")])
def test_names_go_there_and_back(modern):
    assert encoder_names([ldm_name(modern)], ldm=True) == {modern: ldm_name(modern)}


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        (f"{MIDDLE}.to_q.weight", (8, 8, 1, 1), (8, 8)),
        (f"{MIDDLE}.to_out.0.weight", (8, 8, 1, 1), (8, 8)),
        (f"{MIDDLE}.to_q.weight", (8, 8), (8, 8)),
        (f"{MIDDLE}.to_q.weight", (8, 8, 3, 3), (8, 8, 3, 3)),
        (f"{MIDDLE}.to_q.bias", (8,), (8,)),
        ("quant_conv.weight", (8, 8, 1, 1), (8, 8, 1, 1)),
    ],
)
def test_attention_layers_are_linear(name, shape, found):
    assert encoder_shape(name, shape) == found

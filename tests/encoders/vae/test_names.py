"""Names of tensors; test_modules.py tests whole models in original layouts."""

import numpy as np
from safetensors.numpy import save_file

from latentcache.encoders.vae.families import encoder_tensors

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

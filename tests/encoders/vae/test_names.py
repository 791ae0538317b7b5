"""Names of tensors; test_modules.py tests whole models in original layouts."""

from pathlib import Path

from latentcache.encoders.vae.locate import encoder_tensors
from latentcache.encoders.weights import TensorInfo

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


def test_a_full_checkpoint_gives_its_autoencoder_under_the_names_of_diffusers():
    def info(name):
        return TensorInfo(path=Path("w"), name=name, dtype="F32", shape=(1,), start=0, num_bytes=4)

    names = [f"first_stage_model.{name}" for name in (*TRANSLATED, *LEFT_OUT)]
    names += ["model.diffusion_model.out.weight", "cond_stage_model.encoder.layers.0.weight", "encoder.x"]
    found = encoder_tensors({name: info(name) for name in names}, ldm=True)
    wanted = {modern: f"first_stage_model.{original}" for original, modern in TRANSLATED.items()}
    assert {name: one.name for name, one in found.items()} == wanted
    assert list(found) == sorted(found)

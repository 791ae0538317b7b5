"""Single files are named by their tensors. The names and shapes are those of the published files."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from latentcache.encoders.checkpoints import recognize
from latentcache.encoders.vae.locate import locate
from latentcache.encoders.vae.weights import read_header
from latentcache.errors import EncoderError, UnsupportedModelError

UNET = "model.diffusion_model."
KEY = UNET + "input_blocks.{}.1.transformer_blocks.0.attn2.to_k.weight"
LDM_VAE = {"first_stage_model.encoder.conv_out.weight": (8, 512, 3, 3)}
FILES = {
    "Stable Diffusion 1": {KEY.format(1): (320, 768), KEY.format(4): (640, 768), **LDM_VAE},
    "Stable Diffusion 2": {KEY.format(1): (320, 1024), KEY.format(4): (640, 1024), **LDM_VAE},
    "Stable Diffusion XL": {KEY.format(4): (640, 2048), UNET + "label_emb.0.0.weight": (1280, 2816), **LDM_VAE},
    "Stable Diffusion 3": {
        UNET + "joint_blocks.0.x_block.attn.qkv.weight": (4608, 1536),
        "first_stage_model.encoder.conv_out.weight": (32, 512, 3, 3),
    },
    "Flux.1": {
        UNET + "double_blocks.0.img_attn.qkv.weight": (9216, 3072),
        "vae.encoder.conv_out.weight": (32, 512, 3, 3),
    },
}
WITHOUT_VAE = {
    "Flux.1": {"double_blocks.0.img_attn.qkv.weight": (9216, 3072)},
    "Wan 2.1": {"blocks.0.cross_attn.q.weight": (1536, 1536), "head.modulation": (1, 2, 1536)},
    "Qwen-Image": {"transformer_blocks.0.attn.add_k_proj.weight": (3072, 3072), "txt_norm.weight": (3584,)},
}
LONE = {
    "a VAE of Stable Diffusion 1, 2 or XL": {"encoder.conv_out.weight": (8, 512, 3, 3)},
    "a VAE of Stable Diffusion 3 or Flux.1": {"encoder.conv_out.weight": (32, 512, 3, 3)},
    "a VAE of videos, such as that of Wan 2.1 or Qwen-Image": {"encoder.conv1.weight": (96, 3, 3, 3, 3)},
}


def saved(path, shapes):
    """A file with these tensors; large sides are cut, but for those that tell families apart."""
    shapes = {name: (*(min(side, 64) for side in shape[:-1]), shape[-1]) for name, shape in shapes.items()}
    save_file({name: np.zeros(shape, dtype=np.float16) for name, shape in shapes.items()}, path)
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_whole_checkpoint_is_named_and_asked_for_its_configuration(name, tmp_path):
    path = saved(tmp_path / "model.safetensors", FILES[name])
    found = recognize(read_header(path))
    assert (found.name, found.has_encoder) == (name, True)
    with pytest.raises(EncoderError) as caught:
        locate(str(path))
    assert caught.value.what.startswith(f"model.safetensors is a checkpoint of {name}, ")
    assert f"{found.repository} vae/config.json" in caught.value.fix


@pytest.mark.parametrize("name", WITHOUT_VAE)
def test_a_transformer_alone_is_rejected_with_the_vae_that_belongs_to_it(name, tmp_path):
    path = saved(tmp_path / "model.safetensors", WITHOUT_VAE[name])
    with pytest.raises(UnsupportedModelError, match=f"{name}, without its VAE") as caught:
        locate(str(path))
    assert recognize(read_header(path)).repository in caught.value.fix


@pytest.mark.parametrize("name", LONE)
def test_a_vae_alone_is_named_as_far_as_its_tensors_tell(name, tmp_path):
    path = saved(tmp_path / "vae.safetensors", LONE[name])
    with pytest.raises(EncoderError) as caught:
        locate(str(path))
    assert caught.value.what == f"vae.safetensors is {name}, and has no configuration"
    assert "--model-config" in caught.value.fix


def test_another_file_is_not_named(tmp_path):
    path = saved(tmp_path / "other.safetensors", {"lora_up.weight": (4, 4)})
    assert recognize(read_header(path)).name == ""
    with pytest.raises(EncoderError, match="alone does not identify a model"):
        locate(str(path))

"""Modified weights and configurations: edited, renamed, in the original layout."""

import json

from safetensors.torch import load_file, save_file


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(path, change):
    tensors = load_file(path)
    tensors = change(tensors) or tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def ldm_name(name):
    """Convert a diffusers tensor name to the original latent-diffusion name."""
    table = {".resnets.": ".block.", ".downsamplers.0.": ".downsample.", ".upsamplers.0.": ".upsample."}
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    for number in ("0", "1"):
        name = name.replace(f"mid_block.resnets.{number}", f"mid.block_{int(number) + 1}")
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    for new, old in attention.items():
        name = name.replace(f"mid_block.attentions.0.{new}.", f"mid.attn_1.{old}.")
    name = renamed(name, table).replace("down_blocks.", "down.")
    return name.replace("up_blocks.0.", "up.1.") if "up_blocks.0." in name else name.replace("up_blocks.1.", "up.0.")


def ldm_tensor(name, tensor):
    """Convert attention layers to 1x1 convolutions."""
    linear = "attentions" in name and name.endswith("weight") and "group_norm" not in name
    return tensor[:, :, None, None].contiguous() if linear else tensor


def renamed(name, table):
    for new, old in table.items():
        name = name.replace(new, old)
    return name

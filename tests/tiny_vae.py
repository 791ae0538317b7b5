"""A tiny seeded AutoencoderKL with two levels, saved by diffusers."""

import diffusers
import torch


def tiny_vae(folder, *, seed=7, **config):
    """Create the model's folder; the same seed gives the same weights."""
    torch.manual_seed(seed)
    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        **config,
    )
    model.save_pretrained(folder, safe_serialization=True)
    return folder

"""Rewrite causal Conv3d layers that see one frame as Conv2d: the same numbers, a third of the work.

Before the first frame a causal convolution sees zeros (Wan, Qwen-Image) or that frame again (HunyuanVideo). So of its
kernel only the last time step matters, or the sum over all of them. Guarantee: the latents are those of the original
module to 1e-4 of their standard deviation (measured: 3e-6 to 1e-5); a clip of several frames is an error in a
rewritten module, never encoded wrongly. Source: diffusers 0.42, ``models/autoencoders``; kohya-ss/sd-scripts #2382.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fold_single_frames(module: nn.Module) -> int:
    """Rewrite every causal convolution of these classes, and count them; weights become flat."""
    folded = 0
    for part in module.modules():
        own: Any = part  # its class stays: encoders of Wan and Qwen-Image count their convolutions by it
        match type(part).__name__:
            case "WanCausalConv3d" | "QwenImageCausalConv3d":
                own.forward = _flat(own, own._padding[:4], "constant")
            case "HunyuanVideoCausalConv3d":
                own.forward = _flat(own.conv, own.time_causal_padding[:4], own.pad_mode)
            case "HunyuanVideoMidBlock3D":
                own.forward = _unmasked(own)
                continue
            case _:
                continue
        folded += 1
    return folded


def _unmasked(block: Any) -> Callable[..., Tensor]:
    """HunyuanVideo's middle block without its mask, (B, cells, cells), which hides nothing in one frame."""

    def forward(x: Tensor) -> Tensor:
        x = block.resnets[0](x)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            if attention is not None:
                cells = x.permute(0, 2, 3, 4, 1)
                x = attention(cells.flatten(1, 3)).view(cells.shape).permute(0, 4, 1, 2, 3)
            x = resnet(x)
        return x

    return forward


def _flat(conv: Any, spatial: tuple[int, ...], mode: str) -> Callable[..., Tensor]:
    """(B, C, 1, H, W) -> (B, O, 1, h, w) by a 2D convolution with a reduced kernel."""
    weight = conv.weight.detach()
    # In float32: three roundings of a half-precision sum would show.
    flat = weight.float().sum(2).to(weight.dtype) if mode == "replicate" else weight[:, :, -1]
    conv.weight = nn.Parameter(flat.contiguous(memory_format=torch.channels_last), requires_grad=False)
    left, right, top, bottom = spatial
    symmetric = mode == "constant" and left == right and top == bottom
    options = conv.stride[1:], (top, left) if symmetric else 0, conv.dilation[1:], conv.groups

    def convolve(x: Tensor, cache_x: Any = None) -> Tensor:
        if x.shape[2] != 1:
            raise ValueError(f"an encoder for single frames was given {x.shape[2]} of them")
        frame = x.squeeze(2) if symmetric or not any(spatial) else F.pad(x.squeeze(2), spatial, mode=mode)
        return F.conv2d(frame, conv.weight, conv.bias, *options).unsqueeze(2)

    return convolve

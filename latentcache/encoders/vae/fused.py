"""Channels-last images on CUDA in half precision: by torch, or by Triton kernels where they proved to be faster.

The residual blocks and the attention of diffusers' ``AutoencoderKL`` get forwards that use the kernels: a bias is
added by the step after its convolution, and SiLU by the normalization. Other classes keep their own forwards.

Kernels compile on the user's machine, and no two cards are alike. So a build begins with torch. After
``_WARM_BATCHES`` batches one batch runs both ways. The kernels stay if their latents are as near as rounding allows
and their time is shorter by a tenth. A kernel that fails or is wrong gives one warning and torch for the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latentcache.encoders.devices import first_line

#: Compiling takes about 5 s on a new machine, so a short build is done before.
_WARM_BATCHES = 16
#: Largest distance of the two ways, root mean square in standard deviations of the latents. In bfloat16 each of them
#: lies 0.023 from float32, in float16 0.003.
_NEAR = {torch.bfloat16: 0.06, torch.float16: 0.01}
_FASTER = 0.9


def channels_last(module: nn.Module) -> nn.Module:
    """Order the weights for channels-last images, and normalize groups in that order; on CUDA, in half precision.

    For its own group normalization torch copies such images to contiguous memory and back: an SDXL encoder took 45 ms
    of an H200 for 1024x1024 pixels, with contiguous images 27 ms (convolutions copy them), and 20 ms this way.
    """
    for part in module.modules():
        if type(part) is nn.GroupNorm and part.affine:
            part.forward = _normalized(part)  # type: ignore[assignment, method-assign]
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _normalized(norm: nn.GroupNorm) -> Callable[[Tensor], Tensor]:
    """Group normalization by sums of each channel in float32: latents lie 0.023 std from those of float32 (0.025)."""
    groups, weight, bias, eps = norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps

    def forward(x: Tensor) -> Tensor:
        if x.ndim != 4:  # of attention
            return F.group_norm(x, groups, norm.weight, norm.bias, eps)
        cells = x.movedim(1, -1).flatten(1, 2)
        square = torch.linalg.vector_norm(cells, 2, 1, dtype=torch.float32).square() / cells.shape[1]
        both = torch.stack([cells.mean(1, dtype=torch.float32), square]).view(2, len(x), groups, -1)
        mean, square = both.mean(3, keepdim=True).expand_as(both).flatten(2)
        rstd = torch.rsqrt((square - mean.square()).clamp_(min=0) + eps)
        out = torch.empty_like(x)
        for n in range(len(x)):  # its moments are of channels, not of images
            torch.batch_norm_elemt(x[n : n + 1], weight, bias, mean[n], rstd[n], eps, out=out[n : n + 1])
        return out

    return forward


class Kernels:
    """The kernels of one module: off, then tried on one batch, then on or off for good.

    Args:
        module: Channels-last, on its device. Its forwards change.
        warn: Called once if a kernel fails or is wrong.
        kernels: In place of the Triton kernels: a module with the same functions.
    """

    def __init__(self, module: nn.Module, warn: Callable[[str], None], kernels: Any = None) -> None:
        self.on = False
        """True while forwards use the kernels."""
        self._warn, self._kernels, self._device = warn, kernels, next(module.parameters()).device
        self._left = _WARM_BATCHES if kernels or importlib.util.find_spec("triton") else -1
        for part in module.modules():
            if _is_residual(part):
                self._replace(part, self._residual(part))
            elif _is_attention(part):
                self._replace(part, self._attention(part))

    def encode(self, encode: Callable[[], Tensor]) -> Tensor:
        """Latents of one batch from ``encode``, which runs the module; raises what it raises without kernels."""
        # Triton works on the current device.
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            return self._encode(encode)

    def _encode(self, encode: Callable[[], Tensor]) -> Tensor:
        if self.on:
            try:
                return encode()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - Triton, the compiler and the driver raise many
                self._give_up(first_line(error))
        latents = encode()
        if self._left == 0:
            self._try(encode, latents)
        self._left -= 1
        return latents

    def _try(self, encode: Callable[[], Tensor], plain: Tensor) -> None:
        """Encode one batch both ways, and decide."""
        seconds = self._seconds(encode)
        try:
            self._kernels = self._kernels or importlib.import_module("latentcache.encoders.vae.kernels")
            self.on = True
            apart = _distance(encode(), plain)
            self.on = apart <= _NEAR[plain.dtype] and self._seconds(encode) < _FASTER * seconds
        except Exception as error:  # noqa: BLE001 - as above; a lack of memory is a reason as well
            self._give_up(first_line(error))
        else:
            if not apart <= _NEAR[plain.dtype]:
                self._give_up(f"latents differ by {apart:.2g} standard deviations")

    def _seconds(self, encode: Callable[[], Tensor]) -> float:
        """Seconds of one batch."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        encode()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def _give_up(self, why: str) -> None:
        self.on = False
        self._left = -1
        self._warn(f"the faster GPU kernels failed and are off; torch encodes instead: {why}")

    def _replace(self, part: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        plain = part.forward

        def either(x: Tensor, *arguments: Any, **options: Any) -> Any:
            if not self.on:
                return plain(x, *arguments, **options)
            return forward(x.contiguous(memory_format=torch.channels_last))

        part.forward = either

    def _residual(self, block: Any) -> Callable[[Tensor], Tensor]:
        """``ResnetBlock2D`` without time: two normalized convolutions beside a shortcut."""
        first, second = self._norm(block.norm1, silu=True), self._norm(block.norm2, silu=True)
        shortcut = block.conv_shortcut
        none = torch.zeros_like(block.norm1.bias, dtype=torch.float32)
        inner, outer = _bias(block.conv1), _bias(block.conv2)
        if shortcut is not None and shortcut.bias is not None:
            outer = outer + shortcut.bias.float()

        def forward(x: Tensor) -> Tensor:
            hidden = _convolved(block.conv1, first(x, none, torch.empty_like(x)))
            hidden = _convolved(block.conv2, second(hidden, inner, hidden))
            aside: Tensor = x if shortcut is None else _convolved(shortcut, x)
            return self._kernels.add(hidden, aside, outer)  # type: ignore[no-any-return]

        return forward

    def _attention(self, block: Any) -> Callable[[Tensor], Tensor]:
        """``Attention`` of one head over the pixels of an image."""
        norm = self._norm(block.group_norm, silu=False)
        none = torch.zeros_like(block.group_norm.bias).float()

        def forward(x: Tensor) -> Tensor:
            cells = norm(x, none, torch.empty_like(x)).movedim(1, -1)
            q, k, v = (layer(cells.flatten(1, 2)) for layer in (block.to_q, block.to_k, block.to_v))
            out = block.to_out[0](self._kernels.attend(q, k, v)).view_as(cells).movedim(-1, 1)
            return self._kernels.add(out, x, none)  # type: ignore[no-any-return]

        return forward

    def _norm(self, norm: nn.GroupNorm, *, silu: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        weight, shift = norm.weight.float(), norm.bias.float()

        def normalized(x: Tensor, bias: Tensor, out: Tensor) -> Tensor:
            arguments = x, bias, norm.num_groups, weight, shift, norm.eps
            return self._kernels.normalize(*arguments, silu=silu, out=out)  # type: ignore[no-any-return]

        return normalized


def _is_residual(part: Any) -> bool:
    """True for a residual block that does nothing but what :meth:`Kernels._residual` does."""
    return (
        type(part).__name__ == "ResnetBlock2D"
        and isinstance(part.nonlinearity, nn.SiLU)
        and part.upsample is part.downsample is part.time_emb_proj is None
        and part.time_embedding_norm == "default"
        and part.output_scale_factor == 1
    )


def _is_attention(part: Any) -> bool:
    """As :func:`_is_residual`, for the attention of the middle block."""
    return (
        type(part).__name__ == "Attention"
        and part.heads == 1
        and part.group_norm is not None
        and part.spatial_norm is part.norm_q is part.norm_k is None
        and part.residual_connection
        and part.rescale_output_factor == 1
    )


def _convolved(conv: Any, x: Tensor) -> Tensor:
    """A convolution without its bias, in channels-last memory."""
    out: Tensor = F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return out.contiguous(memory_format=torch.channels_last)


def _bias(conv: Any) -> Tensor:
    bias: Tensor = conv.weight.new_zeros(len(conv.weight)) if conv.bias is None else conv.bias
    return bias.float()


def _distance(latents: Tensor, plain: Tensor) -> float:
    """Root mean square of the difference in standard deviations, without values that are not finite in both."""
    same = ~(latents.isfinite() | plain.isfinite())
    apart = (latents.float() - plain.float())[~same]
    values = plain.float()[~same]
    return float(apart.square().mean().sqrt() / values.std())

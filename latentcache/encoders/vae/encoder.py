"""The encoder half of a diffusers autoencoder on a device: uint8 pixels in, raw latents out.

Weights are read tensor by tensor, the encoder half alone, into a module of the class of diffusers. No tensor keeps
its random start; no pickle, no remote code, no network.

Pixels become ``x / 127.5 - 1`` in float32 on the device; raw latents are the mode of the posterior or its moments.
There is no slicing or autocast, and tiles only if the recipe has them. Guarantee: before anything runs, every tensor
of the encoder is there and has the right shape. The decoder is dropped before the encoder moves. An output of another
shape than described is an error, never stored. ``submit`` returns while the device works.

Causal Conv3d layers that see one frame are rewritten as Conv2d: the same numbers, a third of the work. Before the
first frame a causal convolution sees zeros (Wan, Qwen-Image) or that frame again (HunyuanVideo). So of its kernel
only the last time step matters, or the sum over all of them. Guarantee: the latents are those of the original module
to 1e-4 of their standard deviation (measured: 3e-6 to 1e-5). A clip of several frames is an error in a rewritten
module. Source: diffusers 0.42, ``models/autoencoders``; kohya-ss/sd-scripts #2382.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, cast

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

from latentcache.encoders.devices import Translator, device_name
from latentcache.encoders.files import Tensors, read_json
from latentcache.encoders.pixels import Pixels
from latentcache.encoders.vae.builtin import Encoder, Pending
from latentcache.encoders.vae.describe import ModelDescription, no_posterior, no_tiling
from latentcache.encoders.vae.families import FAMILIES, GENERIC, encoder_tensors, is_encoder
from latentcache.encoders.vae.fused import Kernels, channels_last
from latentcache.errors import EncoderError

_DECODER_PARTS = ("decoder", "post_quant_conv")
_OUTPUTS = ("latent_dist", "latent", "latents")


class VaeEncoder(Encoder):
    """Encoder half of one autoencoder on one device, for one thread; see :func:`conv3d_to_conv2d`."""

    def __init__(
        self,
        description: ModelDescription,
        device: torch.device,
        *,
        as_conv2d: bool = True,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.spec = description.spec
        self.device = device_name(device)
        self._warn = warn
        self._description, self._device, self._as_conv2d = description, device, as_conv2d
        self._dtype: torch.dtype = getattr(torch, description.spec.compute_dtype)
        self._storage: torch.dtype = getattr(torch, description.spec.storage_dtype)
        self._modules: dict[torch.dtype, nn.Module] = {}
        self._kernels: Kernels | None = None
        advice = f"use sides that are multiples of {description.spec.multiple}, or another model"
        self._errors = Translator(device=device, name=description.spec.family, label=description.label, fix=advice)
        self._errors.run(lambda: self._module(self._dtype), "the weights")

    def submit(self, images: Sequence[Pixels], *, precise: bool = False) -> Pending:
        """See :class:`Encoder`: latents (B, C, H/f, W/f), moments (B, 2C, ...), of clips (B, C, F', H/f, W/f)."""
        dtype = torch.float32 if precise else self._dtype
        *frames, height, width, _ = images[0].shape
        subject = f"{len(images)} {f'clips of {frames[0]}x' if frames else 'images of '}{height}x{width}"
        return self._errors.run(lambda: self._submitted(images, dtype, subject), subject)

    def close(self) -> None:
        """Free the memory of the device."""
        self._modules.clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _submitted(self, images: Sequence[Pixels], dtype: torch.dtype, subject: str) -> Pending:
        module = self._module(dtype)
        # The bytes of (B, H, W, 3) are a channels-last image. On the CPU such input costs digits: torch's group
        # normalization subtracts the square of the mean (1e-3 std of a latent; 1e-5 if contiguous).
        slab = _host((len(images), *images[0].shape), torch.uint8, self._device)
        np.stack(images, out=slab.numpy())
        slab = slab.to(self._device, non_blocking=True).movedim(-1, 1)
        as_clip = self._clips and images[0].ndim == 3
        order = torch.channels_last if self._is_channels_last(dtype) else torch.contiguous_format
        values = slab.to(torch.float32).div_(127.5).sub_(1).to(dtype).contiguous(memory_format=order)
        values = values.unsqueeze(2) if as_clip else values
        if self._kernels is None or dtype == torch.float32:
            latents = self._latents(module, values)
        else:
            latents = self._kernels.encode(lambda: self._latents(module, values))
        latents = latents.squeeze(2) if as_clip and latents.ndim == 5 else latents
        self._check_shape(latents, (len(images), *images[0].shape))
        kept = latents.float().to(self._storage).contiguous()
        bits = kept.view(torch.uint16) if kept.dtype == torch.bfloat16 else kept  # NumPy lacks it
        if self._device.type != "cuda":
            array = bits.cpu().numpy()
            return Pending(lambda: array)
        bits = _host(bits.shape, bits.dtype, self._device).copy_(bits, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))  # whoever waits sleeps: the core belongs to decoders
        return copying(bits, event, self._errors, subject)

    def _latents(self, module: nn.Module, values: Tensor) -> Tensor:
        """Run the class's own ``encode``: its latent, or the mode or the moments of its posterior."""
        output: Any = module.encode(values)  # type: ignore[operator]
        latents = next((getattr(output, name) for name in _OUTPUTS if hasattr(output, name)), output)
        if self.spec.posterior != "mode":  # logvars are clamped to [-30, 20] by ``DiagonalGaussianDistribution``
            moments = [getattr(latents, name, None) for name in ("mean", "logvar")]
            if not all(isinstance(part, Tensor) for part in moments):
                why = f"its encode gives {type(latents).__name__}, without mean and logvar"
                raise no_posterior(self.spec.family, why)
            return torch.cat(cast("list[Tensor]", moments), dim=1)
        latents = latents.mode() if hasattr(latents, "mode") and not isinstance(latents, Tensor) else latents
        if not isinstance(latents, Tensor):
            raise EncoderError(
                f"{self.spec.family} returns {type(output).__name__}, which has no latents",
                where=self._description.label,
                fix="use a model of one of these classes: " + ", ".join(FAMILIES),
            )
        return latents

    def _check_shape(self, latents: Tensor, pixels: tuple[int, ...]) -> None:
        batch, *_, height, width, _ = pixels
        spec = self.spec
        shape = tuple(latents.shape)
        expected = (batch, spec.stored_channels, height // spec.factor, width // spec.factor)
        if (*shape[:2], *shape[-2:]) != expected or len(shape) != len(pixels):
            configured = f"its configuration says {spec.channels} channels, factor {spec.factor}"
            raise EncoderError(
                f"{spec.family} gives latents of shape {shape}, expected {expected}",
                where=self._description.label,
                why=f"for images of {height}x{width}; {configured}",
                fix="use the config.json that was published with the weights",
            )

    def _module(self, dtype: torch.dtype) -> nn.Module:
        """Load the encoder half in a precision from its files: float32 never comes from rounded weights."""
        if dtype not in self._modules:
            module = load_module(self._description, dtype)
            self._clips = any(weight.ndim == 5 for weight in module.parameters())  # before it is folded
            if self._clips and self._as_conv2d:
                conv3d_to_conv2d(module)
            if self.spec.tiling:
                if not hasattr(module, "use_tiling"):
                    raise no_tiling(self.spec.family)
                module.enable_tiling()  # type: ignore[operator]
            self._modules[dtype] = module = module.to(self._device)
            if self._is_channels_last(dtype):
                self._kernels = Kernels(channels_last(module), self._warn)
        return self._modules[dtype]

    def _is_channels_last(self, dtype: torch.dtype) -> bool:
        return self._device.type == "cuda" and dtype != torch.float32 and not self._clips


def copying(latents: Tensor, event: Any, translator: Translator, subject: str) -> Pending:
    """Wait for a batch on its way to host memory; ``result`` raises the error of a failed device."""

    def done() -> bool:
        try:
            return bool(event.query())
        except RuntimeError:
            return True

    def array() -> NDArray[Any]:
        event.synchronize()
        return latents.numpy().copy()  # in memory of its own

    return Pending(lambda: translator.run(array, subject), done)


def _host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory; for CUDA page-locked, of torch's pool, which reuses a block after its copies."""
    if device.type != "cuda":
        return torch.empty(tuple(shape), dtype=dtype)
    with torch.cuda.device(device):  # a thread begins on device 0, and would open it for this alone
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def load_module(description: ModelDescription, dtype: torch.dtype) -> nn.Module:
    """Load the encoder half in evaluation mode on the CPU, weights frozen."""
    ldm = FAMILIES.get(description.spec.family, GENERIC).ldm
    tensors = encoder_tensors(description.weights, ldm=ldm)
    diffusers.utils.logging.set_verbosity_error()  # it warns of fields that are checked here
    try:
        module = _skeleton(description, "meta")
        if dict(module.named_buffers()).keys() - module.state_dict().keys():  # the class computes them
            module = _skeleton(description, "cpu")
        _fill(module, tensors)
    except RuntimeError as error:
        raise EncoderError(
            f"the weights do not fit {description.spec.family}",
            where=description.weights[0],
            why=" ".join(str(error).split())[:500],
            fix="download the weights again, or use the config.json that belongs to them",
        ) from error
    return module.to(dtype).eval().requires_grad_(False)


def drop_decoder(module: nn.Module) -> nn.Module:
    """Replace the decoder half by empty modules (some classes count its layers in every ``encode``)."""
    for part in _DECODER_PARTS:
        if getattr(module, part, None) is not None:
            setattr(module, part, nn.Identity())
    return module


def _skeleton(description: ModelDescription, device: str) -> nn.Module:
    """Make the encoder half with the right shapes; on ``meta`` without values."""
    family = description.spec.family
    path = description.config_path
    model_class: Any = getattr(diffusers, family, None)
    if model_class is None:
        problem = f"diffusers {diffusers.__version__} has no class {family}"
        raise EncoderError(problem, where=path, fix="`pip install --upgrade diffusers`")
    try:
        with torch.device(device):
            module: nn.Module = model_class.from_config(read_json(path))
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, NotImplementedError) as error:
        problem = f"{family} cannot be made from its configuration"
        fix = "use the config.json published with the model"
        raise EncoderError(problem, where=path, why=str(error), fix=fix) from error
    return drop_decoder(module)


def _fill(module: nn.Module, tensors: Tensors) -> None:
    """Read the tensors of the encoder half; raises RuntimeError if they are not those of the class."""
    needed = module.state_dict()
    state = {name: torch.zeros_like(t, device="cpu") for name, t in needed.items() if not is_encoder(name)}
    for path in sorted({info.path for info in tensors.values()}):
        with safe_open(path, framework="pt") as file:
            for name, info in tensors.items():
                if info.path == path:
                    tensor: Tensor = file.get_tensor(info.name)
                    linear = name in needed and needed[name].shape == info.shape
                    state[name] = tensor.reshape(info.shape) if linear else tensor
    module.load_state_dict(state, strict=True, assign=True)


def conv3d_to_conv2d(module: nn.Module) -> None:
    """Rewrite every causal convolution of these classes; weights become flat."""
    for part in module.modules():
        layer: Any = part  # its class stays: encoders of Wan and Qwen-Image count their convolutions by it
        match type(part).__name__:
            case "WanCausalConv3d" | "QwenImageCausalConv3d":
                layer.forward = _flat(layer, layer._padding[:4], "constant")
            case "HunyuanVideoCausalConv3d":
                layer.forward = _flat(layer.conv, layer.time_causal_padding[:4], layer.pad_mode)
            case "HunyuanVideoMidBlock3D":
                layer.forward = _unmasked(layer)


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

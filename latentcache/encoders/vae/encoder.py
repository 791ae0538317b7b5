"""The encoder half of a diffusers autoencoder on a device: uint8 pixels in, raw latents out.

Decides how pixels become raw latents: ``x / 127.5 - 1`` in float32 on the device, the mode of the posterior or
its moments, no slicing, no autocast, tiles only where the recipe says so. Guarantee: before anything runs, every
tensor of the encoder is there, has the right shape and is finite; the decoder is dropped before the encoder moves;
an output of another shape than described is an error, never stored. ``submit`` returns while the device works: pixels
go up and latents come down beside the computation (encoders/lane.py). Cost: one copy of uint8 pixels up and one of
latents down per batch.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from latentcache.encoders.attention import Attention
from latentcache.encoders.describe import ModelDescription
from latentcache.encoders.families import FAMILIES, GENERIC
from latentcache.encoders.faults import Guard, first_line
from latentcache.encoders.fold import fold_single_frames
from latentcache.encoders.lane import Lane, Mark, Ring, Slot, Stopwatch, lane_to
from latentcache.encoders.modules import enable_tiling, is_video, load_module
from latentcache.encoders.posterior import encoded_channels, encoded_dtype, no_posterior
from latentcache.encoders.protocol import EncodedBatch, Pixels
from latentcache.errors import DeviceError, EncoderError
from latentcache.recipe import EncoderSpec

if TYPE_CHECKING:
    from latentcache.encoders.compiling import Compiler

_OUTPUTS = ("latent_dist", "latent", "latents")
#: Types without a twin in NumPy travel as their bits.
_TRAVELS_AS = {torch.bfloat16: torch.uint16}


def load_vae(
    description: ModelDescription, *, device: str = "auto", fold: bool = True, compiler: Compiler | None = None
) -> VaeEncoder:
    """Load the encoder half and move it to a device.

    Args:
        description: A description of kind ``diffusers``.
        device: ``auto``, ``cpu`` or a torch device.
        fold: Do the causal 3D convolutions of clip encoders as 2D ones (encoders/fold.py).
        compiler: Compiles it for some sizes (encoders/compiling.py).

    Raises:
        EncoderError: A tensor is missing, unexpected, of another shape or not finite.
        DeviceError: The device is not there or failed.
        DeviceMemoryError: The encoder does not fit into its memory.
    """
    return VaeEncoder(description, choose_device(device), fold=fold, compiler=compiler)


def choose_device(device: str) -> torch.device:
    """``auto`` is CUDA where torch can use it, else the CPU.

    Raises:
        DeviceError: No such device on this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"torch cannot use the device {device}",
            where=f"--device {device}",
            why=first_line(error),
            fix="use --device cpu, or install a torch build for this device",
        ) from error
    return chosen


class VaeEncoder:
    """Encoder half of one autoencoder on one device. For one thread.

    Args:
        description: A description of kind ``diffusers``.
        device: Where it runs.
        fold: Do the causal 3D convolutions of clip encoders as 2D ones.
        lane: How batches get there and back; by default as the device needs it.
        compiler: Compiles it for some sizes; by default nothing is compiled.
    """

    def __init__(
        self,
        description: ModelDescription,
        device: torch.device,
        *,
        fold: bool = True,
        lane: Lane | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self._description = description
        self._device = device
        self._fold = fold
        self._family = FAMILIES.get(description.spec.family, GENERIC)
        self._dtype: torch.dtype = getattr(torch, description.spec.compute_dtype)
        self._storage: torch.dtype = getattr(torch, encoded_dtype(description.spec))
        self._modules: dict[torch.dtype, nn.Module] = {}
        self._clips = bool(self._family.video)
        self._attention = Attention()
        self._compiler = compiler
        self._guard = Guard(device, description.spec, description.label)
        self._lane = self._guard.run(lambda: lane or lane_to(device), "the first copy")
        self._slabs, self._results = Ring(self._lane), Ring(self._lane)
        self._guard.run(lambda: self._module(self._dtype), "the weights")

    @property
    def spec(self) -> EncoderSpec:
        """What this encoder is."""
        return self._description.spec

    @property
    def module(self) -> nn.Module:
        """The encoder half in the precision of the recipe."""
        return self._module(self._dtype)

    @property
    def torch_device(self) -> torch.device:
        """Where it runs, with its number where one was named."""
        return self._device

    @property
    def device(self) -> str:
        """Where it runs, with the name of the card where it is one."""
        if self._device.type != "cuda":
            return self._device.type
        return f"cuda {torch.cuda.get_device_name(self._device)}"

    def encode(self, pixels: Pixels, *, precise: bool = False) -> EncodedBatch:
        """Encode (B, H, W, 3) to raw latents (B, C, H/f, W/f), or to moments (B, 2C, H/f, W/f).

        Args:
            pixels: One batch of one size.
            precise: Run in float32, with the weights as they are in the file.

        Raises:
            DeviceMemoryError: The batch does not fit; nothing of it is left on the device.
            DeviceError: The device failed.
            EncoderError: The model cannot encode this size, or gives another shape than described.
            UnsupportedModelError: It was to give its posterior and has none.
        """
        return self.submit(list(pixels), precise=precise).result()

    def submit(self, pictures: Sequence[Pixels], *, precise: bool = False) -> Submitted:
        """Begin to encode pictures (H, W, 3) of one size; raises as ``encode`` does."""
        dtype = torch.float32 if precise else self._dtype
        height, width, _ = pictures[0].shape
        subject = f"{len(pictures)} pictures of {height}x{width}"
        return self._guard.run(lambda: self._submitted(pictures, dtype, subject), subject)

    def close(self) -> None:
        """Give the memory of the device back."""
        self._modules.clear()
        self._slabs.clear()
        self._results.clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _submitted(self, pictures: Sequence[Pixels], dtype: torch.dtype, subject: str) -> Submitted:
        module = self._module(dtype)
        images = self._up(pictures)
        watch = Stopwatch(self._device)
        values = images.to(torch.float32).div_(127.5).sub_(1).to(dtype)
        values = values.unsqueeze(2) if self._clips else values
        with self._attention.watching((*values.shape, values.dtype.itemsize)):
            if self._compiler is None or dtype != self._dtype:
                latents = self._latents(module, values)
            else:
                latents = self._compiler(self._encode, values)
        latents = latents.squeeze(2) if self._clips and latents.ndim == 5 else latents
        self._check_shape(latents, (len(pictures), *pictures[0].shape))
        kept = latents.float().to(self._storage).contiguous()
        finite = torch.isfinite(kept).flatten(1).all(1)
        watch.stop()
        travelling = kept.view(_TRAVELS_AS[kept.dtype]) if kept.dtype in _TRAVELS_AS else kept
        slot = self._results.take(travelling.nbytes + finite.nbytes)
        found = slot.view(travelling.shape, travelling.dtype), slot.view(finite.shape, torch.bool, travelling.nbytes)
        mark = self._lane.down([(travelling, found[0]), (finite, found[1])])
        return Submitted(self._guard, self._results, slot, found, mark, watch, subject)

    def _up(self, pictures: Sequence[Pixels]) -> Tensor:
        """(B, 3, H, W) uint8 on the device.

        The bytes of a slab (B, H, W, 3) are a channels-last picture already: permute is a view, nothing is moved.
        """
        shape = (len(pictures), *pictures[0].shape)
        slot = self._slabs.take(int(np.prod(shape)))
        slab = slot.view(shape, torch.uint8)
        np.stack(pictures, out=slab.numpy())
        images, mark = self._lane.up(slab)
        self._slabs.give_back(slot, mark)
        return images.permute(0, 3, 1, 2)

    def _encode(self, values: Tensor) -> Tensor:
        return self._latents(self.module, values)

    def _latents(self, module: nn.Module, values: Tensor) -> Tensor:
        """What the class's own ``encode`` gives: its latent, or the mode or the moments of its posterior."""
        output: Any = module.encode(values)  # type: ignore[operator]
        names = (self._family.output,) if self._family.output else _OUTPUTS
        found = next((getattr(output, name) for name in names if hasattr(output, name)), output)
        if self.spec.posterior != "mode":
            return self._moments(found)
        found = found.mode() if hasattr(found, "mode") and not isinstance(found, Tensor) else found
        if not isinstance(found, Tensor):
            raise EncoderError(
                f"{self.spec.family} returns {type(output).__name__}, which holds no latents",
                where=self._description.label,
                fix="use a model of one of these classes: " + ", ".join(FAMILIES),
            )
        return found

    def _moments(self, posterior: Any) -> Tensor:
        """Means, then logvars, which ``DiagonalGaussianDistribution`` has clamped to [-30, 20]."""
        found = (getattr(posterior, name, None) for name in ("mean", "logvar"))
        moments = [part for part in found if isinstance(part, Tensor)]
        if len(moments) < 2:
            why = f"its encode gives {type(posterior).__name__}, without mean and logvar"
            raise no_posterior(self.spec.family, self.spec.posterior, why)
        return torch.cat(moments, dim=1)

    def _check_shape(self, latents: Tensor, pixels: tuple[int, ...]) -> None:
        batch, height, width, _ = pixels
        spec = self.spec
        expected = (batch, encoded_channels(spec), height // spec.factor, width // spec.factor)
        if tuple(latents.shape) != expected:
            raise EncoderError(
                f"{spec.family} gives latents of shape {tuple(latents.shape)}, expected {expected}",
                where=self._description.label,
                why=f"for pictures of {height}x{width}; its configuration says {spec.channels} channels, "
                f"factor {spec.factor}",
                fix="use the config.json that was published with the weights",
            )

    def _module(self, dtype: torch.dtype) -> nn.Module:
        """The encoder half in one precision, loaded from the files on first need.

        float32 is never made from rounded weights, so a precise latent is the one a float32 build would store.
        """
        if dtype not in self._modules:
            module = load_module(self._description, dtype)
            if self._family.video is None:
                self._clips = is_video(module)  # before it is folded
            if self._clips and self._fold:
                fold_single_frames(module)
            if self.spec.tiling:
                enable_tiling(module, self._description)
            if self._compiler is not None and dtype == self._dtype:
                self._compiler.prepare(module)
            self._modules[dtype] = module.to(self._device)
        return self._modules[dtype]


@dataclass(slots=True)
class Submitted:
    """A batch that a device has been given: see ``Pending``."""

    guard: Guard
    ring: Ring
    slot: Slot
    found: tuple[Tensor, Tensor]
    """Latents and finite flags in host memory, whole once the device has come to the mark."""
    mark: Mark
    watch: Stopwatch
    subject: str

    def done(self) -> bool:
        """Whether its results are in host memory; a device that failed says so in ``result``."""
        try:
            return self.mark.query()
        except RuntimeError:
            return True

    def result(self) -> EncodedBatch:
        """The latents, in memory of their own; raises as ``encode`` does."""
        return self.guard.run(self._result, self.subject)

    def _result(self) -> EncodedBatch:
        self.mark.synchronize()
        latents, finite = (tensor.numpy().copy() for tensor in self.found)
        self.ring.give_back(self.slot)
        return EncodedBatch(latents=latents, finite=finite, device_s=self.watch.seconds())

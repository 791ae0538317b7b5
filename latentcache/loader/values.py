"""From stored values to values that a model trains on: posterior draws, scale and shift, types, flips.

The formulas are those of the pipelines in diffusers (``pipeline_flux.py``, ``pipeline_wan.py``,
``pipeline_flux2.py``); the numbers come from the manifest. Guarantee: computed in float32 and rounded once; a draw
depends on (seed, epoch, key) and a flip on (seed, epoch, content) alone, so both are the same on every rank, in every
worker, for any batch size and after a resume. On the CPU everything works on pieces that stay in the processor's
cache and are too small for torch to start an OpenMP team: a reader thread that did would compete with the training
process for all cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.protocol import ReadSpec
from latentcache.identity.content import checksum
from latentcache.identity.noise import gaussian
from latentcache.plan.numbers import choice

Draw = Literal["sample", "mode"]
#: Values worked on at once; torch uses several threads from 32768 on.
_AT_ONCE = 1 << 14
_WORD = 0xFFFF_FFFF_FFFF_FFFF
TORCH = {
    "uint8": torch.uint8, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "uint16": torch.uint16, "int32": torch.int32, "uint32": torch.uint32, "int64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """What a caller chooses about values: ``cache.read(...)``."""

    scaled: bool = True
    """True: scaled and shifted as the model trains on them; False: as they are stored."""
    latents: Draw | None = None
    """Of a stored posterior: ``sample`` draws again in every epoch (default), ``mode`` gives the mean."""
    flip: bool | None = None
    """Serve stored horizontal flips in turn; None: if they are stored."""
    dtype: torch.dtype | None = None
    """Floating type of the values; None: as stored."""
    repeats: bool = True
    """Serve a sample as often in an epoch as its data set says; False: once."""

    def __post_init__(self) -> None:
        if self.latents is not None:
            choice("latents", self.latents, ("sample", "mode"))
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise UsageError(f"dtype={self.dtype!r}: must be a floating type of torch", fix="dtype=torch.float32")

    def draw_of(self, spec: ReadSpec, field: str) -> Draw | None:
        """What to make of a field's items: a draw or the mean of a stored posterior; None: nothing."""
        return (self.latents or "sample") if spec.posterior else None


@dataclass(frozen=True, slots=True)
class Affine:
    """Scale and shift of one field.

    ``scale-shift``: ``(z - shift) * scale``. ``mean-std``: per channel ``(z - mean) / std * scale``. ``batch-norm``:
    patches into channels ``(c, row, column)``, then as ``mean-std``. ``none``: as stored.
    """

    kind: str = "none"
    scale: float = 1.0
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    patch: int = 1

    @classmethod
    def of(cls, spec: Mapping[str, Any] | None) -> Affine:
        """From ``ReadSpec.affine``.

        Raises:
            UsageError: This version does not know its kind.
        """
        data = dict(spec or {})
        found = cls(**data | {name: tuple(data.get(name) or ()) for name in ("mean", "std")})
        if found.kind not in ("none", "scale-shift", "mean-std", "batch-norm"):
            raise UsageError(
                f"unknown scaling {found.kind!r} in the recipe", fix="a newer version, or read(scaled=False)"
            )
        return found

    @property
    def changes(self) -> bool:
        """True if values change."""
        return self.kind != "none" and self != Affine(kind=self.kind)

    def apply(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Scale and shift a batch.

        Args:
            stored: (B, C, ...), contiguous.
            out: As many values in the wanted type, contiguous; may be ``stored``.

        Returns:
            ``out``; for ``batch-norm`` as (B, C * patch * patch, h / patch, w / patch).
        """
        if stored.device.type != "cpu":
            return self._on_device(stored, out.dtype)
        batch, channels = stored.shape[:2]
        cells = stored[0, 0].numel() if len(stored) else 0
        flat, made = stored.view(batch * channels, cells), out.view(batch * channels, cells)
        if self.kind != "batch-norm" and not self.mean:
            _in_pieces(flat.view(-1), made.view(-1), self._plain)
            return out.view(stored.shape)
        if self.kind != "batch-norm":
            for row in range(batch * channels):
                mean, std = self.mean[row % channels], self.std[row % channels]
                _in_pieces(flat[row], made[row], lambda z, m=mean, s=std: z.sub_(m).div_(s).mul_(self.scale))
            return out.view(stored.shape)
        height, width = stored.shape[2:]
        patch, parts = self.patch, self.patch * self.patch
        for row in range(batch * channels):
            plane = torch.empty(cells)
            _in_pieces(flat[row], plane, lambda z: z)
            folded = plane.numpy().reshape(height // patch, patch, width // patch, patch)
            patches = torch.from_numpy(np.ascontiguousarray(folded.transpose(1, 3, 0, 2)).reshape(parts, -1))
            target = made[row].view(parts, -1)
            for part in range(parts):
                channel = (row % channels) * parts + part
                mean, std = self.mean[channel], self.std[channel]
                _in_pieces(patches[part], target[part], lambda z, m=mean, s=std: z.sub_(m).div_(s).mul_(self.scale))
        return out.view(batch, channels * parts, height // patch, width // patch)

    def _plain(self, z: torch.Tensor) -> torch.Tensor:
        return z if self.kind == "none" else z.sub_(self.shift).mul_(self.scale)

    def _on_device(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        z = stored.to(torch.float32, copy=True)
        if self.kind in ("none", "scale-shift"):
            return self._plain(z).to(dtype)
        if self.kind == "batch-norm":
            z = torch.nn.functional.pixel_unshuffle(z, self.patch) if self.patch > 1 else z
        column = (1, -1, *(1,) * (z.dim() - 2))
        mean, std = (
            torch.tensor(part, dtype=z.dtype, device=z.device).view(column) for part in (self.mean, self.std)
        )
        return z.sub_(mean).div_(std).mul_(self.scale).to(dtype)


def _in_pieces(source: torch.Tensor, out: torch.Tensor, compute: Any) -> None:
    """``out = compute(source)`` in float32, piece by piece; ``compute`` works in place."""
    for start in range(0, source.numel(), _AT_ONCE):
        part, made = source[start : start + _AT_ONCE], out[start : start + _AT_ONCE]
        if part.dtype == torch.float32 and made.data_ptr() == part.data_ptr():
            compute(part)
        else:
            made.copy_(compute(part.to(torch.float32, copy=True)))


def posterior(
    moments: torch.Tensor, keys: NDArray[np.uint8], out: torch.Tensor, draw: Draw, turn: tuple[int, int]
) -> None:
    """Draw from stored posteriors (``mean + exp(logvar / 2) * noise``, diffusers), or take their means.

    Args:
        moments: (B, 2C, ...), all means before all log variances, raw.
        keys: (B, 32) item keys.
        out: (B, C, ...) float32, contiguous; raw.
        draw: ``sample`` or ``mode``.
        turn: Seed and epoch.
    """
    for item, key, made in zip(moments, keys, out, strict=True):
        half = made.numel()
        values, target = item.reshape(-1), made.view(-1)
        noise = torch.from_numpy(gaussian(half, b"read", *turn, key.tobytes())) if draw == "sample" else None
        for start in range(0, half, _AT_ONCE):
            end = min(start + _AT_ONCE, half)
            mean = values[start:end].to(torch.float32)
            if noise is None:
                target[start:end] = mean
                continue
            deviation = values[half + start : half + end].to(torch.float32, copy=True).mul_(0.5)
            np.exp(deviation.numpy(), out=deviation.numpy())  # torch's may start a team, however small the piece
            torch.addcmul(mean, deviation, noise[start:end], out=target[start:end])


def flipped(keys: NDArray[np.uint8], turn: tuple[int, int]) -> NDArray[np.int64]:
    """(B,) 1 where this epoch serves the horizontal flip, by the content (bytes 8 to 24) of (B, 32) item keys."""
    seed, epoch = turn
    name = b"flip" + (seed & _WORD).to_bytes(8, "little") + (epoch & _WORD).to_bytes(8, "little")
    return np.array([checksum(name + key[8:24].tobytes()) & 1 for key in keys], dtype=np.int64)

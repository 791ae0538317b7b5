"""What a device could do at most, and how much work a picture is: the two halves of "how close".

Decides: the ceiling is what one large matrix product reaches on this device now, in the precision of the encoder,
not what its data sheet says. Work is counted by ``torch.utils.flop_counter`` on the meta device, without weights,
folded as the encoder is. Of an autoencoder the convolutions grow with the pixels and the attention with their
square, so two sizes give all others: ``a * pixels + b * pixels**2`` (a test holds it to 1 %).
Cost: half a second on the device; two passes on the meta device, about a second of the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch.utils.flop_counter import FlopCounterMode

from latentcache.encoders.describe import ModelDescription
from latentcache.encoders.fold import fold_single_frames
from latentcache.encoders.modules import encoder_skeleton, is_video
from latentcache.geometry.sizes import Size

#: Side of the product that is timed, and for how long. 2 * 8192**3 = 1.1 TFLOP: 1.4 ms on an H200.
_SIDE, _SECONDS, _ROUND = 8192, 0.4, 10
#: Pixels of the two counted pictures, as multiples of the model's own.
_SIDES = (256, 512)


def matmul_flops(compute_dtype: str, *, device: torch.device, side: int = _SIDE, seconds: float = _SECONDS) -> float:
    """Floating-point operations per second of one large matrix product; the best of some rounds.

    Returns:
        0 where the device has no room for three matrices.
    """
    dtype: torch.dtype = getattr(torch, compute_dtype)
    try:
        one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        result = torch.empty_like(one)
        best, until = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < until or best == 0.0:
            torch.mm(one, other, out=result)  # the first of a round loads the kernel
            _wait(device)
            started = time.perf_counter()
            for _ in range(_ROUND):
                torch.mm(one, other, out=result)
            _wait(device)
            best = max(best, _ROUND * 2.0 * side**3 / (time.perf_counter() - started))
    except torch.OutOfMemoryError:
        return 0.0
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class PictureFlops:
    """Floating-point operations of one picture.

    Args:
        description: A description of kind ``diffusers``.
        fold: Whether causal 3D convolutions are done as 2D ones.
    """

    description: ModelDescription
    fold: bool = True
    _fitted: tuple[float, float] | None = field(default=None)

    def __call__(self, size: Size) -> float:
        """Of a picture of this size."""
        if self._fitted is None:
            self._fitted = self._fit()
        linear, quadratic = self._fitted
        return linear * size.area + quadratic * float(size.area) ** 2

    def counted(self, size: Size) -> float:
        """Counted, for this very size."""
        module = encoder_skeleton(self.description)
        clips = is_video(module)
        if clips and self.fold:
            fold_single_frames(module)
        shape = (1, 3, 1, size.height, size.width) if clips else (1, 3, size.height, size.width)
        values = torch.empty(shape, device="meta")
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            module.encode(values)  # type: ignore[operator]
        return float(counter.get_total_flops())

    def _fit(self) -> tuple[float, float]:
        multiple = self.description.spec.multiple
        small, large = (Size(side, side) for side in (-(-least // multiple) * multiple for least in _SIDES))
        one, other = self.counted(small) / small.area, self.counted(large) / large.area
        quadratic = (other - one) / (large.area - small.area)
        return one - quadratic * small.area, quadratic

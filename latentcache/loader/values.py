"""Values that a model trains on, made of stored values: posterior draws, scale and shift, types.

The formulas are those of the pipelines in diffusers (``pipeline_flux.py``, ``pipeline_wan.py``,
``pipeline_flux2.py``); the numbers come from the manifest. Guarantee: computed in float32 and rounded once. A draw
depends on (seed, epoch, key, occurrence) alone: not on rank, worker, batch size or a resume. Cost: scale and shift
are one pass over a batch, in place where the type stays.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.content import gaussian
from latentcache.store.gather import Scaling, scaling

Draw = Literal["sample", "mode"]
"""A sample of a stored posterior, or its mean."""
_set_team: Any = getattr(ctypes.PyDLL(None), "omp_set_num_threads", None)  # a torch without OpenMP has no teams


class Affine:
    """Scale and shift of one field: ``z * factor + term`` in float32, of each channel or of all.

    ``scale-shift``: ``(z - shift) * scale``. ``mean-std``: per channel ``(z - mean) / std * scale``. ``batch-norm``:
    patches into channels ``(c, row, column)``, then as ``mean-std``. ``none``: as stored.
    """

    def __init__(self, factor: torch.Tensor, term: torch.Tensor, patch: int = 1) -> None:
        self._patch = patch
        self.changes = patch > 1 or bool((factor != 1).any() or (term != 0).any())
        """True if values change."""
        count = len(factor)
        self._statistics = factor.float(), term.float(), torch.zeros(count), torch.ones(count), torch.empty(0)
        """As batch norm takes them: factor, term, mean 0 and variance 1 of each channel, or of all; and nothing."""

    @classmethod
    def of(cls, spec: Mapping[str, Any] | None) -> Affine:
        """Make it from ``ReadSpec.affine``; a kind that this version does not know is an error."""
        parameters: dict[str, Any] = {"kind": "none", "scale": 1.0, "shift": 0.0, "patch": 1} | dict(spec or {})
        kind = parameters["kind"]
        if kind not in ("none", "scale-shift", "mean-std", "batch-norm"):
            raise UsageError(f"unknown scaling {kind!r} in the recipe", fix="a newer version, or read(scaled=False)")
        if kind == "none":
            return cls(torch.ones(1), torch.zeros(1))
        columns = ([parameters["shift"]], [1.0]) if kind == "scale-shift" else (parameters["mean"], parameters["std"])
        mean, std = (torch.tensor(column, dtype=torch.float64) for column in columns)
        factor = parameters["scale"] / std
        return cls(factor, -mean * factor, parameters["patch"] if kind == "batch-norm" else 1)

    def apply(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Scale and shift a batch (B, C, ...) into ``out``, as many values of the wanted type; both contiguous.

        ``out`` may be ``stored``. For ``batch-norm`` it is given as (B, C * patch * patch, h / patch, w / patch).
        """
        if stored.device.type != "cpu":
            return self._on_device(stored, out.dtype)
        patch = self._patch
        if stored.dtype == out.dtype and patch == 1:
            scaled = out if out is stored else out.view(stored.shape)
            self._multiply(stored, scaled)
            return scaled
        shape: list[int] = []
        for item, target in zip(stored, out.view(len(stored), -1), strict=True):
            exact = torch.nn.functional.pixel_unshuffle(item, patch) if patch > 1 else item
            exact = exact.to(torch.float32, copy=True, memory_format=torch.contiguous_format)[None]
            self._multiply(exact, exact)
            shape = list(exact.shape[1:])
            target.copy_(exact.view(-1))
        return out.view(len(stored), *shape)

    def scaling(self, dtype: str) -> Scaling | None:
        """The same for values of a type while they are read; None: :meth:`apply` has to."""
        if not self.changes or self._patch > 1:
            return None
        factor, term = (part.numpy() for part in self._statistics[:2])
        return scaling(dtype, factor, term)

    def _multiply(self, z: torch.Tensor, out: torch.Tensor) -> None:
        """One pass of torch's batch norm: it computes values of 16 bits in float32 and needs no other memory.

        (``torch.add`` with ``alpha=`` would round the term to 16 bits first: every sixth value differs.)
        """
        factor, term, zero, ones, none = self._statistics
        flat = z.view(z.shape[0], factor.shape[0], -1)
        target = flat if out is z else out.view(flat.shape)
        torch.native_batch_norm(flat, factor, term, zero, ones, False, 0.0, 0.0, out=(target, none, none))

    def _on_device(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same in float32 on another device."""
        z = stored.to(torch.float32, copy=True)
        if self._patch > 1:
            z = torch.nn.functional.pixel_unshuffle(z, self._patch)
        factor, term = (part.to(z.device).view(1, -1, *(1,) * (z.dim() - 2)) for part in self._statistics[:2])
        return z.mul_(factor).add_(term).to(dtype)


@contextlib.contextmanager
def without_team() -> Iterator[None]:
    """Have torch compute in this thread alone, not in a team of OpenMP threads; other threads keep theirs.

    A team of each reader thread would compete with the training process for all cores, and a team waits for its
    slowest thread. ``torch.set_num_threads`` would also hold for threads that start later.
    """
    before = torch.get_num_threads()  # torch applies its own setting to a thread once: now, and not afterwards
    if _set_team is None or before == 1:
        yield
        return
    _set_team(1)
    try:
        yield
    finally:
        _set_team(before)


def posterior(
    moments: torch.Tensor,
    keys: NDArray[np.uint8],
    out: torch.Tensor,
    draw: Draw,
    seed_and_epoch: tuple[int, int],
    occurrence: NDArray[np.integer] | None = None,
) -> None:
    """Draw from stored posteriors (``mean + exp(logvar / 2) * noise``, diffusers), or take their means.

    ``moments`` (B, 2C, ...) has all means before all log variances. ``keys`` (B, 32) are item keys. ``out`` is (B, C,
    ...) float32, contiguous. ``occurrence`` (B,) numbers the occurrences of a sample that the epoch serves several
    times.
    """
    times = [0] * len(keys) if occurrence is None else occurrence.tolist()
    for item, key, number, drawn in zip(moments, keys, times, out, strict=True):
        mean, spread = item.chunk(2)
        if draw == "mode":
            drawn.copy_(mean)
            continue
        noise = torch.from_numpy(
            gaussian(drawn.numel(), b"read", *seed_and_epoch, key.tobytes(), *([number] if number else []))
        )
        deviation = spread.to(torch.float32, copy=True).mul_(0.5)
        np.exp(deviation.numpy(), out=deviation.numpy())
        torch.addcmul(mean.to(torch.float32), deviation, noise.view(drawn.shape), out=drawn)

"""Attention over many positions in bounded memory, for every class of model.

The middle block of an f8 autoencoder attends over all cells of an image with one head of 512 channels: 16,384
positions at 1024 x 1024, for which FlashAttention (256 channels at most) has no kernel. If only plain matrix
products are left, their score matrix of 537 MB (float16) limits the batch.

Chosen once per shape: the plain call if a fused kernel exists, or chunks of queries whose scores take at most
256 MiB. On CUDA a short probe times both, on the CPU memory alone decides (its fused kernel
has no limit of channels). All calls of ``F.scaled_dot_product_attention`` inside ``encode`` are seen, so one rule
serves the classes of all families. Guarantee: equal to the plain call to rounding; scores are float32.
Cost: some microseconds per call of torch for a new shape and for chunks; otherwise none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

#: Bytes of scores held at once.
CAP_BYTES = 256 << 20
#: Kernels that never hold a score matrix.
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
#: Timed calls of each way; one more loads the kernel.
_CALLS = 3
_SCORE_BYTES = 4


@dataclass(slots=True)
class Attention:
    """Attention calls of one encoder.

    Args:
        cap_bytes: Bytes of scores held at once.
    """

    cap_bytes: int = CAP_BYTES
    chunked: int = 0
    """Calls that were done in chunks so far."""
    _in_chunks: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    _left_alone: set[tuple[int, ...]] = field(default_factory=set)

    @contextmanager
    def watching(self, shape: tuple[int, ...]) -> Iterator[None]:
        """Encode pixels of this shape inside; a shape without long attention is not watched again."""
        if shape in self._left_alone:
            yield
            return
        before = self.chunked
        with _Watch(self):
            yield
        if self.chunked == before:
            self._left_alone.add(shape)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention of (..., L, E) over (..., S, E) and (..., S, E); options as of the plain call."""
        if not self._chunks(query, key, value, options):
            return F.scaled_dot_product_attention(query, key, value, **options)
        self.chunked += 1
        return in_chunks(query, key, value, options.get("scale"), self.cap_bytes)

    def _chunks(self, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
        """True if a call is done in chunks; the answer is remembered."""
        if _score_bytes(query, key) <= self.cap_bytes or not _is_plain(query, key, options):
            return False
        signature = (query.device, query.dtype, query.shape[-1], query.shape[-2], key.shape[-2])
        if signature not in self._in_chunks:
            self._in_chunks[signature] = chunks_are_better(query, key, value, self.cap_bytes)
        return self._in_chunks[signature]


class _Watch(TorchFunctionMode):
    """Sees every call of torch, and redirects attention calls."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The same call, or the rule for attention; inside it the mode is off."""
        options = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention or len(args) != 3:
            return func(*args, **options)
        return self._attention(*args, **options)


def chunks_are_better(query: Tensor, key: Tensor, value: Tensor, cap_bytes: int = CAP_BYTES) -> bool:
    """True if chunks are to be used: no fused kernel takes these tensors or, on CUDA, it is slower than chunks."""
    one = query[:1], key[:1], value[:1]
    if query.device.type != "cuda":
        few = tuple(tensor[..., :64, :] for tensor in one)  # the kernel does not depend on their number
        return _timed(lambda: _fused(*few), query.device, calls=0) is None
    fused = _timed(lambda: _fused(*one), query.device)
    chunks = _timed(lambda: in_chunks(*one, None, cap_bytes), query.device)
    return fused is None or (chunks is not None and chunks < fused)


def in_chunks(query: Tensor, key: Tensor, value: Tensor, scale: float | None, cap_bytes: int = CAP_BYTES) -> Tensor:
    """Attention by matrix products over as many queries at once as the cap allows.

    Args:
        query: (..., L, E).
        key: (..., S, E).
        value: (..., S, E).
        scale: Of the scores; None for ``E ** -0.5``.
        cap_bytes: Bytes of float32 scores held at once; one row of queries is the least.

    Returns:
        (..., L, E), of the type of the queries.
    """
    factor = scale if scale is not None else query.shape[-1] ** -0.5
    flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value)]
    queries, keys, values = flat
    rows = max(cap_bytes // (_SCORE_BYTES * queries.shape[0] * keys.shape[-2]), 1)
    result = torch.empty((*queries.shape[:2], values.shape[-1]), dtype=query.dtype, device=query.device)
    for start in range(0, queries.shape[-2], rows):
        part = slice(start, start + rows)
        weights = _scores(queries[:, part], keys).mul_(factor).softmax(-1)
        result[:, part] = torch.bmm(weights.to(values.dtype), values)
    return result.view(*query.shape[:-1], values.shape[-1])


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, l, S) in float32: a score rounded to bfloat16 would be off by up to a tenth."""
    transposed = keys.transpose(-2, -1)
    if queries.dtype == torch.float32:
        return torch.bmm(queries, transposed)
    if queries.device.type == "cuda":
        return torch.bmm(queries, transposed, out_dtype=torch.float32)
    return torch.bmm(queries.float(), transposed.float())


def _fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(_FUSED):
        return F.scaled_dot_product_attention(query, key, value)


def _timed(call: Callable[[], Tensor], device: torch.device, calls: int = _CALLS) -> float | None:
    """Seconds of the fastest call; None if it fails."""
    best = math.inf
    try:
        for _ in range(calls + 1):
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - started)
    except RuntimeError:  # no kernel for these tensors, or no memory for it
        return None
    return best


def _score_bytes(query: Tensor, key: Tensor) -> int:
    return _SCORE_BYTES * math.prod(query.shape[:-1]) * key.shape[-2]


def _is_plain(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> bool:
    """True if a call is one that chunks can do: no mask, no dropout, not causal, as many heads of keys."""
    used = [value for name, value in options.items() if name != "scale"]
    unused = all(not isinstance(value, Tensor) and value in (None, False, 0.0) for value in used)
    return unused and query.shape[:-2] == key.shape[:-2] and query.device.type != "meta"

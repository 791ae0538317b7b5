"""``torch.compile`` for the shapes that come often enough to pay for it.

Decides: only full batches of buckets that were named as worth it are compiled, each shape by itself (static shapes:
convolutions of dynamic ones lose their tuned kernels), and only from the fifth batch of a shape on, so that neither
the sizes tried by the batch trial nor the last, smaller batch of a bucket is. Guarantee: what the compiler cannot do
is encoded as without it, with one warning; latents differ by rounding. Cost: 20 to 60 seconds for each shape
(reported for such networks; not measured here on a device), which is why ``auto`` compiles nothing yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor, nn

from latentcache.geometry.sizes import Size

#: ``diffusers.models.attention_processor.Attention.forward`` calls ``inspect.signature`` (0.42, torch 2.13).
_UNTRACED = ("Attention",)
Encode = Callable[[Tensor], Tensor]
#: Batches of one shape that come before it is compiled. The batch trial calls a size three times.
PATIENCE = 4
#: What the limit of recompilations is called, newest name first; torch 2.13 keeps the old one as an alias.
_LIMITS = ("recompile_limit", "cache_size_limit")


@dataclass(slots=True)
class Compiler:
    """Compiles the encode function of one module.

    Args:
        buckets: Sizes of pictures that are worth it.
        warn: Told once when the compiler fails.
        backend: For ``torch.compile``.
    """

    buckets: Set[Size]
    warn: Callable[[str], None]
    backend: str | Callable[..., Any] = "inductor"
    compiled: int = 0
    """Shapes that are compiled."""
    _seen: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _made: dict[tuple[int, ...], Encode] = field(default_factory=dict)
    _failed: bool = False

    def prepare(self, module: nn.Module) -> None:
        """Leave attention of diffusers' own class out: it asks for signatures, at which tracing fails."""
        for part in module.modules():
            if type(part).__name__ in _UNTRACED:
                part.forward = dynamo.disable(part.forward)  # type: ignore[no-untyped-call]

    def __call__(self, encode: Encode, values: Tensor) -> Tensor:
        """``encode(values)``, by compiled code where this shape has it."""
        shape = tuple(values.shape)
        if self._failed or Size(*shape[-2:]) not in self.buckets or values.dtype == torch.float64:
            return encode(values)
        self._seen[shape] += 1
        if self._seen[shape] <= PATIENCE:
            return encode(values)
        try:
            return self._function(encode, shape)(values)
        except dynamo.exc.TorchDynamoException as error:
            self._failed = True
            self._made.clear()
            self.warn(f"torch.compile failed, going on without it: {_reason(error)}")
        return encode(values)

    def _function(self, encode: Encode, shape: tuple[int, ...]) -> Encode:
        if shape not in self._made:
            _allow(len(self._made) + 2)
            self._made[shape] = torch.compile(encode, dynamic=False, backend=self.backend)
            self.compiled += 1
        return self._made[shape]


def _allow(shapes: int) -> None:
    """Raise the limit behind which torch silently stops compiling one piece of code for further shapes."""
    name = next(name for name in _LIMITS if hasattr(dynamo.config, name))
    wanted = max(getattr(dynamo.config, name), shapes + 8)
    setattr(dynamo.config, name, wanted)


def _reason(error: Exception) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {next((line.strip() for line in str(inner).splitlines() if line.strip()), '')}"

"""How the rows of a view are served: how wide, filled with what, and which tensors a batch has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.lengths import fitting

PaddingSide = Literal["right", "left"]
_TOGETHER = ("input_ids", "attention_mask", "labels")
_ISOLATED = (*_TOGETHER, "position_ids", "seq_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSettings:
    """How rows are served."""

    max_length: int
    lengths: tuple[int, ...]
    """Allowed lengths, rising; the last is ``max_length``."""
    pad_id: int
    padding_side: str = "right"
    isolated: bool = False
    """Whether documents of a row are kept apart: batches have ``position_ids`` and ``seq_idx``."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The tensors of a batch."""
        return _ISOLATED if self.isolated else _TOGETHER

    def width_of(self, tokens: Callable[[], NDArray[np.integer]], rows: NDArray[np.integer]) -> int:
        """The smallest allowed length that holds all of some rows.

        Args:
            tokens: Gives (R,) the tokens of each row; asked only where there are several lengths.
            rows: Their numbers.
        """
        if len(self.lengths) == 1 or not len(rows):
            return self.lengths[-1]
        return self.lengths[int(fitting(tokens()[rows].max(keepdims=True), self.lengths)[0])]

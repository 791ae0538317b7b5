"""What a batch of tokens is called: as here, as transformers has it, or as one long row for FlashAttention.

``plain``: all that the view has. ``transformers``: where documents must not see each other, no ``attention_mask`` and
no ``seq_idx``: its models keep documents apart by ``position_ids``, and only where they are given no mask
(``transformers/masking_utils.py``, ``find_packed_sequence_indices``; with a mask of (B, L) they would see each other,
without a word). ``flat``: all rows of a batch as one of (1, B * L), with what FlashAttention wants, named as the
padding-free collator of TRL does; the filling is a segment of its own, so that shapes stay the same.

Guarantee: rows that are a whole batch become that batch without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from latentcache.errors import UsageError

TokenFormat = Literal["plain", "transformers", "flat"]
Batch = dict[str, Any]
#: With these its models let documents of a row see each other.
_MIXED_UP = ("attention_mask", "seq_idx")


def checked_token_format(name: str, *, isolated: bool) -> str:
    """The name of a form, if there is such a one for these rows.

    Raises:
        UsageError: There is none, or it is for rows whose documents are kept apart.
    """
    if name not in get_args(TokenFormat):
        raise UsageError(f"unknown format {name!r}", fix=f"use one of {', '.join(get_args(TokenFormat))}")
    if name == "flat" and not isolated:
        raise UsageError(
            "format='flat' of rows without position_ids",
            why="in one long row they would see each other",
            fix="use packed(...), or blocks(..., crossing=False)",
        )
    return name


def token_formatted(batch: Batch, name: str) -> Batch:
    """A batch under the names of a form.

    Args:
        batch: ``plain``: tensors of (B, L).
        name: Of :data:`TokenFormat`.
    """
    if name == "flat":
        return _flat(batch)
    if name == "transformers":
        left_out = ("is_pad_row", *(_MIXED_UP if "position_ids" in batch else ()))
        return {name: value for name, value in batch.items() if name not in left_out}
    return batch


def segments(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where documents and filling begin and end in the rows of a batch, one row after the other.

    Args:
        position_ids: (B, L), 0 where one begins.

    Returns:
        (n + 1,) int32, from 0 to B * L, and the length of the longest.
    """
    flat = position_ids.reshape(-1)
    ends = torch.cat([torch.nonzero(flat == 0).reshape(-1), flat.new_tensor([flat.numel()])])
    return ends.to(torch.int32), int(ends.diff().max())


def _flat(batch: Batch) -> Batch:
    position_ids = batch["position_ids"].reshape(1, -1)
    ends, longest = segments(position_ids)
    starts = position_ids[0] == 0
    return {
        "input_ids": batch["input_ids"].reshape(1, -1),
        "labels": batch["labels"].reshape(1, -1),
        "position_ids": position_ids,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": (torch.cumsum(starts, 0, dtype=torch.int32) - 1).reshape(1, -1),
    }


class TokenCollator:
    """Makes a batch of rows of a view, for a ``DataLoader`` or a trainer (``data_collator=``). Picklable.

    Args:
        format: What the batch is called.

    Raises:
        UsageError: No such form.
    """

    def __init__(self, format: TokenFormat = "plain") -> None:
        self.format = checked_token_format(format, isolated=True)

    def __call__(self, rows: Sequence[Batch]) -> Batch:
        """(B, L) tensors of rows of (L,): the batch they are all of, or a copy.

        Raises:
            UsageError: ``flat``, and the rows have no ``position_ids``.
        """
        batch = {name: together([row[name] for row in rows]) for name in rows[0]}
        checked_token_format(self.format, isolated="position_ids" in batch)
        return token_formatted(batch, self.format)


def together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that these are all rows of, in order; else a new one of them."""
    base = rows[0]._base
    if base is None or len(base) != len(rows) or base.dim() != rows[0].dim() + 1:
        return torch.stack(list(rows))
    start, step = base.storage_offset(), base.stride(0)
    for number, row in enumerate(rows):
        if row._base is not base or row.storage_offset() != start + number * step or row.shape != base.shape[1:]:
            return torch.stack(list(rows))
    return base

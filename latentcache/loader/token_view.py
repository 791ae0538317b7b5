"""A view of a token cache: rows of a fixed length, as a map-style data set and as what loaders are made of.

Decides nothing about rows: their plan does. Guarantee: ``len`` is exact and known at once; a batch is as wide as the
view, or as one of its allowed lengths, never as its longest row; a batch is one piece of memory, and its rows are
views of it, so a collator that is given all of them gives it back without a copy. Memory is used again only when
nobody refers to it. Cost: see ``token_rows``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from latentcache.geometry.sizes import Size
from latentcache.loader.ring import BatchRing
from latentcache.loader.row_entries import RowEntries
from latentcache.loader.substitute import OnBad
from latentcache.loader.token_follow import FollowedRows
from latentcache.loader.token_formats import Batch, TokenFormat, segments
from latentcache.loader.token_loader import TokenLoader
from latentcache.loader.token_rows import RowArrays, RowReader, arrays_in
from latentcache.loader.view_settings import ViewSettings
from latentcache.plan.batches import BatchPlan, PlanReport, SmallBuckets
from latentcache.plan.rows import begins
from latentcache.plan.trainer_steps import trainer_steps
from latentcache.plan.weights import Mixture
from latentcache.token_recipe import TokenRecipe

Part = RowReader | FollowedRows
#: Batches whose memory is kept: two read ahead, one being filled, the caller's and the one before it.
_SLOTS = 5


class TokenView(Dataset[Batch]):
    """Rows of tokens. ``view[i]`` is one; ``view.loader(...)`` serves epochs of them. Picklable.

    Batches hold ``input_ids``, ``attention_mask`` and ``labels``, (B, L) int64: filled with ``pad_id``, 0 and -100.
    The first token of a document has the label -100. Where documents are kept apart also ``position_ids``, which
    begin at 0 in each document and in the filling, and ``seq_idx``, int32: 1 for the first document of a row, 0 for
    the filling.

    Args:
        parts: Readers of rows; the rows of the view are those of the first, then those of the second, ...
            A build that is under way has readers that wait.
        settings: How they are served.
        recipe: What the ids were made by.
        identity: Names what the rows are, for checkpoints.
        also: Other names of the same rows, as a checkpoint may have them that was made while they were built.
        mixture: How often each part is served, where they have weights.
        generation: Number of the generation, for messages.
        name: What the cache is called, for messages.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        settings: ViewSettings,
        *,
        recipe: TokenRecipe,
        identity: bytes,
        also: tuple[bytes, ...] = (),
        mixture: Mixture | None = None,
        generation: int = 0,
        name: str = "",
    ) -> None:
        self.parts, self.settings, self.recipe, self.identity = tuple(parts), settings, recipe, identity
        self.mixture, self.generation, self.name, self.also = mixture, generation, name, also
        counts = np.cumsum([len(part) for part in self.parts])
        self._count, self._starts = int(counts[-1]), begins(counts)
        self._row_lengths: NDArray[np.int64] | None = None
        self._ring, self._scratch = BatchRing(_SLOTS), BatchRing(_SLOTS)

    def __len__(self) -> int:
        """Rows."""
        return self._count

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """(R,) tokens of documents in each row.

        Raises:
            UsageError: The build that makes them is under way.
        """
        if self._row_lengths is None:
            self._row_lengths = np.concatenate([part.lengths for part in self.parts])
        return self._row_lengths

    @property
    def known_lengths(self) -> NDArray[np.int64] | None:
        """:attr:`row_lengths`; None while the build that makes them is under way."""
        return None if any(isinstance(part, FollowedRows) for part in self.parts) else self.row_lengths

    @property
    def max_length(self) -> int:
        """Tokens in a row, the filling included."""
        return self.settings.max_length

    @property
    def tokens(self) -> int:
        """Tokens of documents in all rows."""
        return int(self.row_lengths.sum())

    @property
    def fill(self) -> float:
        """Part of all places of rows of ``max_length`` that hold a token of a document."""
        return self.tokens / (len(self) * self.max_length) if len(self) else 0.0

    @property
    def left(self) -> list[tuple[str, str, int]]:
        """What stands in no row: (reason, file and line, tokens of that document), document by document.

        Reasons: ``too_long`` (dropped), ``cut`` (a part of it was cut off), ``idle`` (nothing would be learned of it,
        or of a part), ``tail`` (the end of blocks). :attr:`tokens_left` has the exact number of tokens.
        """
        return [
            (reason, part.store.documents.where(number), int(part.store.documents.length[number]))
            for part in self.parts
            for reason, left in part.plan.left.items()
            for number in left.documents.tolist()
        ]

    @property
    def tokens_left(self) -> Mapping[str, int]:
        """Tokens that stand in no row, by reason."""
        reasons = self.parts[0].plan.left
        return {reason: sum(part.plan.left[reason].tokens for part in self.parts) for reason in reasons}

    def __getitem__(self, row: int) -> Batch:
        """One row, (L,) tensors of ``max_length`` tokens.

        Raises:
            IndexError: No such row.
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return {name: value[0] for name, value in self.batch([row % len(self)], width=self.max_length).items()}

    def __getitems__(self, rows: Sequence[int]) -> list[Batch]:
        """Several rows, each a view of one batch; errors as for one row."""
        batch = self.batch(rows)
        return [{name: value[place] for name, value in batch.items()} for place in range(len(rows))]

    def transform(self, examples: Mapping[str, Sequence[int]]) -> Batch:
        """For ``datasets.Dataset.from_dict({"row": range(len(view))}).with_transform(view.transform)``."""
        return self.batch(examples["row"])

    def batch(self, rows: Sequence[int] | NDArray[np.integer], *, width: int | None = None) -> Batch:
        """One batch of the given rows.

        Args:
            rows: Their numbers, from 0.
            width: Tokens in a row; by default the smallest allowed length that holds all of them.

        Raises:
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        numbers = np.asarray(rows, dtype=np.int64)
        shape = (len(numbers), width or self.settings.width_of(lambda: self.row_lengths, numbers))
        arrays = arrays_in(self._ring, shape, isolated=self.settings.isolated)
        if len(self.parts) == 1:
            self._fill(self.parts[0], numbers, arrays, np.arange(len(numbers)))
        else:
            owner = np.searchsorted(self._starts, numbers, side="right") - 1
            for number in np.unique(owner).tolist():
                at = np.flatnonzero(owner == number)
                self._fill(self.parts[number], numbers[at] - self._starts[number], arrays, at)
        return {name: torch.from_numpy(getattr(arrays, name)) for name in self.settings.columns}

    def where(self, row: int) -> str:
        """File and line of what stands first in a row."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.parts[part].where(row - int(self._starts[part]))

    def segments(self, batch: Batch) -> dict[str, Any]:
        """``cu_seqlens``, (n + 1,) int32, and ``max_seqlen`` of a batch as one row; the filling counts."""
        ends, longest = segments(batch["position_ids"])
        return {"cu_seqlens": ends, "max_seqlen": longest}

    def bucket(self, batch: int) -> NDArray[np.int32]:
        """(R,) for each row the allowed length it is served at, where a step has so many rows on all ranks.

        With weights it is the smallest that holds the row; each epoch may serve it at a longer one.
        """
        return self.entries(batch).bucket

    def entries(self, batch: int) -> RowEntries:
        """The rows and the allowed lengths they are served at, where a step has so many rows on all ranks."""
        name, also, sizes, mixture = self.identity, self.also, self.sizes, self.mixture
        tokens = None if len(sizes) == 1 else self.row_lengths  # a build that is under way has no lengths yet
        return RowEntries.of(len(self), tokens, sizes, batch, name=name, also=also, mixture=mixture)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The allowed lengths as buckets: 1 high, so many tokens wide."""
        return tuple(Size(1, length) for length in self.settings.lengths)

    def plan(self, *, batch_size: int, world_size: int = 1, small_buckets: SmallBuckets = "repeat") -> PlanReport:
        """What an epoch would do, before training starts; a bucket is an allowed length, ``Size(1, L)``.

        Raises:
            UsageError: A number or policy that cannot be.
            PlanError: The policy ``error`` met rows that do not divide.
        """
        batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets=small_buckets)
        return self.entries(batches.global_batch_size).report(batches)

    def steps(
        self, epochs: float, *, batch_size: int, world_size: int = 1, grad_accum: int = 1, drop_last: bool = False
    ) -> int:
        """Optimizer steps of a trainer that shuffles this view itself, as the Trainer of transformers counts them.

        Args:
            epochs: Passes over the rows, also a fraction.
            batch_size: Rows per rank and step.
            world_size: Number of ranks.
            grad_accum: Batches of a rank per optimizer step.
            drop_last: Whether a batch that is not full is left out.

        Raises:
            UsageError: Fewer epochs than none, or a number that is none.
        """
        sizes = {"batch_size": batch_size, "world_size": world_size, "grad_accum": grad_accum}
        return trainer_steps(len(self), epochs, **sizes, drop_last=drop_last)

    def loader(
        self,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        small_buckets: SmallBuckets = "repeat",
        format: TokenFormat = "plain",
        meta: bool = False,
        prefetch: int = 2,
        on_bad: OnBad = "error",
        max_substitutes: int | None = None,
        device: str | torch.device = "cpu",
    ) -> TokenLoader:
        """Batches of one shape, in an order that depends on nothing but the seed and the epoch.

        Args:
            batch_size: Rows per rank and step.
            seed: Changes the order of all epochs.
            rank: Which share of each step this process gets.
            world_size: Number of ranks; all of them see the same steps.
            small_buckets: What becomes of rows that fill no batch: ``repeat`` (default), ``drop``, ``partial``,
                ``error``, or ``mask``: the last batch is filled with rows whose labels are all -100, and a ``plain``
                batch says which, as ``is_pad_row``, (B,) bool.
            format: What a batch calls things: ``plain``, ``transformers`` or ``flat`` (see ``token_formats``).
            meta: Whether a batch also has ``meta``, plain numbers: ``epoch``, ``step_in_epoch``, ``tokens`` and
                ``trainable_tokens`` of this rank's batch. Take it out before a model gets the batch.
            prefetch: Batches that a thread reads ahead while you train; 0 reads each when it is asked for.
            on_bad: ``error`` (default): a row that is damaged or missing is an exception. ``substitute``: another
                row of its length takes its place, with a warning, and is counted in ``loader.substituted``.
            max_substitutes: How many different rows may be bad before it is an error after all; by default 1 % of
                the rows, and at least one.
            device: Where tensors are delivered. For a CUDA device the copy runs beside your computation.

        Raises:
            UsageError: A number, policy, format or device that cannot be.
            DeviceError: The device is not there.
            EmptyPlanError: An epoch would have no step.
            PlanError: The policy ``error`` met rows that do not divide.
        """
        batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets=small_buckets)
        return TokenLoader(
            self,
            batches,
            isolated=self.settings.isolated,
            seed=seed,
            rank=rank,
            format=format,
            meta=meta,
            prefetch=prefetch,
            on_bad=on_bad,
            max_substitutes=max_substitutes,
            device=device,
        )

    def _fill(self, part: Part, rows: NDArray[np.int64], arrays: RowArrays, at: NDArray[np.int64]) -> None:
        shape = arrays.input_ids.shape
        narrow = self._scratch.take(math.prod(shape) * part.dtype.itemsize).view(part.dtype).reshape(shape)
        left = self.settings.padding_side == "left"
        part.fill(rows, part.tokens_of(rows), arrays, at, narrow, pad_id=self.settings.pad_id, left=left)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_ring", "_scratch")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _ring=BatchRing(_SLOTS), _scratch=BatchRing(_SLOTS))

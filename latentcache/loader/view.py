"""Views that loaders read: samples of caches, or rows of tokens; ``combine`` makes several one. Needs no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from latentcache.errors import UsageError
from latentcache.fields.registry import load
from latentcache.plan.batching import BatchPlan, PlanReport, Remainder
from latentcache.plan.mixing import Mixture, Weight, mixture
from latentcache.plan.numbers import several
from latentcache.plan.samples import plan_report

if TYPE_CHECKING:
    import torch

    from latentcache.loader.loader import Loader
    from latentcache.loader.prefetch import Reader
    from latentcache.loader.substitute import OnError
    from latentcache.plan.samples import SampleIndex

P = ParamSpec("P")
Returned = TypeVar("Returned")
Served = TypeVar("Served", bound="View")


#: Arguments of torch's DataLoader -> what a loader has in their place.
_OF_DATA_LOADER = {
    "shuffle": "leave it out: each epoch has its own order, from seed and set_epoch(epoch); seed=None has none",
    "drop_last": "remainder='drop', or remainder='partial' for a smaller last batch",
    "num_workers": "leave it out: the loader reads ahead by itself; for worker processes use"
    " DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None, num_workers=4)",
    "prefetch_factor": "prefetch=2",
    "pin_memory": "device='cuda': batches come from page-locked memory",
    "generator": "seed=0",
}


class ArgumentError(UsageError, TypeError):
    """An argument that a function does not have."""


def named_arguments(function: Callable[P, Returned]) -> Callable[P, Returned]:
    """Raise ArgumentError, which names the right argument, in place of a TypeError of Python."""
    known = list(inspect.signature(function).parameters)[1:]

    @wraps(function)
    def call(*values: P.args, **named: P.kwargs) -> Returned:
        for name in [name for name in named if name not in known]:
            fix = _OF_DATA_LOADER.get(name, f"use some of {', '.join(known)}")
            raise ArgumentError(f"{name}={named[name]!r}: unknown argument", fix=fix)
        return function(*values, **named)

    return call


class View:
    """Samples, or rows of tokens, that loaders serve."""

    if TYPE_CHECKING:  # what both kinds have
        name: Any

        def _index_of(self, fields: Sequence[str] | None) -> SampleIndex: ...
        def _reader_of(self, fields: Sequence[str] | None) -> Reader: ...
        def _of_snapshot(self, number: int) -> Self | None: ...
        def _check_alike(self, other: Any) -> None: ...
        def _combined(self, parts: Sequence[Any], mix: Mixture | None) -> Self: ...

    @named_arguments
    def plan(
        self,
        *,
        batch_size: int | Sequence[int] | None = None,
        batch_pixels: int | None = None,
        batch_tokens: int | None = None,
        multiple_of: int | None = None,
        world_size: int = 1,
        remainder: Remainder = "repeat",
        fields: Sequence[str] | None = None,
    ) -> PlanReport:
        """Count steps and samples of an epoch, bucket by bucket. All rows are one bucket.

        Args:
            batch_size: Samples (or rows) per rank and step.
            batch_pixels: See ``loader``, as ``batch_tokens`` and ``multiple_of``.
            batch_tokens: See ``loader``.
            multiple_of: See ``loader``.
            world_size: Ranks.
            remainder: Policy for samples that do not fill a batch.
            fields: Fields that samples must have; by default all.

        Raises:
            UsageError: A number or policy is not allowed.
            PlanError: The policy ``error`` met a bucket that does not divide.
        """
        batches = BatchPlan(
            batch_size=batch_size,  # type: ignore[arg-type]  # checked there
            batch_pixels=batch_pixels,
            batch_tokens=batch_tokens,
            multiple_of=multiple_of,
            world_size=world_size,
            remainder=remainder,
        )
        return plan_report(self._index_of(fields), batches)

    @named_arguments
    def loader(
        self,
        *,
        batch_size: int | Sequence[int] | None = None,
        batch_pixels: int | None = None,
        batch_tokens: int | None = None,
        multiple_of: int | None = None,
        seed: int | None = 0,
        rank: int | None = None,
        world_size: int | None = None,
        remainder: Remainder = "repeat",
        fields: Sequence[str] | None = None,
        format: str | None = None,
        prefetch: int = 2,
        device: str | torch.device = "cpu",
        on_error: OnError = "error",
        shuffle_block: int | None = None,
    ) -> Loader:
        """Batches of one shape, in an order that depends on nothing but the seed and the epoch.

        Args:
            batch_size: Samples (or rows) per rank and step. Of several caches combined also a list with one number
                for each; a batch then has samples of one cache.
            batch_pixels: In place of ``batch_size``: most pixels (frames x height x width) of all ranks in one step.
                The number of samples follows the bucket.
            batch_tokens: In place of ``batch_size``: most tokens of all ranks in one step, of rows or of text
                embeddings, padding included.
            multiple_of: With a budget: round the samples of all ranks in a step down to a multiple of this number, by
                default of the number of ranks. Numbers of ranks that divide it have the same batches.
            seed: Changes the order of all epochs. None: every epoch in the order of the data set, bucket by bucket,
                for evaluation; draws are those of seed 0.
            rank: Part of each step that this process gets; given together with ``world_size``. By default found:
                torch.distributed, then RANK and WORLD_SIZE of the environment.
            world_size: Number of ranks; all of them see the same steps.
            remainder: Policy for samples that do not fill a batch: ``repeat`` (default), ``drop``, ``partial``,
                ``pad`` or ``error``. With ``pad`` a ``plain`` batch has ``is_pad`` (B,) bool, one of rows
                ``is_pad_row``, and padding rows have no label but -100.
            fields: Fields of a batch, and metadata: ``captions``, ``original_size``, ``crop_top_left``,
                ``target_size``, ``keys``, ``meta`` (``epoch``, ``step_in_epoch``), and other columns of a metadata
                table of DATA, such as ``label``. By default all fields and metadata but ``meta``. A sample that lacks
                a field is excluded and counted. Batches of rows have all tensors; ``names`` (file and line of the
                first document) and ``meta`` (here with ``tokens`` and ``trainable_tokens``) are optional.
            format: Names in a batch: ``plain``, or ``diffusers-`` with ``sd``, ``sdxl``, ``sd3``, ``flux``,
                ``qwen-image`` or ``wan``; ``forward`` of a batch then holds arguments of the model's ``forward``. Of
                rows: ``plain``, ``transformers``, ``flat`` (one long row, as TRL's padding-free collator) or
                ``torchtitan``.
            prefetch: Batches that are made ahead while you train; 0 makes each on demand.
            device: Device of the tensors. For a CUDA device the copy runs beside your computation.
            on_error: ``error`` (default): a sample that is damaged or missing is an exception. ``substitute``:
                another sample of its bucket takes its place, with a warning, and is counted in
                ``loader.substituted``.
            shuffle_block: Samples (or rows) per window: an epoch shuffles the shards, then samples within each
                window, so a step reads few shards. For URLs, whose first batches wait for all their shards, and slow
                disks; take at least ten thousand. By default all samples are shuffled together.

        Raises:
            UsageError: An argument, number, policy, format, field or device is not allowed, or the cache lacks
                embeddings that the format needs.
            DeviceError: The device is not available.
            EmptyPlanError: An epoch would have no step.
            PlanError: The policy ``error`` met a bucket that does not divide.
        """
        from latentcache.loader.loader import Loader

        fields = [fields] if isinstance(fields, str) else fields

        def of_snapshot(number: int) -> Reader | None:
            view = self._of_snapshot(number)
            return None if view is None else view._reader_of(fields)

        batches = {
            "batch_size": batch_size,
            "batch_pixels": batch_pixels,
            "batch_tokens": batch_tokens,
            "multiple_of": multiple_of,
            "remainder": remainder,
        }
        return Loader(
            self._reader_of(fields),
            fields or (),
            batches,
            title=str(self.name),
            of_snapshot=of_snapshot,
            seed=seed,
            rank=rank,
            world_size=world_size,
            format=format,
            prefetch=prefetch,
            device=device,
            on_error=on_error,
            shuffle_block=shuffle_block,
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(load("latentcache.report.page:html_of")(self))


def combine(
    sources: Sequence[Served],
    *,
    weights: Sequence[Weight] | None = None,
    samples: int | None = None,
) -> Served:
    """Several caches, or several views of rows, as one: a batch may hold samples of any of them.

    Args:
        sources: Caches (also parts and repeats of them), or rows; all of one type.
        weights: Fraction of the samples of an epoch that each gets, in any unit. Without them every sample is served
            once. Counts are exact in every epoch; over the epochs all samples of a source are served equally often.
        samples: Samples (or rows) of an epoch. By default the source with the most for its weight is served exactly
            once, and so every sample of the others at least once.

    Raises:
        UsageError: Nothing to combine, fields or settings that differ (they are named), a value that is not allowed,
            or a source that has weights itself.
    """
    views: list[Any] = several("sources", sources, fix="combine([one, other])")
    if len({type(view) for view in views}) != 1 or not isinstance(views[0], View):
        raise UsageError(
            "combine: needs caches, or rows, and not both", fix="combine([open_cache(a), open_cache(b)])"
        )
    if any(view.mixture for view in views):
        raise UsageError("combine: a source has weights itself", fix="combine the caches that it is made of")
    if weights is None and samples is not None:
        raise UsageError(f"samples={samples!r}: only allowed with weights", fix="pass weights too, as [1, 1]")
    for view in views[1:]:
        views[0]._check_alike(view)
    mix = None
    if weights is not None:
        mix = mixture([view.name for view in views], list(map(len, views)), weights, samples=samples)
        mix = tuple(replace(source, parts=len(view.parts)) for source, view in zip(mix, views, strict=True))
    first: Any = views[0]
    return first._combined([part for view in views for part in view.parts], mix)  # type: ignore[no-any-return]

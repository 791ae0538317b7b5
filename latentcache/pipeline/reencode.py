"""Encode stored samples again, as a build would today: for ``verify --reencode``, which compares.

Guarantee: inputs are cut where they were cut then (the stored columns say where), and draws use the stored hash; a
difference comes from decoding or encoding. Nothing is written. Cost: the encoder is opened at the first sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import ModelNotFoundError, SourceError
from latentcache.fields.protocol import (
    Cached,
    DescribeContext,
    Described,
    Failure,
    FieldKind,
    Job,
    Made,
    Output,
    Producer,
)
from latentcache.fields.registry import load
from latentcache.pipeline.existing import kind_of
from latentcache.pipeline.run import make_again
from latentcache.pipeline.settings import MAX_PIXELS
from latentcache.pipeline.workers.worker import Task
from latentcache.sources.scan import Listing, SourceOptions, listing_of, names_root
from latentcache.store.entry import EntryHeader
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot

#: Items per encoder call: half of what a build takes, because this may run beside a training.
BATCH = 4


class Reencode:
    """Opens the encoders of a snapshot and encodes with them; :meth:`encode` closes what it opens.

    Args:
        settings: Field name -> settings of its kind, if the encoder is not at the recorded place.
        device: ``auto``, ``cpu`` or a torch device.
        batch_size: Items per encoder call, at most.
        max_pixels: Larger images are not decoded.
    """

    def __init__(
        self,
        *,
        settings: Mapping[str, Any] | None = None,
        device: str = "auto",
        batch_size: int = BATCH,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.device = ""
        """Where the last encoder runs; empty until one is open."""
        self._settings, self._asked = dict(settings or {}), device
        self._batch_size, self._max_pixels = batch_size, max_pixels
        self._described: dict[str, Described] = {}

    def described(self, snapshot: Snapshot, field: str) -> Described:
        """The encoder of a field as it is now; files are read, nothing is loaded.

        Raises:
            EncoderError: It is not at hand, or cannot be used.
        """
        if field not in self._described:
            context = DescribeContext(device=self._asked, check=True, check_encoder=True)
            try:
                self._described[field] = _describe(snapshot.fields[field], self._settings.get(field), context)
            except ModelNotFoundError as error:
                if field not in self._settings:
                    error.fix = "give its path with --model; without --reencode a check needs no model"
                raise
        return self._described[field]

    def encode(
        self, snapshot: Snapshot, root: Path, field: str, rows: Sequence[int]
    ) -> Iterator[tuple[int, Made | Failure]]:
        """Encode the inputs of these rows again, in any order.

        Raises:
            EncoderError: The encoder cannot be used.
            DeviceError: The device failed, or does not exist.
        """
        root = names_root(root, snapshot.source)
        unread: list[tuple[int, Failure]] = []
        jobs = self._jobs(snapshot, root, field, rows, unread)
        for one in make_again(self._task(snapshot, root, field), jobs, opened=self._opened):
            for output in one.job.outputs if one.output is None else (one.output,):
                yield output.item, one.made
        yield from unread

    def _opened(self, producer: Producer) -> None:
        self.device = producer.device

    def _task(self, snapshot: Snapshot, root: Path, field: str) -> Task:
        described, held = self.described(snapshot, field), snapshot.fields[field]
        return Task(
            field=field,
            recipe=described.recipe.as_json(),
            producer=described.producer,
            groups=held.groups,
            root=str(root),
            cache=str(snapshot.paths.root),
            needs_torch=described.needs_torch,
            device=self._asked,
            batch_size=self._batch_size,
            options={"max_pixels": self._max_pixels, "fold": held.provenance.get("fold", True)},
        )

    def _jobs(
        self, snapshot: Snapshot, root: Path, field: str, rows: Sequence[int], unread: list[tuple[int, Failure]]
    ) -> Iterator[Job]:
        """One job per sample, with its stored columns; rows of inputs that cannot be read go to ``unread``."""
        held, samples = snapshot.fields[field], snapshot.samples
        kind = kind_of(field)
        chosen = np.sort(np.asarray(rows, dtype=np.intp))
        wanted = zip(np.asarray(held.sample[chosen]).tolist(), chosen.tolist(), strict=True)
        own = [(sample, [row for _, row in pairs]) for sample, pairs in groupby(wanted, key=lambda pair: pair[0])]
        listing = listing_of(root, samples, SourceOptions.from_json(snapshot.source.get("options", {})))
        inputs = _inputs(listing, [sample for sample, _ in own], kind.inputs)
        content, reader = kind.content(samples), EntryReader(snapshot.paths, snapshot)
        for (sample, items), given in zip(own, inputs, strict=True):
            if isinstance(given, Failure):
                unread += [(row, given) for row in items]
                continue
            yield Job(
                sample=sample,
                name=samples.names[sample],
                inputs=given,
                content=np.asarray(content[sample]).tobytes(),
                facts={name: np.asarray(column[sample]).tolist() for name, column in samples.columns.items()},
                outputs=tuple(_output(held, row, reader.header(field, row)) for row in items),
            )


def _describe(held: FieldRows, settings: Any, context: DescribeContext) -> Described:
    kind: FieldKind = kind_of(held.name)
    cached = Cached(recipe=held.recipe, provenance=held.provenance)
    found: Described = load(kind.describer)(settings or kind.settings(), cached, context)
    return found


def _inputs(listing: Listing, rows: Sequence[int], names: Sequence[str]) -> Iterator[Mapping[str, Any] | Failure]:
    """Inputs of each row, or why they cannot be read: a file of records may be gone or changed."""
    done = 0
    while done < len(rows):
        try:
            for _, given in listing.job_inputs(rows[done:], names):
                done += 1
                yield given
        except SourceError as error:
            done += 1
            yield Failure(reason="source-changed", detail=error.what)


def _output(held: FieldRows, row: int, header: EntryHeader) -> Output:
    """What is made again, with what was stored beside it."""
    columns = {name: np.asarray(values[row]).tolist() for name, values in held.columns.items()}
    own = np.flatnonzero((header.item_keys() == held.row_keys(np.array([row]))[0]).all(axis=1))
    return Output(
        item=row,
        group=int(held.group[row]),
        variant=int(held.variant[row]),
        columns=columns,
        same=header.same[own[0]].tobytes() if len(own) else b"",
    )

"""Encode stored samples again, as a build would today: for ``verify --reencode``, which compares.

Guarantee: inputs are cut where they were cut then (the stored columns say where), and draws use the stored hash; a
difference comes from decoding or encoding. Nothing is written. Cost: the encoder is opened at the first sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import DeviceMemoryError, ModelNotFoundError, SourceError
from latentcache.fields.protocol import (
    Cached,
    DescribeContext,
    Described,
    Failure,
    FieldKind,
    Job,
    Made,
    Output,
    Prepared,
    Producer,
    ProducerContext,
)
from latentcache.fields.registry import load
from latentcache.pipeline.existing import kind_of
from latentcache.pipeline.settings import MAX_PIXELS
from latentcache.pipeline.workers.batching import prepare, reason
from latentcache.sources.scan import Listing, SourceOptions, listing_of, names_root
from latentcache.store.snapshot import FieldRows, Snapshot


class Reencode:
    """Opens the encoders of a snapshot and encodes with them; :meth:`encode` closes what it opens.

    Args:
        settings: Field name -> settings of its kind, if the encoder is not at the recorded place.
        device: ``auto``, ``cpu`` or a torch device.
    """

    def __init__(self, *, settings: Mapping[str, Any] | None = None, device: str = "auto") -> None:
        self.device = ""
        """Where the last encoder runs; empty until one is open."""
        self._settings, self._asked = dict(settings or {}), device
        self._described: dict[str, Described] = {}

    def described(self, snapshot: Snapshot, field: str) -> Described:
        """The encoder of a field as it is now; files are read, nothing is loaded."""
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
        """Encode the inputs of these rows again, in any order."""
        root = names_root(root, snapshot.source)
        unread: list[tuple[int, Failure]] = []
        jobs = self._jobs(snapshot, root, field, rows, unread)
        yield from reencode_jobs(kind_of(field), jobs, lambda: self._opened(snapshot, root, field))
        yield from unread

    def _opened(self, snapshot: Snapshot, root: Path, field: str) -> Producer:
        described, held = self.described(snapshot, field), snapshot.fields[field]
        context = ProducerContext(
            root=str(root),
            device=self._asked,
            groups=held.groups,
            options={"max_pixels": MAX_PIXELS},
        )
        producer: Producer = load(kind_of(field).producer)(described.producer, described.recipe, context)
        producer.open()
        self.device = producer.device
        return producer

    def _jobs(
        self, snapshot: Snapshot, root: Path, field: str, rows: Sequence[int], unread: list[tuple[int, Failure]]
    ) -> Iterator[Job]:
        """One job per sample, with its stored columns; rows of inputs that cannot be read go to ``unread``."""
        held, samples = snapshot.fields[field], snapshot.samples
        kind = kind_of(field)
        chosen = np.sort(np.asarray(rows, dtype=np.intp))
        wanted = zip(np.asarray(held.sample[chosen]).tolist(), chosen.tolist(), strict=True)
        by_sample = [
            (sample, [row for _, row in pairs]) for sample, pairs in groupby(wanted, key=lambda pair: pair[0])
        ]
        listing = listing_of(root, samples, SourceOptions.from_json(snapshot.source.get("options", {})))
        inputs = _inputs(listing, [sample for sample, _ in by_sample], kind.inputs)
        content = kind.content(samples)
        for (sample, items), given in zip(by_sample, inputs, strict=True):
            if isinstance(given, Failure):
                unread += [(row, given) for row in items]
                continue
            yield Job(
                sample=sample,
                name=samples.names[sample],
                inputs=given,
                content=np.asarray(content[sample]).tobytes(),
                facts={name: np.asarray(column[sample]).tolist() for name, column in samples.columns.items()},
                outputs=tuple(_output(held, row) for row in items),
            )


def reencode_jobs(
    kind: FieldKind, jobs: Iterable[Job], opened: Callable[[], Producer]
) -> Iterator[tuple[int, Made | Failure]]:
    """Encode the items of jobs in this process, one by one, and store nothing.

    Args:
        kind: Of the field.
        jobs: With the content hash of their inputs; if a job has another one, its items fail: ``source-changed``.
        opened: Gives the open producer; called at the first job.
    """
    producer: Producer | None = None
    try:
        for job in jobs:
            producer = producer or opened()
            read = prepare(producer, kind, job)
            if not isinstance(read, Failure) and read.content != job.content:
                detail = "its inputs are not those that the cache was made from"
                read = Failure(reason="source-changed", detail=detail)
            if isinstance(read, Failure):
                yield from ((output.item, read) for output in job.outputs)
            else:
                yield from ((one.output.item, _made(producer, kind, one)) for one in read.items)
    finally:
        if producer is not None:
            producer.close()


def _made(producer: Producer, kind: FieldKind, prepared: Prepared) -> Made | Failure:
    try:
        return producer.encode([prepared]).result()[0]
    except DeviceMemoryError as error:
        return Failure(reason=reason(kind, "memory"), detail=error.why or error.what)


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


def _output(held: FieldRows, row: int) -> Output:
    """What is made again, with what was stored beside it."""
    columns = {name: np.asarray(values[row]).tolist() for name, values in held.columns.items()}
    return Output(item=row, group=int(held.group[row]), variant=int(held.variant[row]), columns=columns)

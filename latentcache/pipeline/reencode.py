"""Encode stored samples again, as a build would today: for ``verify --reencode``, which compares.

Guarantee: inputs are cut where they were cut then (the stored columns say where), and draws use the stored hash; a
difference comes from decoding or encoding. Nothing is written. Cost: the encoder is opened at the first sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import DeviceMemoryError, ModelNotFoundError
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
    ProducerContext,
)
from latentcache.fields.registry import load
from latentcache.pipeline.existing import kind_of
from latentcache.pipeline.settings import MAX_PIXELS
from latentcache.pipeline.workers.batching import prepare, reason
from latentcache.sources.scan import SourceOptions, listing_of, names_root
from latentcache.store.snapshot import FieldRows, Snapshot

_CHANGED = Failure(reason="source-changed", detail="its inputs are not those that the cache was made from")


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
            held, kind, asked = snapshot.fields[field], kind_of(field), self._settings.get(field)
            cached = Cached(recipe=held.recipe, provenance=held.provenance)
            context = DescribeContext(device=self._asked, check=True, check_encoder=True)
            try:
                self._described[field] = load(kind.describer)(asked or kind.settings(), cached, context)
            except ModelNotFoundError as error:
                if field not in self._settings:
                    error.fix = "give its path with --model; without --reencode a check needs no model"
                raise
        return self._described[field]

    def encode(
        self, snapshot: Snapshot, root: Path, field: str, rows: Sequence[int]
    ) -> Iterator[tuple[int, Made | Failure]]:
        """Encode the inputs of these rows again, in any order, one by one."""
        held, samples, kind = snapshot.fields[field], snapshot.samples, kind_of(field)
        root, by_sample = names_root(root, snapshot.source), defaultdict[int, list[int]](list)
        for row in sorted(rows):
            by_sample[int(held.sample[row])].append(row)
        listing = listing_of(root, samples, SourceOptions.from_json(snapshot.source.get("options", {})))
        content, producer = kind.content(samples), None
        try:
            for sample, given in listing.job_inputs(list(by_sample), kind.inputs, strict=False):
                items = by_sample[sample]
                if listing.data_kind == "records" and None in given.values():
                    yield from ((row, _CHANGED) for row in items)
                    continue
                producer = producer or self._opened(snapshot, root, field)
                job = Job(
                    sample=sample,
                    name=samples.names[sample],
                    inputs=given,
                    content=np.asarray(content[sample]).tobytes(),
                    facts={name: np.asarray(column[sample]).tolist() for name, column in samples.columns.items()},
                    outputs=tuple(_output(held, row) for row in items),
                )
                yield from _encoded(producer, kind, job)
        finally:
            if producer is not None:
                producer.close()

    def _opened(self, snapshot: Snapshot, root: Path, field: str) -> Producer:
        described, groups = self.described(snapshot, field), snapshot.fields[field].groups
        options = {"max_pixels": MAX_PIXELS}
        context = ProducerContext(root=str(root), device=self._asked, groups=groups, options=options)
        producer: Producer = load(kind_of(field).producer)(described.producer, described.recipe, context)
        producer.open()
        self.device = producer.device
        return producer


def _encoded(producer: Producer, kind: FieldKind, job: Job) -> Iterator[tuple[int, Made | Failure]]:
    """The items of a job, or why they cannot be made."""
    read = prepare(producer, kind, job)
    if not isinstance(read, Failure) and read.content != job.content:
        read = _CHANGED
    if isinstance(read, Failure):
        yield from ((output.item, read) for output in job.outputs)
        return
    for one in read.items:
        try:
            yield one.output.item, producer.encode([one]).result()[0]
        except DeviceMemoryError as error:
            yield one.output.item, Failure(reason=reason(kind, "memory"), detail=error.why or error.what)


def _output(held: FieldRows, row: int) -> Output:
    """What is made again, with what was stored beside it."""
    columns = {name: np.asarray(values[row]).tolist() for name, values in held.columns.items()}
    return Output(item=row, group=int(held.group[row]), variant=int(held.variant[row]), columns=columns)

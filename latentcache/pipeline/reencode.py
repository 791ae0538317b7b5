"""Encode stored samples again, as a build would today: for ``verify --reencode``, which compares.

Guarantee: inputs are cut where they were cut then (the stored columns say where), and draws use the stored hash. A
difference comes from decoding or encoding. Nothing is written. Cost: the encoder is opened at the first sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from latentcache.fields.protocol import (
    Described,
    Failure,
    Job,
    Made,
    Output,
    Prepared,
    Producer,
    ProducerContext,
)
from latentcache.fields.registry import load
from latentcache.pipeline.preflight import kind_of
from latentcache.pipeline.settings import MAX_PIXELS
from latentcache.pipeline.workers.batching import attempt, read_inputs, too_large
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import listing_of, names_root
from latentcache.store.snapshot import Snapshot

_CHANGED = Failure(reason="source-changed", detail="its inputs are not those that the cache was made from")


def reencode(
    snapshot: Snapshot, root: Path, field: str, rows: Sequence[int], described: Described | None, *, device: str
) -> Iterator[tuple[int, Made | Failure, str]]:
    """Encode the inputs of these rows again, in any order, with the described encoder, and name its device."""
    assert described is not None  # by ``requested`` of the check
    held = snapshot.fields[field]
    samples = snapshot.samples
    kind = kind_of(field)
    root = names_root(root, snapshot.source)
    by_sample = defaultdict[int, list[int]](list)
    for row in sorted(rows):
        by_sample[int(held.sample[row])].append(row)
    listing = listing_of(root, samples, SourceOptions.from_json(snapshot.source.get("options", {})))
    content = kind.content(samples)
    producer = None
    try:
        for sample, inputs in listing.job_inputs(list(by_sample), kind.inputs, strict=False):
            items = by_sample[sample]
            if listing.data_kind == "records" and None in inputs.values():
                yield from ((row, _CHANGED, "") for row in items)
                continue
            if producer is None:
                options = {"max_pixels": MAX_PIXELS}
                context = ProducerContext(root=str(root), device=device, groups=held.groups, options=options)
                producer = load(kind.producer)(described.producer, described.recipe, context)
                producer.open()
            job = Job(
                sample=sample,
                name=samples.names[sample],
                inputs=inputs,
                content=np.asarray(content[sample]).tobytes(),
                sample_columns={
                    name: np.asarray(column[sample]).tolist() for name, column in samples.columns.items()
                },
                outputs=tuple(
                    Output(
                        item=row,
                        group=int(held.group[row]),
                        variant=int(held.variant[row]),
                        columns={name: np.asarray(values[row]).tolist() for name, values in held.columns.items()},
                    )
                    for row in items
                ),
            )
            for row, result in _encoded(producer, str(root), job):
                yield row, result, producer.device
    finally:
        if producer is not None:
            producer.close()


def _encoded(producer: Producer, root: str, job: Job) -> Iterator[tuple[int, Made | Failure]]:
    """The items of a job, or why they cannot be made."""

    def prepared() -> Sequence[Prepared] | Failure:
        inputs = read_inputs(root, job)
        return producer.prepare(job, inputs.data) if inputs.content == job.content else _CHANGED

    items = attempt(prepared)
    if isinstance(items, Failure):
        yield from ((output.item, items) for output in job.outputs)
        return
    for item in items:
        try:
            results = producer.encode([item])
            yield item.output.item, (results.result() if isinstance(results, Future) else results)[0]
        except MemoryError as error:
            yield item.output.item, too_large(error)

"""A toy kind: one ragged uint8 tensor of edges per image, found by ``tests.fields.edge_map:EdgeMap``.

``DELAY_MS`` in the environment slows it down. An image named ``poison*`` ends its worker, ``endless*`` hangs it.
"""

# ruff: noqa: I001
from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import UnusableSampleError
from latentcache.fields.latents import PixelProfile
from latentcache.fields.protocol import Cached, DescribeContext, Described, Failure, FieldKind, FieldRecipe, FieldSpec
from latentcache.fields.protocol import Finished, Job, Made, Prepared, Producer, ProducerContext, Read, WorkSize
from latentcache.fields.protocol import setting
from latentcache.identity.content import content_hash
from latentcache.images.decode import decode
from latentcache.sources.formats.files import read_source


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    edge_threshold: int | None = setting(
        "Smallest step between two pixels that is an edge [default: 16]", metavar="N"
    )


class EdgeRecipe(FieldRecipe):
    id_name = "edge_map"
    threshold: int = 16
    spec = FieldSpec(dtype="uint8", dims=("rows", "bits"), ragged=True, collate="pad", pad_value=255)


class EdgeMap(FieldKind):
    name, kind, inputs, settings, packing, device = "edge_map", 200, ("image",), EdgeSettings, "block", "cpu"
    describer, producer = "tests.fields.edge_map:describe", "tests.fields.edge_map:EdgeProducer"
    recipe = EdgeRecipe
    shape, work = (-1, 8), WorkSize(unit_jobs=64)


def describe(settings: EdgeSettings, cached: Cached, context: DescribeContext) -> Described:
    recipe = cached.recipe if isinstance(cached.recipe, EdgeRecipe) else EdgeRecipe()
    if settings.edge_threshold is not None:
        recipe = EdgeRecipe(threshold=settings.edge_threshold)
    return Described(recipe=recipe, label="edges", producer={"by": "edges"})


class EdgeProducer(Producer):
    def __init__(self, producer: Mapping[str, Any], recipe: EdgeRecipe, context: ProducerContext) -> None:
        self.recipe, self.context = recipe, context

    def prepare(self, job: Job) -> Read | Failure:
        try:
            data, memo = read_source(Path(self.context.root, job.inputs["image"]["path"]))
            content, stat = content_hash(data), memo
            outputs = self.context.missing(job, content)
            pixels = decode(data, PixelProfile()) if outputs else b""
        except UnusableSampleError as error:
            return Failure(reason=error.slug, detail=error.what, hint=error.fix)
        items = [Prepared(output=one, value=(job.name, pixels), num_bytes=len(data)) for one in outputs]
        return Read(content=content, stat=stat, items=items)

    def encode(self, batch: Sequence[Prepared]) -> Finished:
        return Finished([Made(array=self._edges(*item.value)) for item in batch])

    def _edges(self, name: str, pixels: Any) -> Any:
        time.sleep(int(os.environ.get("DELAY_MS", "0")) / 1000)
        if name.startswith("poison"):
            os.abort()
        while name.startswith("endless"):
            time.sleep(1)
        wide = np.pad(pixels.astype(np.int16).mean(axis=2), ((0, 0), (0, 65)))
        steps = np.abs(np.diff(wide, axis=1)) >= self.recipe.threshold
        return np.packbits(steps[:, :64], axis=1, bitorder="little")

"""A toy kind: one ragged uint8 tensor of edges per image, found by ``tests.fields.edge_map:EdgeMap``.

``DELAY_MS`` in the environment slows it down. An image named ``poison*`` ends its worker, ``endless*`` hangs it.
"""

import os
import time

import numpy as np

from latentcache.fields.latents import PixelProfile
from latentcache.fields.protocol import Described, FieldKind, Made, Prepared, Producer, WorkSize
from latentcache.fields.recipe import FieldRecipe, FieldSpec
from latentcache.fields.settings import Settings, setting
from latentcache.images.decode import decode


class EdgeSettings(Settings):
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
    recipe, shape, work = EdgeRecipe, (-1, 8), WorkSize(unit_jobs=64)


def describe(settings, context):
    recipe = context.recipe or EdgeRecipe()
    if settings.edge_threshold is not None:
        recipe = EdgeRecipe(threshold=settings.edge_threshold)
    return Described(recipe=recipe, label="edges")


class EdgeProducer(Producer):
    def prepare(self, job, data):
        pixels = decode(data["image"], PixelProfile())
        return [Prepared(output=output, value=(job.name, pixels), num_bytes=pixels.nbytes) for output in job.outputs]

    def encode(self, batch):
        return [Made(array=self.edges(*item.value)) for item in batch]

    def edges(self, name, pixels):
        time.sleep(int(os.environ.get("DELAY_MS", "0")) / 1000)
        if name.startswith("poison"):
            os.abort()
        while name.startswith("endless"):
            time.sleep(1)
        wide = np.pad(pixels.astype(np.int16).mean(axis=2), ((0, 0), (0, 65)))
        steps = np.abs(np.diff(wide, axis=1)) >= self.recipe.threshold
        return np.packbits(steps[:, :64], axis=1, bitorder="little")

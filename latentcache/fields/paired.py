"""Masks and control images: further images of a sample, placed as its own image is.

A mask has one number for each latent cell: the mean of its pixels there, 255 where all of the loss counts. sd-scripts
(``library/custom_train_functions.py``) and SimpleTuner scale masks so. A sample without a mask has a full one, as in
OneTrainer; all of one bucket share an entry. A video has one mask for all frames. A control image becomes latents by
the encoder of the image. Both get the size, the crop and the flip of the image, whatever their own size is. Their
keys are made from the contents of both files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import count_of
from latentcache.fields.latents import EncoderSpec, Latents, LatentsRecipe, LatentsSettings, Normalization
from latentcache.fields.protocol import FieldPlan, WorkSize
from latentcache.fields.table import SampleTable
from latentcache.identity.content import content_hash

#: Content of the mask of every sample without one.
FULL = content_hash(b"full mask")


class Paired(Latents):
    """Items of an image that belongs to the image of a sample."""

    follows = "latents"

    def resolved(self, fields: Mapping[str, Any], samples: SampleTable, *, held: bool = False) -> Any:
        """As given, else beside latents wherever the data has such images."""
        there = self.inputs[1] in samples.inputs
        return fields.get(self.name) or (fields.get(self.follows) or LatentsSettings() if there else None)

    def remarks(self, columns: Mapping[str, Any]) -> list[tuple[str, str, NDArray[np.intp]]]:
        """Images of another size than the image that they belong to."""
        rows = np.flatnonzero(np.asarray(columns["scaled"]))
        words = f"{self.name}: of another size than its image, scaled to the size of the image"
        return [(f"{self.name.partition('_')[0]}-scaled", words, rows)] if len(rows) else []

    def _without(self, samples: SampleTable) -> NDArray[np.intp]:
        """Rows of samples that have an image and no such image."""
        image, paired = (np.asarray(samples.inputs[name].file) for name in self.inputs)
        return np.flatnonzero((image >= 0) & (paired < 0))


class Mask(Paired):
    """Weights of the loss, one per latent cell."""

    name = "mask"
    kind = 10
    inputs = ("image", "mask")
    one_frame = True  # beside clips an axis of one frame: (B, 1, h, w) would meet their channels
    packing = "block"
    device = "cpu"
    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {"scaled": ("|u1", ())}
    work = WorkSize(unit_cost=1 << 25, worker_cost=1 << 27, cost_bytes=25, batch_cost=8 << 20)
    describer = "latentcache.encoders.vae.describe:describe_mask"
    producer = "latentcache.encoders.pixels:MaskProducer"

    def plan(self, samples: SampleTable, recipe: LatentsRecipe) -> FieldPlan:
        """As of the image, with a note on samples without a mask."""
        planned = super().plan(samples, recipe)
        rows = self._without(samples)
        if not len(rows):
            return planned
        detail = f"{count_of(len(rows), 'samples have')} no mask: all of their image or clip counts in the loss"
        hint = "nothing, if all of such an image is to count; else add a mask of its name"
        return replace(planned, notes=(samples.note(rows, self.name, "no-mask", detail=detail, hint=hint),))

    def content(self, samples: SampleTable) -> NDArray[np.uint8]:
        """As of every kind; one content for all samples without a mask."""
        contents = super().content(samples)
        contents[np.asarray(samples.inputs["mask"].file) < 0] = np.frombuffer(FULL, dtype=np.uint8)
        return contents

    def describe(self, recipe: LatentsRecipe, provenance: Mapping[str, Any]) -> dict[str, str]:
        """Size of a cell."""
        factor = recipe.encoder.factor
        return {"mask": f"mean of {factor} x {factor} pixels, one byte per cell, 0.0 to 1.0 in a batch"}


class Control(Paired):
    """Latents of control and edit images."""

    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {**Latents.columns, "scaled": ("|u1", ())}

    def __init__(self, number: int) -> None:
        self.name = CONTROLS[number]
        self.kind = 11 + number
        self.inputs = self.needed = ("image", self.name)

    def plan(self, samples: SampleTable, recipe: LatentsRecipe) -> FieldPlan:
        """As of the image; samples without such an image are rejected."""
        planned = super().plan(samples, recipe)
        detail = f"it has no image for {self.name}"
        hint = "add the image, or leave the field out: the sample is served without it"
        rows = self._without(samples).tolist()
        lacking = [(row, samples.note([row], self.name, "no-control", detail=detail, hint=hint)) for row in rows]
        return replace(planned, rejected=(*planned.rejected, *lacking))


#: Names of the fields and inputs of control images.
CONTROLS = ("control", "control_2", "control_3")
CONTROL, CONTROL_2, CONTROL_3 = (Control(number) for number in range(len(CONTROLS)))


def mask_recipe(recipe: LatentsRecipe) -> LatentsRecipe:
    """The recipe of masks beside latents: same sizes, same cells, and nothing of the model."""
    encoder = EncoderSpec(
        family="mask",
        fingerprint="",
        config="",
        channels=1,
        factor=recipe.encoder.factor,
        multiple=recipe.encoder.multiple,
        storage_dtype="uint8",
        normalization=Normalization(kind="scale-shift", scale=1 / 255),
    )
    # What is transparent was not painted, whatever color it has.
    pixels = replace(recipe.pixels, resample="lanczos-pil", icc="ignore", alpha="#000000")
    return LatentsRecipe(geometry=recipe.geometry, pixels=pixels, encoder=encoder)

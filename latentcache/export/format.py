"""Format of a trainer: what it needs of a cache, how a sample becomes files, what goes into its configuration."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.fields.latents import GeometrySettings, LatentsRecipe
from latentcache.fields.protocol import FieldRecipe
from latentcache.geometry.sizes import Size
from latentcache.value import Value

Array = NDArray[Any]
#: Fields of a cache.
LATENTS, MASK = "latents", "mask"
TEXT, POOLED, IDS = "prompt_embeds", "pooled_prompt_embeds", "prompt_ids"


class Latent(Value, eq=False):
    """Latents of an image in one size, or its mask."""

    bucket: Size
    """Pixels."""
    values: Array
    """(C, h, w) float32, in the scale that the format asks for; a mask from 0 to 1."""
    flipped: Array | None = None
    """Those of the horizontal flip; None: the cache has none."""


class Sample(Value, eq=False):
    """One image with everything that a format may write of it."""

    name: str
    """In the data set, with ``/``: ``10_cats/a.png``, ``images.tar/a.png``."""
    target: str
    """Of the image in the exported folder, with ``/``."""
    size: Size
    """Upright, in pixels."""
    caption: str
    has_caption: bool = True
    """False: the data set has none for it, and no text is exported; the trainer's rule for such images decides."""
    repeats: int = 1
    """Occurrences in an epoch, as the configuration of its data set says."""
    class_words: str = ""
    is_reg: bool = False
    """True for a regularization image."""
    partners: Mapping[str, str] = field(default_factory=dict)
    """Its ``mask``, ``control``, ``control_2``, ``control_3``: name in the exported folder, with ``/``."""
    latents: Sequence[Latent] = ()
    masks: Sequence[Latent] = ()
    text: Mapping[str, Array] = field(default_factory=dict)
    """Field of the cache -> its item."""

    @property
    def stem(self) -> str:
        """``target`` without its extension."""
        return self.target.rpartition(".")[0] or self.target


class Content(Value):
    """The fields of a cache that an export is asked for, as a format checks them."""

    recipes: Mapping[str, FieldRecipe]
    """By field, of all fields of the cache."""
    wanted: Sequence[str]
    """Fields to export."""


class Request(Value):
    """What an export asks of a format."""

    recipe: LatentsRecipe
    geometry: GeometrySettings
    """The sizes that the trainer chooses, by its settings."""
    wanted: Sequence[str]
    """Fields to export."""
    root: Path
    """Folder of the data set."""
    trainer_config: Path | None
    architecture: str | None
    release: str | None


class Format(Protocol):
    """One trainer. A format is made of a request, and raises UsageError for what it cannot have."""

    name: str
    """As ``--to``, ``build --like`` and ``plan --for`` name it."""
    is_scaled: bool
    """True: latents are written as the model trains on them; False: as the encoder makes them."""
    fields: Mapping[str, Sequence[str]]
    """``latents`` and ``text`` of ``--fields`` -> fields of the cache, as far as it has them."""

    def __init__(self, request: Request) -> None: ...

    def check(self, content: Content) -> None:
        """Raise UsageError if the cache does not fit; the fix names the build that does."""
        ...

    def target(self, sample: Sample) -> str:
        """Name of an image in the exported folder; the sample has the name of the data set as its target.

        Another extension means that the trainer does not read this kind of file: it is written as PNG.
        """
        ...

    def partner(self, sample: Sample, role: str, extension: str) -> str:
        """Name of its mask or control image in the exported folder; empty: the trainer reads no such files."""
        ...

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sidecar and the JSON output say of the form of the files."""
        ...

    def begin(self, folder: str, samples: Iterable[Sample]) -> None:
        """Take all samples, without values, before the files of any are asked for.

        ``folder`` is the path of the export as the trainer sees it.
        """
        ...

    def files(self, sample: Sample, fields: Sequence[str]) -> Mapping[str, Callable[[], bytes]]:
        """Name of each file of values -> what makes its bytes; a sample that is only planned has no values yet."""
        ...

    def settings(self, folder: str, samples: Iterable[Sample]) -> Mapping[str, bytes]:
        """Files of the whole export, such as settings for the trainer, by name.

        ``folder`` is the path as the trainer sees it, ``samples`` are all of them, without values.
        """
        ...

    def advice(self, folder: str, samples: Iterable[Sample]) -> Sequence[str]:
        """Lines on what to set in the trainer, and what must be off; no folder: the files are beside the images."""
        ...


def npz(arrays: Mapping[str, Array]) -> bytes:
    """Arrays as ``numpy.savez`` stores them: a zip of ``.npy`` members, not compressed.

    The same arrays give the same bytes: members carry no time, unlike those of numpy.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue())
    return buffer.getvalue()


def saved(value: Any) -> bytes:
    """A value of dicts, lists, tuples, strings, numbers and tensors as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def joined(folder: str, name: str) -> str:
    """A path as the trainer's machine writes it."""
    separator = "\\" if "\\" in folder else "/"
    return f"{folder.rstrip(separator)}{separator}{name.replace('/', separator)}"

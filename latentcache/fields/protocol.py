"""The plug-in of one field kind, and the values that pass between it and the engine.

A field is one named tensor of a sample. The engine (``store``, ``pipeline``, ``verify``, ``loader``, ``cli``) knows items,
entries, bytes, shapes and failures; everything it has to know about a kind it asks of these two protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import json_hash
from latentcache.identity.key import KEY_BYTES, RECIPE_BYTES, EntryKey

#: Kinds below are reserved for this package; others use 128 to 255.
FIRST_FOREIGN_KIND = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One shape of items of a field: a bucket of images, or the ragged group of documents."""

    label: str
    """How messages name it: ``1024x768`` (height x width, pixels); empty for a ragged field."""
    shape: tuple[int, ...]
    """Shape of one item's payload; -1 in the first place is the ragged axis."""
    dims: tuple[int, int, int] = (1, 1, 1)
    """Frames, height and width (pixels) that enter the key."""

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"label": self.label, "shape": list(self.shape), "dims": list(self.dims)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Group:
        """Inverse of :meth:`as_json`. Raises KeyError or TypeError if a part is missing."""
        frames, height, width = (int(value) for value in data["dims"])
        return cls(label=str(data["label"]), shape=tuple(map(int, data["shape"])), dims=(frames, height, width))


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """How items of a field are stored and put together in a batch."""

    dtype: str
    """Storage type, a name of ``fields.dtypes.DTYPES``."""
    dims: tuple[str, ...]
    """Names of the axes, such as ``("C", "h", "w")``; a ragged axis comes first and is marked by ``ragged``."""
    ragged: bool = False
    """True if the first axis differs between items."""
    collate: Literal["stack", "pad", "pack"] = "stack"
    pad_value: int | float = 0
    variants: int = 1
    """Stored variants per item, such as 2 with horizontal flips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """What the loader does to stored values. Nothing here changes stored bytes."""

    affine: Mapping[str, Any] | None = None
    """``kind`` (scale-shift, mean-std, batch-norm), ``scale``, ``shift``, ``mean``, ``std``, ``patch``."""
    posterior: bool = False
    """True if means and log variances are stored, from which the loader draws."""
    flips: bool = False
    """True if variant 1 is the horizontal flip of variant 0."""


class FieldRecipe(Protocol):
    """The frozen settings that decide an entry's bytes, plus read-time and provenance parts."""

    @property
    def spec(self) -> FieldSpec:
        """Storage and collation."""

    @property
    def read_time(self) -> ReadSpec:
        """What the loader applies."""

    def identity(self) -> dict[str, Any]:
        """The part that moves stored bytes, as JSON values without floats."""

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""

    @property
    def recipe_id(self) -> bytes:
        """16 bytes of :meth:`identity`; the first 8 are in every key."""


def recipe_id(kind_name: str, identity: Mapping[str, Any]) -> bytes:
    """16 bytes that depend on nothing but the kind and the identity."""
    return json_hash({kind_name: identity})


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPlan:
    """The P items that a field needs for a sample table, in build order of the samples."""

    sample: NDArray[np.int32]
    """(P,) row of the sample table."""
    group: NDArray[np.int32]
    """(P,) position in :attr:`groups`."""
    variant: NDArray[np.uint8]
    """(P,)"""
    cost: NDArray[np.int64]
    """(P,) work of one item: pixels, or characters of text."""
    key: NDArray[np.uint8]
    """(P, 32) item keys; rows of zeros where the content is unknown before the input is read."""
    groups: tuple[Group, ...]
    rejected: tuple[tuple[int, Rejected], ...] = ()
    """Samples that this field cannot use, with the row of each in the sample table."""
    notes: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One item that is to be made from a sample."""

    item: int
    """Its position in the field plan."""
    group: int
    variant: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One distinct input and everything that is to be made from it. Travels to workers as JSON."""

    sample: int
    """Row of the sample table."""
    name: str
    """Of the sample, for messages."""
    inputs: Mapping[str, Any]
    """Input name -> JSON value: ``{"path": "a/b.png"}`` below the data root, ``{"text": ...}``, or a record's form."""
    content: bytes = b""
    """Content hash of the field's inputs; empty if it is known only after reading."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The sample's columns, such as ``original_size``."""
    outputs: tuple[Output, ...] = ()
    cost: int = 1
    tie: int = 0
    """Consecutive jobs with one non-zero tie go to one worker: files of equal size, which may be duplicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a sample gives no item."""

    reason: str
    detail: str = ""
    hint: str = ""
    field: str = ""
    content: bytes = b""
    stat: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One item that is ready for the encoder."""

    output: Output
    value: Any
    """What the producer encodes: pixels, a record, ..."""
    same: bytes = b""
    """16-byte hash of exactly what the encoder will see (the pixels); empty if the kind has none. An entry of the same
    recipe and group with an equal hash has equal bytes, and is copied instead of encoded."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of the field's own columns that are known now (crop, resize)."""
    num_bytes: int = 0
    """Host memory that ``value`` holds, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What reading the inputs of a job gave, beside its items."""

    content: bytes
    """Content hash of the field's inputs (16 bytes)."""
    stat: tuple[int, ...] = ()
    """Stat memo of the file that was read; empty for records."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Sample columns as found (``original_size``)."""
    items: Sequence[Prepared] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One encoded item."""

    array: NDArray[Any]
    """In the storage type, of the group's shape; bfloat16 travels as uint16."""
    columns: Mapping[str, Any] = field(default_factory=dict)


class Pending(Protocol):
    """A batch that the encoder has been given."""

    def done(self) -> bool:
        """True if ``result`` would return at once."""

    def result(self) -> Sequence[Made | Failure]:
        """One per item, in order; waits. Raises DeviceMemoryError (the engine halves the batch) or DeviceError."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that was encoded before ``encode`` returned."""

    results: Sequence[Made | Failure]

    def done(self) -> bool:
        """Always True."""
        return True

    def result(self) -> Sequence[Made | Failure]:
        """The results."""
        return self.results


class Producer(Protocol):
    """Makes items. Lives in a worker process (or in a thread of the build for encoders without torch)."""

    def prepare(self, job: Job) -> Read | Failure:
        """Read and decode the inputs of one job. Called from any thread."""

    def encode(self, batch: Sequence[Prepared]) -> Pending:
        """Begin to encode items of one group. Called from one thread."""

    def close(self) -> None:
        """Give memory back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerContext:
    """What a worker tells a producer when it opens it."""

    root: str
    """DATA, absolute."""
    device: str = "cpu"
    """``auto``, ``cpu`` or a torch device."""
    groups: tuple[Group, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run that never reach an entry: ``max_pixels``, ``fold``, ..."""
    warn: Callable[[str], None] = lambda message: None
    missing: Callable[[Job, bytes], tuple[Output, ...]] = lambda job, content: job.outputs
    """Outputs of a job that are still to be made, given the content hash of its inputs. A producer that reads files asks
    once per job, after hashing and before decoding, and prepares nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What was found out about settings before anything is encoded."""

    recipe: FieldRecipe
    label: str
    """How people call the encoder: the model's path, or its name."""
    producer: Mapping[str, Any] = field(default_factory=dict)
    """JSON that the producer is opened with in each worker."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """For the manifest: model path, library versions. Never compared."""
    notes: tuple[str, ...] = ()
    """One sentence each, for the user."""
    needs_torch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a stored item is from the one made again."""

    differs: bool
    largest: float = 0.0
    mean: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """What a field's settings may follow: the current snapshot's recipe and provenance, if there is one."""

    recipe: FieldRecipe | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSize:
    """How the work of a kind is divided. Costs are in the unit of ``FieldPlan.cost``."""

    unit_cost: int = 1 << 20
    """Cost of the jobs that a worker is given at a time."""
    unit_jobs: int = 256
    """Number of those jobs at most."""
    worker_cost: int = 2 << 20
    """Cost that is worth a further worker process on the CPU."""
    cost_bytes: int = 32
    """Host memory that one unit of cost takes while it is prepared and encoded, in bytes at the peak."""
    batch_cost: int = 8 << 20
    """Cost of the items that the encoder gets in one call, if no batch size is given."""
    batch_items: int = 64
    """Number of those items at most."""


class FieldKind:
    """Base class of the field plug-ins; defaults fit a field with one stacked item per sample and entry.

    Subclasses set the class attributes and implement :meth:`recipe_from_json` and :meth:`plan`.
    """

    name: str = ""
    kind: int = 0
    """Byte 0 of every key; ``FIRST_FOREIGN_KIND`` or more for kinds from outside."""
    inputs: tuple[str, ...] = ()
    """Names of the inputs; the first one decides the name and the staleness of a sample."""
    settings: type[Any] = object
    """Frozen dataclass. Its fields become flags by ``metadata={"flag": ..., "help": ..., "metavar": ...}``;
    None always means "not given", and then the current snapshot decides."""
    packing: Literal["entry", "block"] = "entry"
    device: Literal["accelerator", "cpu"] = "accelerator"
    """``cpu``: several worker processes on the CPU; ``accelerator``: one worker per device."""
    needs_header: tuple[str, ...] = ()
    """Sample columns that must be filled before :meth:`plan`: ``original_size``."""
    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    """The field's own columns per row: name -> (numpy dtype, trailing shape). Kept by entry and snapshot."""
    ragged_columns: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    """The same for columns with several values per row (loss spans), stored as (ends, values)."""
    work: WorkSize = WorkSize()
    reasons: Mapping[str, str] = {}
    """Words for failures that the engine finds: ``memory``, ``prepare`` and ``encode`` (it ends its workers there)."""
    describer: str = ""
    """``module:function``: ``(settings, cached: Cached, *, has_text_inputs..., device) -> Described``; imported by the
    pipeline in the build process, must not import torch."""
    producer: str = ""
    """``module:Class``: ``Class(described.producer, recipe, ProducerContext)``; imported in workers only."""

    def recipe_from_json(self, data: Mapping[str, Any]) -> FieldRecipe:
        """Inverse of ``recipe.as_json()``.

        Raises:
            RecipeError: A part is missing or has a field that this version does not know.
        """
        raise TypeError(f"{type(self).__name__} lacks recipe_from_json")

    def plan(self, samples: SampleTable, recipe: FieldRecipe) -> FieldPlan:
        """The items that this recipe makes from these samples."""
        raise TypeError(f"{type(self).__name__} lacks plan")

    def keys(
        self,
        content: NDArray[np.uint8],
        group: NDArray[np.integer],
        variant: NDArray[np.integer],
        groups: Sequence[Group],
        recipe: FieldRecipe,
    ) -> NDArray[np.uint8]:
        """(n, 32) item keys of n contents (n, 16) in their groups; rows of zeros where the content is zeros."""
        keys = np.zeros((len(content), KEY_BYTES), dtype=np.uint8)
        for number, one in enumerate(groups):
            for flip in np.unique(variant).tolist():
                rows = (group == number) & (variant == flip)
                prefix = EntryKey(
                    kind=self.kind, variant=int(flip), dims=one.dims, content=bytes(16), recipe=recipe.recipe_id[:RECIPE_BYTES]
                ).pack()
                keys[rows] = np.frombuffer(prefix, dtype=np.uint8)
        keys[:, 8:24] = content
        keys[~content.any(axis=1)] = 0
        return keys

    def content(self, samples: SampleTable) -> NDArray[np.uint8]:
        """(S, 16) what keys of this field are made from: the content of its only input, or a hash of all of them."""
        first: NDArray[np.uint8] = samples.inputs[self.inputs[0]].content
        return first

    def check(self, group: Group, payload: NDArray[Any], row: Mapping[str, Any], recipe: FieldRecipe) -> str:
        """Why a payload with a correct checksum is wrong all the same (not finite, id out of range); empty: right."""
        if payload.dtype.kind == "f" and not np.isfinite(payload).all():
            return "not finite"
        return ""

    def compare(self, stored: NDArray[Any], made: NDArray[Any], noise: Mapping[str, float], recipe: FieldRecipe) -> Difference:
        """Compare a stored item with the same item made again; ``noise`` is the floor that the build measured."""
        same = stored.shape == made.shape and stored.tobytes() == made.tobytes()
        return Difference(differs=not same, detail="" if same else "the bytes differ")

    def differences(self, cached: FieldRecipe, requested: FieldRecipe) -> list[tuple[str, Any, Any]]:
        """Settings in which two recipes differ: (name, cached, requested)."""
        mine, theirs = cached.as_json(), requested.as_json()
        return [(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]

    def describe(self, recipe: FieldRecipe, rows: Mapping[str, Any]) -> dict[str, Any]:
        """What ``info`` prints about the field: label -> value, in order."""
        return {}

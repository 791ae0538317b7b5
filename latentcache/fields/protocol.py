"""The plug-in of one field kind, and the values that pass between it and the engine.

A field is one named tensor of a sample. The engine (``store``, ``pipeline``, ``verify``, ``loader``, ``cli``) works
on items, entries, bytes, shapes and failures. It asks :class:`FieldKind` and :class:`Producer` for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.dtypes import FLOATS, is_finite
from latentcache.fields.recipe import Difference as Difference
from latentcache.fields.recipe import FieldRecipe as FieldRecipe
from latentcache.fields.recipe import FieldSpec as FieldSpec
from latentcache.fields.recipe import Group as Group
from latentcache.fields.recipe import ReadSpec as ReadSpec
from latentcache.fields.recipe import compare_floats
from latentcache.fields.table import Failure as Failure
from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import RECIPE_BYTES, item_keys
from latentcache.value import Value

Array = NDArray[Any]
Ints = NDArray[np.integer]
Recipe = Any
"""The recipe of a kind, of its class :attr:`FieldKind.recipe`."""


class FieldPlan(Value):
    """The P items that a field needs for a sample table, in build order of the samples."""

    sample: NDArray[np.int32]
    """(P,) row of the sample table."""
    group: NDArray[np.int32]
    """(P,) position in :attr:`groups`."""
    variant: NDArray[np.uint8]
    """(P,)"""
    cost: NDArray[np.int64]
    """(P,) work of one item: pixels, or characters of text."""
    groups: tuple[Group, ...]
    rejected: tuple[tuple[int, Rejected], ...] = ()
    """Samples that this field cannot use, with the row of each in the sample table."""
    notes: tuple[Rejected, ...] = ()

    def keys(self, kind: FieldKind, content: Array, recipe: Recipe, items: Any = slice(None)) -> NDArray[np.uint8]:
        """(n, 32) keys of some items, from the contents (S, 16) of :meth:`FieldKind.content`."""
        contents = np.asarray(content[self.sample[items]])
        return kind.keys(contents, self.group[items], self.variant[items], self.groups, recipe)


# Classes with one object per item are not frozen, which takes three times as long.
@dataclass(slots=True, kw_only=True)
class Output:
    """One item that is to be made from a sample."""

    item: int
    """Its position in the field plan."""
    group: int
    variant: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The field's own columns as stored, if the item is made again to be compared; the producer follows them."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One distinct input and everything that is to be made from it. Travels to workers as JSON."""

    sample: int
    """Row of the sample table."""
    name: str
    """Name of the sample, for messages."""
    inputs: Mapping[str, Any]
    """Input name -> JSON value: ``{"path": ...}`` below the data root, ``{"text": ...}``, or a record, which is a
    ``Record`` in the build's own process."""
    content: bytes = b""
    """Content hash of the field's inputs; empty if it is known only after reading."""
    sample_columns: Mapping[str, Any] = field(default_factory=dict)
    """The sample's columns, such as ``original_size``."""
    outputs: tuple[Output, ...] = ()
    cost: int = 1


@dataclass(slots=True, kw_only=True)
class Prepared:
    """One item that is ready for the encoder."""

    output: Output
    value: Any
    """Value that the producer encodes: pixels, the job, ..."""
    same: bytes = b""
    """16-byte hash of what the encoder gets; an entry with an equal one is copied and not encoded. Empty: none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of the field's own columns that are known now (crop, resize)."""
    num_bytes: int = 0
    """Host memory that ``value`` holds, in bytes."""


@dataclass(slots=True, kw_only=True)
class Made:
    """One encoded item."""

    array: NDArray[Any]
    """In the storage type, of the group's shape; bfloat16 travels as uint16."""
    columns: Mapping[str, Any] = field(default_factory=dict)


Results = Sequence[Made | Failure]
"""One result per item of a batch, in order."""


class Producer:
    """Makes items. Lives in a worker process (or in a thread of the build for encoders without torch).

    Opened as ``Class(described.producer, recipe, context)`` by the thread that calls :meth:`encode`.
    """

    noise: Mapping[str, Any] = MappingProxyType({})
    """Possible difference of two encodings of one input, known after opening; see :func:`join_noise`."""
    device: str = "cpu"
    """Device that the encoder runs on, with the name of the card."""

    def __init__(self, producer: Mapping[str, Any], recipe: Recipe, context: ProducerContext) -> None:
        self.recipe, self.context = recipe, context

    def open(self) -> None:
        """Load what encoding needs; set :attr:`noise` and :attr:`device`. Called by the thread that encodes."""

    def prepare(self, job: Job, data: Mapping[str, bytes]) -> Sequence[Prepared] | Failure:
        """Decode the inputs of one job: one item per output. Called from several threads.

        ``data`` has the bytes of each input that is a file; it is empty if one of them is not there. Without this
        method :meth:`encode` gets the jobs of texts and records as they are. May raise UnusableSampleError.
        """
        return [Prepared(output=output, value=job) for output in job.outputs]

    def encode(self, batch: Sequence[Prepared]) -> Results | Future[Results]:
        """Encode items of one group, now or later. Called from one thread.

        Raises:
            DeviceMemoryError, MemoryError: The engine halves the batch.
            DeviceError: The engine starts another worker.
        """
        raise TypeError(f"{type(self).__name__} lacks encode")

    def host_bytes(self, job: Job) -> int:
        """Host memory that :meth:`prepare` takes for one job at its peak; 0: ``WorkSize.cost_bytes`` decides."""
        return 0

    def close(self) -> None:
        """Free the memory of the device."""


class ProducerContext(Value):
    """Values that a worker gives a producer when it opens it."""

    root: str
    """DATA, absolute."""
    device: str = "cpu"
    """``auto``, ``cpu`` or a torch device."""
    groups: tuple[Group, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run that never reach an entry: such as ``max_pixels``"""
    warn: Callable[[str], None] = lambda message: None
    """Shows the user one sentence."""


class Described(Value):
    """Description of settings, made before anything is encoded."""

    recipe: FieldRecipe
    label: str
    """Name of the encoder for people: the model's path, or its name."""
    producer: Mapping[str, Any] = field(default_factory=dict)
    """JSON that the producer is opened with in each worker."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """For the manifest: model path, library versions. Never compared."""
    notes: tuple[str, ...] = ()
    """One sentence each, for the user."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Settings that a plan shows, with their value and where it is from."""
    needs_torch: bool = False
    demo: bool = False
    """True if the encoder is for trying the tool and not for training."""


class DescribeContext(Value):
    """Values that a describer may use beside the settings."""

    recipe: FieldRecipe | None = None
    """Recipe of the current snapshot, which settings that were not given follow."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Provenance of the current snapshot."""
    samples: SampleTable | None = None
    """None if no data is at hand (``verify``); then the cached recipe says which kind of data it was made for."""
    device: str = "auto"
    ask: Callable[..., Any] | None = None
    """``ask("module:function", **kwargs)`` runs a function in a worker; None if no worker may be started."""
    check: bool = False
    """True: only say which recipe the settings ask for. Nothing is downloaded: EncoderError says what is not here."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a configuration in DATA asks for."""
    followed: Described | None = None
    """Description of the field of ``FieldKind.follows`` in the same build; None: that field is not built."""


class WorkSize(Value):
    """Sizes by which the work of a kind is divided. Costs are in the unit of ``FieldPlan.cost``."""

    unit_cost: int = 1 << 20
    """Cost of the jobs that a worker is given at a time."""
    unit_jobs: int = 256
    """Number of those jobs at most."""
    worker_cost: int = 8 << 20
    """Cost that is worth a further worker process on the CPU."""
    cost_bytes: int = 32
    """Host memory that one unit of cost takes while it is prepared and encoded, in bytes at the peak."""
    batch_cost: int = 8 << 20
    """Cost of the items that the encoder gets in one call, if no batch size is given."""
    batch_items: int = 64
    """Number of those items at most."""


class FieldKind:
    """Base class of the field plug-ins; its defaults fit a field with one stacked item per sample and entry."""

    name: str = ""
    kind: int = 0
    """Byte 0 of every key; 128 to 255 for kinds from outside this package."""
    inputs: tuple[str, ...] = ()
    """Names of the inputs; the first one decides the name and the staleness of a sample."""
    settings: type[Any] = object
    """Frozen dataclass. Its fields become flags by ``metadata={"flag": ..., "help": ..., "metavar": ...}``;
    None always means "not given", and then the current snapshot decides. The first one names the encoder."""
    recipe: type[FieldRecipe] = FieldRecipe
    shape: tuple[int, ...] = (-1,)
    """Shape of the items of :meth:`plan`."""
    packing: Literal["entry", "block"] = "entry"
    device: Literal["accelerator", "cpu"] = "accelerator"
    """``cpu``: several worker processes on the CPU; ``accelerator``: one worker per device."""
    follows: str = ""
    """Field whose settings and options this one takes, unless ``--fields`` names it."""
    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    """The field's own columns per row: name -> (numpy dtype, trailing shape). Kept by entry and snapshot."""
    ragged_columns: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    """The same for columns with several values per row (loss spans), stored as (ends, values)."""
    work: WorkSize = WorkSize()
    sample_columns: tuple[str, ...] = ()
    """Columns that :meth:`plan` and the producer need; ``original_size`` is read from headers before."""
    encoder: str = "encoder"
    """Word for the maker of the items: ``encoder``, ``tokenizer``."""
    describer: str = ""
    """``module:function``: ``(settings, context: DescribeContext) -> Described``, without torch."""
    producer: str = ""
    """``module:Class``: ``Class(described.producer, recipe, ProducerContext)``; imported in workers only."""

    decoder: str = ""
    """``module:function``: ``(recipe, provenance)`` -> what shows an item to a person: of ids ``[(text, True if
    special)]``, of latents (C, F, h, w) the frames (H, W, 3). LatentcacheError: the encoder is not here. Empty: none.
    """

    @property
    def encoder_setting(self) -> str:
        """Name of the setting that names the encoder; empty if there is none."""
        return fields(self.settings)[0].name if is_dataclass(self.settings) else ""

    def resolved(self, fields: Mapping[str, Any], samples: SampleTable, *, held: bool = False) -> Any:
        """Settings of this field in a build, or None; ``fields`` are those given, ``held``: the cache has it."""
        return fields.get(self.name)

    def source_options(self, settings: Any) -> Mapping[str, Any]:
        """Options of the source, as JSON, that settings of this field bring with them: ``{"videos": True}``."""
        return {}

    def completed(self, recipe: Recipe, samples: Callable[[], SampleTable], *, again: bool = False) -> Recipe:
        """The recipe with what depends on the sizes of all samples of DATA, which ``samples`` gives.

        ``again``: decided for these samples, although it is in the recipe.
        """
        return recipe

    def plan(self, samples: SampleTable, recipe: Recipe) -> FieldPlan:
        """The items that this recipe makes from these samples: one of each that has the first input."""
        rows = np.flatnonzero(np.asarray(samples.inputs[self.inputs[0]].file) >= 0).astype(np.int32)
        size = samples.columns.get("characters")
        return FieldPlan(
            sample=rows,
            group=np.zeros(len(rows), dtype=np.int32),
            variant=np.zeros(len(rows), dtype=np.uint8),
            cost=np.ones(len(rows), dtype=np.int64) if size is None else np.add(size[rows], 1, dtype=np.int64),
            groups=(Group(label="", shape=self.shape),),
        )

    def content(self, samples: SampleTable) -> NDArray[np.uint8]:
        """(S, 16) what keys of this field are made from: the content of its inputs; zeros while unknown."""
        return samples.content_of(self.inputs)

    def keys(
        self, content: NDArray[np.uint8], group: Ints, variant: Ints, groups: Sequence[Group], recipe: Recipe
    ) -> NDArray[np.uint8]:
        """(n, 32) keys of items of n contents (n, 16) in their groups; zeros where the content is zeros."""
        dims = [shape.dims for shape in groups]
        return item_keys(content, group, variant, dims, kind=self.kind, recipe=recipe.recipe_id[:RECIPE_BYTES])

    def check(self, array: Array, recipe: Recipe) -> Failure | None:
        """Say why an item, or the values of an entry in one axis, must not be stored: not finite, id out of range."""
        if is_finite(array, recipe.spec.dtype):
            return None
        return Failure(reason="non-finite", detail="it has values that are not finite")

    def compare(self, stored: Array, again: Array, noise: Mapping[str, Any], recipe: Recipe) -> Difference:
        """Compare a stored item with the same item made again, both in the storage type.

        Floats may differ within the noise that the build recorded (:attr:`Producer.noise`), other values in no byte.
        ``noise`` has ``device`` too, the one of ``again``.
        """
        if recipe.spec.dtype in FLOATS:
            types = recipe.compute_dtype, recipe.spec.dtype
            return compare_floats(stored, again, noise, *types, parts=2 if recipe.read_time.posterior else 1)
        same = stored.shape == again.shape and stored.tobytes() == again.tobytes()
        return Difference(differs=not same, detail="" if same else "the bytes differ")

    def describe(self, recipe: Recipe, provenance: Mapping[str, Any]) -> dict[str, str]:
        """Return the lines of ``info`` about the field: label -> text, in order."""
        return {}

    def remarks(self, columns: Mapping[str, Any]) -> list[tuple[str, str, NDArray[np.intp]]]:
        """Return remarks on made items for the user: (reason, sentence, rows), from the field's own columns."""
        return []

    def numbers(self, recipe: Recipe, columns: Mapping[str, Any]) -> Mapping[str, float]:
        """Return numbers that ``info`` and ``build`` print with items, from the field's own columns in a snapshot."""
        return {}

"""Samples of one or several snapshots: their fields joined, their buckets, and the reading of a batch.

Guarantee: a batch holds what the plan decided before the first read; every entry is proven as ``checksum`` says;
tensors are memory of their own, used again only when nothing refers to them. A sample that lacks a field that was
asked for is excluded and counted. A field whose items differ in length is padded to one fixed length, its longest
item, with a mask; while a build still makes items, to the longest item of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.captions import BETWEEN, CaptionVariants
from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.strings import Strings
from latentcache.loader.buffers import BufferPool
from latentcache.loader.formats import CAPTION, METADATA, check_sample_format, sample_format, with_arguments
from latentcache.loader.samples import Part, ReadSettings, Selection, Split, default_fields, prompt_row
from latentcache.loader.values import TORCH, Affine, posterior, restored, without_team
from latentcache.plan.mixing import Mixture
from latentcache.plan.samples import Ints
from latentcache.plan.variants import drawn_of_samples, drawn_variants
from latentcache.store.gather import Scaling
from latentcache.store.reader import Checksum, EntryReader, Gathering, Located, Place
from latentcache.store.snapshot import Snapshot

if TYPE_CHECKING:
    from latentcache.loader.loader import BatchIndex

Turn = tuple[int, int]
"""Seed and epoch: what decides draws and flips."""
Batch = dict[str, Any]
#: The samples themselves, beside the names of fields.
_SAMPLES = ""
Variants = Mapping[str, Ints]
"""First input of fields -> (B,) variant that each sample is served in; without it the first."""
#: Variant of a sample whose texts are left out.
DROPPED = -1
_ANY = CaptionVariants()
#: Columns up to this size are kept in memory; larger ones are read by position.
_RESIDENT_BYTES = 8 << 20


class SampleReader:
    """The samples of several parts, as a loader reads them. Picklable; opens files on first use in each process.

    Args:
        parts: Samples of snapshots.
        asked: Names of fields and of metadata; None: everything that there is.
        settings: What the caller chose about values.
        checksum: ``first`` or ``always``.
        mixture: How often each source is served.
        selection: The same samples, if they were selected already.

    Raises:
        UsageError: A name is unknown, or a setting does not fit what is stored.
    """

    has_labels = False

    def __init__(
        self,
        parts: Sequence[Part],
        asked: Sequence[str] | None,
        settings: ReadSettings,
        *,
        checksum: Checksum = "first",
        mixture: Mixture | None = None,
        selection: Selection | None = None,
    ) -> None:
        self._given = (tuple(parts), asked, settings), {"checksum": checksum, "mixture": mixture}
        self._parts, self._settings, self._checksum = tuple(parts), settings, checksum
        snapshot = parts[0].snapshot
        self.fields, self.metadata = _asked(snapshot, asked)
        self._specs = {name: snapshot.fields[name].spec for name in self.fields}
        found = selection
        if found is None or found.fields != self.fields:
            found = Selection(parts, self.fields, repeats=settings.repeats, mixture=mixture)
        self.index, self.excluded, self.names_of = found.index, found.excluded, found.names_of
        self._joined, self._shapes, self._split = found.joined, found.shapes, found.split
        self._check_values()
        self._lengths = {name: self._longest(name) for name in self.fields if self._specs[name].ragged}
        self._forms = self._forms_of()
        snapshots = [part.snapshot for part in parts]
        self._readers = [EntryReader(one.paths, one, checksum=checksum) for one in snapshots]
        self._open()

    def name(self, row: int) -> str:
        """Name of a sample."""
        return self.names_of(np.array([row]))[0]

    def check_format(self, name: str | None) -> str | None:
        """The format, if it fits; see ``formats.check_sample_format``."""
        fields = self._parts[0].snapshot.fields
        shapes = [dict(shape.shapes) for shape in self._shapes]
        served = {one: (fields[one].recipe, [found[one] for found in shapes if one in found]) for one in self.fields}
        return check_sample_format(name, [*self.fields, *self.metadata], served)

    def formatted(self, batch: Batch, name: str | None) -> Batch:
        """The batch with a trainer's names."""
        return sample_format(batch, name)

    @property
    def plans(self) -> bool:
        """True unless a build still makes items."""
        return all(part.snapshot.pending is None for part in self._parts)

    def works(self, batches: Sequence[BatchIndex]) -> list[SampleBatch]:
        """Batches of one epoch: drawn where a posterior is stored; for a device as stored, else scaled and cast.

        Raises:
            MissingEntryError: A shard is gone.
        """
        turn = batches[0].seed, batches[0].epoch
        rows = np.concatenate([batch.rows for batch in batches])
        ends = np.cumsum([0, *(len(batch.rows) for batch in batches)]).tolist()
        split = self._split(rows)
        variants = self._variants(split, turn)
        items: dict[str, Split] = {
            name: [(number, at, self._items(name, number, local, at, variants)) for number, at, local in split]
            for name in self.fields
        }
        items[_SAMPLES] = [(number, at, self._joined[number].sample[local]) for number, at, local in split]
        sides = np.repeat([self._shapes[batch.bucket].dims[1:] for batch in batches], np.diff(ends), axis=0)
        described = self._described(items, variants, sides, partial(self._captions, split, turn))
        again = self._over(split, self._occurrence) if any(self._draws.values()) else None
        shapes = [dict(self._shapes[batch.bucket].shapes) for batch in batches]
        fields = [
            self._located(name, items[name], ends, [one.get(name, ()) for one in shapes], turn, again)
            for name in self.fields
        ]
        return [
            SampleBatch(self, number, ends[number], ends[number + 1], fields, described)
            for number in range(len(batches))
        ]

    def padded(self, batch: Batch, is_pad: NDArray[np.bool_]) -> Batch:
        """The batch with ``is_pad``, (B,) bool: samples have no labels that could say so."""
        return batch | {"is_pad": torch.from_numpy(is_pad)}

    def meta(self, batch: Batch, is_pad: NDArray[np.bool_] | None) -> dict[str, Any]:
        """Nothing beside epoch and step."""
        return {}

    def finish(self, batch: Batch) -> Batch:
        """Scale, shift and cast, in place where the type stays: on a device, because on the CPU ``read`` has."""
        for name in self._values if self._on_device else ():
            if name in batch:  # else the format has no name for it
                batch[name] = self._valued(name, batch[name])
        return with_arguments(batch)

    def _valued(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """The values that a model trains on, of values as they are stored or drawn."""
        affine, dtype = self._values[name]
        if self._specs[name].restored:
            return restored(stored, dtype)
        if stored.dtype == dtype and not affine.changes:
            return stored
        out = stored
        if stored.dtype != dtype and stored.device.type == "cpu":
            out = torch.from_numpy(self._pool.take(stored.numel() * dtype.itemsize)).view(dtype)
        elif stored.dtype != dtype:
            out = stored.new_empty(0, dtype=dtype)
        return affine.apply(stored, out)

    def fresh(self, *, slots: int = 4, device: str = "cpu") -> SampleReader:
        """The same samples with files and memory of its own, for a kind of device."""
        other = SampleReader.__new__(SampleReader)
        vars(other).update(vars(self))
        other._open(slots, device)
        return other

    def __reduce__(self) -> Any:
        return _opened, (*self._given, self._slots, self._on_device)

    def _open(self, slots: int = 4, device: str = "cpu") -> None:
        self._slots, self._on_device = slots, device != "cpu"
        self._readers = [reader.fresh() for reader in self._readers]
        self._pool = BufferPool(slots * max(len(self.fields), 1), pinned=device == "cuda")
        self._columns: dict[tuple[int, str, str], Any] = {}
        self._scaled = {} if self._on_device else self._scaled_by_read()

    def _scaled_by_read(self) -> dict[str, Scaling]:
        """Fields that are scaled as they are read, by the compiled library."""
        found = {
            name: affine.scaling(spec.dtype)
            for name, (affine, dtype) in self._values.items()
            if not (spec := self._specs[name]).ragged and not self._draws[name] and TORCH[spec.dtype] == dtype
        }
        return {name: scaling for name, scaling in found.items() if scaling is not None}

    def _items(self, name: str, number: int, local: Ints, at: Ints, variants: Variants) -> Ints:
        """(n,) rows of a field: the variants that this epoch serves."""
        rows = self._joined[number].rows[name]
        drawn = variants.get(self._leads[name])
        if drawn is None:
            first: Ints = rows[:, 0][local]
            return first
        own = drawn[at]
        found: Ints = rows[local, np.clip(own, 0, rows.shape[1] - 1)]
        if (own == DROPPED).any():
            found[own == DROPPED] = self._empty[number, name]
        return found

    def _variants(self, split: Split, turn: Turn) -> Variants:
        """First input -> (B,) variant of each sample: one draw for all fields of this input."""
        dropout = self._settings.caption_dropout
        if not self._choices and not dropout:
            return {}
        again = self._over(split, self._occurrence)
        drawn: dict[str, Ints] = {}
        for lead, (name, stored, crops, flips) in self._choices.items():
            if lead == self._own:
                keys = self._over(split, partial(self._item_keys, name, {}))
                drawn[lead] = drawn_variants(keys, turn, stored=stored, crops=crops, flips=flips, occurrence=again)
            else:
                draws = drawn_of_samples(lead, self._over(split, self._sample), turn, occurrence=again)
                drawn[lead] = (draws % self._over(split, partial(self._held, name))).astype(np.int64)
        if dropout:
            draws = drawn_of_samples("dropout", self._over(split, self._sample), turn, occurrence=again)
            held = drawn.get(CAPTION, np.zeros(len(draws), dtype=np.int64))
            drawn[CAPTION] = np.where(draws < np.uint64(min(int(dropout * 2**64), 2**64 - 1)), DROPPED, held)
        return drawn

    def _occurrence(self, number: int, at: Ints, local: Ints) -> NDArray[np.integer]:
        """(n,) number of each among the occurrences of its sample."""
        found = self._joined[number].occurrence
        return np.zeros(len(local), dtype=np.uint32) if found is None else found[local]

    def _sample(self, number: int, at: Ints, local: Ints) -> NDArray[np.int32]:
        """(n,) numbers in the snapshot."""
        return self._joined[number].sample[local]

    def _held(self, name: str, number: int, at: Ints, local: Ints) -> NDArray[np.uint64]:
        """(n,) how many variants of a field each sample has."""
        rows = self._joined[number].rows[name][local]
        held: NDArray[np.uint64] = (rows[:, 1:] != rows[:, :1]).sum(axis=1, dtype=np.uint64) + np.uint64(1)
        return held

    def _located(
        self,
        name: str,
        items: Split,
        ends: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        turn: Turn,
        again: NDArray[np.integer] | None = None,
    ) -> _Located:
        """Where the items of a field are, of batches that end at these places and have items of these shapes."""
        spec, counts, lengths = self._specs[name], np.diff(ends), None
        if spec.ragged:
            lengths = self._over(items, partial(self._elements, name))
            longest = self._lengths[name] or max(int(lengths.max()), 1)
            shapes = [(longest, *self._parts[0].snapshot.fields[name].groups[0].shape[1:])] * len(counts)
        width = numpy_dtype(spec.dtype).itemsize
        size = np.repeat([math.prod(shape) * width for shape in shapes], counts)
        front, room = (np.arange(ends[-1]) - np.repeat(ends[:-1], counts)) * size, np.repeat(counts, counts) * size
        parts = [
            (self._readers[number].located(name, rows, front[at], room[at]), np.searchsorted(at, ends).tolist())
            for number, at, rows in items
        ]
        keys = self._over(items, partial(self._keys, name)) if self._draws[name] else None
        full = [(count, *shape) for count, shape in zip(counts.tolist(), shapes, strict=True)]
        return _Located(name, full, parts, lengths, keys, turn, again)

    def _elements(self, name: str, number: int, at: Ints, rows: Ints) -> Ints:
        """(n,) lengths of items; those of a streaming build are waited for."""
        pending = self._parts[number].snapshot.pending
        if pending is None:
            found: Ints = self._column(number, name, "length")[rows]
            return found
        self._readers[number].ready(name, rows)
        return np.asarray(pending.length(name, rows))

    def _described(
        self, items: Mapping[str, Split], variants: Variants, sides: Ints, draw: Callable[[str], Ints]
    ) -> Batch:
        """Names, keys and other metadata of samples whose buckets have these sides, (N, 2)."""
        batch: Batch = {}
        for name, source, form in self._forms:
            if form == "dims":
                batch[name] = torch.from_numpy(sides)
            elif form == "texts":
                batch[name] = self._texts(source, items[_SAMPLES], variants, draw)
            elif form == "keys":
                keys = {field: self._over(items[field], partial(self._keys, field)) for field in self.fields}
                batch[name] = {field: torch.from_numpy(found) for field, found in keys.items()}
            else:  # of the samples, or of a field
                found = self._over(items[form], partial(self._values_of, source, form))
                batch[name] = torch.from_numpy(found.astype(np.int64))
        return batch

    def _forms_of(self) -> list[tuple[str, str, str]]:
        """Name in a batch, where it is from, and what it is: texts, keys, dims, or the field that has the column."""
        snapshot, found = self._parts[0].snapshot, []
        for name in ("names", *self.metadata):
            source = METADATA.get(name, name)
            if source in ("dims", "keys"):
                form = source
            elif source == "names" or source in snapshot.samples.inputs:
                form = "texts"
            elif source in snapshot.samples.columns:
                form = _SAMPLES
            else:
                form = next(field for field in self.fields if source in snapshot.fields[field].columns)
            found.append((name, source, form))
        return found

    def _over(self, split: Split, get: Callable[[int, Ints, Ints], NDArray[Any]]) -> NDArray[Any]:
        """(B, ...) values of all parts, in the order of the batch; ``get`` is given an element of the split."""
        parts = [get(number, at, local) for number, at, local in split]
        if len(parts) == 1:
            return parts[0]
        found = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype)
        for (_, at, _), part in zip(split, parts, strict=True):
            found[at] = part
        return found

    def _item_keys(self, name: str, variants: Variants, number: int, at: Ints, local: Ints) -> NDArray[np.uint8]:
        """(n, 32) item keys of the items that are served."""
        return self._keys(name, number, at, self._items(name, number, local, at, variants))

    def _values_of(self, source: str, field: str, number: int, at: Ints, rows: Ints) -> NDArray[Any]:
        """(n, 2) of a column of a field, or of the samples."""
        found: NDArray[Any] = self._column(number, field, source)[rows]
        return found

    def _captions(self, split: Split, turn: Turn, source: str) -> Ints:
        """(B,) a number for each sample, to choose one of its texts."""
        again = self._over(split, self._occurrence)
        draws = drawn_of_samples(source, self._over(split, self._sample), turn, occurrence=again)
        return (draws >> np.uint64(1)).astype(np.int64)

    def _texts(self, source: str, samples: Split, variants: Variants, draw: Callable[[str], Ints]) -> list[str]:
        """Names, or texts of an input: what the items that are served were made of; of no item, any of several."""
        found = [""] * sum(len(at) for _, at, _ in samples)
        drawn = variants.get(source, np.zeros(len(found), dtype=np.int64))
        is_free = self._settings.captions and source not in ("names", *variants, *self._leads.values())
        for number, at, rows in samples:
            texts: list[str] = self._strings(number, source).take(rows)
            if source != "names":
                several, made = BETWEEN in "".join(texts), self._text_of(source, number)
                if is_free and several:
                    drawn, is_free = draw(source), False
                if several or made != _ANY.text or drawn.any():  # else each text is what is served
                    served = zip(texts, drawn[at].tolist(), strict=True)
                    texts = ["" if variant == DROPPED else made(text, variant) for text, variant in served]
            if len(samples) == 1:
                return texts
            for place, text in zip(at.tolist(), texts, strict=True):
                found[place] = text
        return found

    def _text_of(self, source: str, number: int) -> Callable[[str, int], str]:
        """Gives the text of a variant, from all texts of a sample."""
        fields = self._parts[number].snapshot.fields
        kinds = [(fields[name].kind, fields[name].recipe) for name in self.fields if self._leads[name] == source]
        kind, recipe = next(iter(kinds), (None, None))
        return _ANY.text if kind is None or recipe is None else partial(kind.text, recipe=recipe)

    def prompt(self, text: str) -> Batch:
        """The items of a prompt that belongs to fields and to no sample, (1, ...) each, with masks.

        Raises:
            UsageError: No field holds it.
        """
        fields, batch, none = self._parts[0].snapshot.fields, Batch(), np.zeros(1, dtype=np.int64)
        for name in self.fields:
            row = prompt_row(fields[name], text)
            if row < 0:
                continue
            found = self._located(name, [(0, none, np.array([row]))], (0, 1), [fields[name].groups[0].shape], (0, 0))
            batch |= SampleBatch(self, 0, 0, 1, [found], {}).finish()
        if not batch:
            stored = sorted(
                {one for field in fields.values() if field.recipe for one in field.recipe.read_time.prompts}
            )
            raise UsageError(
                f"prompt({text!r}): the cache does not hold it",
                why=f"it holds {', '.join(map(repr, stored)) or 'no prompt beside the captions'}",
                fix="run the same `latentcache build` with --empty-prompt or --negative-prompt TEXT",
                slug="no-prompt",
            )
        return batch

    def _keys(self, field: str, number: int, at: Ints, rows: Ints) -> NDArray[np.uint8]:
        """(n, 32) item keys; kept in memory if they are few."""
        found = self._parts[number].snapshot.fields[field]
        if len(found) * 32 > _RESIDENT_BYTES:
            return found.row_keys(rows)
        if (number, field, "key") not in self._columns:
            self._columns[number, field, "key"] = found.row_keys()
        keys: NDArray[np.uint8] = self._columns[number, field, "key"][rows]
        return keys

    def _column(self, number: int, field: str, name: str) -> Any:
        """A column of a field, or of the samples; kept in memory if it is small."""
        if (number, field, name) not in self._columns:
            snapshot = self._parts[number].snapshot
            rows = snapshot.fields[field] if field else None
            column = snapshot.samples.columns[name] if rows is None else rows.columns.get(name)
            column = getattr(rows, name) if column is None else column
            small = math.prod(column.shape) * column.dtype.itemsize <= _RESIDENT_BYTES
            self._columns[number, field, name] = np.asarray(column) if small else column
        return self._columns[number, field, name]

    def _strings(self, number: int, source: str) -> Any:
        """Names or texts of the samples; kept in memory if they are short."""
        if (number, _SAMPLES, source) not in self._columns:
            samples = self._parts[number].snapshot.samples
            found = samples.names if source == "names" else samples.inputs[source].text
            assert found is not None
            ends = found.ends
            if len(ends) and int(ends[-1]) + 8 * len(ends) <= _RESIDENT_BYTES:
                found = Strings(np.asarray(found.data), np.asarray(ends))
            self._columns[number, _SAMPLES, source] = found
        return self._columns[number, _SAMPLES, source]

    def _longest(self, name: str) -> int:
        """The fixed length of a ragged field: the recipe's, else of its longest item; 0 while items are made."""
        if self._specs[name].length:
            return self._specs[name].length
        if any(part.snapshot.pending is not None for part in self._parts):
            return 0
        found = 1
        for part, joined in zip(self._parts, self._joined, strict=True):
            lengths = np.asarray(part.snapshot.fields[name].length)[joined.rows[name].reshape(-1)]
            found = max(found, int(lengths.max(initial=0)))
        return found

    def _check_values(self) -> None:
        """Scaling, draws and flips, as the recipe and the settings say."""
        settings, snapshot = self._settings, self._parts[0].snapshot
        self._values: dict[str, tuple[Affine, torch.dtype]] = {}
        self._draws = dict.fromkeys(self.fields)
        self._own = next(iter(snapshot.samples.inputs), "")
        self._leads: dict[str, str] = {}
        self._choices: dict[str, tuple[str, int, bool, bool]] = {}
        for name in sorted(self.fields, key=list(snapshot.fields).index):  # draws are the same in any order
            recipe, stored = (
                snapshot.fields[name].recipe,
                TORCH[self._specs[name].restored or self._specs[name].dtype],
            )
            kind = snapshot.fields[name].kind
            self._leads[name] = kind.inputs[0] if kind is not None else self._own
            if recipe is not None:
                self._draws[name] = settings.draw_of(recipe.read_time)
                flips = recipe.read_time.flips
                crops = self._specs[name].variants // (2 if flips else 1)
                several = settings.crops if self._leads[name] == self._own else settings.captions
                choices = crops, crops > 1 and several, flips and settings.flip is not False
                if any(choices[1:]):
                    self._choices.setdefault(self._leads[name], (name, *choices))
            spec = recipe.read_time.affine if recipe is not None and settings.scaled else None
            affine, floats = Affine.of(spec), stored.is_floating_point
            if floats or affine.changes:
                self._values[name] = (affine, settings.dtype or (stored if floats else torch.float32))
        if settings.flip and not any(flips for *_, flips in self._choices.values()):
            raise UsageError(
                "flip=True: the cache holds no flips",
                why="latents are never flipped: encoders are not symmetric",
                fix="run the same `latentcache build` with --flip: only flips are encoded",
                slug="no-flips",
            )
        self._check_texts()
        if settings.latents and not any(self._draws.values()):
            recipes = (snapshot.fields[name].recipe for name in self.fields)
            held = {getattr(getattr(recipe, "encoder", None), "posterior", "") for recipe in recipes}
            if settings.latents not in held:
                raise UsageError(
                    f"latents={settings.latents!r}: the cache does not hold posteriors",
                    why="only means and variances can give both",
                    fix="leave latents out, or build with --latents moments (encodes everything again)",
                    slug="no-moments",
                )

    def _check_texts(self) -> None:
        """There is an item for texts that are left out."""
        rate, names = self._settings.caption_dropout, [name for name in self.fields if self._leads[name] == CAPTION]
        held = enumerate(part.snapshot.fields for part in self._parts) if rate else ()
        self._empty = {(number, name): prompt_row(one[name], "") for number, one in held for name in names}
        lacking = next((name for (_, name), row in self._empty.items() if row < 0), "")
        if lacking:
            raise UsageError(
                f"caption_dropout={rate}: {lacking} does not hold the empty prompt",
                fix="run the same `latentcache build` with --empty-prompt: one prompt is encoded",
                slug="no-prompt",
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Located:
    """Where the items of a field of several batches are."""

    name: str
    shapes: Sequence[tuple[int, ...]]
    """(B, ...) of each batch."""
    parts: Sequence[tuple[Located, Sequence[int]]]
    """Where items are, and which of those belong to each batch."""
    lengths: Ints | None
    """(N,) elements of ragged items."""
    keys: NDArray[np.uint8] | None
    """(N, 32) keys of posteriors."""
    turn: Turn
    again: NDArray[np.integer] | None


class SampleBatch:
    """One of several batches that were planned together.

    Args:
        reader: What reads it.
        number: Which one.
        first, last: Its samples among those of all.
        fields: Where items are.
        described: What else is in a batch, of all samples.
    """

    def __init__(
        self,
        reader: SampleReader,
        number: int,
        first: int,
        last: int,
        fields: Sequence[_Located],
        described: Batch,
    ) -> None:
        self._reader, self._number, self._own, self._fields = reader, number, slice(first, last), fields
        self._begun: list[tuple[_Located, torch.Tensor, list[Gathering], Batch]] | None = None
        self._described: Batch = {}
        for name, values in described.items():
            if isinstance(values, dict):
                self._described[name] = {field: part[first:last] for field, part in values.items()}
            else:
                self._described[name] = values[first:last]

    def places(self) -> list[Place]:
        """See ``prefetch.Work``."""
        parts = [part for field in self._fields for part in field.parts]
        return [place for one, ends in parts for place in one.places(*ends[self._number : self._number + 2])]

    def begin(self) -> None:
        """Take memory and have the compiled library begin, if it is there. Errors as :meth:`finish`."""
        self._begun = [self._field(field) for field in self._fields]

    def finish(self) -> Batch:
        """The batch.

        Raises:
            CorruptEntryError: An entry fails its check; it is named with its shard and the fix.
            MissingEntryError: A shard is gone.
        """
        if self._begun is None:
            self.begin()
        begun, self._begun = self._begun or [], None
        batch: Batch = {}
        for field, stored, gatherings, mask in begun:
            for gathering in gatherings:
                gathering.finish()
            batch[field.name] = self._values(field, stored)
            batch |= mask
        return batch | self._described

    def _field(self, field: _Located) -> tuple[_Located, torch.Tensor, list[Gathering], Batch]:
        """(B, ...) of a field, on its way, and (B, L) bool where an element is if items differ in length."""
        reader, name, shape, mask = self._reader, field.name, field.shapes[self._number], Batch()
        spec = reader._specs[name]
        kind, dtype = numpy_dtype(spec.dtype), TORCH[spec.dtype]
        memory = reader._pool.take(math.prod(shape) * kind.itemsize)
        values = memory.view(kind).reshape(shape)
        if field.lengths is not None:
            lengths = field.lengths[self._own]
            for item, length in zip(values, lengths.tolist(), strict=True):
                item[length:] = spec.pad_value
            mask[f"{name}_mask"] = torch.from_numpy(np.arange(shape[1]) < lengths[:, None])
        gatherings = []
        for located, ends in field.parts:
            first, last = ends[self._number : self._number + 2]
            if first < last:
                gatherings.append(Gathering(located, first, last, memory, reader._scaled.get(name)))
                gatherings[-1].begin()
        stored = torch.from_numpy(values)
        return field, stored if stored.dtype == dtype else stored.view(dtype), gatherings, mask  # as bfloat16

    def _values(self, field: _Located, stored: torch.Tensor) -> torch.Tensor:
        """What is served: drawn, scaled and cast, unless that was done or a device does it."""
        reader, name, shape = self._reader, field.name, stored.shape
        draw, values = reader._draws[name], name in reader._values and name not in reader._scaled
        values = values and not reader._on_device
        if draw is None and not values:
            return stored
        with without_team():
            if draw is not None and field.keys is not None:
                half = (shape[0], shape[1] // 2, *shape[2:])
                drawn = torch.from_numpy(reader._pool.take(math.prod(half) * 4)).view(torch.float32).view(half)
                again = None if field.again is None else field.again[self._own]
                posterior(stored, field.keys[self._own], drawn, draw, field.turn, again)
                stored = drawn
            return reader._valued(name, stored) if values else stored


def _opened(given: tuple[Any, ...], more: Mapping[str, Any], slots: int, on_device: bool) -> SampleReader:
    """A reader in another process, which reads the columns by itself; that process may not be able to use CUDA."""
    reader = SampleReader(*given, **more)
    reader._open(slots, "any" if on_device else "cpu")
    return reader


def _asked(snapshot: Snapshot, asked: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fields and metadata of a batch."""
    names = list(dict.fromkeys([asked] if isinstance(asked, str) else asked or ()))
    fields = default_fields(snapshot) if asked is None else tuple(name for name in names if name in snapshot.fields)
    possible = [name for name, source in METADATA.items() if _has(snapshot, fields, source)]
    if asked is None:
        return fields, (*possible, "keys")
    known = [*snapshot.fields, "names", "keys", "meta", *possible]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"fields: {unknown[0]!r} is unknown", fix=f"use some of {', '.join(known)}")
    packed = [name for name in fields if snapshot.fields[name].spec.collate == "pack"]
    if packed:
        raise UsageError(
            f"fields: {packed[0]} holds documents, which have different lengths",
            fix="cache.rows(pack=4096).loader(...)",
        )
    return fields, tuple(name for name in names if name not in fields and name not in ("names", "meta"))


def _has(snapshot: Snapshot, fields: Sequence[str], source: str) -> bool:
    """True if samples or these fields have a column of metadata."""
    samples = snapshot.samples
    text = samples.inputs[source].text if source in samples.inputs else None
    if text is not None or source in samples.columns:
        return True
    stacked = [snapshot.fields[name] for name in fields if not snapshot.fields[name].spec.ragged]
    if source == "dims":
        return any(group.dims[1] * group.dims[2] > 1 for field in stacked for group in field.groups)
    return any(source in field.columns for field in stacked)

"""Samples of one or several snapshots as a loader reads them: fields, what describes them, and their values.

Guarantee: a batch holds what the plan decided before the first read. Every entry is proven as ``checksum`` says.
Tensors are memory of their own, used again only when nothing refers to them. A sample that lacks a field that was
asked for is excluded and counted. A field whose items differ in length is padded to one fixed length, its longest
item, with a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.errors import UsageError, count_of
from latentcache.fields.captions import BETWEEN, CaptionVariants
from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.protocol import ReadSpec
from latentcache.fields.strings import Strings
from latentcache.fields.table import OF_TABLE, table_values
from latentcache.loader.formats import Batch, check_embeddings, check_sample_format, sample_format
from latentcache.loader.memory import BufferPool
from latentcache.loader.prefetch import Reader, ShardUse, read_soon
from latentcache.loader.samples import (
    CAPTION,
    METADATA,
    SAMPLES,
    TABLE,
    TEXTS,
    CachePart,
    Joined,
    Selection,
    prompt_row,
    table_names,
)
from latentcache.loader.values import Affine, Draw, posterior, without_team
from latentcache.plan.documents import Ints
from latentcache.plan.samples import BatchIndex
from latentcache.plan.shuffle import drawn_of_samples
from latentcache.store import gather
from latentcache.store.gather import Scaling
from latentcache.store.reader import Checksum, EntryReader, Located

Epoch = tuple[int, int]
"""Seed and epoch: what decides draws and flips."""
Metadata = dict[tuple[str, str], Any]
"""Field (or the samples) and name of a column -> its values for all samples: (n, ...), or a list of n texts."""
_Located = tuple[tuple[int, ...], Sequence[Located]]
"""(B, ...) of a field in a batch, and where the items of each part are."""
Variants = Mapping[str, Ints]
"""First input of fields -> (n,) variant that each sample is served in; without it the first."""
#: Variant of a sample whose texts are left out.
DROPPED = -1
_ANY = CaptionVariants()
#: Columns up to this size are kept in memory; larger ones are read by position.
_RESIDENT_BYTES = 8 << 20
#: Bits of an occurrence that number the repeats of a sample; the others count how often weights serve each.
_REPEAT_BITS = 16


class _Source:
    """The samples of one part: their columns, and what reads their entries."""

    def __init__(self, part: CachePart, joined: Joined, checksum: Checksum) -> None:
        self.snapshot = part.snapshot
        self.joined = joined
        self.entries = EntryReader(part.snapshot.paths, part.snapshot, checksum=checksum)
        self.empty: dict[str, int] = {}
        """Row of the empty prompt of fields."""
        self._kept: dict[tuple[str, str], Any] = {}

    def keys(self, field: str, rows: Ints) -> NDArray[np.uint8]:
        """(n, 32) item keys."""
        items = self.snapshot.fields[field]
        if len(items) * 32 > _RESIDENT_BYTES:
            return items.row_keys(rows)
        if (field, "key") not in self._kept:
            self._kept[field, "key"] = items.row_keys()
        keys: NDArray[np.uint8] = self._kept[field, "key"][rows]
        return keys

    def column(self, field: str, name: str) -> Any:
        """A column of a field, or of the samples."""
        if (field, name) not in self._kept:
            rows = self.snapshot.fields[field] if field else None
            column = self.snapshot.samples.columns[name] if rows is None else rows.columns.get(name)
            column = getattr(rows, name) if column is None else column
            small = math.prod(column.shape) * column.dtype.itemsize <= _RESIDENT_BYTES
            self._kept[field, name] = np.asarray(column) if small else column
        return self._kept[field, name]

    def strings(self, source: str) -> Any:
        """Names or texts of the samples."""
        if (SAMPLES, source) not in self._kept:
            samples = self.snapshot.samples
            texts = samples.names if source == "names" else samples.inputs[source].text
            assert texts is not None
            ends = texts.ends
            if len(ends) and int(ends[-1]) + 8 * len(ends) <= _RESIDENT_BYTES:
                texts = Strings(np.asarray(texts.data), np.asarray(ends))
            self._kept[SAMPLES, source] = texts
        return self._kept[SAMPLES, source]


class SampleReader(Reader):
    """The samples of several parts, as a loader reads them. Picklable; opens files on first use in each process."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._snapshot = selection.parts[0].snapshot
        self.fields, self.metadata, self.index = selection.fields, selection.metadata, selection.index
        self.excluded, self._settings = selection.excluded, selection.settings
        self._specs = {name: self._snapshot.fields[name].spec for name in self.fields}
        pairs = zip(selection.parts, selection.joined, strict=True)
        self._sources = [_Source(*pair, self._settings.checksum) for pair in pairs]
        self.snapshots = [part.snapshot for part in selection.parts]
        self._read_recipes()
        self._find_empty_prompts()
        self._lengths = selection.lengths
        self.buffers = max(len(self.fields), 1)

    def check_format(self, name: str | None) -> str | None:
        """The format, if it fits; see ``formats.check_sample_format``."""
        columns = [*self.fields, *self.metadata]
        shapes = [dict(bucket.shapes) for bucket in self.index.buckets]
        form = check_sample_format(name, columns, self._snapshot, shapes)
        if form is not None and self._selection.requested is None:
            check_embeddings(form, columns, self._snapshot)
        return form

    def notes(self, title: str) -> list[str]:
        """Sentences on samples that are not served, or are served without a caption."""
        lines = list[str]()
        selection = self._selection
        if self.excluded:
            lacking = ", ".join(selection.lacking()) or "an item of their size"
            excluded = count_of(self.excluded, "samples are not served")
            lines.append(f"{title}: {excluded}, for lack of {lacking}; `latentcache verify` names them")
        if hidden := table_names(self.snapshots)[1]:
            names = ", ".join(hidden)
            lines.append(f"{title}: batches lack the column {names} of the metadata table: rename it there and build")
        count, total, first = selection.without_caption() if "captions" in self.metadata else (0, 0, "")
        if count:
            every = "all" if count == total else f"{count} of {total}"
            lines.append(
                f"{every} samples of {title} are without captions, the first is {first}: batches have '' for them;"
                " add captions to the data and build again, or leave captions out of fields="
            )
        return lines

    def read(self, batch: BatchIndex, pool: BufferPool, *, on_device: bool) -> Batch:
        """A batch: drawn where a posterior is stored; for a device as stored, else scaled and cast."""
        epoch = (batch.seed, batch.epoch)
        count = len(batch.rows)
        parts = self._selection.split(batch.rows)
        chosen = [
            self._chosen(self._sources[number], local, None if batch.again is None else batch.again[at], epoch)
            for number, at, local in parts
        ]
        columns = _merged([at for _, at, _ in parts], [described for _, described in chosen])
        bucket = self.index.buckets[batch.bucket]
        if "target_size" in self.metadata:
            columns[SAMPLES, "target_size"] = np.tile(np.array(bucket.size[1:]), (count, 1))
        shapes, located = dict(bucket.shapes), dict[str, _Located]()
        for name in self.fields:
            items = [
                (self._sources[number], at, rows[name])
                for (number, at, _), (rows, _) in zip(parts, chosen, strict=True)
            ]
            located[name] = self._located(name, items, count, shapes.get(name, ()), columns)
        read_soon([piece for _, entries in located.values() for part in entries for piece in part.byte_ranges()])
        values = self._tensors(located, columns, epoch, pool, on_device=on_device)
        for name in self.metadata:
            if name == "keys":
                values[name] = {field: torch.from_numpy(columns[field, "key"]) for field in self.fields}
            elif (SAMPLES, name) in columns:
                column = columns[SAMPLES, name]
                values[name] = column if isinstance(column, list) else torch.from_numpy(column)
        return values

    def _tensors(
        self,
        located: Mapping[str, _Located],
        columns: Metadata,
        epoch: Epoch,
        pool: BufferPool,
        *,
        on_device: bool = False,
    ) -> Batch:
        """Fields (B, ...) and masks of ragged ones; drawn, scaled and cast, unless a device does it."""
        batch: Batch = {}
        for name, (shape, parts) in located.items():
            draw = self._draws[name]
            is_valued = name in self._values and not on_device
            scaling = self._scalings.get(name) if is_valued and gather.LIBRARY is not None else None
            values = self._stored(name, shape, parts, columns.get((name, "length")), pool, scaling)
            if draw is not None or (is_valued and scaling is None):
                with without_team():
                    if draw is not None:
                        moments, (count, channels, *rest) = values, shape
                        drawn = pool.take(math.prod(shape) // 2 * 4)
                        values = torch.from_numpy(drawn).view(torch.float32).view(count, channels // 2, *rest)
                        posterior(moments, columns[name, "key"], values, draw, epoch, columns[SAMPLES, "again"])
                    if is_valued:
                        values = self._valued(name, values, pool)
            batch[name] = values
        for name, (shape, _) in located.items():
            if (name, "length") in columns:
                batch[f"{name}_mask"] = torch.from_numpy(np.arange(shape[1]) < columns[name, "length"][:, None])
        return batch

    def _stored(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: Sequence[Located],
        lengths: Ints | None,
        pool: BufferPool,
        scaling: Scaling | None,
    ) -> torch.Tensor:
        """(B, ...) of a field in the storage type; ``scaling``: scaled as it is read."""
        spec = self._specs[name]
        stored_type = numpy_dtype(spec.dtype)
        dtype = getattr(torch, spec.dtype)
        memory = pool.take(math.prod(shape) * stored_type.itemsize)
        values = memory.view(stored_type).reshape(shape)
        if lengths is not None:
            for item, length in zip(values, lengths.tolist(), strict=True):
                item[length:] = spec.pad_value
        for located in parts:
            located.read(memory, scaling)
        stored = torch.from_numpy(values)
        return stored if stored.dtype == dtype else stored.view(dtype)  # as bfloat16

    def finish(self, batch: Batch, form: str | None, *, on_device: bool) -> Batch:
        """The batch in a format. On a device, scale, shift and cast, in place where the type stays."""
        for name in self._values if on_device else ():
            batch[name] = self._valued(name, batch[name], None)
        return sample_format(batch, form)

    def _valued(self, name: str, stored: torch.Tensor, pool: BufferPool | None) -> torch.Tensor:
        """Scaled values in the type that a model trains on; ``pool``: memory for values on the CPU."""
        affine, dtype = self._values[name]
        if stored.dtype == dtype and not affine.changes:
            return stored
        out = stored
        if stored.dtype != dtype and pool is not None:
            out = torch.from_numpy(pool.take(stored.numel() * dtype.itemsize)).view(dtype)
        elif stored.dtype != dtype:
            out = stored.new_empty(0, dtype=dtype)
        return affine.apply(stored, out)

    def uses(self, rows: Ints) -> Iterator[ShardUse]:
        """The shards of samples, field by field; of variants those of the first."""
        for number, at, local in self._selection.split(rows):
            source = self._sources[number]
            for name in self.fields:
                items = source.joined.rows[name][local, 0]
                yield ShardUse(number, source.snapshot, at, *source.entries.shards(name, items))

    def close(self) -> None:
        """Close the files; they are opened again when more is read."""
        for source in self._sources:
            source.entries.close()

    def __reduce__(self) -> Any:
        return SampleReader, (self._selection,)

    def _chosen(
        self, source: _Source, local: Ints, times: Ints | None, epoch: Epoch
    ) -> tuple[dict[str, Ints], Metadata]:
        """Rows of each field that n samples of one part are served with, and what describes them.

        ``times`` (n,): how often the epoch served each before.
        """
        joined = source.joined
        sample = joined.sample[local]
        again = None if joined.occurrence is None else joined.occurrence[local]
        if times is not None:  # of a sample that is repeated too, each of its rows has numbers of its own
            again = (times << np.uint32(_REPEAT_BITS)) | (0 if again is None else again)
        variants = self._variants(source, local, sample, again, epoch)
        rows = {name: self._items(source, name, local, variants) for name in self.fields}
        metadata: Metadata = {}
        for name in self.fields:
            if self._draws[name] or "keys" in self.metadata:
                metadata[name, "key"] = source.keys(name, rows[name])
            if self._specs[name].ragged:
                metadata[name, "length"] = source.column(name, "length")[rows[name]]
        if any(self._draws.values()):
            metadata[SAMPLES, "again"] = np.zeros(len(local), dtype=np.uint32) if again is None else again
        for name, holder in self.metadata.items():
            column = METADATA.get(name, name)
            if holder == TEXTS:
                metadata[SAMPLES, name] = self._texts(source, column, sample, variants, again, epoch)
            elif holder == SAMPLES or holder in rows:
                metadata[SAMPLES, name] = source.column(holder, column)[rows.get(holder, sample)].astype(np.int64)
            elif holder == TABLE:
                metadata[SAMPLES, name] = table_values(source.column(SAMPLES, OF_TABLE + name)[sample])
        return rows, metadata

    def _items(self, source: _Source, name: str, local: Ints, variants: Variants) -> Ints:
        """(n,) rows of a field: the variants that this epoch serves."""
        rows = source.joined.rows[name]
        drawn = variants.get(self._leads[name])
        if drawn is None:
            first: Ints = rows[:, 0][local]
            return first
        served: Ints = rows[local, np.clip(drawn, 0, rows.shape[1] - 1)]
        if (drawn == DROPPED).any():
            served[drawn == DROPPED] = source.empty[name]
        return served

    def _variants(self, source: _Source, local: Ints, sample: Ints, again: Ints | None, epoch: Epoch) -> Variants:
        """First input -> (n,) variant of each sample: one draw for all fields of this input."""
        dropout = self._settings.caption_dropout
        drawn = dict[str, Ints]()
        for lead, names in self._choices.items():
            stored = [source.joined.rows[name][local] for name in names]
            counts = [(rows[:, 1:] != rows[:, :1]).sum(axis=1, dtype=np.uint64) for rows in stored]
            held = np.minimum.reduce(counts) + np.uint64(1)  # a field may have lost variants that others have
            drawn[lead] = (drawn_of_samples(lead, sample, epoch, again) % held).astype(np.int64)
        if dropout:
            draws = drawn_of_samples("dropout", sample, epoch, again)
            held = drawn.get(CAPTION, np.zeros(len(draws), dtype=np.int64))
            drawn[CAPTION] = np.where(draws < np.uint64(min(int(dropout * 2**64), 2**64 - 1)), DROPPED, held)
        return drawn

    def _texts(
        self, source: _Source, name: str, sample: Ints, variants: Variants, again: Ints | None, epoch: Epoch
    ) -> list[str]:
        """Names, or texts of an input. A sample with several captions has the one that its embedding was made from.

        Without an embedding in the batch one of them is drawn.
        """
        texts: list[str] = source.strings(name).take(sample)
        if name == "names":
            return texts
        several = BETWEEN in "".join(texts)
        drawn = variants.get(name)
        if drawn is None and several and self._settings.augment and name not in self._leads.values():
            draws = drawn_of_samples(name, sample, epoch, again)
            drawn = (draws >> np.uint64(1)).astype(np.int64)
        if not several and name not in self._made and (drawn is None or not drawn.any()):
            return texts  # each is what is served
        text_of = self._made.get(name, _ANY.text)
        numbers = [0] * len(texts) if drawn is None else drawn.tolist()
        served = zip(texts, numbers, strict=True)
        return ["" if variant == DROPPED else text_of(text, variant) for text, variant in served]

    def _located(
        self,
        name: str,
        items: Sequence[tuple[_Source, Ints, Ints]],
        count: int,
        shape: tuple[int, ...],
        columns: Metadata,
    ) -> _Located:
        """Locate the items of a field for a batch of ``count`` items of this shape."""
        lengths = columns.get((name, "length"))
        if lengths is not None:
            shape = (self._lengths[name], *self._snapshot.fields[name].groups[0].shape[1:])
        size = math.prod(shape) * numpy_dtype(self._specs[name].dtype).itemsize
        front = np.arange(count) * size
        parts = [source.entries.located(name, rows, front[at], count * size) for source, at, rows in items]
        return (count, *shape), parts

    def prompt(self, text: str) -> Batch:
        """The items of a prompt that belongs to fields and to no sample, (1, ...) each, with masks."""
        fields = self._snapshot.fields
        batch = Batch()
        source = self._sources[0]
        none = np.zeros(1, dtype=np.int64)
        for name in self.fields:
            row = np.array([prompt_row(fields[name], text)])
            if row[0] < 0:
                continue
            described: Metadata = {}
            if self._specs[name].ragged:
                described[name, "length"] = source.column(name, "length")[row]
            located = self._located(name, [(source, none, row)], 1, fields[name].groups[0].shape, described)
            batch |= self._tensors({name: located}, described, (0, 0), BufferPool(1))
        if not batch:
            stored = sorted(
                {prompt for field in fields.values() if field.recipe for prompt in field.recipe.read_time.prompts}
            )
            raise UsageError(
                f"prompt({text!r}): the cache does not hold it",
                why=f"it holds {', '.join(map(repr, stored)) or 'no prompt beside the captions'}",
                fix="run the same `latentcache build` with --empty-prompt or --negative-prompt=TEXT",
                slug="no-prompt",
            )
        return batch

    def _read_recipes(self) -> None:
        """Scaling, draws and variants, as the recipes and the settings say."""
        settings, snapshot = self._settings, self._snapshot
        self._values: dict[str, tuple[Affine, torch.dtype]] = {}
        self._scalings: dict[str, Scaling | None] = {}
        """Of fields that the compiled library can scale as they are read."""
        self._draws: dict[str, Draw | None] = {}
        self._leads: dict[str, str] = {}
        self._made: dict[str, Callable[[str, int], str]] = {}
        """Input -> what its fields make of a text for a variant."""
        self._choices: dict[str, list[str]] = {}
        """First input -> the fields that have variants of it."""
        for name in sorted(self.fields, key=list(snapshot.fields).index):  # draws are the same in any order
            kind, recipe, spec = snapshot.fields[name].kind, snapshot.fields[name].recipe, self._specs[name]
            read = ReadSpec() if recipe is None else recipe.read_time
            lead = self._leads[name] = kind.inputs[0] if kind is not None else next(iter(snapshot.samples.inputs))
            if kind is not None and recipe is not None:
                self._made.setdefault(lead, recipe.text)
            self._draws[name] = ("sample" if settings.augment else "mode") if read.posterior else None
            if recipe is not None and settings.augment and spec.variants > 1:
                self._choices.setdefault(lead, []).append(name)
            stored = getattr(torch, spec.dtype)
            scaled = settings.scaled or not stored.is_floating_point  # whole numbers are no values: masks are weights
            affine = Affine.of(read.affine if scaled else None)
            if stored.is_floating_point or affine.changes:
                dtype = settings.dtype or (stored if stored.is_floating_point else torch.float32)
                self._values[name] = affine, dtype
                if not spec.ragged and not self._draws[name] and stored == dtype:
                    self._scalings[name] = affine.scaling(spec.dtype)

    def _find_empty_prompts(self) -> None:
        """Find the rows that caption dropout serves; raise an error if there are none."""
        rate = self._settings.caption_dropout
        names = [name for name in self.fields if self._leads[name] == CAPTION]
        if rate and not names and "captions" not in self.metadata:
            raise UsageError(
                f"caption_dropout={rate}: there are no captions and no embeddings of them",
                fix="leave caption_dropout out, or add captions or embeddings to fields",
                slug="no-prompt",
            )
        for name in names if rate else ():
            for source in self._sources:
                source.empty[name] = prompt_row(source.snapshot.fields[name], "")
            if any(source.empty[name] < 0 for source in self._sources):
                raise UsageError(
                    f"caption_dropout={rate}: {name} does not hold the empty prompt",
                    fix="run the same `latentcache build` with --empty-prompt: one prompt is encoded",
                    slug="no-prompt",
                )


def _merged(at: Sequence[Ints], parts: Sequence[Metadata]) -> Metadata:
    """Columns of several parts as columns of all samples; ``at`` has the positions of each part."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate(at))
    merged = Metadata()
    for name, first in parts[0].items():
        if isinstance(first, list):
            every = [value for part in parts for value in part[name]]
            merged[name] = [every[position] for position in order.tolist()]
        else:
            merged[name] = np.concatenate([part[name] for part in parts])[order]
    return merged

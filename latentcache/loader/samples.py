"""Samples of a snapshot as a plan sees them: their fields joined, their buckets, their repeats. Needs no torch.

Guarantee: a sample that lacks a field that was asked for is excluded and counted. A sample in several sizes is
several, and so is one that its data set repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.protocol import Group
from latentcache.fields.table import OF_TABLE
from latentcache.identity.content import content_hash
from latentcache.plan.batching import Bucket, bucket_of, size_rank
from latentcache.plan.documents import Ints, spread
from latentcache.plan.mixing import Mixture
from latentcache.plan.numbers import real
from latentcache.plan.samples import SampleIndex
from latentcache.store.reader import Checksum
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value

if TYPE_CHECKING:
    import torch

Split = list[tuple[int, Ints, Ints]]
"""Number of a part, positions in the batch, rows in the part (or rows of a field of it)."""
#: Names of metadata in a batch, and the columns that they come from.
CAPTION = "caption"
METADATA = {"captions": CAPTION, "original_size": "original_size", "crop_top_left": "crop", "target_size": "dims"}
#: What has metadata, beside the names of fields: the samples, the texts of their inputs, their bucket, their table.
SAMPLES, TEXTS, BUCKET, TABLE = "", "texts of inputs", "bucket", "metadata table"


class ReadSettings(Value):
    """Options for values: the arguments of ``cache.read(...)`` and ``open_cache``, which say what they mean."""

    scaled: bool = True
    augment: bool = True
    caption_dropout: float = 0.0
    dtype: torch.dtype | None = None
    repeats: bool = True
    checksum: Checksum = "first"

    def __post_init__(self) -> None:
        name = "caption_dropout"
        rate = self.caption_dropout
        rate = real(name, rate, 0, 1, why="it is a probability", fix=f"{name}=0.1")
        object.__setattr__(self, name, rate)  # one of numpy would be computed with in its own width
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise UsageError(f"dtype={self.dtype!r}: must be a floating type of torch", fix="dtype=torch.float32")


@dataclass(frozen=True, slots=True, eq=False)
class CachePart:
    """Samples of one snapshot."""

    snapshot: Snapshot
    samples: NDArray[np.int32] | None = None
    """(n,) sample numbers, rising; None: all."""
    multiple: int = 1
    """Occurrences of each sample in an epoch, beside the repeats of its data set."""

    @property
    def chosen(self) -> NDArray[np.int32]:
        """(n,) sample numbers."""
        if self.samples is not None:
            return self.samples
        return np.arange(len(self.snapshot.samples), dtype=np.int32)

    def occurrences(self, sample: Ints, repeats: bool) -> NDArray[np.int64] | None:
        """(n,) how often an epoch serves each of these samples, with the repeats of its data set; None: each once."""
        column = self.snapshot.samples.columns.get("repeats") if repeats else None
        if column is None:
            return None if self.multiple == 1 else np.full(len(sample), self.multiple)
        return np.asarray(column)[sample].astype(np.int64) * self.multiple


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The n samples of a part that have all fields; a sample that is repeated is several."""

    sample: NDArray[np.int32]
    rows: Mapping[str, NDArray[np.int32]]
    """Field -> (n, V) rows of its variants."""
    groups: Mapping[str, NDArray[np.integer]]
    """Stacked field -> (n,) group of each."""
    excluded: int
    """Samples that lack a field; one in two sizes is two."""
    occurrence: NDArray[np.integer] | None = None
    """(n,) number of each among the occurrences of its sample in an epoch; None: each is served once."""


class Selection:
    """The samples of parts that have some fields, in buckets, as a plan takes them. Picklable.

    ``requested``: names of fields and of metadata; None: everything that there is.
    """

    def __init__(
        self,
        parts: Sequence[CachePart],
        requested: Sequence[str] | None,
        settings: ReadSettings,
        mixture: Mixture | None,
    ) -> None:
        self._given = tuple(parts), requested, settings, mixture
        self.parts, self.settings, self.requested = tuple(parts), settings, requested
        self.fields, self.metadata = _requested([part.snapshot for part in parts], requested)
        """Fields of a batch, and its metadata by name: what has each."""
        self._specs = {name: parts[0].snapshot.fields[name].spec for name in self.fields}
        _check_texts(parts[0].snapshot, self.fields)
        self.joined = [join(part, self.fields, repeats=settings.repeats) for part in parts]
        self.excluded = sum(joined.excluded for joined in self.joined)
        self._starts = np.concatenate(([0], np.cumsum([len(joined.sample) for joined in self.joined])))
        self.lengths = {name: self._longest(name) for name in self.fields if self._specs[name].ragged}
        """Ragged field -> the fixed length of its items in a batch."""
        buckets, bucket = self._buckets()
        self.index = SampleIndex(
            bucket=bucket,
            buckets=buckets,
            names_of=self._names_of,
            identify=self._identify,
            parts=tuple((_name(part), len(joined.sample)) for part, joined in zip(parts, self.joined, strict=True)),
            mixture=None if mixture is None else _of_entries(mixture, self._starts),
            snapshot=parts[0].snapshot.number,
        )

    def __reduce__(self) -> Any:
        return Selection, self._given

    def _names_of(self, rows: Ints) -> list[str]:
        """Names of samples."""
        names: list[str] = [""] * len(rows)
        for number, at, local in self.split(rows):
            sample = self.joined[number].sample[local]
            for position, name in zip(
                at.tolist(), self.parts[number].snapshot.samples.names.take(sample), strict=True
            ):
                names[position] = name
        return names

    def lacking(self) -> list[str]:
        """Fields that some samples lack."""
        fields = [
            (name, part.chosen, part.snapshot.fields[name].sample) for name in self.fields for part in self.parts
        ]
        return list(dict.fromkeys(name for name, chosen, held in fields if not np.isin(chosen, held).all()))

    def without_caption(self) -> tuple[int, int, str]:
        """Count served samples with an empty caption, unless by choice, and all; and name the first."""
        count, total, first = 0, 0, ""
        for part, joined in zip(self.parts, self.joined, strict=True):
            served = np.zeros(len(part.snapshot.samples), dtype=np.bool_)
            served[joined.sample] = True
            total += int(served.sum())
            caption = part.snapshot.samples.inputs.get(CAPTION)
            if caption is None or caption.text is None or part.snapshot.empty_by_choice:
                continue
            empty = np.flatnonzero(served & (np.diff(caption.text.ends, prepend=0) == 0))
            if len(empty) and not count:
                first = part.snapshot.samples.names[int(empty[0])]
            count += len(empty)
        return count, total, first

    def split(self, rows: Ints) -> Split:
        """See :func:`split`."""
        return split(self._starts, rows)

    def _buckets(self) -> tuple[tuple[Bucket, ...], NDArray[np.int32]]:
        """The buckets of all parts, largest first, and (N,) the bucket of each sample."""
        numbers: dict[Bucket, int] = {}
        bucket_of_sample = []
        for part, joined in zip(self.parts, self.joined, strict=True):
            ragged = {name: part.snapshot.fields[name].groups[0] for name in self.lengths}
            code: Any = np.intp(0)  # of each sample, or of all: its position in ``combinations``
            combinations: list[dict[str, Group]] = [{}] if len(joined.sample) else []
            for name, group in joined.groups.items():
                part_groups = part.snapshot.fields[name].groups
                if len(part_groups) == 1:
                    combinations = [{**shared, name: part_groups[0]} for shared in combinations]
                    continue
                code = code * len(part_groups) + group.astype(np.intp)
                counts = np.bincount(code)
                used = np.flatnonzero(counts).tolist()
                pairs = [divmod(number, len(part_groups)) for number in used]
                combinations = [{**combinations[before], name: part_groups[now]} for before, now in pairs]
                code = (np.cumsum(counts > 0) - 1)[code]
            of_part = [
                numbers.setdefault(bucket_of({**groups, **ragged}, self._specs, self.lengths), len(numbers))
                for groups in combinations
            ]
            bucket = np.array([*of_part, 0], dtype=np.int32)[code]
            bucket_of_sample.append(np.broadcast_to(bucket, len(joined.sample)))
        order = tuple(sorted(numbers, key=lambda bucket: (*size_rank(bucket.size), bucket.shapes)))
        rank = np.zeros(max(len(order), 1), dtype=np.int32)
        rank[[numbers[bucket] for bucket in order]] = np.arange(len(order))
        return order, rank[np.concatenate(bucket_of_sample)]

    def _longest(self, name: str) -> int:
        """The fixed length of a ragged field: the recipe's, else of its longest item."""
        if self._specs[name].length:
            return self._specs[name].length
        longest = 1
        for part, joined in zip(self.parts, self.joined, strict=True):
            length = np.asarray(part.snapshot.fields[name].length)[joined.rows[name].reshape(-1)]
            longest = max(longest, int(length.max(initial=0)))
        return longest

    def _identify(self) -> str:
        """Hex digits of the item keys of the first field, in order, and of their buckets."""
        hashes = [content_hash(self.index.bucket.tobytes() + repr(self.index.buckets).encode())]
        lead = self.fields[0] if self.fields else ""
        for part, joined in zip(self.parts, self.joined, strict=True):
            if lead:
                rows = joined.rows[lead][:, 0]
                hashes += [
                    content_hash(part.snapshot.fields[lead].row_keys(rows[start : start + (1 << 16)]).tobytes())
                    for start in range(0, len(rows), 1 << 16)
                ]
            else:
                hashes.append(content_hash(joined.sample.tobytes()))
        return content_hash(b"".join(hashes)).hex()


def _name(part: CachePart) -> str:
    return part.snapshot.paths.root.absolute().name.removesuffix(".latentcache")


def split(starts: Ints, rows: Ints) -> Split:
    """For each part with some of the rows: its number, their positions in the batch, and their rows in the part.

    ``starts`` (parts + 1,): where each part begins among all rows.
    """
    if len(starts) == 2:
        return [(0, np.arange(len(rows)), rows)]
    owner = np.searchsorted(starts, rows, side="right") - 1
    per_part: Split = []
    for number in np.unique(owner).tolist():
        at = np.flatnonzero(owner == number)
        per_part.append((number, at, rows[at] - starts[number]))
    return per_part


def _check_texts(snapshot: Snapshot, fields: Sequence[str]) -> None:
    """Texts of one input are the same in all fields."""
    rules: dict[str, str] = {}
    for name in fields:
        kind, recipe = snapshot.fields[name].kind, snapshot.fields[name].recipe
        lead_input = snapshot.samples.inputs.get(kind.inputs[0]) if kind is not None else None
        if recipe is not None and lead_input is not None and lead_input.text is not None:
            rules.setdefault(recipe.read_time.texts, name)
    if len(rules) > 1:
        first, other = list(rules.values())[:2]
        raise UsageError(
            f"{first} and {other} hold other variants of captions",
            why=" and ".join(rules),
            fix=f"build both again with the same --caption-variants, or leave {other} out of fields=",
            slug="other-captions",
        )


def _of_entries(mixture: Mixture, starts: Ints) -> Mixture:
    """The mixture over the samples that have every field that is asked for; its weights stay."""
    counts = np.diff(starts[np.cumsum([0, *(source.parts for source in mixture)])]).tolist()
    return tuple(replace(source, entries=count) for source, count in zip(mixture, counts, strict=True))


def join(part: CachePart, fields: Sequence[str], *, repeats: bool) -> Joined:
    """The samples of a part that have all of these fields; a sample in several sizes is several, a repeated one too.

    The field with most items decides how many a sample is. Other fields are found by sample, and by size if they have
    several items per sample.
    """
    items = {name: _Items.of(part.snapshot.fields[name]) for name in fields}
    lead = max(items.values(), key=lambda field_items: field_items.largest, default=None)
    sample = part.chosen
    item_of = dict[str, Any]()
    missing = 0
    occurrence = None
    if lead is not None:
        lead_item: Any = np.arange(len(lead.sample), dtype=np.int32)
        if part.samples is not None:
            count = np.bincount(lead.sample, minlength=len(part.snapshot.samples))
            lead_item = spread((np.cumsum(count) - count)[part.samples], count[part.samples])
        item_of = {
            name: lead_item if other is lead else other.items_of(lead, lead_item) for name, other in items.items()
        }
        kept = np.logical_and.reduce([at >= 0 for at in item_of.values()])
        absent = len(part.chosen) - len(lead_item) if lead.largest < 2 else (~np.isin(part.chosen, lead.sample)).sum()
        missing = int(absent + (~kept).sum())
        if not kept.all():
            lead_item = lead_item[kept]
            item_of = {name: at[kept] for name, at in item_of.items()}
        sample = lead.sample[lead_item]
    times = part.occurrences(sample, repeats)
    if times is not None and (times != 1).any():
        repeated = np.repeat(np.arange(len(sample)), times)
        occurrence = (np.arange(len(repeated)) - np.repeat(np.cumsum(times) - times, times)).astype(np.uint32)
        sample = sample[repeated]
        item_of = {name: at[repeated] for name, at in item_of.items()}
    rows = {name: items[name].rows[at] for name, at in item_of.items()}
    groups = {name: items[name].group[at] for name, at in item_of.items() if not items[name].ragged}
    return Joined(sample, rows, groups, missing, occurrence)


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """The items of a field, without their variants: I of them, in the order of their samples."""

    sample: NDArray[np.int32]
    group: NDArray[np.integer]
    size: NDArray[np.int64]
    """(groups,) size of each as one number."""
    rows: NDArray[np.int32]
    """(I, V) rows of the variants; a variant that is missing is the first one."""
    largest: int
    """Items of a sample at most."""
    ragged: bool

    @classmethod
    def of(cls, field: FieldRows) -> _Items:
        sample, group = np.asarray(field.sample), np.asarray(field.group)
        variants = max(field.spec.variants, 1)
        first = np.arange(len(sample), dtype=np.int32)
        rows = first[:, None]
        if variants > 1 or field.spec.first_prompt < 256:
            variant = np.asarray(field.variant)
            first = np.flatnonzero(variant == 0).astype(np.int32)
            rows = np.repeat(first[:, None], variants, axis=1)
            for number in range(1, variants):
                after = (first + number).clip(max=len(sample) - 1)
                there = (variant[after] == number) & (sample[after] == sample[first]) & (group[after] == group[first])
                rows[there, number] = after[there]
            sample = sample[first]
            group = group[first]
        sizes = [(group.dims[1] << 24) + group.dims[2] for group in field.groups] or [0]
        several = bool((sample[1:] == sample[:-1]).any())
        largest = int(np.bincount(sample).max()) if several else min(len(sample), 1)
        return cls(sample, group, np.array(sizes, dtype=np.int64), rows, largest, field.spec.ragged)

    def items_of(self, lead: _Items, lead_item: Ints) -> Ints:
        """(n,) the item of each sample (and size) of items of another field, -1 if there is none."""
        sample = lead.sample[lead_item]
        if not len(self.sample):
            return np.full(len(sample), -1)
        if self.largest < 2:
            table = np.full(max(int(self.sample[-1]), int(sample.max(initial=0))) + 1, -1, dtype=np.int32)
            table[self.sample] = np.arange(len(self.sample))
            return table[sample]
        numbers = np.unique(np.concatenate([self.size, lead.size]), return_inverse=True)[1]  # of the sizes
        count, mine, theirs = len(numbers), numbers[: len(self.size)], numbers[len(self.size) :]
        codes = self.sample.astype(np.int64) * count + mine[self.group]
        wanted = sample.astype(np.int64) * count + theirs[lead.group[lead_item]]
        order = np.argsort(codes, kind="stable")
        at = order[np.searchsorted(codes[order], wanted).clip(max=len(codes) - 1)]
        return np.where(codes[at] == wanted, at, -1)


def prompt_row(field: FieldRows, text: str) -> int:
    """Row of a prompt that belongs to a field and to no sample; -1: the field does not hold it."""
    number = field.recipe.read_time.prompts.get(text, -1) if field.recipe is not None else -1
    rows = np.flatnonzero(np.asarray(field.variant) == number)
    return int(rows[0]) if len(rows) else -1


def _requested(
    snapshots: Sequence[Snapshot], requested: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Fields of a batch, by default all that are not documents, and its metadata with what has it."""
    snapshot = snapshots[0]
    names = list(dict.fromkeys([requested] if isinstance(requested, str) else requested or ()))
    wanted = [name for name in snapshot.fields if requested is None or name in names]
    fields = tuple(name for name in wanted if snapshot.fields[name].spec.collate != "pack")
    if len(fields) < len(wanted) and not (requested is None and fields):
        raise UsageError(
            f"fields: {next(name for name in wanted if name not in fields)} holds documents of different lengths",
            fix="cache.rows(pack=4096).loader(...), or rows(pad=...), rows(chunk=...)",
        )
    holders = {name: _holder(snapshot, fields, column) for name, column in METADATA.items()}
    possible = {name: holder for name, holder in holders.items() if holder is not None} | {"keys": BUCKET}
    possible = dict.fromkeys(table_names(snapshots)[0], TABLE) | possible
    if requested is None:
        return fields, {"names": TEXTS} | possible
    known = [*snapshot.fields, "names", "keys", "meta", *possible]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"fields: {unknown[0]!r} is unknown", fix=f"use some of {', '.join(dict.fromkeys(known))}")
    return fields, {"names": TEXTS} | {name: possible[name] for name in names if name in possible}


def table_names(snapshots: Sequence[Snapshot]) -> tuple[list[str], list[str]]:
    """Columns of metadata tables that all snapshots have: those of a batch, and those that something else hides."""
    columns_of = [
        {(name.removeprefix(OF_TABLE), column.ndim) for name, column in snapshot.samples.columns.items()
         if name.startswith(OF_TABLE)}
        for snapshot in snapshots
    ]  # fmt: skip
    names = sorted({name for name, _ in set.intersection(*columns_of)})
    fields = snapshots[0].fields
    taken = {"names", "keys", "meta", *METADATA, *fields, *(f"{name}_mask" for name in fields)}
    return [name for name in names if name not in taken], [name for name in names if name in taken]


def _holder(snapshot: Snapshot, fields: Sequence[str], column: str) -> str | None:
    """Find the holder of a column of metadata, among the samples and these fields; None: there is none."""
    samples = snapshot.samples
    if column in samples.inputs and samples.inputs[column].text is not None:
        return TEXTS
    if column in samples.columns:
        return SAMPLES
    stacked = {name: snapshot.fields[name] for name in fields if not snapshot.fields[name].spec.ragged}
    if column == "dims":
        sized = any(group.dims[1] * group.dims[2] > 1 for field in stacked.values() for group in field.groups)
        return BUCKET if sized else None
    return next((name for name, field in stacked.items() if column in field.columns), None)

"""Samples of a snapshot as a plan sees them: their fields joined, their buckets, their repeats. Needs no torch.

Guarantee: a sample that lacks a field that was asked for is excluded and counted; a sample in several sizes is
several, and so is one that its data set repeats.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.content import content_hash
from latentcache.plan.batching import Bucket
from latentcache.plan.documents import spread
from latentcache.plan.samples import Ints
from latentcache.store.snapshot import FieldRows, Snapshot

#: Warnings about empty texts that were given in this process: cache, snapshot, column.
_SAID: set[tuple[Path, int, str]] = set()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
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
        """(n,) how often an epoch serves each of these samples; None: each once.

        Args:
            sample: (n,) sample numbers.
            repeats: Count the repeats that the data set gives its samples.
        """
        column = self.snapshot.samples.columns.get("repeats") if repeats else None
        if column is None:
            return None if self.multiple == 1 else np.full(len(sample), self.multiple)
        return np.asarray(column)[sample].astype(np.int64) * self.multiple

    def identity(self) -> tuple[str, bytes, int]:
        """What two equal parts have in common."""
        chosen = b"" if self.samples is None else content_hash(self.samples.tobytes())
        return self.snapshot.fingerprint, chosen, self.multiple


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The n samples of a part that have all fields; a sample that is repeated is several."""

    sample: NDArray[np.int32]
    rows: Mapping[str, NDArray[np.int32]]
    """Field -> (n, V) rows of its variants."""
    groups: Mapping[str, NDArray[np.integer]]
    """Stacked field -> (n,) group of each."""
    excluded: int
    """Samples that lack a field."""
    occurrence: NDArray[np.integer] | None = None
    """(n,) number of each among the occurrences of its sample in an epoch; None: each is served once."""

    def repeated(self, times: NDArray[np.int64] | None) -> Joined:
        """Each sample as often in an epoch as ``times`` (n,) says; None: once."""
        if times is None or not len(times) or (int(times.min()) == int(times.max()) == 1):
            return self
        first = np.cumsum(times) - times
        return replace(
            self,
            sample=np.repeat(self.sample, times),
            rows={name: np.repeat(rows, times, axis=0) for name, rows in self.rows.items()},
            groups={name: np.repeat(group, times) for name, group in self.groups.items()},
            occurrence=(np.arange(int(times.sum())) - np.repeat(first, times)).astype(np.uint32),
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What a bucket means for the fields of a batch."""

    label: str
    dims: tuple[int, int, int]
    """Frames, and height and width in pixels."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Stacked field -> shape of one item."""

    @property
    def bucket(self) -> Bucket:
        """As plans know it."""
        return Bucket.sized(self.label, self.dims)


def join(part: Part, fields: Sequence[str]) -> Joined:
    """The samples of a part that have all of these fields; a sample in several sizes is several.

    The field with most items decides how many a sample is; other fields are found by sample, and by size if they have
    several items per sample.
    """
    items = {name: _Items.of(part.snapshot.fields[name]) for name in fields}
    lead = max(items.values(), key=lambda found: found.largest, default=None)
    if lead is None:
        return Joined(part.chosen, {}, {}, 0)
    if part.samples is None:
        place: Ints = np.arange(len(lead.sample), dtype=np.int32)
    else:
        count = np.bincount(lead.sample, minlength=len(part.snapshot.samples))
        place = spread((np.cumsum(count) - count)[part.samples], count[part.samples])
    others = {name: other for name, other in items.items() if other is not lead}
    found = {name: other.places(lead, place) for name, other in others.items()}
    kept = np.logical_and.reduce([at >= 0 for at in found.values()]) if found else np.True_
    if not kept.all():
        place, found = place[kept], {name: at[kept] for name, at in found.items()}
    sample, found = lead.sample[place], {name: found.get(name, place) for name in items}
    chosen = part.chosen
    missing = len(chosen) - len(sample) if lead.largest < 2 else np.count_nonzero(~np.isin(chosen, sample))
    rows = {name: items[name].rows[at] for name, at in found.items()}
    groups = {name: items[name].group[at] for name, at in found.items() if not items[name].ragged}
    return Joined(sample, rows, groups, int(missing))


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
            variant = field.spec.variant_of(field.variant)
            first = np.flatnonzero(variant == 0).astype(np.int32)
            rows = np.repeat(first[:, None], variants, axis=1)
            for number in range(1, variants):
                after = (first + number).clip(max=len(sample) - 1)
                there = (variant[after] == number) & (sample[after] == sample[first]) & (group[after] == group[first])
                rows[there, number] = after[there]
            sample, group = sample[first], group[first]
        sizes = [(one.dims[1] << 24) + one.dims[2] for one in field.groups] or [0]
        several = bool((sample[1:] == sample[:-1]).any())
        largest = int(np.bincount(sample).max()) if several else min(len(sample), 1)
        return cls(sample, group, np.array(sizes, dtype=np.int64), rows, largest, field.spec.ragged)

    def places(self, lead: _Items, place: Ints) -> Ints:
        """(n,) the item of each sample (and size) of items of another field, -1 if there is none."""
        sample = lead.sample[place]
        if not len(self.sample):
            return np.full(len(sample), -1)
        if self.largest < 2:
            table = np.full(max(int(self.sample[-1]), int(sample.max(initial=0))) + 1, -1, dtype=np.int32)
            table[self.sample] = np.arange(len(self.sample))
            return table[sample]
        own, wanted = _together(self.sample, self.size[self.group]), _together(sample, lead.size[lead.group[place]])
        order = np.argsort(own, kind="stable")
        at = order[np.searchsorted(own[order], wanted).clip(max=len(own) - 1)]
        return np.where(own[at] == wanted, at, -1)


def prompt_row(field: FieldRows, text: str) -> int:
    """Row of a prompt that belongs to a field and to no sample; -1: the field does not hold it."""
    number = field.recipe.read_time.prompts.get(text, -1) if field.recipe is not None else -1
    found = np.flatnonzero(np.asarray(field.variant) == number)
    return int(found[0]) if len(found) else -1


def _together(sample: Ints, dims: Ints) -> NDArray[Any]:
    """Sample and size as one value that can be sorted."""
    both = np.empty(len(sample), dtype=[("sample", np.int64), ("dims", np.int64)])
    both["sample"], both["dims"] = sample, dims
    return both


def default_fields(snapshot: Snapshot) -> tuple[str, ...]:
    """Fields that can be in a batch of samples: all but documents, which become rows first.

    Raises:
        UsageError: There are only documents.
    """
    names = tuple(name for name, field in snapshot.fields.items() if field.spec.collate != "pack")
    if not names:
        raise UsageError(
            "the cache holds documents, which have different lengths",
            fix="cache.rows(pack=4096).loader(...), or rows(pad=...), rows(chunk=...)",
        )
    return names


def warn_of_empty(texts: Mapping[str, str], snapshots: Sequence[Snapshot]) -> None:
    """Say once in a process for each snapshot that texts of a batch are empty, such as captions."""
    for snapshot in snapshots:
        for name, source in texts.items():
            about = snapshot.paths.root, snapshot.number, name
            text = snapshot.samples.inputs[source].text if source in snapshot.samples.inputs else None
            if text is None or about in _SAID:
                continue
            _SAID.add(about)
            count, first = text.empty()
            if count:
                every = "all" if count == len(text) else f"{count} of {len(text)}"
                warnings.warn(
                    f"{every} samples of {snapshot.paths.root.name} are without {name}, the first is"
                    f" {snapshot.samples.names[first]}: batches have '' for them; add {name} to the data and build"
                    f" again, or leave {name} out of fields=",
                    stacklevel=3,
                )

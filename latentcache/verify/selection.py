"""Choose the samples and entries that a check reads, and state what a clean part says of the whole.

``n/t`` takes the entries whose key falls into the n-th of t slices. Keys hold content hashes, so t runs read every
entry once, and new entries move no other. ``x%`` and ``N`` draw samples at random by a seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.key import CONTENT_SLICE
from latentcache.store.snapshot import Snapshot
from latentcache.value import Value

_CERTAINTY = 0.95
_GRAMMAR = re.compile(r"([0-9]{1,9})/([0-9]{1,9})|([0-9]{1,3}(?:\.[0-9]{1,9})?)%|([0-9]{1,12})")
_FORMS = "expected n/t (slice n of t), x%, or a number of samples"


class Selection(Value):
    """A part of a cache: slice ``amount`` (from 1) of ``slices``, or random samples up to ``amount`` of ``unit``."""

    amount: float
    unit: str = "samples"
    """``slice``, ``samples``, or ``percent`` of the samples."""
    slices: int = 0
    seed: int = 0


class Depth(Value):
    """Extent of a check."""

    full: bool = False
    """Read every payload and every source."""
    selection: Selection | None = None
    """Read payloads and sources of this part only."""
    untrusted: bool = False
    """The cache comes from elsewhere: links in it are errors, and the data that it names is not read."""
    reencode: int = 0
    """Samples to encode again."""
    seed: int = 0
    """Seed for choosing the samples to encode again."""

    @property
    def mode(self) -> str:
        """``sample``, ``full`` or ``fast``."""
        return "sample" if self.selection is not None else "full" if self.full else "fast"

    @property
    def reads(self) -> bool:
        """True if payloads and sources are read."""
        return self.mode != "fast"


class Chosen(NamedTuple):
    """Selected samples and entries of a snapshot with S samples."""

    samples: NDArray[np.bool_]
    """(S,)"""
    entries: Mapping[str, NDArray[np.bool_]]
    """(E,) for each field: entries that are read."""


def parse_selection(text: str, seed: int = 0) -> Selection:
    """Read ``3/10``, ``2%`` or ``500``."""
    parts = _GRAMMAR.fullmatch(text)
    if parts and parts[1] and 1 <= int(parts[1]) <= int(parts[2]):
        return Selection(amount=int(parts[1]), unit="slice", slices=int(parts[2]), seed=seed)
    if parts and parts[3] and 0 < float(parts[3]) <= 100:
        return Selection(amount=float(parts[3]), unit="percent", seed=seed)
    if parts and parts[4] and int(parts[4]):
        return Selection(amount=int(parts[4]), seed=seed)
    raise UsageError(
        "names no part of the samples", argument="sample", value=text, why=_FORMS, fix="give 1/7, 2% or 300"
    )


def choose(snapshot: Snapshot, selection: Selection | None) -> Chosen:
    """Select samples and entries of a snapshot; everything without a selection."""
    total, fields = len(snapshot.samples), snapshot.fields
    if selection is None:
        every = {name: np.ones(len(rows.key), dtype=np.bool_) for name, rows in fields.items()}
        return Chosen(np.ones(total, dtype=np.bool_), every)
    if selection.unit == "slice":
        entries = {name: _slice(np.asarray(rows.key), selection) for name, rows in fields.items()}
        samples = np.zeros(total, dtype=np.bool_)
        for name, rows in fields.items():
            samples[np.asarray(rows.sample)[entries[name][np.asarray(rows.entry)]]] = True
        return Chosen(samples, entries)
    samples, entries = _drawn(snapshot, selection), {}
    for name, rows in fields.items():
        entries[name] = np.zeros(len(rows.key), dtype=np.bool_)
        entries[name][np.asarray(rows.entry)[samples[np.asarray(rows.sample)]]] = True
    return Chosen(samples, entries)


def _slice(keys: NDArray[np.uint8], selection: Selection) -> NDArray[np.bool_]:
    """(E,) entries in the slice: by the first half of the content hash, so variants of one input stay together."""
    numbers = np.ascontiguousarray(keys[:, CONTENT_SLICE][:, :8]).view("<u8").ravel()
    chosen: NDArray[np.bool_] = numbers % np.uint64(selection.slices) == np.uint64(selection.amount - 1)
    return chosen


def _drawn(snapshot: Snapshot, selection: Selection) -> NDArray[np.bool_]:
    """(S,) True for as many random samples as are asked for."""
    total = len(snapshot.samples)
    order = np.random.default_rng(selection.seed).permutation(total)
    count = math.ceil(selection.amount * total / 100 if selection.unit == "percent" else selection.amount)
    chosen = np.zeros(total, dtype=np.bool_)
    chosen[order[:count]] = True
    return chosen


def confidence(looked: int, total: int, unit: str = "samples") -> str:
    """State in one sentence what ``looked`` clean units out of ``total`` say of all of them."""
    if looked >= total:
        return f"{looked} {unit} clean: all of them"
    # So many wrong ones would be missed in one of twenty draws with replacement; a draw without it misses fewer.
    percent = 100 * (1 - (1 - _CERTAINTY) ** (1 / looked)) if looked else 100
    return f"{looked} {unit} clean: 95 % sure that less than {percent:.2g} % of the {unit} are wrong"

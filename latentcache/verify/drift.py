"""Encodes some samples again and says which stored latents lie further from the new ones than noise does.

Decides which samples, and how much noise is allowed. Differences are parts of the latents' standard deviation (std):
that of the entry, or the median of all that were drawn where that is larger, so that a flat picture is no drift. A
largest difference beyond ``tolerance().largest`` or a mean one beyond ``.mean`` is ``drift``. Encoding itself is the
caller's: nothing here knows a model. Cost: one pass of the encoder over N samples; a few numbers are kept of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import MissingEntryError, StoreError
from latentcache.recipe import EncoderSpec, Recipe
from latentcache.store.column_files import parts
from latentcache.store.generation import Generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader
from latentcache.verify.entries import Checked
from latentcache.verify.findings import PROBLEMS, Finding, Reencoded, Tolerance
from latentcache.verify.selection import Deadline, confidence
from latentcache.verify.sources import SourcesChecked

#: Samples encoded before the clock is looked at.
_CHUNK = 16
#: How much of a build's own noise is allowed: of the largest difference, and of the mean one.
_OF_FLOOR = (8.0, 4.0)
#: Spacing of numbers next to 1 in each storage type.
_STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


class FreshLatents(Protocol):
    """One entry, encoded again."""

    @property
    def row(self) -> int:
        """Of the generation."""

    @property
    def latents(self) -> NDArray[Any]:
        """As they would be stored; bfloat16 as uint16. Without meaning where there is a ``cause``."""

    @property
    def same_pixels(self) -> bool:
        """Whether the file decodes to the pixels that were encoded then."""

    @property
    def cause(self) -> str:
        """Why it could not be encoded: ``source-changed``, or a cause word; empty where it was."""

    @property
    def detail(self) -> str:
        """The words to that."""


class Reencode(Protocol):
    """An encoder and all that leads to it; none of this folder's business."""

    def spec(self, generation: Generation) -> EncoderSpec:
        """What the model of a generation is now, from its files. Raises EncoderError where it is not at hand."""

    def encode(self, generation: Generation, root: Path, rows: Sequence[int]) -> Iterator[FreshLatents]:
        """Encode the sources of these rows below ``root``, each as it was placed then, in any order."""

    @property
    def device(self) -> str:
        """Where it runs; known once something was encoded."""


#: Least that is allowed: above what batches, threads and kernels differ by in bfloat16 (0.015 std at most) and what
#: bfloat16 differs from float32 by (0.055), far below one pixel of shift (4) or tiles (2.4).
LEAST = Tolerance(largest=0.1, mean=0.02)
#: The same on another device in bfloat16, where each lies 2 % (root mean square) from float32 in its own way.
ELSEWHERE_IN_BFLOAT16 = Tolerance(largest=0.5, mean=0.06)


def tolerance(made: Mapping[str, Any], recipe: Recipe, device: str) -> Tolerance:
    """What is still noise between a cache and an encoder.

    Args:
        made: The ``provenance`` of the manifest; one that records no noise is taken for one of another device.
        recipe: Of the cache.
        device: Where the encoder runs now.
    """
    elsewhere = made.get("devices") != [device]
    least = ELSEWHERE_IN_BFLOAT16 if elsewhere and recipe.encoder.compute_dtype == "bfloat16" else LEAST
    floor = made.get("noise_floor", {"largest": 0.0, "mean": 0.0})
    return Tolerance(
        largest=max(least.largest, _OF_FLOOR[0] * floor["largest"]),
        mean=max(least.mean, _OF_FLOOR[1] * floor["mean"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far two latents lie from each other, in their own unit."""

    largest: float
    mean: float
    std: float
    peak: float
    """Largest stored value, without its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    row: int
    same_pixels: bool
    parts: tuple[Apart, ...]


@dataclass(slots=True, kw_only=True)
class Encoding:
    """One round of encoding again; adds what it finds to ``checked`` and ``sources``."""

    layout: CacheLayout
    generation: Generation
    root: Path
    checked: Checked
    sources: SourcesChecked
    reencode: Reencode
    _compared: list[_Compared] = field(default_factory=list)
    _failed: set[int] = field(default_factory=set)
    """Samples that could not be compared."""

    def __call__(self, fine: NDArray[np.bool_], number: int, seed: int, deadline: Deadline) -> Reencoded:
        """Encode ``number`` of the samples that are ``fine`` (S,) again, all entries of each."""
        drawn, done = draw(fine, number, seed), 0
        reader = EntryReader(self.layout, self.generation)
        while done < len(drawn) and not deadline.over:
            part = drawn[done : done + _CHUNK]
            rows = _rows_of(self.generation, part)
            for fresh in self.reencode.encode(self.generation, self.root, rows):
                self._compare(reader, fresh)
            done += len(part)
        recipe = self.generation.recipe
        allowed = tolerance(self.generation.manifest["provenance"], recipe, self.reencode.device)
        scales = _scales(self._compared)
        apart = [_in_std(item, scales) for item in self._compared]
        drifted = 0
        for item, (largest, mean) in zip(self._compared, apart, strict=True):
            if _beyond(item, scales, allowed, _STEP[recipe.encoder.storage_dtype]):
                self._drift(item, largest, mean, allowed)
                drifted += 1
        samples = done - len(self._failed)
        clean = samples and not drifted and not self._failed
        return Reencoded(
            samples=samples,
            entries=len(apart),
            asked=number,
            seed=seed,
            drifted=drifted,
            device=self.reencode.device,
            largest=max((pair[0] for pair in apart), default=0.0),
            mean=max((pair[1] for pair in apart), default=0.0),
            tolerance=allowed,
            confidence=confidence(samples, int(fine.sum())) if clean else "",
        )

    def _compare(self, reader: EntryReader, fresh: FreshLatents) -> None:
        """Read what is stored and note how far it lies from what was encoded now."""
        sample = int(self.generation.rows.sample[fresh.row])
        if fresh.cause:
            self._failed.add(sample)
            self._cannot(fresh, sample)
            return
        try:
            kept = as_floats(reader.read(fresh.row)[1])
        except MissingEntryError as error:
            self._failed.add(sample)
            self.checked.add(self.generation, fresh.row, "missing", "entry-lost", found=error.what)
        except StoreError as error:
            self._failed.add(sample)
            self.checked.add(self.generation, fresh.row, "corrupt", "payload", found=error.why or error.what)
        else:
            halves = 2 if self.generation.recipe.encoder.posterior == "moments" else 1
            sides = (np.split(side, halves) for side in (kept, as_floats(fresh.latents)))
            parts = tuple(apart(old, new) for old, new in zip(*sides, strict=True))
            self._compared.append(_Compared(row=fresh.row, same_pixels=fresh.same_pixels, parts=parts))

    def _cannot(self, fresh: FreshLatents, sample: int) -> None:
        """A file with other bytes than its stat says is stale; of one that cannot be encoded nothing is known."""
        if fresh.cause != "source-changed":
            found = f"{fresh.cause}: {fresh.detail}"
            self.checked.add(self.generation, fresh.row, "unverifiable", "not-encoded", found=found)
            return
        name, content = self.generation.samples.names[sample], self.generation.samples.content[sample]
        self.sources.by_sample[sample] = Finding(
            category="stale",
            reason="source-changed",
            path=name,
            expected=content.tobytes().hex(),
            found=fresh.detail,
        )

    def _drift(self, item: _Compared, largest: float, mean: float, allowed: Tolerance) -> None:
        found = f"up to {largest:.2g} std, {mean:.2g} on average"
        if not item.same_pixels:
            found += "; the same file decodes to other pixels now"
        reason = "latents" if item.same_pixels else "pixels"
        self.checked.add(self.generation, item.row, "drift", reason, expected=str(allowed), found=found)


def _rows_of(generation: Generation, samples: NDArray[np.intp]) -> list[int]:
    """The rows of some samples."""
    sample, rows = generation.rows.sample, list[int]()
    for part in parts(len(sample)):
        rows += (np.flatnonzero(np.isin(sample[part], samples)) + part.start).tolist()
    return rows


def with_model(generation: Generation, asked: Recipe | None, reencode: Reencode) -> Recipe | None:
    """What is asked for, with the model as it is now: other weights than then are another recipe, and no drift."""
    recipe, spec = asked or generation.recipe, reencode.spec(generation)
    if recipe.encoder == generation.recipe.encoder != spec:
        return replace(recipe, encoder=spec)
    return asked


def draw(fine: NDArray[np.bool_], number: int, seed: int) -> NDArray[np.intp]:
    """Numbers of the samples to encode, in an order that has nothing to do with theirs.

    One sample more or less that is fine moves no other in or out but the last.
    """
    order = np.random.default_rng(seed).permutation(len(fine))
    return order[fine[order]][:number].astype(np.intp)


def fine_samples(
    looked: NDArray[np.bool_], checked: Checked, sources: SourcesChecked, *, same_recipe: bool
) -> NDArray[np.bool_]:
    """(S,) the samples that are worth encoding again: what is wrong already stays wrong."""
    fine = looked & same_recipe
    wrong = [number for number, own in checked.damage.items() if own]
    wrong += [number for number, finding in sources.by_sample.items() if finding.category in PROBLEMS]
    fine[wrong] = False
    return fine


def as_floats(latents: NDArray[Any]) -> NDArray[np.float32]:
    """Stored values as float32; bfloat16 is the upper half of one."""
    if latents.dtype == np.uint16:
        return (latents.astype(np.uint32) << 16).view(np.float32)
    return latents.astype(np.float32)


def apart(kept: NDArray[np.float32], fresh: NDArray[np.float32]) -> Apart:
    """How far two latents of one shape lie from each other; infinitely far where one is not finite."""
    if kept.shape != fresh.shape or not (np.isfinite(kept).all() and np.isfinite(fresh).all()):
        return Apart(largest=math.inf, mean=math.inf, std=0.0, peak=0.0)
    wide = kept.astype(np.float64)
    difference = np.abs(wide - fresh)
    return Apart(
        largest=float(difference.max()),
        mean=float(difference.mean()),
        std=float(wide.std()),
        peak=float(np.abs(wide).max()),
    )


def _scales(compared: Sequence[_Compared]) -> tuple[float, ...]:
    """The median std of each part."""
    parts = zip(*(item.parts for item in compared), strict=True)
    return tuple(float(np.median([part.std for part in column])) for column in parts)


def _in_std(item: _Compared, scales: Sequence[float]) -> tuple[float, float]:
    """Largest and mean difference of an entry in std, of the part where they are largest."""
    pairs = list(zip(item.parts, scales, strict=True))
    largest = max(_ratio(part.largest, max(part.std, scale)) for part, scale in pairs)
    return largest, max(_ratio(part.mean, max(part.std, scale)) for part, scale in pairs)


def _ratio(difference: float, scale: float) -> float:
    return difference / scale if scale else (math.inf if difference else 0.0)


def _beyond(item: _Compared, scales: Sequence[float], allowed: Tolerance, step: float) -> bool:
    """Whether a part differs by more than noise, and by more than two roundings of its largest value."""
    for part, scale in zip(item.parts, scales, strict=True):
        unit, rounding = max(part.std, scale), 2 * step * part.peak
        if part.largest > max(allowed.largest * unit, rounding) or part.mean > max(allowed.mean * unit, rounding):
            return True
    return False

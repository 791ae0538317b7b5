"""Encode some samples again and note the stored items that differ by more than noise.

Draws the samples; the kind of a field decides what noise is (``kind.compare``), the caller encodes. One field after
the other, so that one model is loaded at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.fields.protocol import Failure
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import Snapshot
from latentcache.verify.entries import Store, View, words
from latentcache.verify.findings import Reencoded
from latentcache.verify.selection import confidence

#: Samples encoded before the clock is looked at.
_CHUNK = 64


class Remade(Protocol):
    """One item, encoded again."""

    @property
    def row(self) -> int:
        """Of the field."""

    @property
    def array(self) -> NDArray[Any] | None:
        """As it would be stored; bfloat16 as uint16. None if there is a failure."""

    @property
    def failure(self) -> Failure | None:
        """Why it could not be encoded; the reason ``source-changed`` says that the input is another one now."""

    @property
    def same(self) -> bool:
        """True if the input of the encoder equals the input of the build."""


class Reencode(Protocol):
    """Encoders and all that leads to them, opened by the caller."""

    @property
    def device(self) -> str:
        """Where it runs; empty before something was encoded."""

    def encode(self, snapshot: Snapshot, root: Path, field: str, rows: NDArray[np.intp], /) -> Iterable[Remade]:
        """Encode the inputs of these rows again, in any order."""


class _Round:
    """One round of encoding again."""

    def __init__(self, store: Store, reencode: Reencode, root: Path, over: Callable[[], bool]) -> None:
        self.store, self.reencode, self.root, self.over = store, reencode, root, over
        self.failed: set[int] = set()
        self.entries = self.drifted = 0
        self.largest = self.mean = 0.0

    def field(self, reader: EntryReader, view: View, drawn: NDArray[np.intp]) -> int:
        """Compare all items of a field of these samples; returns how many samples there was time for."""
        rows = np.flatnonzero(np.isin(view.sample, drawn))
        for start in range(0, len(drawn), _CHUNK):
            if self.over():
                return start
            part = rows[np.isin(view.sample[rows], drawn[start : start + _CHUNK])]
            if len(part):
                for remade in self.reencode.encode(self.store.snapshot, self.root, view.name, part):
                    self._compare(reader, view, remade)
        return len(drawn)

    def _compare(self, reader: EntryReader, view: View, remade: Remade) -> None:
        rows, row = view.rows, np.array([remade.row])
        sample, entry = view.sample[row], view.entry[row]
        if remade.failure is not None or remade.array is None:
            self.failed.add(int(sample[0]))
            self._cannot(view, remade, sample)
            return
        try:
            stored = reader.read(view.name, remade.row)
        except StoreError as error:
            self.failed.add(int(sample[0]))
            self.store.note(view, "corrupt", "payload", entry, found=words(error))
            return
        assert rows.kind is not None
        assert rows.recipe is not None
        noise = {**rows.noise, "device": self.reencode.device}
        difference = rows.kind.compare(stored, remade.array, noise, rows.recipe)
        self.entries += 1
        self.largest, self.mean = max(self.largest, difference.largest), max(self.mean, difference.mean)
        if not difference.differs:
            return
        self.drifted += 1
        # A block holds items of other samples: it has to go, and only this sample has drifted.
        self.store.damage.wrong.setdefault(view.name, {}).setdefault("drift", []).append(entry)
        self.store.damage.intact[view.name].append(entry)
        self.store.findings.add(
            "drift",
            "encoder-output" if remade.same else "encoder-input",
            sample,
            field=view.name,
            keys=rows.row_keys(row),
            found=difference.detail + ("" if remade.same else "; the same file is read as another input now"),
        )

    def _cannot(self, view: View, remade: Remade, sample: NDArray[np.integer]) -> None:
        """An input with other bytes is stale; the state of one that cannot be encoded is unknown."""
        failure = remade.failure or Failure(reason="not-encoded")
        if failure.reason == "source-changed":
            self.store.findings.add("stale", "source-changed", sample, found=failure.detail)
        else:
            text = f"{failure.reason}: {failure.detail}" if failure.detail else failure.reason
            self.store.findings.add("unverifiable", "not-encoded", sample, field=view.name, found=text)


def reencode_samples(
    store: Store,
    reencode: Reencode,
    root: Path,
    fine: NDArray[np.bool_],
    number: int,
    seed: int,
    over: Callable[[], bool],
) -> Reencoded:
    """Encode ``number`` of the samples that are ``fine`` (S,) again, all fields of each, and note what differs.

    Raises:
        EncoderError: The model is not at hand, or cannot be used.
        DeviceError: Its device failed, or does not exist.
    """
    drawn = draw(fine, number, seed)
    again = _Round(store, reencode, root, over)
    done = len(drawn)
    reader = EntryReader(store.paths, store.snapshot)
    try:
        for view in store.views.values():
            if len(drawn) and view.rows.kind is not None and view.rows.recipe is not None:
                done = min(done, again.field(reader, view, drawn))
    finally:
        reader.close()
    samples = max(done - len(again.failed), 0)
    clean = samples and not again.drifted and not again.failed
    return Reencoded(
        asked=number,
        seed=seed,
        samples=samples,
        entries=again.entries,
        drifted=again.drifted,
        device=reencode.device,
        largest=again.largest,
        mean=again.mean,
        confidence=confidence(samples, int(fine.sum())) if clean else "",
    )


def draw(fine: NDArray[np.bool_], number: int, seed: int) -> NDArray[np.intp]:
    """Samples to encode, in an order that has nothing to do with theirs.

    One sample more or less that is fine moves no other in or out but the last.
    """
    order = np.random.default_rng(seed).permutation(len(fine))
    return order[fine[order]][:number].astype(np.intp)

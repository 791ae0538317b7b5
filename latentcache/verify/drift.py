"""Encode some samples again and note the stored items that differ by more than noise.

Draws the samples; the kind of a field decides what noise is (``kind.compare``), the caller encodes. One field after
the other, so that one model is loaded at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.fields.protocol import Failure, Made
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.verify.entries import Bad, Store, View, words
from latentcache.verify.findings import Reencoded
from latentcache.verify.selection import confidence


class Reencode(Protocol):
    """Encoders and all that leads to them, opened by the caller."""

    @property
    def device(self) -> str:
        """Where it runs; empty before something was encoded."""

    def encode(
        self, snapshot: Snapshot, root: Path, field: str, rows: Sequence[int], /
    ) -> Iterable[tuple[int, Made | NDArray[Any] | Failure]]:
        """Encode the inputs of these rows again, in any order.

        Returns:
            Each row with its item, or why it cannot be made; ``source-changed`` says that the input is another one.
        """


class _Round:
    """One round of encoding again."""

    def __init__(self, store: Store, reencode: Reencode, root: Path) -> None:
        self.store, self.reencode, self.root = store, reencode, root
        self.failed: set[int] = set()
        self.entries = self.drifted = 0
        self.largest = self.mean = 0.0

    def field(self, reader: EntryReader, view: View, drawn: NDArray[np.intp]) -> None:
        """Compare all items of a field of these samples."""
        rows = np.flatnonzero(np.isin(view.sample, drawn)).tolist()
        for row, made in self.reencode.encode(self.store.snapshot, self.root, view.name, rows) if rows else ():
            self._compare(reader, view, row, made)

    def _compare(self, reader: EntryReader, view: View, number: int, made: Made | NDArray[Any] | Failure) -> None:
        rows, row = view.rows, np.array([number])
        sample, entry = view.sample[row], view.entry[row]
        if isinstance(made, Failure):
            self.failed.add(int(sample[0]))
            if made.reason == "source-changed":
                self.store.findings.add("stale", "source-changed", sample, found=made.detail)
            else:
                text = f"{made.reason}: {made.detail}" if made.detail else made.reason
                self.store.findings.add("unverifiable", "not-encoded", sample, field=view.name, found=text)
            return
        array, columns = (made.array, made.columns) if isinstance(made, Made) else (made, {})
        try:
            stored = reader.read(view.name, number)
        except StoreError as error:
            self.failed.add(int(sample[0]))
            self.store.note(view, "corrupt", "payload", entry, found=words(error))
            return
        assert rows.kind is not None
        assert rows.recipe is not None
        noise = {**rows.noise, "device": self.reencode.device}
        difference = rows.kind.compare(stored, array, noise, rows.recipe)
        other = [name for name in columns if not _equal(_own(rows, name, number), columns[name])]
        self.entries += 1
        self.largest, self.mean = max(self.largest, difference.largest), max(self.mean, difference.mean)
        if not difference.differs and not other:
            return
        self.drifted += 1
        # A block holds items of other samples: it has to go, and only this sample has drifted.
        self.store.bad.append(Bad(view.name, "drift", entry, intact=True))
        text = difference.detail if difference.differs else f"other values of {', '.join(other)}"
        self.store.findings.add(
            "drift", "reencoded", sample, field=view.name, keys=view.keys_of(row), expected="as stored", found=text
        )


def _equal(stored: NDArray[Any], made: Any) -> bool:
    """Exactly; measurements, which are floats, within a tenth."""
    return np.allclose(stored, made, rtol=0.1) if stored.dtype.kind == "f" else np.array_equal(stored, made)


def _own(rows: FieldRows, name: str, row: int) -> NDArray[Any]:
    """The stored value of one of a kind's own columns."""
    if name in rows.ragged_columns:
        ends, values = rows.ragged_columns[name]
        return np.asarray(values[int(ends[row - 1]) if row else 0 : int(ends[row])])
    return np.asarray(rows.columns[name][row]) if name in rows.columns else np.empty(0)


def reencode_samples(
    store: Store, reencode: Reencode, root: Path, fine: NDArray[np.bool_], number: int, seed: int
) -> Reencoded:
    """Encode ``number`` of the samples that are ``fine`` (S,) again, all fields of each, and note what differs."""
    drawn = draw(fine, number, seed)
    again = _Round(store, reencode, root)
    reader = EntryReader(store.paths, store.snapshot)
    try:
        for view in store.views.values():
            if len(drawn) and view.rows.kind is not None and view.rows.recipe is not None:
                again.field(reader, view, drawn)
    finally:
        reader.close()
    samples = max(len(drawn) - len(again.failed), 0)
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

"""Encode some samples again and note the stored items that differ by more than noise.

Draws the samples; the kind of a field decides what noise is (``kind.compare``), the caller encodes. One field after
the other, so that one model is loaded at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.fields.protocol import Described, Difference, Failure, Made
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.verify.entries import BadEntries, Check, View, words
from latentcache.verify.findings import Reencoded
from latentcache.verify.selection import confidence

#: Encode the inputs of rows of a field again, in any order, with a described encoder: each row, its item or why there
#: is none (``source-changed``: the input is another one), and the device.
Reencode = Callable[[Snapshot, Path, str, Sequence[int], Described | None], Iterable[tuple[int, Made | Failure, str]]]


def reencode_samples(
    check: Check,
    reencode: Reencode,
    descriptions: Mapping[str, Described],
    root: Path,
    fine: NDArray[np.bool_],
    number: int,
    seed: int,
) -> Reencoded:
    """Encode ``number`` of the samples that are ``fine`` (S,) again, all fields of each, and note what differs."""
    # In an order of its own: one fine sample more or less moves no other in or out but the last.
    order = np.random.default_rng(seed).permutation(len(fine))
    drawn = order[fine[order]][:number]
    differences, failed, device = list[Difference](), set[int](), ""
    reader = EntryReader(check.paths, check.snapshot)
    try:
        for view in check.views.values():
            known = view.rows.kind is not None and view.rows.recipe is not None
            rows, described = np.flatnonzero(np.isin(view.sample, drawn)).tolist(), descriptions.get(view.name)
            given = check.snapshot, root, view.name, rows, described
            for row, item, used in reencode(*given) if known and rows else ():
                device = used or device
                difference = _compare(check, reader, view, row, item, device)
                if difference is None:
                    failed.add(int(view.sample[row]))
                else:
                    differences.append(difference)
    finally:
        reader.close()
    samples, drifted = max(len(drawn) - len(failed), 0), sum(difference.differs for difference in differences)
    return Reencoded(
        asked=number,
        seed=seed,
        samples=samples,
        entries=len(differences),
        drifted=drifted,
        device=device,
        largest=max((difference.largest for difference in differences), default=0.0),
        mean=max((difference.mean for difference in differences), default=0.0),
        confidence=confidence(samples, int(fine.sum())) if samples and not drifted and not failed else "",
    )


def _compare(
    check: Check, reader: EntryReader, view: View, number: int, item: Made | Failure, device: str
) -> Difference | None:
    """Compare a stored item with the item that was encoded now; None if that is not possible."""
    rows, row = view.rows, np.array([number])
    sample, entry = view.sample[row], view.entry[row]
    if isinstance(item, Failure):
        if item.reason == "source-changed":
            check.findings.add("stale", "source-changed", sample, found=item.detail)
        else:
            text = f"{item.reason}: {item.detail}" if item.detail else item.reason
            check.findings.add("unverifiable", "not-encoded", sample, field=view.name, found=text)
        return None
    try:
        stored = reader.read(view.name, number)
    except StoreError as error:
        check.note(view, "corrupt", "payload", entry, found=words(error))
        return None
    assert rows.kind is not None
    assert rows.recipe is not None
    difference = rows.kind.compare(stored, item.array, {**rows.noise, "device": device}, rows.recipe)
    other = [name for name, value in item.columns.items() if not _equal(_stored_column(rows, name, number), value)]
    if difference.differs or other:
        # A block holds items of other samples: it has to go, and only this sample has drifted.
        check.bad.append(BadEntries(view.name, "drift", entry, intact=True))
        text = difference.detail if difference.differs else f"other values of {', '.join(other)}"
        keys = view.keys_of(row)
        check.findings.add("drift", "reencoded", sample, field=view.name, keys=keys, expected="as stored", found=text)
    return replace(difference, differs=bool(difference.differs or other))


def _equal(stored: NDArray[Any], now: Any) -> bool:
    """Exactly; measurements, which are floats, within a tenth."""
    return np.allclose(stored, now, rtol=0.1) if stored.dtype.kind == "f" else np.array_equal(stored, now)


def _stored_column(rows: FieldRows, name: str, row: int) -> NDArray[Any]:
    """The stored value of one of a kind's own columns."""
    if name in rows.ragged_columns:
        ends, values = rows.ragged_columns[name]
        return np.asarray(values[int(ends[row - 1]) if row else 0 : int(ends[row])])
    return np.asarray(rows.columns[name][row]) if name in rows.columns else np.empty(0)

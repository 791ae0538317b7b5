"""Reads payloads, in a process of its own where that is wanted, and notes what became of each entry.

An entry that was not read, because the time was over or the process ended, is never taken for a good one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import checksum
from latentcache.store.generation import Generation
from latentcache.store.layout import CacheLayout
from latentcache.verify.child import Limits, Work, run_child
from latentcache.verify.entries import Checked
from latentcache.verify.findings import Finding
from latentcache.verify.payloads import Message, reading_order, scan_shards
from latentcache.verify.selection import Deadline, Selection


@dataclass(slots=True, kw_only=True)
class Deep:
    """What reading came to."""

    read: NDArray[np.bool_]
    """(R,) whether all that was wanted of each row is known."""
    payloads: int = 0
    payload_bytes: int = 0
    """Headers and payloads."""


def read_payloads(
    layout: CacheLayout,
    generation: Generation,
    checked: Checked,
    *,
    chosen: NDArray[np.bool_],
    selection: Selection | None = None,
    deadline: Deadline,
    isolate: bool = True,
    limits: Limits | None = None,
) -> Deep:
    """Read the payloads of all whole shards and add what is wrong with them to ``checked``.

    Args:
        layout: The cache.
        generation: What the entries should be.
        checked: The look at indexes and headers.
        chosen: (R,) which rows to read.
        selection: What ``chosen`` was made by, where it is not all.
        deadline: When to stop.
        isolate: Whether to read in a process of its own.
        limits: What that process may use.

    Raises:
        CacheDamagedError: That process ended before it came to a shard.
    """
    deep = Deep(read=~np.isin(generation.rows.shard, checked.whole_shards))
    pages = [number for number in checked.whole_shards if _walks_pages(generation.shards[number], selection)]

    def here(shards: Sequence[int]) -> Iterator[Message]:
        for number in shards:
            walk = number in pages
            yield from scan_shards(
                layout, generation, [number], chosen=chosen, pages=walk, over=lambda: deadline.over
            )

    messages = here(checked.whole_shards)
    if isolate:
        messages = run_child(
            Work(
                cache=str(layout.root),
                generation=generation.number,
                shards=tuple(checked.whole_shards),
                pages=tuple(pages),
                selection=selection,
                limits=limits,
            ),
            deadline,
            here if limits is None else None,
        )
    if checked.whole_shards:
        _take(messages, deep, generation, checked, chosen)
    return deep


def _take(
    messages: Iterator[Message],
    deep: Deep,
    generation: Generation,
    checked: Checked,
    chosen: NDArray[np.bool_],
) -> None:
    """Enter what was read into ``deep``, and what is wrong into ``checked``."""
    rows, upto = np.empty(0, dtype=np.intp), 0
    for message in messages:
        if "shard" in message:
            rows, upto = reading_order(generation, message["shard"], chosen), 0
        elif "upto" in message:
            deep.read[rows[upto : message["upto"]]] = True
            deep.payloads += message["upto"] - upto
            deep.payload_bytes += message["bytes"]
            upto = message["upto"]
        elif "row" in message:
            checked.add(generation, message["row"], message["category"], message["reason"], found=message["found"])
        elif "died" in message:
            deep.read[rows[upto:]] = True
            _died(generation, checked, message, rows[upto:])
        elif "pages" in message:
            file = f"shards/{generation.shards[message['pages']]}/data.mdb"
            checked.loose.append(Finding(category="corrupt", reason="pages", file=file, found=message["found"]))


def _died(generation: Generation, checked: Checked, message: Message, rows: NDArray[np.intp]) -> None:
    """A process ended in a shard: what it had not come to is as good as damaged; after the last entry, the pages."""
    category, found = message["category"], message["found"]
    for row in rows.tolist():
        checked.add(generation, row, category, "shard", found=found)
    if not len(rows):
        file = f"shards/{generation.shards[message['died']]}/data.mdb"
        checked.loose.append(Finding(category=category, reason="shard", file=file, found=found))


def _walks_pages(shard: str, selection: Selection | None) -> bool:
    """All shards have their pages walked in a full check, and each in one slice of a sliced one."""
    if selection is None:
        return True
    return bool(selection.slices) and checksum(shard.encode()) % selection.slices == selection.slice_number - 1

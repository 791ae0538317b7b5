"""Reads payloads, in a process of its own where that is wanted, and notes what became of each entry.

An entry that was not read, because the time was over or the process ended, is never taken for a good one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import checksum
from latentcache.store.column_files import parts
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import AnyGeneration
from latentcache.verify.child import Work, run_child, scan_one
from latentcache.verify.entries import Checked
from latentcache.verify.findings import Finding
from latentcache.verify.payloads import Message
from latentcache.verify.portions import Portion, by_place
from latentcache.verify.selection import Deadline, Depth, Limits, Selection
from latentcache.verify.subjects import field_of


@dataclass(slots=True, kw_only=True)
class Deep:
    """What reading came to."""

    read: NDArray[np.bool_] | None
    """(R,) whether all that was wanted of each row is known; None where that is so of all."""
    payloads: int = 0
    payload_bytes: int = 0
    """Headers and payloads."""


def read_payloads(
    layout: CacheLayout,
    generation: AnyGeneration,
    checked: Checked,
    *,
    chosen: NDArray[np.bool_] | None,
    depth: Depth,
    deadline: Deadline,
    limits: Limits | None = None,
) -> Deep:
    """Read the payloads of all whole shards, where that is asked for, and add what is wrong with them to ``checked``.

    Args:
        layout: The cache.
        generation: What the entries should be.
        checked: The look at indexes and headers.
        chosen: (R,) which rows to read; None for all.
        depth: Whether to read, what ``chosen`` was made by, and whether to read in a process of its own.
        deadline: When to stop.
        limits: What that process may use.

    Raises:
        CacheDamagedError: That process ended before it came to a shard.
    """
    if not depth.reads:
        return Deep(read=None)
    selection, shard = depth.selection, generation.rows.shard
    read = np.empty(len(shard), dtype=np.bool_)
    for part in parts(len(read)):
        read[part] = ~np.isin(shard[part], checked.whole_shards)
    deep = Deep(read=read)
    pages = [number for number in checked.whole_shards if _walks_pages(generation.shards[number], selection)]

    unused = [name for name in checked.unneeded if _walks_pages(name, selection)]

    def here(shards: Sequence[int | str]) -> Iterator[Message]:
        for item in shards:
            yield from scan_one(layout, generation, item, pages, chosen, lambda: deadline.over)

    messages = here([*checked.whole_shards, *unused])
    if depth.isolate:
        messages = run_child(
            Work(
                cache=str(layout.root),
                generation=generation.number,
                shards=tuple(checked.whole_shards),
                unused=tuple(unused),
                pages=tuple(pages),
                selection=selection,
                limits=limits,
            ),
            deadline,
            here if limits is None else None,
        )
    if checked.whole_shards or unused:
        _take(messages, deep, read, generation, checked, chosen)
    return deep


class _InOrder:
    """The rows of a shard as they are read, from which the next ones are taken."""

    def __init__(self, portions: Iterator[Portion]) -> None:
        self._portions, self._rest = portions, np.empty(0, dtype=np.intp)

    def take(self, count: int) -> Iterator[NDArray[np.intp]]:
        """The next ``count`` rows, or as many as there are, in pieces."""
        while count > 0:
            if not len(self._rest):
                portion = next(self._portions, None)
                if portion is None:
                    return
                self._rest = portion.row
            part, self._rest = self._rest[:count], self._rest[count:]
            count -= len(part)
            yield part


def _take(
    messages: Iterator[Message],
    deep: Deep,
    read: NDArray[np.bool_],
    generation: AnyGeneration,
    checked: Checked,
    chosen: NDArray[np.bool_] | None,
) -> None:
    """Enter what was read into ``deep``, and what is wrong into ``checked``."""
    rows, upto = _InOrder(iter(())), 0
    for message in messages:
        if "shard" in message:
            shard, upto = message["shard"], 0
            rows = _InOrder(iter(()) if isinstance(shard, str) else by_place(generation, shard, chosen))
        elif "upto" in message:
            for part in rows.take(message["upto"] - upto):
                read[part] = True
            deep.payloads += message["upto"] - upto
            deep.payload_bytes += message["bytes"]
            upto = message["upto"]
        elif "row" in message:
            checked.add(generation, message["row"], message["category"], message["reason"], found=message["found"])
        elif "unused" in message:
            checked.loose.append(_unused(message, field_of(generation)))
        elif "died" in message:
            _died(generation, checked, message, read, rows)
        elif "pages" in message:
            file = f"shards/{generation.shards[message['pages']]}/data.mdb"
            checked.loose.append(Finding(category="corrupt", reason="pages", file=file, found=message["found"]))


def _unused(message: Message, field: str) -> Finding:
    """An entry that nobody needs and nobody should ever get."""
    return Finding(
        category="corrupt",
        reason=message["reason"],
        key=message["key"],
        field=field if message["key"] else "",
        file=f"shards/{message['unused']}",
        found=message["found"],
        hint="no sample needs this entry now; a later build that needs it would take it as it is",
    )


def _died(
    generation: AnyGeneration, checked: Checked, message: Message, read: NDArray[np.bool_], rows: _InOrder
) -> None:
    """A process ended in a shard: what it had not come to is as good as damaged; after the last entry, the pages."""
    category, found, count = message["category"], message["found"], 0
    for part in rows.take(len(read)):
        read[part] = True
        count += len(part)
        for row in part.tolist():
            checked.add(generation, row, category, "shard", found=found)
    if not count:
        shard = message["died"]
        file = f"shards/{shard if isinstance(shard, str) else generation.shards[shard]}/data.mdb"
        checked.loose.append(Finding(category=category, reason="shard", file=file, found=found))


def _walks_pages(shard: str, selection: Selection | None) -> bool:
    """All shards have their pages walked in a full check, and each in one slice of a sliced one."""
    if selection is None:
        return True
    return bool(selection.slices) and checksum(shard.encode()) % selection.slices == selection.slice_number - 1

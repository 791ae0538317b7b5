"""Every item that is committed in a cache, whichever build wrote it: what a new build need not encode.

The items of all shards are numbered, shard by shard. A search looks up 64 bits,
which mix the content hash with the rest of the key, and then compares keys in the indexes. This takes 12 bytes an
item and no Python object.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, RemoteError, StoreError
from latentcache.fields.protocol import FieldKind
from latentcache.identity.content import CONTENT_SLICE, KEY_BYTES, checksum
from latentcache.store.atomic_io import file_descriptor, writing
from latentcache.store.entry import EntryHeader, Item
from latentcache.store.paths import OPEN_SUFFIX, CachePaths
from latentcache.store.shard import (
    ShardIndex,
    checked_index,
    collect_index,
    mend_index,
    read_entry,
    seal_folder,
)

_TOGETHER = 1 << 17
_KEY, _SAME = "key", "same"
#: 2**64 divided by the golden ratio: spreads the few kinds and sizes of keys over all bits.
_ODD = np.uint64(0x9E37_79B9_7F4A_7C15)

Table = tuple[NDArray[np.uint64], NDArray[np.uint32]]
"""Sorted numbers, and the item of each."""


#: Location of an item: its shard in the catalog, its entry in the shard's index; other names as in ``FieldRows``.
LOCATION_TYPES = np.dtype("i4,u4,u8,u4,u8,u8,u4,u4")
LOCATION_TYPES.names = ("shard", "entry", "offset", "head", "bytes", "checksum", "start", "length")


class StoredEntry(NamedTuple):
    """One committed item."""

    key: bytes
    shape: tuple[int, ...] = ()
    dtype: str = ""
    checksum: int = 0
    """xxh3-64 of the item's bytes."""
    intact: bool = False
    """True if head and payload of its entry pass their checks; else the others are empty."""


class Catalog:
    """Finds committed items by key, or by the input of the encoder. Items are given by their numbers.

    ``damaged`` are shards that a build has to mend first: their index is damaged, or they were cut short. The tables
    for looking items up are made when they are first needed.
    """

    def __init__(self, indexes: Sequence[ShardIndex], damaged: Sequence[str] = ()) -> None:
        self._indexes = indexes
        self._bases = np.cumsum([0, *(index.items for index in indexes)])
        self.shards = tuple(index.folder.name for index in indexes)
        self.damaged = tuple(damaged)
        self._tables: dict[str, Table] = {}

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of the shards."""
        return tuple(str(index.folder) for index in self._indexes)

    def is_whole(self, shards: Sequence[str]) -> bool:
        """True if no index of these shards was written again: every entry that a snapshot names is here."""
        whole = {index.folder.name for index in self._indexes if not index.is_rewritten}
        return whole.issuperset(shards)

    def count(self, kind: int, recipe: bytes) -> int:
        """Number of items of one kind whose keys end in these bytes of a recipe."""
        count = 0
        ending = np.frombuffer(recipe, dtype=np.uint8)
        for index in self._indexes:
            for start in range(0, index.items, _TOGETHER):
                part = slice(start, start + _TOGETHER)
                keys = index.keys(part)
                chosen = (keys[:, 0] == kind) & (keys[:, -len(ending) :] == ending).all(axis=1)
                count += int(np.count_nonzero(chosen))
        return count

    def __len__(self) -> int:
        return len(self._table(_KEY)[0])

    def all_items(self) -> NDArray[np.int64]:
        """(n,) all distinct items, shard by shard and entry by entry."""
        return np.sort(self._table(_KEY)[1]).astype(np.int64)

    def keys(self, items: NDArray[np.integer] | None = None) -> NDArray[np.uint8]:
        """(n, 32) item keys, of all distinct items if no numbers are given."""
        items = self.all_items() if items is None else items
        keys = np.empty((len(items), KEY_BYTES), dtype=np.uint8)
        for at, _, index, rows in self._parts(items):
            keys[at] = index.keys(rows)
        return keys

    def find(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """(n,) item of each key (n, 32); -1 if it is not committed."""
        numbers = np.full(len(keys), -1, dtype=np.int64)
        rows, items = self._candidates(_KEY, mixed(keys))
        is_right = (self.keys(items) == keys[rows]).all(axis=1)
        numbers[rows[is_right]] = items[is_right]
        return numbers

    def find_same(self, same: bytes, key: bytes) -> int:
        """The item that the encoder saw as ``same``, under a key that differs in its content only; -1: none."""
        wanted, hashes = (np.frombuffer(data, dtype=np.uint8)[None] for data in (key, same))
        _, items = self._candidates(_SAME, mixed(wanted, hashes))
        for _, _, index, rows in self._parts(items):
            stored = index.keys(rows)
            stored[:, CONTENT_SLICE] = wanted[:, CONTENT_SLICE]
            if (stored == wanted).all() and (index.columns["item.same"][rows] == hashes).all():
                return int(items[0])
        return -1

    def forget(self) -> None:
        """Give the memory back; what is needed again is made again."""
        self._tables = {}

    def locations(self, items: NDArray[np.integer]) -> Any:
        """(n,) where items are, as a record array of ``LOCATION_TYPES``."""
        locations: Any = np.zeros(len(items), dtype=LOCATION_TYPES).view(np.recarray)
        for at, number, index, rows in self._parts(items):
            entry = index.columns["item.entry"][rows]
            locations.shard[at], locations.entry[at] = number, entry
            locations.start[at], locations.length[at] = (
                index.columns["item.start"][rows],
                index.columns["item.length"][rows],
            )
            for name in ("offset", "head", "bytes", "checksum"):
                locations[name][at] = getattr(index, name)[entry]
        return locations

    def entry_numbers(self, rows: Any) -> NDArray[np.int64]:
        """(n,) a number for the entry of each item."""
        bases = np.cumsum([0, *(index.entries for index in self._indexes)], dtype=np.int64)
        numbers: NDArray[np.int64] = bases[rows.shard] + rows.entry
        return numbers

    def entry_keys(self, rows: Any) -> NDArray[np.uint8]:
        """(n, 32) keys of the entries that hold items."""
        keys = np.empty((len(rows.shard), KEY_BYTES), dtype=np.uint8)
        for number in np.unique(rows.shard).tolist():
            at = np.flatnonzero(rows.shard == number)
            at = at[np.argsort(rows.entry[at])]
            for start in range(0, len(at), _TOGETHER):  # neighbors at a time: the column of all keys is large
                some = at[start : start + _TOGETHER]
                keys[some] = self._indexes[number].key[rows.entry[some]]
        return keys

    def own_columns(self, kind: FieldKind, items: NDArray[np.integer]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The kind's plain and ragged columns of n items; what their heads lack is zeros."""
        plain = {name: np.zeros((len(items), *shape), dtype) for name, (dtype, shape) in kind.columns.items()}
        counts = {name: np.zeros(len(items), np.int64) for name in kind.ragged_columns}
        paths = {f"columns/{kind.kind}/{name}": column for name, column in plain.items()}
        paths |= {f"ragged/{kind.kind}/{name}.counts": column for name, column in counts.items()}
        for at, _, index, rows in self._parts(items):
            for path, column in paths.items():
                if (stored := index.columns.get(path)) is not None:
                    column[at] = stored[rows]
        ragged = dict[str, Any]()
        for name, (dtype, shape) in kind.ragged_columns.items():
            ends = np.cumsum(counts[name], out=counts[name])
            ragged[name] = ends, np.zeros((int(ends[-1]) if len(ends) else 0, *shape), dtype)
            last = -1
            stored_ends = ends
            for at, number, index, rows in self._parts(items):
                if (stored := index.columns.get(f"ragged/{kind.kind}/{name}.counts")) is not None:
                    stored_ends = stored_ends if number == last else np.cumsum(stored, dtype=np.int64)
                    last = number
                    values = index.columns[f"ragged/{kind.kind}/{name}.values"]
                    ragged[name][1][_spans(ends, at)] = values[_spans(stored_ends, rows)]
        return plain, ragged

    def stored(self, number: int) -> tuple[EntryHeader, int, memoryview] | None:
        """Head and payload of the entry that holds an item, and the item's position; None if a check fails."""
        try:
            ((_, _, index, row),) = self._parts(np.array([number]))
            entry = index.columns["item.entry"][row]
            head = int(index.head[entry][0])
            path = index.folder / "data.mdb"
            # A worker whose build was killed seals its shard, perhaps since it was listed.
            path = path if path.exists() else index.folder.with_suffix("") / path.name
            with file_descriptor(path) as file:
                header, value = read_entry(
                    file, int(index.offset[entry][0]) - head, head + int(index.bytes[entry][0])
                )
            position = np.flatnonzero((header.item_keys() == index.keys(row)).all(axis=1))[0]
        except RemoteError:
            raise
        except (StoreError, IndexError, OSError):
            return None
        return header, int(position), value[head:]

    def item(self, number: int) -> Item | None:
        """One item with its own columns, for storing it under another key; None if its entry fails its check."""
        stored = self.stored(number)
        if stored is None:
            return None
        header, position, payload = stored
        return Item(
            key=header.item_keys()[position].tobytes(),
            array=header.item(payload, position),
            same=header.same[position].tobytes() if header.same[position].any() else b"",
            columns=header.item_columns(position),
        )

    def _parts(
        self, items: NDArray[np.integer]
    ) -> Iterator[tuple[NDArray[np.int32], int, ShardIndex, NDArray[np.int64]]]:
        """For each shard of some items, in slices: their positions, its number, its index, and their rows in it."""
        shard = (np.searchsorted(self._bases, items, "right") - 1).astype(np.int32)
        for number in np.unique(shard).tolist():
            in_shard = np.flatnonzero(shard == number).astype(np.int32)
            for start in range(0, len(in_shard), _TOGETHER):
                at = in_shard[start : start + _TOGETHER]
                yield at, number, self._indexes[number], items[at].astype(np.int64) - self._bases[number]

    def _candidates(self, table: str, wanted: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Positions of wanted numbers (n,) that a table has, and their items, whose keys are still to be compared."""
        numbers, items = self._table(table)
        rows = np.argsort(wanted, kind="stable")  # neighbors are looked up together
        at = np.searchsorted(numbers, wanted[rows])
        is_there = at < len(numbers)
        is_there[is_there] = numbers[at[is_there]] == wanted[rows[is_there]]
        return rows[is_there], items[at[is_there]].astype(np.int64)

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            parts = [*self._mixed_parts(name)]
            numbers = np.concatenate([np.zeros(0, np.uint64), *(part[0] for part in parts)])
            items = np.concatenate([np.zeros(0, np.uint32), *(part[1] for part in parts)])
            del parts
            order = np.argsort(numbers, kind="stable")
            numbers = numbers[order]
            items = items[order]
            # Two keys of one number have a chance of 2**-64 for each pair; the second one is then not found.
            is_first = np.ones(len(numbers), dtype=np.bool_)
            is_first[1:] = numbers[1:] != numbers[:-1]
            self._tables[name] = (numbers, items) if is_first.all() else (numbers[is_first], items[is_first])
        return self._tables[name]

    def _mixed_parts(self, name: str) -> Iterator[Table]:
        """Numbers of the keys or same-hashes of items, and the items; those without a same-hash are left out."""
        for index, base in zip(self._indexes, self._bases.tolist(), strict=False):
            for start in range(0, index.items, _TOGETHER):
                part = slice(start, min(start + _TOGETHER, index.items))
                keys = index.keys(part)
                items = np.arange(base + part.start, base + part.stop, dtype=np.uint32)
                same = None if name == _KEY else index.columns["item.same"][part]
                chosen = np.ones(len(items), dtype=np.bool_) if same is None else same.any(axis=1)
                yield mixed(keys[chosen], None if same is None else same[chosen]), items[chosen]


def load_catalog(paths: CachePaths, *, open_shards: bool = False) -> Catalog:
    """The items of every sealed shard; shards that have to be mended are named and not fatal.

    ``open_shards``: take also what a killed build left in open shards, without sealing them.
    """
    indexes, damaged, looked = list[ShardIndex](), list[str](), set[str]()
    # Sealed shards are listed again behind open ones: a build may have sealed one of these.
    lists = (paths.sealed_shards, paths.open_shards, paths.sealed_shards)
    for folder in (folder for listed in lists[: 3 if open_shards else 1] for folder in listed()):
        if folder.name in looked:
            continue
        looked.add(folder.name)
        is_open = folder.suffix == OPEN_SUFFIX
        try:
            index = ShardIndex(folder, collect_index(folder / "data.mdb")) if is_open else checked_index(folder)
            if index.entries and index.is_beyond_end().any():
                raise CacheDamagedError("a shard is truncated", where=str(folder))
            indexes.append(index)
        except (CacheDamagedError, CorruptEntryError):
            if not is_open:
                damaged.append(folder.name)
    return Catalog(indexes, damaged)


def mend_shards(paths: CachePaths) -> tuple[list[str], list[str]]:
    """Before a build: seal what dead builds left open, and write indexes of damaged shards again.

    Returns the shards whose index was written again, and the shards without an entry that a build can use.
    """
    mended, lost = list[str](), list[str]()
    for folder in paths.open_shards():
        if not recover_shard(paths, folder):
            lost.append(folder.name)
    for name in load_catalog(paths).damaged:
        (mended if mend_index(paths.shard(name)) else lost).append(name)
    return mended, lost


def recover_shard(paths: CachePaths, folder: Path) -> bool:
    """Seal the shard that a dead builder left open. False: it is damaged, so nothing is found in it, and it goes."""
    data = folder / "data.mdb"
    with writing(folder):
        if not data.exists() or data.stat().st_size == 0:
            shutil.rmtree(folder)
            return True
        try:
            seal_folder(folder)
        except (CacheDamagedError, CorruptEntryError):
            shutil.rmtree(paths.to_scratch(folder), ignore_errors=True)
            return False
    return True


def stored_entries(catalog: Catalog) -> Iterator[StoredEntry]:
    """Every item of a catalog, read and checked."""
    every = catalog.all_items()
    rows = catalog.locations(every)
    starts = np.flatnonzero((np.diff(rows.shard) != 0) | (rows.entry[1:] != rows.entry[:-1])) + 1
    for some in np.split(every, starts) if len(every) else ():
        stored = catalog.stored(int(some[0]))
        numbers = {key.tobytes(): number for number, key in enumerate(stored[0].item_keys())} if stored else {}
        for key in (key.tobytes() for key in catalog.keys(some)):
            if stored is None or key not in numbers:
                yield StoredEntry(key)
                continue
            array = stored[0].item(memoryview(stored[2]), numbers[key])
            yield StoredEntry(key, array.shape, stored[0].dtype, checksum(array.tobytes()), True)


def mixed(keys: NDArray[np.uint8], hashes: NDArray[np.uint8] | None = None) -> NDArray[np.uint64]:
    """(n,) 8 bytes of hashes (n, 16), or of the contents of keys (n, 32), mixed with the rest of the keys.

    Keys that differ in their content only keep their order in ranges, so neighbors are near each other in an index.
    """
    words = np.ascontiguousarray(keys).view(">u8").astype(np.uint64)
    first = words[:, 1] if hashes is None else np.ascontiguousarray(hashes).view(">u8")[:, 0]
    numbers: NDArray[np.uint64] = first ^ (words[:, 0] * _ODD + words[:, 3])
    return numbers


def picked(ends: Any, values: Any, rows: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Rows of a ragged column: where the values of each end, and the values."""
    stops = np.asarray(ends, dtype=np.int64)
    return np.cumsum(np.diff(stops, prepend=np.int64(0))[rows]), np.asarray(values)[_spans(stops, rows)]


def _spans(ends: NDArray[np.int64], rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Positions of the values of rows, one row after the other, by where the values of all rows end."""
    first = np.where(rows > 0, ends[rows - 1], 0)
    counts = ends[rows] - first
    positions: NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(
        first - np.cumsum(counts) + counts, counts
    )
    return positions

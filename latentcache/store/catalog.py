"""Every item that is committed in a cache, whichever build wrote it: what a new build need not encode.

The catalog is four sorted columns and no Python object per item: 22 bytes an item, about 40 more while it is loaded.
A search looks up 8 bytes that mix the content hash with the rest of the key, then compares the other 24 bytes.
Workers open the same columns from one file, so they share its memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, StoreError
from latentcache.identity.content import checksum
from latentcache.identity.key import Keys, joined_keys, split_keys
from latentcache.store.atomic_io import make_folder, open_file, raise_unreadable, reading, writing
from latentcache.store.entry import EntryHeader, Item
from latentcache.store.index import ShardIndex, checked_head, checked_index, load_index, open_shard_index
from latentcache.store.paths import CachePaths
from latentcache.value import Value

#: Items whose same-hashes are read together.
_TOGETHER = 1 << 17
_NO_PLACE = 0xFFFF_FFFF


class CatalogRows(Value):
    """Where n items are. Offsets and lengths in bytes, except for start and length."""

    shard: NDArray[np.int32]
    """(n,) position in the catalog's shards."""
    entry: NDArray[np.uint32]
    """(n,) position in the shard's index."""
    offset: NDArray[np.uint64]
    """(n,) of the entry's payload in ``data.mdb``."""
    head: NDArray[np.uint32]
    """(n,) bytes of the head before it."""
    bytes: NDArray[np.uint64]
    """(n,) of the payload."""
    checksum: NDArray[np.uint64]
    """(n,) xxh3-64 of the payload."""
    start: NDArray[np.uint32]
    """(n,) first element in the entry along its first axis."""
    length: NDArray[np.uint32]
    """(n,) elements; 0 if items are not ragged."""


HeaderOf = tuple[NDArray[np.int64], NDArray[np.int64], EntryHeader]
"""Positions in the places that were asked for, the position of each item in its entry, and the entry's header."""


class Catalog:
    """Finds committed items by key, or by what the encoder saw. A place is a position in its columns.

    Args:
        folders: Of the shards, by which :attr:`shards` are named.
        columns: ``mixed``, ``tail``, ``frame``, ``row``, ``frames``, ``bases`` and, if it was built, ``same``; None
            if they are to be made of the indexes when they are first needed.
        damaged: Shards that could not be opened.
        indexes: Indexes that are open already.
        without: Shards whose items are not found.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        columns: dict[str, NDArray[Any]] | None,
        damaged: Sequence[str] = (),
        indexes: Sequence[ShardIndex] = (),
        without: Collection[str] = (),
    ) -> None:
        self._folders, self._indexes = tuple(folders), dict(enumerate(indexes))
        self.shards, self._without = tuple(folder.name for folder in folders), without
        self.damaged = tuple(damaged)
        """Shards that could not be opened; their items count as missing."""
        self._lengths: dict[int, tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]] = {}
        if columns is not None:
            self._columns = columns

    @cached_property
    def _columns(self) -> dict[str, NDArray[Any]]:
        return _sorted_columns(list(self._indexes.values()), self._without)

    @cached_property
    def frames(self) -> NDArray[np.uint8]:
        """(F, 16) frames of all keys, in memcmp order."""
        return _frames(list(self._indexes.values())) if "_columns" not in vars(self) else self._columns["frames"]

    @cached_property
    def frame_numbers(self) -> dict[bytes, int]:
        """Position of each frame in :attr:`frames`."""
        return {frame.tobytes(): number for number, frame in enumerate(self.frames)}

    def count(self, kind: int, recipe: bytes) -> int:
        """Number of items of one kind whose keys end in these bytes of a recipe."""
        own, frames = np.frombuffer(recipe, dtype=np.uint8), self.frames
        mine = (frames[:, 0] == kind) & (frames[:, -len(own) :] == own).all(axis=1)
        return int(np.bincount(self._columns["frame"], minlength=len(mine))[mine].sum())

    def __len__(self) -> int:
        return len(self._columns["mixed"])

    def keys(self, place: NDArray[np.integer] | None = None) -> NDArray[np.uint8]:
        """(n, 32) item keys, of all places if none are given."""
        chosen: Any = slice(None) if place is None else place
        frame = self._columns["frame"][chosen]
        head = self._columns["mixed"][chosen] ^ _mixtures(self._columns["frames"])[frame]
        content = np.stack([head, self._columns["tail"][chosen]], axis=1).astype(">u8").view(np.uint8)
        return joined_keys(content.reshape(-1, 16), self._columns["frames"][frame])

    def find(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """(n,) place of each item key (n, 32); -1 if it is not committed."""
        mixed, tail, frame = self._split(keys)
        columns = self._columns

        def right(at: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.bool_]:
            held: NDArray[np.bool_] = (columns["tail"][at] == tail[row]) & (columns["frame"][at] == frame[row])
            return held

        return self._search(columns["mixed"], mixed, right)

    def forget(self) -> None:
        """Give the memory back; what is needed again is made again."""
        vars(self).pop("_columns", None)
        self._lengths = {}

    def find_same(self, same: NDArray[np.uint8], keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """(n,) place of an item with the same-hash (n, 16) whose key differs from the key (n, 32) in content only."""
        hashes, places = self._same_columns()
        _, _, frame = self._split(keys)
        halves = np.ascontiguousarray(same).view(">u8").astype(np.uint64)
        known = frame >= 0
        mixed = halves[:, 0] ^ np.append(_mixtures(self._columns["frames"]), np.uint64(0))[frame]

        def right(at: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.bool_]:
            found = places[at].astype(np.int64)
            held: NDArray[np.bool_] = known[row] & (self._columns["frame"][found] == frame[row])
            held[held] = (self._stored_same(found[held]) == same[row[held]]).all(axis=1)
            return held

        at = self._search(hashes, mixed, right)
        return np.where(at >= 0, np.append(places, 0)[at].astype(np.int64), -1)

    def places(self, place: NDArray[np.integer]) -> CatalogRows:
        """Where items are."""
        shard, item = self._located(place)
        rows: dict[str, NDArray[Any]] = {"shard": shard}
        rows |= {name: np.zeros(len(shard), dtype=dtype) for name, dtype in _ROW_TYPES.items()}
        for number in np.unique(shard).tolist():
            at: Any = slice(None) if (shard == number).all() else np.flatnonzero(shard == number)
            index = self._index(number)
            entry, start, length = self._items(number, item[at])
            rows["entry"][at], rows["start"][at], rows["length"][at] = entry, start, length
            for name in ("offset", "head", "bytes", "checksum"):
                rows[name][at] = getattr(index, name)[entry]
        return CatalogRows(**rows)

    def entry_keys(self, rows: CatalogRows) -> Keys:
        """(n, 32) keys of the entries that hold items."""
        frames = self.frames
        content = np.empty((len(rows.shard), 16), dtype=np.uint8)
        frame = np.empty(len(rows.shard), dtype=np.uint32)
        for number in np.unique(rows.shard).tolist():
            at: Any = slice(None) if (rows.shard == number).all() else np.flatnonzero(rows.shard == number)
            columns, entry = self._index(number).columns, rows.entry[at]
            theirs = [self.frame_numbers[one.tobytes()] for one in np.asarray(columns["frames"])]
            content[at] = columns["content"][entry]
            frame[at] = np.array(theirs, dtype=frame.dtype)[columns["frame"][entry]]
        return Keys(content, frame, frames)

    def headers(self, place: NDArray[np.integer]) -> Iterator[HeaderOf]:
        """The heads of the entries that hold these items, each read once."""
        shard, item = self._located(place)
        for number in np.unique(shard).tolist():
            at = np.flatnonzero(shard == number)
            index = self._index(number)
            entry, _, _ = self._items(number, item[at])
            order = np.argsort(entry, kind="stable")
            starts = np.flatnonzero(np.diff(entry[order], prepend=-1))
            distinct = entry[order[starts]]
            first = item[at[order[starts]]] if not index.has_blocks else self._first_items(number)[distinct]
            places = [index.offset[distinct], index.head[distinct], index.bytes[distinct]]
            with reading(index.data.parent), _reading(index.data) as file:
                rows = zip(np.split(order, starts[1:]), first, *(column.tolist() for column in places), strict=True)
                for some, begin, offset, head, size in rows:
                    header = checked_head(file, offset - head, head + size)
                    yield at[some], item[at[some]] - begin, header

    def in_order(self) -> NDArray[np.int64]:
        """(n,) all places, shard by shard and entry by entry."""
        return np.argsort(self._columns["row"], kind="stable")

    def stored(self, place: int) -> tuple[EntryHeader, int, bytes] | None:
        """Head and payload of the entry that holds an item, and the item's position; None if a check fails."""
        shard, item = (int(one[0]) for one in self._located(np.array([place])))
        try:
            rows = self.places(np.array([place]))
            offset, head, size = int(rows.offset[0]), int(rows.head[0]), int(rows.bytes[0])
            with _reading(self._index(shard).data) as file:
                header, payload = checked_head(file, offset - head, head + size), os.pread(file, size, offset)
            if len(payload) != size or checksum(payload) != header.payload_checksum:
                return None
            index = self._index(shard)
            position = item - int(self._first_items(shard)[int(rows.entry[0])]) if index.has_blocks else 0
            right = header.item_keys()[position].tobytes() == self.keys(np.array([place])).tobytes()
        except (StoreError, OSError, IndexError):
            return None
        return (header, position, payload) if right else None

    def item(self, place: int) -> Item | None:
        """One item with its own columns, for storing it under another key; None if its entry fails its check."""
        found = self.stored(place)
        if found is None:
            return None
        header, position, payload = found
        return Item(
            key=header.item_keys()[position].tobytes(),
            array=header.item(memoryview(payload), position),
            same=header.same[position].tobytes() if header.same[position].any() else b"",
            columns=header.item_columns(position),
        )

    def read(self, place: int) -> NDArray[Any] | None:
        """One item's array; None if its entry fails its check."""
        item = self.item(place)
        return None if item is None else item.array

    def save_lookup(self, folder: Path) -> None:
        """Write the columns, with those of same-hashes, to a folder that :func:`open_lookup` reads."""
        self._same_columns()
        make_folder(folder)
        with writing(folder):
            for name, column in self._columns.items():
                with (folder / f"{name}.npy").open("wb") as file:  # numpy.save does not say that the disk is full
                    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(column))
                    file.write(np.ascontiguousarray(column).data)
            about = [list(map(str, self._folders)), self.damaged, list(self._columns)]
            (folder / "shards.json").write_text(json.dumps(about), "ascii")

    @contextlib.contextmanager
    def shared_lookup(self, paths: CachePaths) -> Iterator[str]:
        """A scratch folder with the columns, for worker processes. Errors as :meth:`save_lookup`."""
        folder = paths.scratch / f"lookup-{os.urandom(4).hex()}"
        try:
            self.save_lookup(folder)
            self._columns = open_lookup(folder)._columns
            yield str(folder)
        finally:
            self.forget()
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                paths.scratch.rmdir()

    def _split(self, keys: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int32]]:
        """Mixed, tail and frame of keys; frame -1 for one that no committed item has."""
        content, frames, number = split_keys(np.ascontiguousarray(keys).reshape(-1, 32))
        known = np.array([self.frame_numbers.get(frame.tobytes(), -1) for frame in frames], dtype=np.int32)
        halves = content.view(">u8").astype(np.uint64)
        mixed = halves[:, 0] ^ _mixtures(frames)[number] if len(number) else halves[:, 0]
        return mixed, halves[:, 1], known[number]

    @staticmethod
    def _search(column: NDArray[np.uint64], wanted: NDArray[np.uint64], right: Any) -> NDArray[np.int64]:
        """(n,) position of each wanted number for which ``right(positions, rows)`` is true; -1 for none."""
        found = np.full(len(wanted), -1, dtype=np.int64)
        rows = np.argsort(wanted, kind="stable")  # neighbours are looked up together
        at = np.searchsorted(column, wanted[rows]).astype(np.int64)
        while len(rows):
            inside = at < len(column)
            rows, at = rows[inside], at[inside]
            equal = column[at] == wanted[rows]
            rows, at = rows[equal], at[equal]
            held = right(at, rows)
            found[rows[held]] = at[held]
            rows, at = rows[~held], at[~held] + 1
        return found

    def _same_columns(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Sorted mixed same-hashes of the items that have one, and their places."""
        if "same" not in self._columns:
            mixed, places = np.empty(len(self), dtype=np.uint64), np.empty(len(self), dtype=np.uint32)
            count = 0
            for some, its_places in self._same_parts():
                part = slice(count, count + len(some))
                mixed[part], places[part] = some, its_places
                count = part.stop
            order = _order(mixed[:count])
            mixed = mixed[order]
            self._columns |= {"same": mixed, "same_place": places[order]}
        return self._columns["same"], self._columns["same_place"]

    def _same_parts(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32]]]:
        """Mixed same-hashes and places, shard by shard, of the items that have one."""
        bases, mixtures = self._columns["bases"], _mixtures(self._columns["frames"])
        place_of = np.full(int(bases[-1]), _NO_PLACE, dtype=np.uint32)
        place_of[self._columns["row"]] = np.arange(len(self), dtype=np.uint32)
        for shard, base in enumerate(bases[:-1].tolist()):
            index = self._index(shard)
            source = index.item_columns("same")["same"] if index.has_blocks else index.columns["same"]
            for start in range(0, index.items, _TOGETHER):
                hashes = source[start : start + _TOGETHER]
                places = place_of[base + start : base + start + len(hashes)]
                some = hashes.any(axis=1) & (places != _NO_PLACE)
                halves = np.ascontiguousarray(hashes[some]).view(">u8").astype(np.uint64)
                yield halves[:, 0] ^ mixtures[self._columns["frame"][places[some]]], places[some]

    def _stored_same(self, place: NDArray[np.integer]) -> NDArray[np.uint8]:
        """(n, 16) same-hashes of items."""
        shard, item = self._located(place)
        found = np.zeros((len(shard), 16), dtype=np.uint8)
        for number in np.unique(shard).tolist():
            at = np.flatnonzero(shard == number)
            index = self._index(number)
            source = index.item_columns("same")["same"] if index.has_blocks else index.columns["same"]
            found[at] = source[item[at]]
        return found

    def _located(self, place: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Shard of each place, and its item in the shard."""
        if not len(place):
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        row, bases = self._columns["row"][place].astype(np.int64), self._columns["bases"]
        shard = (np.searchsorted(bases, row, "right") - 1).astype(np.int32)
        row -= bases[shard]
        return shard, row

    def _first_items(self, shard: int) -> NDArray[np.int64]:
        """(E,) number of the first item of each entry."""
        counts = np.maximum(np.asarray(self._index(shard).block).astype(np.int64), 1)
        return np.cumsum(counts) - counts

    def _items(
        self, shard: int, item: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]:
        """Entry, start and length of items of a shard."""
        index = self._index(shard)
        if not index.has_blocks:
            return item, np.zeros(len(item), dtype=np.uint32), index.columns["length"][item]
        if shard not in self._lengths:
            self._lengths[shard] = (index.entry_of_items(), *index.lengths())
        entry, start, length = self._lengths[shard]
        return entry[item], start[item], length[item]

    def _index(self, shard: int) -> ShardIndex:
        if shard not in self._indexes:
            self._indexes[shard] = load_index(self._folders[shard], check_data=False)
        return self._indexes[shard]


_ROW_TYPES = {
    "entry": "u4", "offset": "u8", "head": "u4", "bytes": "u8", "checksum": "u8", "start": "u4",
    "length": "u4",
}  # fmt: skip


def load_catalog(paths: CachePaths, *, open_shards: bool = False, without: Collection[str] = ()) -> Catalog:
    """The items of every sealed shard; damaged shards are named and not fatal.

    Args:
        paths: The cache.
        open_shards: Take also what a killed build left in open shards, without sealing them.
        without: Shards whose items are not found.
    """
    found: list[ShardIndex] = []
    damaged: list[str] = []
    for folder in paths.sealed_shards():
        index = undamaged_index(folder)
        if index is None:
            damaged.append(folder.name)
        else:
            found.append(index)
    for folder in paths.open_shards() if open_shards else ():
        with contextlib.suppress(CacheDamagedError, CorruptEntryError, OSError):
            found.append(open_shard_index(folder))
    return catalog_of(found, damaged, without)


def catalog_of(indexes: Sequence[ShardIndex], damaged: Sequence[str] = (), without: Collection[str] = ()) -> Catalog:
    """The items of these shards; of two items with one key the first counts."""
    return Catalog([index.folder for index in indexes], None, damaged, indexes, without)


def _frames(indexes: Sequence[ShardIndex]) -> NDArray[np.uint8]:
    known = [np.zeros((0, 16), np.uint8), *(np.asarray(index.columns["frames"]) for index in indexes)]
    # With an index, which loads no numpy.ma.
    return np.unique(np.concatenate(known), axis=0, return_index=True)[0]


def _sorted_columns(indexes: Sequence[ShardIndex], without: Collection[str]) -> dict[str, NDArray[Any]]:
    known, frames = [np.asarray(index.columns["frames"]) for index in indexes], _frames(indexes)
    numbers = {frame.tobytes(): number for number, frame in enumerate(frames)}
    counts = [0 if index.folder.name in without else index.items for index in indexes]
    bases = np.cumsum([0, *counts])
    mixtures = _mixtures(frames)
    narrow = np.dtype(np.uint16 if len(frames) < 1 << 16 else np.uint32)
    mixed, tail = np.empty(bases[-1], dtype=np.uint64), np.empty(bases[-1], dtype=np.uint64)
    frame = np.empty(bases[-1], dtype=narrow)
    for index, theirs, base, count in zip(indexes, known, bases.tolist(), counts, strict=False):
        numbers_of = np.array([numbers[one.tobytes()] for one in theirs], dtype=narrow)
        columns = index.item_columns("content", "frame") if index.has_blocks else index.columns
        for start in range(0, count, _TOGETHER):
            part = slice(start, min(start + _TOGETHER, count))
            into = slice(base + part.start, base + part.stop)
            frame[into] = numbers_of[columns["frame"][part]]
            halves = np.ascontiguousarray(columns["content"][part]).view(">u8")
            mixed[into], tail[into] = halves[:, 0], halves[:, 1]
            mixed[into] ^= mixtures[frame[into]]
    order = _order(mixed)
    mixed = mixed[order]
    tail = tail[order]  # one after the other: memory
    frame = frame[order]
    twice = np.flatnonzero((mixed[1:] == mixed[:-1]) & (tail[1:] == tail[:-1]) & (frame[1:] == frame[:-1])) + 1
    columns = {"mixed": mixed, "tail": tail, "frame": frame, "row": order}
    if len(twice):
        columns = {name: np.delete(column, twice) for name, column in columns.items()}
    return columns | {"frames": frames, "bases": bases}


def open_lookup(folder: Path) -> Catalog:
    """The catalog that another process saved; its columns are mapped read-only. The files are complete and ours."""
    with writing(folder):
        folders, damaged, names = json.loads((folder / "shards.json").read_text("ascii"))
        columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}
    return Catalog([Path(one) for one in folders], columns, damaged)


def undamaged_index(folder: Path) -> ShardIndex | None:
    """The index of a sealed shard, or None if the shard is surely damaged."""
    try:
        return checked_index(folder)
    except CacheDamagedError as error:
        raise_unreadable(error, folder)
        return None


def _order(numbers: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """What ``argsort`` gives, faster: positions replace the low bits, and values sort faster than positions.

    Equal numbers stay in their order. There are fewer than 2**32.
    """
    low = np.uint64((1 << max(len(numbers) - 1, 1).bit_length()) - 1)
    packed = numbers & ~low
    packed |= np.arange(len(numbers), dtype=np.uint64)
    packed.sort()
    order = (packed & low).astype(np.uint32)
    del packed
    nearly: NDArray[np.uint64] = numbers[order]
    return order[np.argsort(nearly, kind="stable")]  # linear: only numbers with equal high bits change places


def _mixtures(frames: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(F,) a number for each frame (F, 16), which is mixed into the first 8 bytes of contents."""
    return np.array([checksum(frame.tobytes()) for frame in frames], dtype=np.uint64)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[int]:
    try:  # a worker whose build was killed seals its shard, perhaps since it was listed
        descriptor = open_file(path if path.exists() else path.parent.with_suffix("") / path.name)
    except OSError as error:
        raise CacheDamagedError("a shard cannot be read", where=str(path), why=str(error)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)

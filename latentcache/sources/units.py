"""What readers take and give: a request, samples in columns that are no table yet, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.strings import Strings
from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES
from latentcache.sources.causes import as_rejected
from latentcache.sources.known import KnownFiles, files_of, take_rows
from latentcache.sources.layout import above
from latentcache.sources.options import SourceOptions
from latentcache.value import Value


@dataclass(kw_only=True)
class Scan:
    """Request for a scan; see ``scan.scan``."""

    options: SourceOptions
    known: SampleTable | None = None
    rejected: Sequence[Rejected] = ()
    notes: Sequence[Rejected] = ()
    chosen: NDArray[np.bool_] | None = None
    full: bool = False
    hash_all: bool = False
    stopping: Callable[[], bool] = bool

    def held(self, names: Strings, memos: NDArray[np.uint64], reading: NDArray[np.uint8] | None) -> KnownFiles:
        """The files of the snapshot among these, without those that are to be read again or were read otherwise."""
        held = KnownFiles(self.known, names, memos, () if self.full else self.rejected)
        if self.full and self.known is not None:
            held.distrust(take_rows(files_of(self.known, self.chosen), held.position))
        old = held.table.files.reading if held.table is not None else None
        if old is not None or reading is not None:  # files that the snapshot read in another way
            before = np.zeros((len(names), HASH_BYTES), np.uint8) if old is None else take_rows(old, held.position)
            now = np.zeros_like(before) if reading is None else reading
            held.distrust((before != now).any(axis=1) & (held.position >= 0))
        return held

    def contained(
        self, held: KnownFiles, files: NDArray[np.intp], name: str, bad: list[Rejected], read: Callable[[int], None]
    ) -> NDArray[np.intp]:
        """Unchanged files among those that hold several units, such as records: the snapshot has their rows.

        Each other one of ``files`` is given to ``read``. Those that cannot be read, and what the snapshot rejected in
        unchanged ones, are appended to ``bad``; ``name`` is the input.
        """
        names = held.names.take(files)
        is_known = (held.position[files] >= 0) & (held.table is not None and held.table.inputs[name].line is not None)
        lacking = {name for item in self.rejected if item.target or item.content for name in above(item.name)}
        if lacking:  # the snapshot has no rows for these
            is_known &= [name not in lacking for name in names]
        known = {names[number] for number in np.flatnonzero(is_known).tolist()} if self.rejected else set[str]()
        bad += [item for item in self.rejected if known.intersection(above(item.name))]
        for file, label in zip(files[~is_known].tolist(), held.names.take(files[~is_known]), strict=True):
            if self.stopping():
                break
            try:
                read(file)
            except UnusableSampleError as error:
                bad.append(as_rejected(label, error))
        return np.asarray(files[is_known])


class ScanResult(Value):
    """Result of a scan of images or of records."""

    samples: SampleTable
    rejected: tuple[Rejected, ...]
    """By the source, for every field."""
    notes: tuple[Rejected, ...]
    images: Any = None
    """An ``images.ImageCounts``; None: DATA are records."""
    hashed: int = 0
    """Images that were hashed."""
    unread: Mapping[tuple[str, int], UnusableSampleError] = field(default_factory=dict)
    """(Input, row) of those that could not be read, and why."""


_NONE = np.array(-1, dtype=np.int32)
#: Column of units -> its value where nothing is said; the others are positions of files, where it is -1.
_DEFAULTS: Mapping[str, NDArray[Any]] = {
    "which": np.array(-1, dtype=np.int8),
    "owner": np.array(0, dtype=np.int32),
    "repeats": np.array(1, dtype=np.int32),
    "text": np.array("", dtype=object),
    "tail": np.array("", dtype=object),
    "line": np.array(0, dtype=np.uint32),
    "member": np.array(0, dtype=np.uint32),
    "span": np.zeros(2, dtype=np.uint64),
    "more": np.array({}, dtype=object),
    "known": _NONE,
    "caption_known": _NONE,
}


class Units:
    """Samples (n) that are no table yet, in columns; a column that was not given takes no memory.

    - ``image``, ``caption``, ``mask``, ...: positions among the files; -1: none.
    - ``which``: extension of the caption file among those of its rule; -1: it is not beside the image.
    - ``owner``: sets; ``repeats`` in an epoch.
    - ``more``: other columns of the table, by their names.
    - ``text``: captions that are read already; ``line``: rows or members that hold them, 0: none.
    - ``member``: members or rows of archives, from 1; 0: the image is the file. ``tail``: their names behind that of
      the file; ``span``: (n, 2) see ``locations.SPAN``; ``known``: rows of the snapshot, -1: new.
    """

    def __init__(self, **columns: NDArray[Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["image"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        default = _DEFAULTS.get(name, _NONE)
        held = self.columns.get(name)
        return np.broadcast_to(default, (len(self), *default.shape)) if held is None else held

    @property
    def files(self) -> dict[str, NDArray[np.int32]]:
        """The columns that are positions among the files, such as ``image``."""
        return {name: column for name, column in self.columns.items() if name not in _DEFAULTS}

    def take(self, rows: NDArray[Any]) -> Units:
        """Some of them: positions, or True for each."""
        return Units(**{name: column[rows] for name, column in self.columns.items()})

    @classmethod
    def joined(cls, parts: Sequence[Units]) -> Units:
        """One after the other."""
        names = dict.fromkeys(name for part in parts for name in part.columns)
        return cls(**{name: np.concatenate([part[name] for part in parts]) for name in names})

"""What a source hands over: samples that can be used, and a word on every file that cannot.

Guarantee: every picture file below the root is in exactly one of ``samples``, ``refused`` and ``notes``.
Names are relative to the root with ``/``; a name that is not UTF-8 carries its bytes as surrogate escapes
(``os.fsdecode``), so that ``os.fsencode(name)`` gives them back.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.stat import StatMemo

_STAT_WIDTH = 5
_WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One picture and its caption."""

    name: str
    """Path below the root."""
    caption: str
    """Empty when there is none."""
    stat: StatMemo
    """Of the picture file (of the target, for a symbolic link inside the root); ``seen_ns`` is 0."""


class SampleColumns(Sequence[Sample]):
    """Samples in columns: a sample becomes an object only when it is asked for.

    Args:
        names: In byte order.
        captions: One for each name.
        stats: (S, 5) size, mtime_ns, ctime_ns, inode and device, times before 1970 wrapped into 64 bits.
    """

    def __init__(self, names: Sequence[str], captions: Sequence[str], stats: NDArray[np.uint64]) -> None:
        self.names, self.captions, self.stats = names, captions, stats

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleColumns:
        """Any samples as columns."""
        if isinstance(samples, SampleColumns):
            return samples
        identities = [pack_identity(sample.stat.identity) for sample in samples]
        stats = np.array(identities, dtype=np.uint64).reshape(-1, _STAT_WIDTH)
        return cls([sample.name for sample in samples], [sample.caption for sample in samples], stats)

    @classmethod
    def joined(cls, several: Sequence[SampleColumns]) -> SampleColumns:
        """The samples of several, one after the other."""
        stats = [np.empty((0, _STAT_WIDTH), dtype=np.uint64), *(part.stats for part in several)]
        names = [name for part in several for name in part.names]
        captions = [caption for part in several for caption in part.captions]
        return cls(names, captions, np.concatenate(stats))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        stat = unpack_identity(self.stats[index].tolist())
        return Sample(name=self.names[index], caption=self.captions[index], stat=stat)

    def __iter__(self) -> Iterator[Sample]:
        for name, caption, stat in zip(self.names, self.captions, self.stats.tolist(), strict=True):
            yield Sample(name=name, caption=caption, stat=unpack_identity(stat))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class StatColumns:
    """Names and stats as they are met."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._stats = array("Q")

    def add(self, name: str, result: os.stat_result) -> None:
        """One more file."""
        self.names.append(name)
        numbers = (result.st_size, result.st_mtime_ns, result.st_ctime_ns, result.st_ino, result.st_dev)
        try:
            self._stats.extend(numbers)
        except OverflowError:  # a time before 1970
            del self._stats[_STAT_WIDTH * (len(self.names) - 1) :]
            self._stats.extend(pack_identity(numbers))

    @property
    def stats(self) -> NDArray[np.uint64]:
        """(n, 5) the stats."""
        return np.frombuffer(self._stats, dtype=np.uint64).reshape(-1, _STAT_WIDTH)


def pack_identity(identity: Sequence[int]) -> tuple[int, ...]:
    """Five fields of a stat as unsigned 64-bit numbers."""
    return tuple([value & _WORD for value in identity])


def unpack_identity(values: Sequence[int]) -> StatMemo:
    """Inverse of :func:`pack_identity`; times before 1970 come back negative."""
    size, mtime, ctime, inode, device = values
    mtime, ctime = (time - ((time >> 63) << 64) for time in (mtime, ctime))
    return StatMemo(size=size, mtime_ns=mtime, ctime_ns=ctime, inode=inode, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A file that is not used: as ``refused`` with a cause word, or as a note."""

    name: str
    cause: str
    """Stable word: truncated, empty, html, git-lfs, svg, not-regular, symlink-loop, caption-encoding, ..."""
    detail: str = ""
    """One sentence with the numbers: line, offset, expected and found."""
    hint: str = ""
    """What the user can do about it."""
    stat: StatMemo | None = None
    content: bytes = b""
    """Content hash, where the file was read (16 bytes); empty otherwise."""
    line: int = 0
    """Line or row of the file, from 1, where one record of it is meant; 0 for the file itself."""
    field: str = ""
    """Field of the record, as ``messages[2].content``; empty where it is about the whole of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a data folder holds, samples in the byte order of their names."""

    root: Path
    samples: Sequence[Sample]
    refused: tuple[Refusal, ...] = ()
    notes: tuple[Refusal, ...] = ()
    caption_source: str = "none"
    """``sidecar``, ``metadata.csv``, ``metadata.jsonl`` or ``none``."""

    def parts(self) -> Iterator[SampleColumns]:
        """All samples in columns: what a listing gives a part at a time."""
        yield SampleColumns.of(self.samples)

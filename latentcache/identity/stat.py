"""The stat memo: when a file may be taken for unchanged without reading it.

Rule (after ccache and git's racy index): size, mtime, ctime, inode and device are all *equal* to what they
were when the content was hashed, and the file was not written within two seconds of that moment. Times are
compared for equality only, so a clock that jumps does no harm.
"""

from __future__ import annotations

import os
from typing import NamedTuple

#: A file younger than this when it was hashed may have changed again within its timestamp's resolution.
RACY_NS = 2_000_000_000
_WORD = 0xFFFF_FFFF_FFFF_FFFF


class StatMemo(NamedTuple):
    """Result of ``lstat`` when a source was hashed. Bytes, nanoseconds; ``seen_ns`` is when it was hashed."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    seen_ns: int = 0

    @classmethod
    def of(cls, result: os.stat_result, *, seen_ns: int = 0) -> StatMemo:
        """Make it from a stat result; times before 1970 are wrapped into 64 bits."""
        times = result.st_mtime_ns & _WORD, result.st_ctime_ns & _WORD
        return cls(result.st_size, *times, result.st_ino, result.st_dev, seen_ns)

    @property
    def identity(self) -> tuple[int, ...]:
        """All fields but the moment of hashing."""
        return self[:5]

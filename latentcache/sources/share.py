"""A share of the records: what one node of several makes, told by content alone.

Guarantee: shares of one count are disjoint and together they are all records; a record's share depends on nothing but
its content and the count, so no node has to ask another, equal records fall into one share, and a line that moves
stays where it was. Shares are as even as chance makes them: n records differ by about the square root of their part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from latentcache.errors import UsageError

_FORM = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")
_FIX = "--shard 0/4 on the first of four nodes, 1/4, 2/4 and 3/4 on the others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Share ``index`` of ``of``; 0 of 1 is all there is."""

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise UsageError(
                f"there is no share {self.index} of {self.of}",
                why="shares are counted from 0, and each is below their count",
                fix=_FIX,
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    @classmethod
    def parse(cls, words: str) -> Share:
        """``0/4`` as a share.

        Raises:
            UsageError: It is no pair of numbers, or there is no such share.
        """
        found = _FORM.fullmatch(words)
        if found is None:
            raise UsageError(f"--shard {words!r} names no share", why="expected two whole numbers", fix=_FIX)
        return cls(index=int(found[1]), of=int(found[2]))

    def holds(self, content: bytes) -> bool:
        """Whether a record is in this share.

        Args:
            content: Its content hash, 16 bytes. The last eight say it: the first eight part validation off.
        """
        return int.from_bytes(content[8:], "little") % self.of == self.index

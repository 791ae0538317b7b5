"""A part of a data set: what one node of several builds.

Parts of one count are disjoint, and together they are the whole. No node has to ask another. Records belong to a part
by their content: equal records are in one part, also after a line moved. Images belong to a part by their name,
because one node may know their content and another not. Parts are as even as chance makes them.
"""

from __future__ import annotations

import re

import xxhash

from latentcache.errors import UsageError
from latentcache.value import Value

_FORM = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")
_FIX = "give 0/4 on the first of four nodes, 1/4, 2/4 and 3/4 on the others"


class Part(Value):
    """Part ``index`` of ``of``; 0 of 1 is the whole."""

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            why = "parts are counted from 0, and each is below their count"
            raise UsageError("there is no such part", argument="part", value=str(self), why=why, fix=_FIX)

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    @classmethod
    def parse(cls, words: str) -> Part:
        """``0/4`` as a part; raises UsageError."""
        found = _FORM.fullmatch(words)
        if found is None:
            raise UsageError("expected two integers", argument="part", value=words, why="such as 0/4", fix=_FIX)
        return cls(index=int(found[1]), of=int(found[2]))

    def holds(self, content: bytes) -> bool:
        """True if a record with this content hash (16 bytes) is in this part."""
        # The last eight bytes: the first eight split validation off.
        return int.from_bytes(content[8:], "little") % self.of == self.index

    def holds_name(self, name: str) -> bool:
        """True if the image of this name is in this part."""
        return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape")) % self.of == self.index

"""Keys: 32 bytes that name what determines an item's bytes, and nothing else.

``kind u8 | variant u8 | frames u16 | height u16 | width u16 | content 16 | recipe 8``, big endian, so that
``memcmp`` order groups keys by kind and size. Paths, times and positions are never part of a key.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from latentcache.identity.content import HASH_BYTES

#: Bytes in a key.
KEY_BYTES = 32
#: Bytes of the recipe hash that enter the key.
RECIPE_BYTES = 8
#: Where the content hash begins in a key, in bytes.
CONTENT_AT = 8
#: Largest side or frame count that a key holds.
MAX_DIM = 65535
_LAYOUT = struct.Struct(f">BBHHH{HASH_BYTES}s{RECIPE_BYTES}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryKey:
    """What an item is made from. ``content`` 16 bytes; ``recipe`` 8 bytes; ``dims`` frames, height, width in pixels.

    Raises:
        ValueError: A hash has another length, or a dimension is beyond 65535.
    """

    kind: int
    content: bytes
    recipe: bytes
    dims: tuple[int, int, int] = (1, 1, 1)
    variant: int = 0

    def __post_init__(self) -> None:
        # struct would cut or pad a hash of another length silently: two inputs, one key.
        if (len(self.content), len(self.recipe)) != (HASH_BYTES, RECIPE_BYTES):
            expected, found = f"{HASH_BYTES} + {RECIPE_BYTES}", f"{len(self.content)} + {len(self.recipe)}"
            raise ValueError(f"a key needs {expected} bytes of content hash and recipe, got {found}")
        if not all(1 <= side <= MAX_DIM for side in self.dims):
            raise ValueError(f"a key holds dimensions from 1 to {MAX_DIM}, got {self.dims}")

    def pack(self) -> bytes:
        """The 32 bytes."""
        return _LAYOUT.pack(self.kind, self.variant, *self.dims, self.content, self.recipe)

    @classmethod
    def unpack(cls, data: bytes) -> EntryKey:
        """Inverse of :meth:`pack`.

        Raises:
            ValueError: Not 32 bytes, or a dimension of zero.
        """
        if len(data) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(data)}")
        kind, variant, frames, height, width, content, recipe = _LAYOUT.unpack(data)
        return cls(kind=kind, variant=variant, dims=(frames, height, width), content=content, recipe=recipe)

"""Entry keys: 32 bytes that name what determines an entry's bytes, and nothing else.

``kind u8 | variant u8 | frames u16 | height u16 | width u16 | content 16 | recipe 8``, big endian, so that
``memcmp`` order groups entries by kind and bucket. Paths, times and positions are never part of a key.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from latentcache.geometry.buckets import MAX_SIDE
from latentcache.geometry.sizes import Size
from latentcache.identity.content import HASH_BYTES

#: Bytes in a key.
KEY_BYTES = 32
#: Bytes of the recipe hash that enter the key.
RECIPE_BYTES = 8
#: ``kind`` of image and video latents.
KIND_LATENTS = 1
#: ``kind`` of blocks of tokenised documents, whose ``bucket`` is 1 x 1.
KIND_TOKENS = 2
#: ``variant`` of a mirrored picture, and where in a key it stands.
FLIPPED, VARIANT_BYTE = 1, 1
_LAYOUT = struct.Struct(f">BBHHH{HASH_BYTES}s{RECIPE_BYTES}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryKey:
    """What an entry is made from. ``bucket`` in pixels; ``content`` 16 bytes; ``recipe`` 8 bytes.

    Raises:
        ValueError: A hash has another length, or a side is beyond 65535 pixels.
    """

    content: bytes
    bucket: Size
    recipe: bytes
    kind: int = KIND_LATENTS
    variant: int = 0
    frames: int = 1

    def __post_init__(self) -> None:
        # struct would cut or pad a hash of another length in silence: two inputs, one key.
        if (len(self.content), len(self.recipe)) != (HASH_BYTES, RECIPE_BYTES):
            expected, found = f"{HASH_BYTES} + {RECIPE_BYTES}", f"{len(self.content)} + {len(self.recipe)}"
            raise ValueError(f"a key needs {expected} bytes of content hash and recipe, got {found}")
        if max(self.bucket.height, self.bucket.width) > MAX_SIDE:
            raise ValueError(f"a key holds sides up to {MAX_SIDE} pixels, got {self.bucket}")

    def pack(self) -> bytes:
        """The 32 bytes under which the entry is stored."""
        sides = self.bucket.height, self.bucket.width
        return _LAYOUT.pack(self.kind, self.variant, self.frames, *sides, self.content, self.recipe)

    @classmethod
    def unpack(cls, data: bytes) -> EntryKey:
        """Inverse of :meth:`pack`.

        Raises:
            ValueError: Not 32 bytes, or a side of zero pixels.
        """
        if len(data) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(data)}")
        kind, variant, frames, height, width, content, recipe = _LAYOUT.unpack(data)
        bucket = Size(height, width)
        return cls(kind=kind, variant=variant, frames=frames, bucket=bucket, content=content, recipe=recipe)

"""Keys: 32 bytes that name what determines an item's bytes, and nothing else.

``kind u8 | variant u8 | frames u16 | height u16 | width u16 | content 16 | recipe 8``, big endian, so that
``memcmp`` order groups keys by kind and size. Paths, times and positions are never part of a key.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import HASH_BYTES

KEY_BYTES = 32
#: Bytes of the recipe hash that enter the key.
RECIPE_BYTES = 8
CONTENT_AT = 8
#: Largest side or frame count that a key holds.
MAX_DIM = 65535
_END = CONTENT_AT + HASH_BYTES
_LAYOUT = struct.Struct(f">BBHHH{HASH_BYTES}s{RECIPE_BYTES}s")


def entry_key(
    *, kind: int, content: bytes, recipe: bytes, dims: tuple[int, int, int] = (1, 1, 1), variant: int = 0
) -> bytes:
    """The 32 bytes of what an item is made from; ``dims`` are frames, height and width in pixels."""
    # struct would cut or pad a hash of another length silently: two inputs, one key.
    if (len(content), len(recipe)) != (HASH_BYTES, RECIPE_BYTES):
        expected, found = f"{HASH_BYTES} + {RECIPE_BYTES}", f"{len(content)} + {len(recipe)}"
        raise ValueError(f"a key needs {expected} bytes of content hash and recipe, got {found}")
    if not all(1 <= side <= MAX_DIM for side in dims):
        raise ValueError(f"a key holds dimensions from 1 to {MAX_DIM}, got {dims}")
    return _LAYOUT.pack(kind, variant, *dims, content, recipe)


class Keys:
    """(n, 32) keys as contents (n, 16), the number of the frame of each (n,), and distinct frames (F, 16).

    A frame is the 8 bytes before and the 8 bytes after the content. Indexing gives arrays of keys.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, content: Any, frame: Any, frames: Any) -> None:
        self.content, self.frame, self.frames = content, frame, frames
        self.shape = (len(content), KEY_BYTES)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        if isinstance(index, int | np.integer):
            one: NDArray[np.uint8] = self[np.array([index])][0]
            return one
        content, frames = self.content[index], np.asarray(self.frames)[self.frame[index]]
        keys = np.empty((len(content), KEY_BYTES), dtype=np.uint8)
        keys[:, :CONTENT_AT], keys[:, CONTENT_AT:_END], keys[:, _END:] = frames[:, :8], content, frames[:, 8:]
        return keys

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)


def equal_hashes(hashes: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """(n,) True where two hashes (n, 16) are equal; ``all`` of an axis of 16 takes ten times as long."""
    halves = np.ascontiguousarray(hashes).view(np.uint64) == np.ascontiguousarray(others).view(np.uint64)
    return np.asarray(halves[:, 0] & halves[:, 1])


def split_keys(keys: Any) -> tuple[Any, NDArray[np.uint8], NDArray[np.int32]]:
    """Contents (n, 16), distinct frames (F, 16) in memcmp order, and (n,) the frame of each key."""
    if isinstance(keys, Keys):
        frames, frame = np.asarray(keys.frames), np.asarray(keys.frame)
        used = np.bincount(frame, minlength=len(frames)) > 0
        return keys.content, frames[used], (np.cumsum(used, dtype=np.int32) - np.int32(1))[frame]
    content = np.ascontiguousarray(keys[:, CONTENT_AT:_END])
    frames = np.concatenate([keys[:, :CONTENT_AT], keys[:, _END:]], axis=1)
    halves = frames.view(">u8").astype(np.uint64)
    if not len(keys):
        return content, frames, np.zeros(0, dtype=np.int32)
    changes = np.flatnonzero((halves[1:] != halves[:-1]).any(axis=1)) + 1
    starts = np.concatenate([[0], changes])
    mixed = halves[starts, 0] * np.uint64(0x9E37_79B9_7F4A_7C15) + halves[starts, 1]
    _, first, number = np.unique(mixed, return_index=True, return_inverse=True)
    distinct = frames[starts[first]]
    if not np.array_equal(distinct[number], frames[starts]):  # two frames with one mixed number
        distinct, number = np.unique(frames[starts], axis=0, return_inverse=True)
    order = np.lexsort(distinct.T[::-1])
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    counts = np.diff(np.append(starts, len(keys)))
    return content, distinct[order], np.repeat(rank[number.reshape(-1)], counts)

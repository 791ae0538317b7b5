"""The bytes of one entry: a fixed 112-byte header and the raw payload. Normative text: docs/format/entry.md.

Guarantee: a header is believed only when its checksum over key and header holds and its shape, type and length
agree, so a swapped, truncated or invented entry is refused before anything is allocated for it. LMDB starts a
large value 16 bytes into a page; 16 + 112 = 128 puts the payload on a 64-byte boundary. What a build has to know
of an entry without its payload is kept a second time, in a small record with a checksum of its own.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheFormatError, CorruptEntryError
from latentcache.geometry.placement import Placement
from latentcache.geometry.sizes import Box, Size
from latentcache.identity.content import HASH_BYTES, checksum
from latentcache.identity.key import EntryKey
from latentcache.recipe import DTYPES

MAGIC = b"LCE1"
HEADER_VERSION = 1
#: Bytes in a header.
HEADER_BYTES = 112
#: Bytes of the facts stored beside the header: pixel hash, resize and crop.
FACTS_BYTES = 32
#: Bytes of a record: header, facts and their checksum.
RECORD_BYTES = HEADER_BYTES + FACTS_BYTES + 8
MAX_DIMENSIONS = 8
_LAYOUT = struct.Struct(f"<4sBBBBHHIQQ{MAX_DIMENSIONS}I{HASH_BYTES}s{HASH_BYTES}sIIQ")
_FACTS = struct.Struct(f"<{HASH_BYTES}sIIII")
_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_NUMPY = {"bfloat16": "<u2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryHeader:
    """What an entry says of itself."""

    kind: int
    dtype: str
    shape: tuple[int, ...]
    payload_checksum: int
    """xxh3-64 of the payload."""
    content: bytes
    """xxh3-128 of the source file."""
    recipe_id: bytes
    """16 bytes."""
    original_size: Size
    """Source pixels, after EXIF orientation."""
    true_length: int = 0
    flags: int = 0

    @property
    def payload_bytes(self) -> int:
        """Length of the payload that type and shape ask for."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFacts:
    """How the picture was placed, and what its pixels were: read by build and verify, never recomputed."""

    pixel_hash: bytes
    """xxh3-128 of the cropped RGB pixels, 16 bytes."""
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """One entry ready to be written. ``value`` is header and payload in one buffer."""

    key: bytes
    value: bytes | bytearray | memoryview
    facts: bytes


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type that carries a storage type; bfloat16 travels as uint16."""
    return np.dtype(_NUMPY.get(name, name)).newbyteorder("<")


def pack_header(header: EntryHeader, key: bytes) -> bytes:
    """The 112 bytes, ending in xxh3-64 over ``key`` and all that stands before.

    Raises:
        ValueError: More than 8 dimensions, none, or one that is zero.
    """
    if not 1 <= len(header.shape) <= MAX_DIMENSIONS or 0 in header.shape:
        raise ValueError(f"an entry has 1 to {MAX_DIMENSIONS} dimensions of at least 1, got {header.shape}")
    code = DTYPES[header.dtype][0]
    shape = header.shape + (0,) * (MAX_DIMENSIONS - len(header.shape))
    front = MAGIC, HEADER_VERSION, header.kind, code, len(header.shape), HEADER_BYTES, header.flags
    sizes = header.true_length, header.payload_bytes, header.payload_checksum
    ids = header.content, header.recipe_id, header.original_size.height, header.original_size.width
    unsigned = _LAYOUT.pack(*front, *sizes, *shape, *ids, 0)[:-8]
    return unsigned + struct.pack("<Q", checksum(key + unsigned))


def unpack_header(data: bytes, key: bytes) -> EntryHeader:
    """Inverse of :func:`pack_header`, believing nothing.

    Raises:
        CorruptEntryError: Any field or the checksum is wrong for this key.
        CacheFormatError: A header version this release does not know.
    """
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        raise _corrupt(key, f"expected {HEADER_BYTES} bytes starting with {MAGIC!r}, found {bytes(data[:4])!r}")
    found = _LAYOUT.unpack_from(data)
    expected = checksum(key + bytes(data[: HEADER_BYTES - 8]))
    if found[-1] != expected:
        raise _corrupt(key, f"header checksum: expected {expected:016x}, found {found[-1]:016x}")
    if found[1] != HEADER_VERSION:
        raise CacheFormatError(
            f"entry format {found[1]} is newer than this version reads ({HEADER_VERSION})",
            where=f"entry {key.hex()}",
            fix="upgrade latentcache",
        )
    _, _, kind, code, ndim, header_bytes, flags, length, payload_bytes, payload_checksum = found[:10]
    ndim = min(ndim, MAX_DIMENSIONS + 1)
    shape, unused = found[10 : 10 + ndim], found[10 + ndim : 18]
    content, recipe_id, height, width = found[18:22]
    known = code in _NAMES and 1 <= ndim <= MAX_DIMENSIONS and header_bytes == HEADER_BYTES
    if not known or 0 in (*shape, height, width) or any(unused):
        sizes = f"shape {list(found[10:18])}, source {height}x{width}"
        raise _corrupt(key, f"type {code}, {ndim} dimensions, header of {header_bytes}, {sizes}")
    header = EntryHeader(
        kind=kind,
        dtype=_NAMES[code],
        shape=shape,
        payload_checksum=payload_checksum,
        content=content,
        recipe_id=recipe_id,
        original_size=Size(height, width),
        true_length=length,
        flags=flags,
    )
    if header.payload_bytes != payload_bytes:
        raise _corrupt(key, f"{header.dtype} {shape} needs {header.payload_bytes} bytes, found {payload_bytes}")
    return header


def pack_facts(facts: EntryFacts) -> bytes:
    """The 32 bytes kept beside the header."""
    resize, crop = facts.placement.resize, facts.placement.crop
    return _FACTS.pack(facts.pixel_hash, resize.height, resize.width, crop.top, crop.left)


def unpack_facts(data: bytes, bucket: Size) -> EntryFacts:
    """Inverse of :func:`pack_facts`; the crop's size is the bucket's.

    Raises:
        ValueError: Not 32 bytes, a resize of zero pixels, or a crop that leaves the resized picture.
    """
    if len(data) != FACTS_BYTES:
        raise ValueError(f"facts have {FACTS_BYTES} bytes, got {len(data)}")
    pixel_hash, height, width, top, left = _FACTS.unpack(data)
    crop = Box(top=top, left=left, size=bucket)
    placement = Placement(bucket=bucket, resize=Size(height, width), crop=crop)
    if not crop.fits(placement.resize):
        raise ValueError(f"a crop of {bucket} at {top}, {left} leaves the picture of {placement.resize}")
    return EntryFacts(pixel_hash=pixel_hash, placement=placement)


def pack_record(header: bytes, facts: bytes, key: bytes) -> bytes:
    """Packed header and facts, ending in xxh3-64 over ``key`` and both."""
    return header + facts + struct.pack("<Q", checksum(key + header + facts))


def unpack_record(data: bytes, key: bytes) -> tuple[EntryHeader, bytes]:
    """The header, and the facts still packed, of a record made by :func:`pack_record`.

    Raises:
        CorruptEntryError: Length, checksum, key or a field is wrong.
        CacheFormatError: A header version this release does not know.
    """
    header = unpack_header(data[:HEADER_BYTES], key)
    facts = data[HEADER_BYTES : HEADER_BYTES + FACTS_BYTES]
    if len(data) != RECORD_BYTES or data != pack_record(data[:HEADER_BYTES], facts, key):
        raise _corrupt(key, "the facts beside the header fail their checksum")
    try:
        unpack_facts(facts, EntryKey.unpack(key).bucket)
    except ValueError as error:
        raise _corrupt(key, str(error)) from error
    return header, facts


def payload_array(header: EntryHeader, payload: bytes | bytearray | memoryview) -> NDArray[Any]:
    """The payload as an array of the header's shape, over the same memory."""
    return np.frombuffer(payload, dtype=numpy_dtype(header.dtype)).reshape(header.shape)


def _corrupt(key: bytes, why: str) -> CorruptEntryError:
    return CorruptEntryError("an entry's header is damaged", key=key.hex(), where=f"entry {key.hex()}", why=why)

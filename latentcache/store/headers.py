"""Headers of a whole batch, checked at once: what ``unpack_header`` says yes to, for one shape and type.

Guarantee: True only where every header would be unpacked without an error and has the shape and type asked for.
False says no more than "look closer": the reader of single entries knows which entry it is, and why.
Cost: three passes of numpy over 144 bytes per entry and one short xxh3 each; unpacking costs 6 us per entry.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.geometry.sizes import Size
from latentcache.identity.content import HASH_BYTES, checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.entry import HEADER_BYTES, MAX_DIMENSIONS, EntryHeader, pack_header

#: Bytes of a key with its header behind it: one row of a batch of headers.
KEYED_BYTES = KEY_BYTES + HEADER_BYTES
_SIGNED_BYTES = KEYED_BYTES - 8
_FIELDS = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"), ("magic", "V4"), ("version", "u1"), ("kind", "u1"), ("dtype", "u1"),
        ("ndim", "u1"), ("header_bytes", "<u2"), ("flags", "<u2"), ("true_length", "<u4"),
        ("payload_bytes", "<u8"), ("payload_checksum", "<u8"), ("shape", "<u4", (MAX_DIMENSIONS,)),
        ("content", f"V{HASH_BYTES}"), ("recipe_id", f"V{HASH_BYTES}"), ("height", "<u4"), ("width", "<u4"),
        ("checksum", "<u8"),
    ]
)  # fmt: skip
#: Shapes that are told apart; entries of more are checked with their headers every time.
_MAX_FORMS = 1 << 16
#: Fields that shape and type decide.
_DECIDED = ("magic", "version", "dtype", "ndim", "header_bytes", "payload_bytes", "shape")


def keyed_headers(keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(B, 144) for B headers behind their keys; the headers are the caller's to fill in.

    Args:
        keys: (B, 32) entry keys.
    """
    keyed = np.empty((len(keys), KEYED_BYTES), dtype=np.uint8)
    keyed[:, :KEY_BYTES] = keys
    return keyed


def headers_hold(keyed: NDArray[np.uint8], shape: tuple[int, ...], dtype: str) -> bool:
    """Whether every header is whole, belongs to its key, and says this shape and type.

    Args:
        keyed: (B, 144) keys and headers, C-contiguous.
        shape: Of one payload.
        dtype: Storage type, as in the recipe.
    """
    fields = keyed.view(_FIELDS)[:, 0]
    expected, mask = _template(shape, dtype)
    if ((keyed ^ expected) & mask).any() or not (fields["height"].all() and fields["width"].all()):
        return False
    signed = keyed[:, :_SIGNED_BYTES]
    stored: list[int] = fields["checksum"].tolist()
    return [checksum(row.data) for row in signed] == stored


def payload_checksums(keyed: NDArray[np.uint8]) -> list[int]:
    """What the headers say of their payloads: B numbers, xxh3-64.

    Args:
        keyed: (B, 144) keys and headers, C-contiguous.
    """
    checksums: list[int] = keyed.view(_FIELDS)[:, 0]["payload_checksum"].tolist()
    return checksums


def header_ids(keyed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Content hash and recipe id of each header: (B, 16) twice.

    Args:
        keyed: (B, 144) keys and headers, C-contiguous.
    """
    content, recipe = (_FIELDS.fields[name][1] for name in ("content", "recipe_id"))  # type: ignore[index]
    return keyed[:, content : content + HASH_BYTES], keyed[:, recipe : recipe + HASH_BYTES]


class SeenHeaders:
    """Checksums of payloads whose headers held once in this process: such a header need not be read again.

    What guards a payload is its checksum; the header that gave it was checked against its key. Threads may share it:
    the same row is only ever given the same values. A file cannot change under it, because sealed shards do not.

    Args:
        num_rows: Of the generation.
    """

    def __init__(self, num_rows: int) -> None:
        # Zeros of this size are pages that do not exist before they are written to.
        self._checksums = np.zeros(num_rows, dtype=np.uint64)
        self._form = np.zeros(num_rows, dtype=np.uint16)
        self._forms: dict[tuple[tuple[int, ...], str], int] = {}
        self._numbers = itertools.count(1)  # two threads are never given the same one

    def checksums(self, rows: NDArray[Any], shape: tuple[int, ...], dtype: str) -> list[int] | None:
        """xxh3-64 of the payloads of these rows, if all their headers held with this shape and type."""
        form = self._forms.get((shape, dtype))
        if form is None or (self._form.take(rows) != form).any():
            return None
        checksums: list[int] = self._checksums.take(rows).tolist()
        return checksums

    def remember(self, rows: NDArray[Any], shape: tuple[int, ...], dtype: str, checksums: list[int]) -> None:
        """Say that all headers of these rows held with this shape and type."""
        if (shape, dtype) not in self._forms:
            self._forms.setdefault((shape, dtype), next(self._numbers))
        form = self._forms[shape, dtype]
        if form < _MAX_FORMS:
            self._checksums[rows] = checksums  # before the form, which says that it is there
            self._form[rows] = form


@functools.lru_cache(maxsize=256)
def _template(shape: tuple[int, ...], dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(144,) a header of this shape and type, and (144,) which of its bits they decide."""
    nothing: Any = b"\0" * HASH_BYTES
    header = EntryHeader(
        kind=0,
        dtype=dtype,
        shape=shape,
        payload_checksum=0,
        content=nothing,
        recipe_id=nothing,
        original_size=Size(1, 1),
    )
    mask = np.zeros(KEYED_BYTES, dtype=np.uint8)
    for name in _DECIDED:
        kind, start = _FIELDS.fields[name][:2]  # type: ignore[index]
        mask[start : start + kind.itemsize] = 0xFF
    packed = b"\0" * KEY_BYTES + pack_header(header, b"\0" * KEY_BYTES)
    return np.frombuffer(packed, dtype=np.uint8), mask

"""The members of a tar, from its headers alone: about 5 us each, no payload is read.

Formats: POSIX ustar and pax (IEEE Std 1003.1-2017, ``pax``), and GNU tar's long names, sparse files and binary sizes
(GNU tar manual, "Basic Tar Format"). A tar that ends without its two blocks of zeros is whole if its last member is.
Members that are no plain files are passed over, as by WebDataset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from latentcache.errors import UnusableSampleError
from latentcache.sources.causes import hint_for

_BLOCK = 512
_CHECKSUM = slice(148, 156)
_REGULAR, _SPARSE = frozenset((b"0", b"\0", b"7")), b"S"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", (b"x", b"X"), b"g"
#: Types whose size says nothing about data behind the header: links, devices, folders, pipes.
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))
#: Largest header of a long name or of pax records.
_MOST_BYTES = 1 << 20


class Member(NamedTuple):
    """A plain file in a tar."""

    number: int
    """From 1, counting all members, as ``tar -t`` lists them."""
    name: str
    """As it is written, without ``./`` in front."""
    offset: int
    """Of its bytes in the tar."""
    size: int


def tar_members(file: BinaryIO) -> Iterator[Member]:
    """The plain files of an open tar, in order.

    Raises:
        UnusableSampleError: ``tar-truncated`` or ``tar-damaged``, with the byte; all members before were given.
    """
    descriptor, end = file.fileno(), os.fstat(file.fileno()).st_size
    common, own = dict[str, str](), dict[str, str]()
    at = number = 0
    while head := os.pread(descriptor, _BLOCK, at):
        if head[0] == 0 and not head.strip(b"\0"):
            return
        if len(head) < _BLOCK:
            raise _fault("tar-truncated", f"the header at byte {at} is cut short, the file ends at byte {end}")
        _check(head, at)
        kind, data, size = head[156:157], at + _BLOCK, _number(head[124:136], at)
        if (own or common) and (kind in _REGULAR or kind == _SPARSE):
            size = int(own.get("size", common.get("size", size)))
        last = data if kind in _WITHOUT_DATA else data + size
        if last > end:
            what = f"member {number + 1} ({_name(head, own, common)}) ends at byte {last}, the file at byte {end}"
            raise _fault("tar-truncated", what)
        at = last + -last % _BLOCK
        if kind in _REGULAR:
            number += 1
            name = _name(head, own, common)
            if not name.endswith("/") and not any(key.startswith("GNU.sparse.") for key in own):
                yield Member(number, name, data, size)
            own = {}
        elif kind == _LONG_NAME:
            own["path"] = _text(_header(descriptor, data, size).rstrip(b"\0"))
        elif kind in _PAX:
            own |= _pax(_header(descriptor, data, size), data)
        elif kind == _PAX_GLOBAL:
            common |= _pax(_header(descriptor, data, size), data)
        elif kind != _LONG_LINK:
            number += 1
            own = {}
            at += _map_bytes(descriptor, head, data) if kind == _SPARSE else 0


def _check(head: bytes, at: int) -> None:
    """Compare the checksum of a header: the sum of its bytes, with blanks in place of the checksum."""
    own = head[_CHECKSUM]
    told = _number(own, at)
    total = sum(head) - sum(own) + 8 * ord(" ")
    if told == total:
        return
    signed = sum(byte - 256 * (byte > 127) for byte in head[:148] + b" " * 8 + head[156:])
    if told != signed:
        raise _fault("tar-damaged", f"the header at byte {at} has the checksum {told}, expected {total}")


def _number(field: bytes, at: int) -> int:
    """An octal number, or GNU's binary one."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError as error:
        raise _fault("tar-damaged", f"the header at byte {at} has {field!r} in place of a number") from error


def _name(head: bytes, own: dict[str, str], common: dict[str, str]) -> str:
    name = (own.get("path") or common.get("path") or "") if own or common else ""
    if not name:
        name = _text(head[:100].partition(b"\0")[0])
        prefix = head[345:500].partition(b"\0")[0] if head[257:263] == b"ustar\0" else b""
        name = f"{_text(prefix)}/{name}" if prefix else name
    while name.startswith("./"):
        name = name[2:]
    return name


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _header(descriptor: int, at: int, size: int) -> bytes:
    """The data of a header that is not a member."""
    if size > _MOST_BYTES:
        raise _fault("tar-damaged", f"the header before byte {at} has {size} bytes, at most {_MOST_BYTES} are read")
    return os.pread(descriptor, size, at)


def _pax(data: bytes, at: int) -> dict[str, str]:
    """Records: bytes in decimal digits, a blank, ``key=value`` and a line end."""
    found, place = dict[str, str](), 0
    while place < len(data) and data[place]:
        length, _, _ = data[place : place + 20].partition(b" ")
        if not length.isdigit() or not int(length) > len(length) + 1:
            raise _fault("tar-damaged", f"a pax record at byte {at + place} has no length")
        key, _, value = data[place + len(length) + 1 : place + int(length) - 1].partition(b"=")
        found[_text(key)] = _text(value).replace("\0", "")
        place += int(length)
    size = found.get("size", "0")
    if not (size.isascii() and size.isdigit() and len(size) < 20):
        raise _fault("tar-damaged", f"the pax record before byte {at + len(data)} has the size {size[:20]!r}")
    return found


def _map_bytes(descriptor: int, head: bytes, data: int) -> int:
    """Bytes of the map of a sparse file that did not fit into its header: further blocks before its data."""
    more, count = head[482:483], 0
    while more not in (b"", b"\0"):
        more = os.pread(descriptor, _BLOCK, data + count * _BLOCK)[504:505]
        count += 1
    return count * _BLOCK


def _fault(cause: str, what: str) -> UnusableSampleError:
    return UnusableSampleError(what, fix=hint_for(cause), slug=cause)

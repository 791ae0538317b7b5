"""The members of a tar, from its headers alone: about 25 us each, no payload is read.

Python's ``tarfile`` reads the headers. It takes a header that is damaged for the end, and gives a last member that is
cut short: both are errors here. A tar that ends without its two blocks of zeros is whole if its last member is.
Links and sparse files have no bytes of their own: WebDataset passes over them, here they are noted.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from latentcache.sources.causes import fault


class Member(NamedTuple):
    """A file in a tar."""

    number: int
    """Number from 1, counting all members, as ``tar -t`` lists them."""
    name: str
    """As it is written, without ``./`` in front."""
    offset: int
    size: int
    """Negative for a link, a sparse file or a device: its bytes are not a range of the tar."""


def tar_members(file: BinaryIO) -> Iterator[Member]:
    """The members of an open tar but its folders, in order.

    Raises:
        UnusableSampleError: ``tar-truncated`` or ``tar-damaged``, with the byte; all members before were given.
    """
    import tarfile

    descriptor, end = file.fileno(), os.fstat(file.fileno()).st_size
    number, tar = 0, None
    with io.FileIO(descriptor, closefd=False) as headers:  # without a buffer: no payload is read
        try:
            headers.seek(0)
            tar = tarfile.TarFile(fileobj=headers, errors="surrogateescape", encoding="utf-8")
            while (header := tar.next()) is not None:
                vars(tar)["members"] = []  # it keeps all
                number, last = number + 1, header.offset_data + header.size
                if header.isdir():
                    continue
                is_plain = header.isreg() and not header.issparse()
                if is_plain and last > end:
                    problem = f"member {number} ({header.name}) ends at byte {last}, the file at byte {end}"
                    raise fault("tar-truncated", problem)
                yield Member(
                    number, header.name.removeprefix("./"), header.offset_data, header.size if is_plain else -1
                )
            at = tar.offset
        except (tarfile.TarError, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
            at = tar.offset if tar else 0
            words = str(error) or "its size is too large"
            raise fault("tar-damaged", f"the header at byte {at} cannot be read: {words}") from error
    rest = os.pread(descriptor, tarfile.BLOCKSIZE, at)
    if rest.strip(b"\0"):
        if len(rest) < tarfile.BLOCKSIZE:
            raise fault("tar-truncated", f"the header at byte {at} is cut short, the file ends at byte {end}")
        raise fault("tar-damaged", f"the header at byte {at} cannot be read: its checksum or a number is wrong")

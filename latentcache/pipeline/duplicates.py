"""Find images of equal content before a build, so that its plan counts entries and not images.

Only unread images that agree in size and in their first bytes are hashed. All others differ, so their content is
learned when a worker reads them. Cost: one short read for each image whose size another one has, and one whole read
for each of equal first bytes. Rows of parquet files are left out: sizes are known only after decompression, so
finding equal ones would read all of the data before the build does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.table import STAT_WIDTH, SampleTable, stat_numbers
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.sources.archives.members import SPAN, Place, is_read_by_workers, open_image, places, read_image
from latentcache.sources.known import with_contents

#: Bytes at the start of two files that are compared; tables and headers of most images end before.
_HEAD_BYTES = 1 << 14
_THREADS = 4
_PRIME = np.uint64(0x9E37_79B9_7F4A_7C15)
T = TypeVar("T")


def with_equal_files(
    samples: SampleTable, name: str, root: Path, *, stopping: Callable[[], bool] = bool
) -> SampleTable:
    """The table with the contents of unread images that are equal to another one, as far as their heads tell.

    An input that is no file and no part of a file is left as it is. ``stopping`` is asked between files.
    """
    if not is_read_by_workers(samples, name):
        return samples

    def read(read_one: Callable[[Path, Place], T], rows: NDArray[np.intp]) -> tuple[NDArray[np.intp], list[T]]:
        """The rows that can be read, and what is read of them: whoever encodes the others says why."""

        def one(place: Place) -> T | None:
            try:
                return None if stopping() else read_one(root, place)
            except (UnusableSampleError, OSError):
                return None

        if not len(rows):
            return rows, []
        with ThreadPoolExecutor(_THREADS) as pool:
            results = list(pool.map(one, places(samples, rows, name)))
        there = [number for number, result in enumerate(results) if result is not None]
        return rows[there], [result for result in results if result is not None]

    held = samples.inputs[name]
    size = np.asarray(samples.files.stat[:, 0])[np.asarray(held.file)]
    if held.line is not None:  # 0 for rows of parquet files
        size = np.where(np.asarray(held.line) > 0, np.asarray(samples.columns[SPAN])[:, 1], size)
    unread: NDArray[np.bool_] = np.asarray(~np.asarray(held.content).any(axis=1))
    rows = np.flatnonzero((np.asarray(held.file) >= 0) & (size > 0))
    rows = rows[_shared(size[rows], unread[rows])]
    rows, heads = read(_head, rows)
    rows = rows[_shared(size[rows] * _PRIME ^ np.array(heads, dtype=np.uint64), unread[rows])]
    rows, found = read(_whole, rows[unread[rows]])
    if not found:
        return samples
    hashes = np.frombuffer(b"".join(content for content, _ in found), dtype=np.uint8).reshape(-1, HASH_BYTES)
    stats = np.array([stat for _, stat in found], dtype=np.uint64).reshape(-1, STAT_WIDTH)
    return with_contents(samples, name, rows, hashes, stats)


def _shared(marks: NDArray[np.uint64], unread: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Positions of marks that occur more than once, at least once unread."""
    near = np.flatnonzero(np.isin(marks, marks[unread]))
    _, which, counts = np.unique(marks[near], return_inverse=True, return_counts=True)
    shared: NDArray[np.intp] = near[counts[which.reshape(-1)] > 1]
    return shared


def _head(root: Path, place: Place) -> int:
    with open_image(root, place) as file:
        return xxhash.xxh3_64_intdigest(file.read(_HEAD_BYTES))


def _whole(root: Path, place: Place) -> tuple[bytes, tuple[int, ...]]:
    data, memo = read_image(root, place)
    return content_hash(data), stat_numbers(memo)

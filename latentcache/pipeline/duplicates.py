"""Find files of equal content before a build, so that its plan counts entries and not files.

Only unread files that agree in size, in their header facts and in their first bytes are hashed. All others differ, so
their content is learned when a worker reads them. Cost: one short read for each file whose size and facts another
file has too, and one whole read for each file of equal first bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.table import STAT_WIDTH, SampleTable, stat_numbers
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.sources.reading import open_source, read_source
from latentcache.sources.scan import with_contents

#: Bytes at the start of two files that are compared; tables and headers of most images end before.
_HEAD_BYTES = 1 << 14
_THREADS = 4
_PRIME = np.uint64(0x9E37_79B9_7F4A_7C15)


def with_equal_files(
    samples: SampleTable,
    name: str,
    root: Path,
    *,
    facts: Iterable[str],
    skip: NDArray[np.bool_],
    stopping: Callable[[], bool] = bool,
) -> SampleTable:
    """The table with the contents of unread files that are equal to another file, as far as their heads tell.

    Args:
        samples: With the header columns that a build reads.
        name: The input; one that is not a whole file is left as it is.
        root: Of the data.
        facts: Columns that are read from the heads of files.
        skip: (S,) True for samples that are known to be unusable.
        stopping: Asked between files; once True, nothing more is read.
    """
    held = samples.inputs[name]
    if held.line is not None or held.text is not None:
        return samples
    file = np.asarray(held.file)
    rows = np.flatnonzero((file >= 0) & ~skip)
    unread: NDArray[np.bool_] = np.asarray(~np.asarray(held.content)[rows].any(axis=1))
    if not unread.any():
        return samples
    marks = _facts(samples, file[rows], rows, facts)
    alike = _shared(marks, unread)
    rows, unread, marks = rows[alike], unread[alike], marks[alike]
    heads, there = _read(_head, root, samples, file[rows], stopping)
    rows, unread, marks = rows[there], unread[there], marks[there] * _PRIME ^ np.array(heads, dtype=np.uint64)
    alike = _shared(marks, unread)
    rows = rows[alike[unread[alike]]]
    found, there = _read(_whole, root, samples, file[rows], stopping)
    if not found:
        return samples
    hashes = np.frombuffer(b"".join(content for content, _ in found), dtype=np.uint8).reshape(-1, HASH_BYTES)
    stats = np.array([stat for _, stat in found], dtype=np.uint64).reshape(-1, STAT_WIDTH)
    return with_contents(samples, name, rows[there], hashes, stats)


def _facts(
    samples: SampleTable, file: NDArray[np.integer], rows: NDArray[np.intp], facts: Iterable[str]
) -> NDArray[np.uint64]:
    """(n,) one number from the size of each file and the header columns; equal for equal files."""
    marks = np.array(samples.files.stat[file, 0], dtype=np.uint64)
    for name in facts:
        for part in np.asarray(samples.columns[name][rows]).reshape(len(rows), -1).T:
            marks = marks * _PRIME + part.astype(np.uint64)
    return marks


def _shared(marks: NDArray[np.uint64], unread: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Positions of marks that occur more than once, at least once unread."""
    near = np.flatnonzero(np.isin(marks, marks[unread]))
    _, which, counts = np.unique(marks[near], return_inverse=True, return_counts=True)
    shared: NDArray[np.intp] = near[counts[which.reshape(-1)] > 1]
    return shared


def _read(
    read: Callable[[Path], Any],
    root: Path,
    samples: SampleTable,
    files: NDArray[np.integer],
    stopping: Callable[[], bool],
) -> tuple[list[Any], NDArray[np.bool_]]:
    """What a function reads from files, and True for each that can be read: whoever encodes the others says why."""

    def one(name: str) -> Any:
        try:
            return None if stopping() else read(root / name)
        except (UnusableSampleError, OSError):
            return None

    if not len(files):
        return [], np.zeros(0, dtype=np.bool_)
    with ThreadPoolExecutor(_THREADS) as pool:
        results = list(pool.map(one, samples.files.names.take(files)))
    there = np.array([result is not None for result in results], dtype=np.bool_)
    return [result for result in results if result is not None], there


def _head(path: Path) -> int:
    with open_source(path) as file:
        return xxhash.xxh3_64_intdigest(os.read(file.fileno(), _HEAD_BYTES))


def _whole(path: Path) -> tuple[bytes, tuple[int, ...]]:
    data, memo = read_source(path)
    return content_hash(data), stat_numbers(memo)

"""Find images of equal content before a build, so that its plan counts entries and not images.

Only unread images that agree in size and in their first bytes are hashed. All others differ, so their content is
learned when a worker reads them. Cost: one short read of each image whose size another image has. Images with equal
first bytes are read whole. Rows of parquet files are left out. Their sizes are known only after decompression:
finding equal rows would read all data twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.table import SampleTable
from latentcache.sources.known import with_hashes
from latentcache.sources.places import Place, is_read_by_workers, open_image, read_each, read_head, sizes

_PRIME = np.uint64(0x9E37_79B9_7F4A_7C15)


def with_equal_files(
    samples: SampleTable,
    name: str,
    root: Path,
    heads: NDArray[np.uint64] | None = None,
    *,
    stopping: Callable[[], bool] = bool,
) -> SampleTable:
    """The table with the contents of unread images that are equal to another one, as far as their heads show.

    ``heads``: (S,) hashes of their first bytes, 0 where it is not known.
    """
    if not is_read_by_workers(samples, name):
        return samples

    held, size = samples.inputs[name], sizes(samples, np.arange(len(samples)), name)
    unread: NDArray[np.bool_] = np.asarray(~np.asarray(held.content).any(axis=1))
    rows = np.flatnonzero((np.asarray(held.file) >= 0) & (size > 0))
    rows = rows[_shared(size[rows], unread[rows])]

    def head(place: Place) -> int:
        with open_image(root, place) as file:
            return read_head(file)[0]

    # An unreadable image gets its reason from the worker that encodes it.
    marks = np.zeros(len(rows), dtype=np.uint64) if heads is None else heads[rows]
    unknown = np.flatnonzero(marks == 0)
    for at, answer in read_each(head, samples, rows[unknown], name, stopping):
        marks[unknown[at]] = answer if isinstance(answer, int) else 0
    rows, marks = rows[marks > 0], marks[marks > 0]
    rows = rows[_shared(size[rows] * _PRIME ^ marks, unread[rows])]
    return with_hashes(root, samples, name, rows[unread[rows]], stopping)[0]


def _shared(marks: NDArray[np.uint64], unread: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Positions of marks that occur more than once, at least once unread."""
    near = np.flatnonzero(np.isin(marks, marks[unread]))
    _, which, counts = np.unique(marks[near], return_inverse=True, return_counts=True)
    shared: NDArray[np.intp] = near[counts[which.reshape(-1)] > 1]
    return shared

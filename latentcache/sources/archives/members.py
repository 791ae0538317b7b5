"""One image of DATA as bytes: a whole file, a member of a tar, or a row of a parquet or Arrow file.

A place is JSON: ``{"path"}``, below the data root; ``{"path", "offset", "bytes"}``, a range of the file;
``{"path", "row", "column"}``, a row (from 1) of a parquet file and the position of its column.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.table import SampleTable
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.archives.rows import close_tables, read_row
from latentcache.sources.reading import open_source, read_source

#: Column of samples, (S, 2) uint64. Range of a file: offset and bytes; row: number of its column and 0; file: zeros.
SPAN = "span"

#: Threads that hash images, and images that they are given at a time.
_THREADS, _WINDOW = 4, 1 << 12

Place = Mapping[str, Any]
#: Content and memo of the file of an image, or why it cannot be read.
Hashed = tuple[bytes, StatMemo] | UnusableSampleError


def is_read_by_workers(samples: SampleTable, name: str) -> bool:
    """True if an input is bytes at a place, for :func:`read_image`; False for texts and records."""
    held = samples.inputs[name]
    return held.text is None and (held.line is None or SPAN in samples.columns)


def places(samples: SampleTable, rows: NDArray[np.integer] | Sequence[int], name: str = "image") -> list[Place]:
    """Where the images of some samples are."""
    held, rows = samples.inputs[name], np.asarray(rows, dtype=np.intp)
    paths = samples.files.names.take(np.maximum(np.asarray(held.file)[rows], 0))
    if held.line is None or SPAN not in samples.columns:
        return [{"path": path} for path in paths]
    lines, spans = np.asarray(held.line)[rows].tolist(), np.asarray(samples.columns[SPAN])[rows].tolist()
    return [_place(path, line, *span) for path, line, span in zip(paths, lines, spans, strict=True)]


def _place(path: str, line: int, first: int, size: int) -> Place:
    if not line:
        return {"path": path}
    return {"path": path, "offset": first, "bytes": size} if size else {"path": path, "row": line, "column": first}


def read_image(root: Path | str, place: Place) -> tuple[bytes, StatMemo]:
    """All bytes of an image, and the memo of the file that holds them.

    Raises:
        UnusableSampleError: As ``reading.read_source``; ``no-image``, ``rows-damaged`` of a row.
    """
    if "row" in place:
        return read_row(Path(root, place["path"]), place["row"], place["column"])
    return read_source(_path(root, place), span=_span(place))


def open_image(root: Path | str, place: Place) -> BinaryIO:
    """An image as a stream, to read its header; the caller closes it.

    Raises:
        UnusableSampleError: As :func:`read_image`.
    """
    if "row" in place:
        return BytesIO(read_image(root, place)[0])
    return open_source(_path(root, place), _span(place))


def _path(root: Path | str, place: Place) -> str:
    return os.path.join(root, place["path"])  # noqa: PTH118 - a Path costs more than the open


def _span(place: Place) -> tuple[int, int] | None:
    return (place["offset"], place["bytes"]) if "offset" in place else None


def hashed_images(
    root: Path,
    rows: NDArray[np.integer],
    places_of: Callable[[NDArray[np.integer]], Sequence[Place]],
    stopping: Callable[[], bool] = bool,
) -> Iterator[tuple[int, Hashed]]:
    """Hash the images of some rows in threads: (row, what was read), in order, until ``stopping`` gives True."""

    def read(place: Place) -> Hashed | None:
        try:
            if not stopping():
                data, memo = read_image(root, place)
                return content_hash(data), memo
        except UnusableSampleError as error:
            return error
        return None

    if not len(rows):
        return
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(_THREADS)
    try:
        for start in range(0, len(rows), _WINDOW):
            some = rows[start : start + _WINDOW]
            for row, found in zip(some.tolist(), pool.map(read, places_of(some)), strict=True):
                if found is not None:
                    yield row, found
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C only the reads in hand are waited for
        close_tables()

"""One image of DATA as bytes: a file, a member of a tar, or a row of a parquet or Arrow file.

A location is JSON: ``{"path", "size"}``, below the data root, with its bytes when it was scanned; ``{"path",
"offset", "bytes"}``, a range of the file; ``{"path", "row", "column"}``, a row (from 1) of a parquet file and the
position of its column.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.table import SampleTable
from latentcache.identity.content import StatMemo
from latentcache.sources.causes import cause_of, fault
from latentcache.sources.formats.archives import close_tables, read_row
from latentcache.sources.formats.files import open_source, read_source

#: Column of samples, (S, 2) uint64. Range of a file: offset and bytes; row: number of its column and 0; file: zeros.
SPAN = "span"

#: Threads that read images, images that they are given at a time, and reads of these that are measured. Threads that
#: wait for a core cost four times what they gain: 0.11 ms a header without threads, 0.4 ms with eight.
_THREADS, _WINDOW, _PROBE = 8, 1024, 8
#: Images that a thread is given at a time: handing over one costs as much as reading a small one, 60 us.
_BLOCK = 16
#: Bytes at the start of two images that are compared; tables and headers of most images end before.
_HEAD_BYTES = 1 << 14

Location = Mapping[str, Any]
T = TypeVar("T")


def is_read_by_workers(samples: SampleTable, name: str) -> bool:
    """True if an input is bytes at a location, for :func:`read_image`; False for texts and records."""
    held = samples.inputs[name]
    return held.text is None and (held.line is None or SPAN in samples.columns)


def locations(samples: SampleTable, rows: NDArray[np.integer] | Sequence[int], name: str = "image") -> list[Location]:
    """Return the locations of the images of some samples."""
    held = samples.inputs[name]
    rows = np.asarray(rows, dtype=np.intp)
    paths = samples.files.names.take(np.maximum(np.asarray(held.file)[rows], 0))
    size_of = sizes(samples, rows, name).tolist()
    if held.line is None or SPAN not in samples.columns:
        return [{"path": path, "size": size} for path, size in zip(paths, size_of, strict=True)]
    listed = list[Location]()
    spans = np.asarray(samples.columns[SPAN])[rows].tolist()
    for path, whole, line, (first, size) in zip(
        paths, size_of, np.asarray(held.line)[rows].tolist(), spans, strict=True
    ):
        inside = {"offset": first, "bytes": size} if size else {"row": line, "column": first}
        listed.append({"path": path, **inside} if line else {"path": path, "size": whole})
    return listed


def sizes(samples: SampleTable, rows: NDArray[np.integer], name: str) -> NDArray[np.uint64]:
    """(n,) bytes of an input of samples that have it; 0 for rows of parquet files: they are not known."""
    held = samples.inputs[name]
    stat = samples.files.stat
    file = held.file[rows]
    size: NDArray[np.uint64] = stat[file, 0] if isinstance(stat, np.ndarray) else stat[file][:, 0]
    if held.line is not None and SPAN in samples.columns:
        size = np.where(held.line[rows] > 0, samples.columns[SPAN][rows][:, 1], size)
    return size


def read_image(root: Path | str, location: Location) -> tuple[bytes, StatMemo]:
    """All bytes of an image, and the memo of the file that holds them.

    Raises:
        UnusableSampleError: As ``files.read_source``; ``no-image``, ``rows-damaged`` of a row.
    """
    if "row" in location:
        return read_row(Path(root, location["path"]), location["row"], location["column"])
    return read_source(*_at(root, location))


def open_image(root: Path | str, location: Location) -> BinaryIO:
    """An image as a stream, to read its header; the caller closes it. Raises as :func:`read_image`."""
    if "row" in location:
        return BytesIO(read_image(root, location)[0])
    return open_source(*_at(root, location))


def bytes_of(root: Path | str, location: Location) -> int:
    """Bytes of an image; 0 if it cannot be known: :func:`read_image` gives the reason."""
    if "row" not in location:
        return int(location.get("bytes") or location.get("size") or 0)
    try:
        return len(read_image(root, location)[0])
    except UnusableSampleError:
        return 0


def read_head(file: BinaryIO) -> tuple[int, BinaryIO]:
    """The 64-bit hash of the first bytes of an image, and a stream that begins with them."""
    data = file.read(_HEAD_BYTES)
    if len(data) < _HEAD_BYTES:
        return xxhash.xxh3_64_intdigest(data), BytesIO(data)
    file.seek(0)
    return xxhash.xxh3_64_intdigest(data), file


def _at(root: Path | str, location: Location) -> tuple[str, tuple[int, int] | None]:
    span = (location["offset"], location["bytes"]) if "offset" in location else None
    return os.path.join(root, location["path"]), span  # noqa: PTH118 - a Path costs more than the open


def read_each(
    read: Callable[[Location], T],
    samples: SampleTable,
    rows: NDArray[np.integer],
    name: str,
    stopping: Callable[[], bool] = bool,
    *,
    quick: bool = False,
) -> Iterator[tuple[int, T | UnusableSampleError]]:
    """Read an input of some samples in threads, until ``stopping``: (position in ``rows``, what was read or why not).

    ``quick``: threads are used only where the first reads wait for the disk more than they work.
    """

    def outcome_of(location: Location) -> T | UnusableSampleError | None:
        try:
            return None if stopping() else read(location)
        except UnusableSampleError as error:
            return error
        except OSError as error:
            return fault(cause_of(error), f"it cannot be read: {error.strerror}", location["path"])

    def outcomes_of(block: Sequence[Location]) -> list[T | UnusableSampleError | None]:
        return [outcome_of(location) for location in block]

    def outcomes_alone(block: Sequence[Location]) -> list[T | UnusableSampleError | None]:
        began = time.perf_counter()
        worked = time.thread_time()
        results = outcomes_of(block[:_PROBE])
        is_waiting = time.perf_counter() - began > 3 * (time.thread_time() - worked)
        return results if is_waiting else results + outcomes_of(block[_PROBE:])

    if not len(rows):
        return
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(_THREADS)  # not by the caller: a signal does not interrupt a read that never ends
    try:
        for start in range(0, len(rows), _WINDOW):
            window = locations(samples, rows[start : start + _WINDOW], name)
            first = pool.submit(outcomes_alone, window).result() if quick else []
            rest = window[len(first) :]
            blocks = [rest[at : at + _BLOCK] for at in range(0, len(rest), _BLOCK)]
            results = chain(first, chain.from_iterable(pool.map(outcomes_of, blocks)))
            for number, result in enumerate(results, start=start):
                if result is not None:
                    yield number, result
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C only the reads in hand are waited for
        close_tables()

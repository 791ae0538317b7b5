"""Rows of parquet files and of data sets that Hugging Face ``datasets`` saved, by pyarrow alone.

The folder that ``save_to_disk`` writes names its Arrow files in ``state.json`` (``_data_files``), and its splits in
``dataset_dict.json``; files are Arrow IPC streams. Guarantee: rows come in the order of the files, one batch of them
in memory; the hash is that of the bytes of the file, read first, and a file that changes between the two is an error.
Nothing but this module imports pyarrow, the extra ``hf``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from latentcache.errors import SourceError
from latentcache.sources.lines import LineReader
from latentcache.sources.reading import stat_source, unusable
from latentcache.sources.record_files import RecordFile, read_rows
from latentcache.sources.records import Record, RecordLog

_ROWS = 1024


def read_columnar(file: RecordFile, log: RecordLog) -> Iterator[Record]:
    """The records of one parquet or Arrow file; rows that are none are logged.

    Raises:
        UnusableSampleError: It cannot be read, or changed while it was read.
        SourceError: It is damaged, or too many of its rows cannot be used.
    """
    with LineReader(file.path) as reader:
        for _ in reader.chunks():
            pass
        stat, content = reader.finish()
    rows = _parquet_rows(file.path) if file.kind == "parquet" else _arrow_rows(file.path)
    yield from read_rows(file, rows, stat, content, log)
    if not stat.same_stat(stat_source(file.path)):
        raise unusable("changing", file.path, "its size or time changed while it was read")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, "parquet", error) from error


def _arrow_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            for batch in stream:
                for start in range(0, batch.num_rows, _ROWS):
                    yield from batch.slice(start, _ROWS).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, "arrow", error) from error


def _damaged(path: Path, kind: str, error: Exception) -> SourceError:
    return SourceError(
        f"{path.name} is no {kind} file that can be read",
        where=str(path),
        why=str(error).splitlines()[0] if str(error) else type(error).__name__,
        fix="download or export it again",
    )

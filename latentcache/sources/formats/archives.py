"""Archives: the members of tars, and the columns, rows and images of parquet and Arrow files (extra ``hf``).

A column of images is binary, or the struct ``{bytes, path}`` of Hugging Face ``datasets`` (5.2,
``features/image.py``), and one of its first values begins like an image. Rows of an Arrow file are read from a map of
the file. Rows of a parquet file are decompressed in blocks that are kept. So rows that are read in their order are
decompressed once.

Python's ``tarfile`` reads the headers of tars, about 25 us each, and no payload. It takes a damaged header for the
end, and gives a last member that is cut short: both are errors here. A tar that ends without its two blocks of zeros
is complete if its last member is. Links and sparse files have no bytes of their own: WebDataset skips them, and they
are noted here.
"""

from __future__ import annotations

import io
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import StatMemo
from latentcache.sources.causes import fault, sniff_cause
from latentcache.sources.formats.files import stat_source

TAR, PARQUET, ARROW = "tar", "parquet", "arrow"
_KINDS = {".tar": TAR, ".parquet": PARQUET, ".arrow": ARROW}
#: Endings of compressed tars, whose members cannot be read one by one.
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
#: Bytes of a block of rows, about; blocks that are kept of one file; files that are kept open in this process.
_BLOCK_BYTES, _BLOCKS, _OPEN = 8 << 20, 3, 2
_ROWS = 1 << 14
_HEAD_BYTES = 4096
#: Rows that are looked at to see if a column holds images.
_LOOKED_AT = 16
#: Results of ``sniff_cause`` for bytes that begin like an image.
_IMAGES = frozenset(("truncated", "svg", "heic-needs-plugin", "jxl-needs-plugin"))


def kind_of_archive(name: str) -> str:
    """``tar``, ``parquet`` or ``arrow``; empty for other files."""
    return _KINDS.get(name[name.rfind(".") :].lower(), "")


class TableFile:
    """An open file of rows; each pass reads it from front to back."""

    def __init__(self, path: Path, file: Any, schema: Any) -> None:
        self._path, self._file, self.schema = path, file, schema
        self._is_parquet = hasattr(file, "iter_batches")

    def batches(self, columns: Sequence[str] | None = None, rows: int = _ROWS) -> Iterator[Any]:
        """Record batches of some columns, or of all, with at most ``rows`` rows each."""
        if self._is_parquet:  # by group, so that those before a damaged one are read
            for group in range(self._file.metadata.num_row_groups):
                yield from self._file.iter_batches(batch_size=rows, columns=columns, row_groups=[group])
            return
        from pyarrow import ipc

        self._file.seek(0)
        for batch in ipc.open_stream(self._file):
            for start in range(0, batch.num_rows, rows):
                yield (batch if columns is None else batch.select(columns)).slice(start, rows)

    @property
    def is_empty(self) -> bool:
        """True if it has no rows."""
        return not (self._file.metadata.num_rows if self._is_parquet else any(True for _ in self.batches(rows=1)))

    @property
    def binary(self) -> list[str]:
        """Columns that hold bytes."""
        return [field.name for field in self.schema if _bytes_of(field) is not None]

    @property
    def texts(self) -> list[str]:
        """Columns that hold text."""
        return [field.name for field in self.schema if _is_text(field.type)]

    def images(self) -> list[str]:
        """Columns that hold images, as one of their first values shows."""
        return [name for name in self.binary if self._shows_images(self.schema.field(name))]

    def values(self, column: str) -> Iterator[Any]:
        """The values of a column, row by row; None for each row if no column is named."""
        if column:
            yield from chain.from_iterable(batch.column(0).to_pylist() for batch in self.batches([column]))
        elif self._is_parquet:
            yield from repeat(None, self._file.metadata.num_rows)
        else:
            yield from chain.from_iterable(repeat(None, batch.num_rows) for batch in self.batches())

    def _shows_images(self, field: Any) -> bool:
        child = _bytes_of(field)
        column = f"{field.name}.{child}" if child and self._is_parquet else field.name
        batch = next(self.batches([column], _LOOKED_AT), None)
        values = [] if batch is None else batch.column(0).to_pylist()[:_LOOKED_AT]
        values = [value and value[child] for value in values] if child else values
        return any(value and sniff_cause(value[:_HEAD_BYTES]) in _IMAGES for value in values)


@contextmanager
def open_rows(path: Path, kind: str) -> Iterator[TableFile]:
    """A file of rows, ``parquet`` or ``arrow``; raises UnusableSampleError for damage, also in the block."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    stat_source(path)  # a pipe would block
    if os.fspath(path).encode(errors="replace") != os.fsencode(path):
        raise fault("rows-damaged", "pyarrow cannot read it: its path is not UTF-8, rename it", path)
    try:
        if kind == PARQUET:
            with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
                yield TableFile(path, file, file.schema_arrow)
        else:
            with pyarrow.memory_map(str(path)) as file:
                yield TableFile(path, file, pyarrow.ipc.open_stream(file).schema)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def read_row(path: Path, row: int, column: int) -> tuple[bytes, StatMemo]:
    """The image in a row (from 1) of a column, and the memo of the file.

    Raises:
        UnusableSampleError: ``no-image`` if the row has none; else as ``files.read_source``.
    """
    import pyarrow

    now = stat_source(path)
    try:
        data, seen_ns = _opened(path, column, now.identity).row(row - 1)
    except (pyarrow.ArrowException, OSError, IndexError) as error:
        raise _damaged(path, error) from error
    if not data:
        raise fault("no-image", f"row {row} holds no bytes of an image", path)
    return data, now._replace(seen_ns=seen_ns)


def close_tables() -> None:
    """Close the files of rows that this process keeps open."""
    _opened.cache_clear()


@lru_cache(maxsize=_OPEN)
def _opened(path: Path, column: int, _: tuple[int, ...]) -> _Column:
    return _Column(path, column)


class _Column:
    """One column of a file of rows. Rows near the last ones come from memory; threads may share it."""

    def __init__(self, path: Path, column: int) -> None:
        import pyarrow.ipc
        import pyarrow.parquet

        self._path = path
        self._lock = threading.Lock()
        self._blocks: deque[tuple[int, Any, int]] = deque()
        self._ahead: Iterator[Any] = iter(())
        self._next = -1
        if kind_of_archive(path.name) == ARROW:  # its blocks are in the map of the file: all are kept
            self._file = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            self._number = column
            self._ends = list[int]()
            self._child = _bytes_of(self._file.schema.field(column))
            self._ahead = iter(self._file)
            self._next = 0
            return
        self._file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        field = self._file.schema_arrow.field(column)
        data = self._file.metadata
        self._number = 0
        self._child = _bytes_of(field)
        self._name = f"{field.name}.{self._child}" if self._child else field.name
        groups = [data.row_group(number) for number in range(data.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        total_bytes = sum(group.total_byte_size for group in groups)
        self._rows = max(min(_BLOCK_BYTES * data.num_rows // max(total_bytes, 1), _ROWS), 1)
        self._blocks = deque(maxlen=_BLOCKS)

    def row(self, number: int) -> tuple[bytes, int]:
        """The bytes in a row, from 0, and when its block was read in nanoseconds; empty if there are none."""
        with self._lock:
            start, values, seen_ns = self._block(number)
            return values[number - start].as_py() or b"", seen_ns

    def _block(self, number: int) -> tuple[int, Any, int]:
        """First row, values and moment of the block that holds a row."""
        held = next((block for block in self._blocks if block[0] <= number < block[0] + len(block[1])), None)
        group = bisect_right(self._ends, number)
        first = self._ends[group - 1] if group else 0
        if held is None and self._ends and not first <= self._next <= number:
            groups = range(group, len(self._ends))
            self._ahead = self._file.iter_batches(batch_size=self._rows, row_groups=groups, columns=[self._name])
            self._next = first
        while held is None:
            seen_ns = time.time_ns()
            first = self._next
            self._next = -1
            batch = next(self._ahead, None)
            if batch is None:
                raise fault("changing", f"it has no row {number + 1} any more", self._path)
            values = batch.column(self._number)
            values = values.field(self._child) if self._child else values
            self._blocks.append((first, values, seen_ns))
            self._next = first + len(values)
            held = self._blocks[-1] if number < self._next else None
        return held


def _damaged(path: Path, error: Exception) -> UnusableSampleError:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    return fault("rows-damaged", f"pyarrow cannot read it: {words}", path)


def _bytes_of(field: Any) -> str | None:
    """Child of a struct that holds bytes, empty for a binary column; None for a column of another type."""
    from pyarrow import types

    kind = field.type
    child = ""
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
        child = "bytes"
    return child if types.is_binary(kind) or types.is_large_binary(kind) else None


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


# tars


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

    descriptor = file.fileno()
    end = os.fstat(file.fileno()).st_size
    number = 0
    tar = None
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

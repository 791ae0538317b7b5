"""How does an exported folder get its name? Written beside it, read back, made durable, then renamed.

Guarantee: a folder of that name holds every file as it was meant, with the facts beside them, or it is not there;
what was there before is not touched. Cost: each file is read once after it was written, mostly from memory.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latentcache.errors import ExportError, UsageError
from latentcache.identity.content import checksum_of
from latentcache.interop.exported import FACTS, file_checksum
from latentcache.store.durable import (
    as_store_error,
    json_bytes,
    make_folder,
    sync_file,
    sync_folder,
    write_atomically,
)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """The folder to write into; ``out`` is its name once the block has ended without an error.

    Args:
        out: A folder that is not there, or is empty.

    Raises:
        UsageError: There is something already.
        DiskFullError: No space.
        CacheReadOnlyError: It cannot be written.
        StoreError: The disk fails.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = f"rm -r {shlex.quote(str(out))}, or give another folder"
        raise UsageError(f"{out} is there already", where=str(out), fix=fix)
    out = out.resolve()  # a link to an empty folder stays one, and "." has a name
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make_folder(partial)
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise as_store_error(error, out) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def put(file: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a file in parts; xxh3-64 of what was given, in hex, however much of it arrived."""
    with file.open("wb") as sink:
        return f"{checksum_of(_written(parts, sink)):016x}"


def seal(folder: Path, files: Mapping[str, str | None], facts: Mapping[str, Any]) -> None:
    """Hold each file against what was meant, make it durable, and leave the facts beside them.

    Args:
        folder: What :func:`whole_folder` gave.
        files: File, as seen from the folder -> what :func:`put` said; None where a library wrote it.
        facts: What is said of the folder; ``files`` and ``bytes`` are added.

    Raises:
        ExportError: What is read back is not what was written.
    """
    found = {}
    for name, meant in files.items():
        sync_file(folder / name)
        found[name] = file_checksum(folder / name)
        if meant not in (None, found[name]):
            raise ExportError(
                f"{name} was read back with other bytes than were written",
                where=str(folder / name),
                why=f"expected xxh3-64 {meant}, found {found[name]}",
                fix="check the disk, then export again",
            )
    for parent in {(folder / name).parent for name in files}:
        sync_folder(parent)
    sizes = {name: (folder / name).stat().st_size for name in files}
    write_atomically(folder / FACTS, json_bytes({"schema": 1, **facts, "files": found, "bytes": sizes}))


def _written(parts: Iterable[bytes | memoryview], sink: Any) -> Iterator[bytes | memoryview]:
    for part in parts:
        sink.write(part)
        yield part

"""Write an exported folder beside its final name, read it back, make it durable, then rename it.

Guarantee: a folder of that name holds every file as it was written, with the metadata beside them, or does not exist;
existing files and folders are never touched, and two exports to one name never touch each other: one of them is
rejected. A killed export leaves a folder ``OUT.partial-...``. Cost: each file is read once after it was written.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latentcache.errors import ExportError, UsageError
from latentcache.identity.content import checksum_of
from latentcache.store.atomic_io import (
    as_store_error,
    json_bytes,
    make_folder,
    sync_file,
    sync_folder,
    write_atomically,
)

#: The file of metadata in an exported folder, and the version of its keys.
METADATA, SCHEMA = "latentcache.json", 2
_PIECE_BYTES = 1 << 20


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Give a folder to write into; it gets the name ``out`` if the block ends without an error.

    Args:
        out: A folder that does not exist, or is empty.
    """
    _require_free(out)
    out = out.resolve()  # a link to an empty folder stays a link, and "." has a name
    partial = None
    try:
        make_folder(out.parent)
        partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
        partial.chmod(0o755)
        yield partial
        _require_free(out)
        partial.rename(out)  # fails on a folder that got files meanwhile
        sync_folder(out.parent)
    except OSError as error:
        _remove(partial)
        _require_free(out)
        raise as_store_error(error, out) from error
    except BaseException:
        _remove(partial)
        raise


def _require_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = f"rm -r {shlex.quote(str(out))}, or give another folder"
        raise UsageError(f"{out} exists", where=str(out), fix=fix)


def _remove(partial: Path | None) -> None:
    if partial is not None:
        shutil.rmtree(partial, ignore_errors=True)


def put(file: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a file in parts; returns xxh3-64 of the parts, in hex."""
    with file.open("wb") as sink:
        written = (part for part in parts if sink.write(part) is not None)
        return f"{checksum_of(written):016x}"


def file_checksum(file: Path) -> str:
    """xxh3-64 of a file's bytes, in hex."""
    with file.open("rb") as source:
        return f"{checksum_of(iter(lambda: source.read(_PIECE_BYTES), b'')):016x}"


def seal(folder: Path, files: Mapping[str, str | None], facts: Mapping[str, Any]) -> None:
    """Compare each file with its checksum, make it durable, and write the metadata beside the files.

    Args:
        folder: The folder of :func:`atomic_folder`.
        files: File, relative to the folder -> result of :func:`put`; None if a library wrote the file.
        facts: Metadata; ``files`` and ``bytes`` are added.
    """
    found = {}
    for name, expected in files.items():
        sync_file(folder / name)
        found[name] = file_checksum(folder / name)
        if expected not in (None, found[name]):
            raise ExportError(
                f"{name} was read back with other bytes than were written",
                where=str(folder / name),
                why=f"expected xxh3-64 {expected}, found {found[name]}",
                fix="check the disk, then export again",
            )
    for parent in {(folder / name).parent for name in files}:
        sync_folder(parent)
    sizes = {name: (folder / name).stat().st_size for name in files}
    write_atomically(folder / METADATA, json_bytes({"schema": SCHEMA, **facts, "files": found, "bytes": sizes}))

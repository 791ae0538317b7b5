"""Write an exported folder beside its final name, make it durable, then rename it.

Guarantee: a folder of that name is whole, with the metadata beside its files, or does not exist; existing files and
folders are never touched, and of two exports to one name one is rejected. A killed export leaves a folder
``OUT.partial-...``.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latentcache.errors import UsageError
from latentcache.store.atomic_io import (
    as_store_error,
    json_bytes,
    make_folder,
    sync_file,
    sync_folder,
    write_atomically,
)

#: The file of metadata in an exported folder, and the version of its keys.
METADATA, SCHEMA = "latentcache.json", 3


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
        partial = None
        sync_folder(out.parent)
    except OSError as error:
        _require_free(out)
        raise as_store_error(error, out) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _require_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = f"rm -r {shlex.quote(str(out))}, or give another folder"
        raise UsageError(f"{out} exists", where=str(out), fix=fix)


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Make every file of the folder durable, and write the metadata beside them.

    Args:
        folder: The folder of :func:`atomic_folder`.
        facts: Metadata; ``bytes`` of each file are added.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        sync_file(file)
    for parent in {file.parent for file in files}:
        sync_folder(parent)
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    write_atomically(folder / METADATA, json_bytes({"schema": SCHEMA, **facts, "bytes": sizes}))

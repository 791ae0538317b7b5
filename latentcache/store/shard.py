"""Write one LMDB shard: batches in, durable after each commit; then seal it. Normative text: docs/format/shard.md.

When :meth:`ShardWriter.write` returns, its entries survive ``kill -9`` and a power cut. LMDB has its default flags:
``sync=False`` lost synced entries in 54 of 120 simulated power cuts. A map that is too small grows and the batch is
replayed. A sealed shard is never opened for writing again, so readers need no lock. An open transaction holds its
bytes in memory, so callers commit at about 16 MiB.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from latentcache.errors import DiskFullError, StoreError
from latentcache.failpoint import failpoint
from latentcache.store.atomic_io import DISK_FULL, make_folder, sync_file, sync_folder, writing
from latentcache.store.entry import NewEntry
from latentcache.store.index import write_index
from latentcache.store.paths import OPEN_SUFFIX

#: First map size. Growing costs 0.1 ms; a huge map breaks under address space limits.
FIRST_MAP_BYTES = 1 << 30
_KEEP_FREE_BYTES = 64 << 20


class ShardWriter:
    """An open shard. One thread of one process writes it; use as a context manager or call :meth:`close`."""

    def __init__(self, folder: Path, *, map_bytes: int = FIRST_MAP_BYTES) -> None:
        fresh = not folder.exists()
        make_folder(folder)
        self.folder = folder
        self._environment: Any = None
        try:
            with _storing(folder):
                # 0 pins the 0.9 format whatever LMDB_DEFAULT_LIB_VERSION says: 1.0 moves values by 8 bytes.
                self._environment = lmdb.open(
                    str(folder),
                    map_size=map_bytes,
                    lock=False,  # there is one writer; a lock file is mapped, and a SIGBUS on a full disk
                    lib_version=0,
                    sync=True,
                    metasync=True,
                    writemap=False,
                    readahead=False,
                )
                sync_folder(folder)
                sync_folder(folder.parent)
        except StoreError:
            self.close()
            if fresh:  # half of an empty shard would be taken for a damaged one
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def write(self, entries: Sequence[NewEntry]) -> None:
        """Commit a batch; all of it is durable when this returns, or none of it is there.

        A key that is in the shard already keeps its entry: same key, same bytes.
        """
        with _storing(self.folder):
            while True:
                try:
                    self._commit(entries)
                    break
                except lmdb.MapFullError:
                    size = self._environment.info()["map_size"]
                    self._environment.set_mapsize(size + max(size, 2 * sum(len(entry.value) for entry in entries)))
                    failpoint("map-grown")
            failpoint("after-commit")

    def seal(self, name: str = "") -> Path:
        """Close the shard and give it its final name, by default that of the open shard; remove an empty one.

        Returns the sealed folder, which does not exist when the shard was empty.
        """
        with _storing(self.folder):
            self._environment.sync(True)
            self.close()
            return seal_folder(self.folder, name)

    def close(self) -> None:
        """Close the environment. Committed entries stay where they are, in the open shard."""
        if self._environment is not None:
            self._environment.close()

    def _commit(self, entries: Sequence[NewEntry]) -> None:
        with self._environment.begin(write=True) as transaction:
            failpoint("before-put")
            for entry in entries:
                transaction.put(entry.key, entry.value, overwrite=False)
            failpoint("after-put")


@contextlib.contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Turn errors of LMDB and of the system into errors of this package."""
    with writing(folder):
        try:
            yield
        except lmdb.Error as error:
            code = getattr(error, "code", None)
            # LMDB reports a full disk as EIO, because it names a short write so.
            if code in DISK_FULL or (code == errno.EIO and not _has_room(folder)):
                raise DiskFullError("the disk is full", where=str(folder), why=str(error)) from error
            problem, fix = "a shard cannot be written or read", "check the disk, then run again"
            raise StoreError(problem, where=str(folder), why=str(error), fix=fix) from error


def seal_folder(folder: Path, name: str = "") -> Path:
    """Index a closed shard, rename ``<id>.open`` to ``<id>`` or ``name``. Idempotent; safe to kill at any point."""
    sealed = folder.with_name(name or folder.name.removesuffix(OPEN_SUFFIX))
    # A builder killed in the middle of a commit leaves a state that only the memory of the system may hold: an index
    # of it, durable, over a file that is not, would make a power cut later turn a whole shard into a damaged one.
    sync_file(folder / "data.mdb")
    num_entries = write_index(folder, sealed.name)
    if num_entries == 0:
        shutil.rmtree(folder)
        return sealed
    with contextlib.suppress(OSError):  # advice to people; a file system without modes does no harm
        (folder / "data.mdb").chmod(0o444)
    sync_folder(folder)
    folder.rename(sealed)
    failpoint("after-rename")
    sync_folder(folder.parent)
    failpoint("folder-synced")
    return sealed


def _has_room(folder: Path) -> bool:
    """Return True if the shard could grow: no full disk, no used-up quota, no file size limit."""
    try:
        size = (folder / "data.mdb").stat().st_size
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), size, _KEEP_FREE_BYTES)
    except (OSError, AttributeError) as error:  # macOS lacks the call
        return getattr(error, "errno", 0) not in DISK_FULL
    return True

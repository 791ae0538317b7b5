"""An exported folder and its sidecar, the record of every file in it.

``latentcache.json`` says what was exported of which cache. ``latentcache.files`` has a line for each file: its name,
what it was made of, its size and its hash. It is written as the files are, so an interrupted export goes on where it
stopped. A file is written beside its name and renamed. Files that the sidecar does not list are never touched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from latentcache.errors import CacheDamagedError, UsageError, count_of
from latentcache.export.run import METADATA, SCHEMA
from latentcache.identity.content import content_hash
from latentcache.store.atomic_io import as_store_error, make_folder, read_json, write_atomically, write_json
from latentcache.value import Value

#: Name of the list of files, and of a file that is being written.
FILES, PARTIAL = "latentcache.files", "latentcache.partial"


class File(Value):
    """A file of an export."""

    name: str
    """In the folder, with ``/``."""
    origin: str
    """Hex digits: what it was made of. Equal ones mean equal bytes."""
    size: int
    """Bytes."""
    hash: str
    """Hex content hash."""
    changed_ns: int = 0
    """Time of its last change, when it was written."""
    sample: str = ""
    """Name of the image in the data set; empty for files of the whole export."""
    source: str = ""
    """Hex content hash of that image."""


class Folder:
    """A folder to export into, with what an earlier export wrote there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, File] = {}
        """By name, those of the sidecar."""
        self.written = self.kept = 0
        self._listing: BinaryIO | None = None
        self.about = read_json(root / METADATA) if (root / METADATA).exists() else {}
        if (root / FILES).exists():
            self.files = {file.name: file for file in _listed(root / FILES)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._listing is not None:
            self._listing.close()

    def put(self, file: File, make: Callable[[Path], tuple[int, str]]) -> None:
        """Have ``make`` write a file, unless it is there; ``make`` returns its bytes and its hash.

        Raises:
            UsageError: There is a file of this name that no export wrote.
            StoreError: It cannot be written.
        """
        path, known = self.root / file.name, self.files.get(file.name)
        if known is not None and known.origin == file.origin and _state(path) == (known.size, known.changed_ns):
            self.files[file.name] = replace(known, sample=file.sample, source=file.source)
            self.kept += 1
            return
        if known is None and (path.exists() or path.is_symlink()):
            raise UsageError(
                f"{path} exists, and no export wrote it",
                where=str(path),
                fix="export into a new folder, or move this file away",
            )
        partial = self.root / PARTIAL
        try:
            make_folder(path.parent)
            partial.unlink(missing_ok=True)
            size, found = make(partial)
            path.unlink(missing_ok=True)  # a rename between two links to one file does nothing
            partial.rename(path)
            entry = {**vars(file), "size": size, "hash": found, "changed_ns": path.stat().st_mtime_ns}
            self._append(json.dumps(entry))
        except OSError as error:
            raise as_store_error(error, path) from error
        self.files[file.name] = File(**entry)
        self.written += 1

    def finish(self, names: set[str], about: Mapping[str, Any]) -> int:
        """Delete files that are no longer wanted and write the sidecar; returns the number of deleted files."""
        stale = [file for name, file in self.files.items() if name not in names]
        for file in stale:
            self._delete(file)
        lines = [json.dumps(vars(self.files[name])) + "\n" for name in sorted(self.files)]
        write_atomically(self.root / FILES, "".join(lines).encode())
        write_json(self.root / METADATA, {"schema": SCHEMA, **about})
        return len(stale)

    def undo(self) -> tuple[int, list[str]]:
        """Delete exactly what the sidecar lists, and folders that are empty then; returns how many, and what stays.

        A file that was changed since stays and is named.
        """
        changed = [finding["path"] for finding in self.findings() if finding["problem"] == "changed"]
        names = [name for name in self.files if name not in changed]
        for name in names:
            self._delete(self.files[name])
        for name in (METADATA, FILES, PARTIAL):
            (self.root / name).unlink(missing_ok=True)
        for folder, _, _ in os.walk(self.root, topdown=False):
            if not os.listdir(folder):  # noqa: PTH208 - a list is what is wanted
                Path(folder).rmdir()
        return len(names), changed

    def findings(self) -> Iterator[dict[str, str]]:
        """Compare every file with the sidecar: those that are missing or changed."""
        for file in self.files.values():
            path = self.root / file.name
            state = _state(path)
            if state is None:
                yield {"path": file.name, "problem": "missing", "sample": file.sample}
            elif state[0] != file.size or content_hash(path.read_bytes()).hex() != file.hash:
                yield {"path": file.name, "problem": "changed", "sample": file.sample}

    def _append(self, line: str) -> None:
        """Add a line to the list, after the last whole one."""
        if self._listing is None:
            self._listing = (self.root / FILES).open("a+b")
            self._listing.seek(0)
            self._listing.truncate(self._listing.read().rfind(b"\n") + 1)
        self._listing.write(line.encode() + b"\n")
        self._listing.flush()

    def _delete(self, file: File) -> None:
        (self.root / file.name).unlink(missing_ok=True)
        self.files.pop(file.name)


def is_export(folder: Path) -> bool:
    """True if an export of images is in this folder."""
    return (folder / FILES).is_file()


def link(source: Path, target: Path, *, copy: bool) -> None:
    """A hard link, else a symbolic link; with ``copy`` a copy."""
    if copy:
        shutil.copyfile(source, target)
        return
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        target.symlink_to(source.resolve())


def check_room(folder: Path, needed: int) -> None:
    """Raise a UsageError if the disk has less free space than an export needs, in bytes."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UsageError(
            f"{folder}: the export needs {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free",
            where=str(folder),
            why="a trainer's files hold every value of each image, without our sharing of equal ones",
            fix="free space, export to another disk, or leave the text out with --fields latents",
        )


def _state(path: Path) -> tuple[int, int] | None:
    """Bytes and time of the last change of a file, also behind a link; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _listed(path: Path) -> Iterator[File]:
    """Lines of the list; a later line of one name takes the place of an earlier one."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or was cut by a crash
        try:
            yield File(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise CacheDamagedError(
                f"{path.name} is damaged",
                where=f"{path}:{number}",
                why=str(error),
                fix=f"export into a new folder; {count_of(number - 1, 'files')} could be read",
            ) from error

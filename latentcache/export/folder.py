"""An exported folder and its sidecar, the record of every file in it.

``latentcache.json`` names the cache and the settings of the export. ``latentcache.files`` has a line for each file:
its name, its origin, its size and its hash. Each line is written right after its file, so an interrupted export goes
on where it stopped. A file is written beside its name and renamed. An export never touches files that the sidecar
does not list.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from latentcache.errors import CacheDamagedError, UsageError, count_of
from latentcache.identity.content import content_hash
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import scan
from latentcache.store.atomic_io import (
    as_store_error,
    make_folder,
    read_json,
    sync_file,
    sync_folder,
    write_atomically,
    write_json,
    writing,
)
from latentcache.store.lock import NO_LOCKS
from latentcache.value import Value

#: Names of the list of files, of a file that is being written, and of the metadata, with the version of their keys.
FILES, PARTIAL = "latentcache.files", "latentcache.partial"
METADATA, SCHEMA = "latentcache.json", 4


class File(Value):
    """A file of an export."""

    name: str
    """In the folder, with ``/``."""
    origin: str = ""
    """Hex hash of its inputs; equal origins mean equal bytes."""
    size: int = 0
    """Bytes."""
    hash: str = ""
    """Hex content hash."""
    changed_ns: int = 0
    """Time of its last change, when it was written."""
    sample: str = ""
    """Name of the image in the data set; empty for files of the whole export."""
    source: str = ""
    """Hex content hash of that image."""
    is_changing: bool = False
    """True if the trainer writes to it."""


class Folder:
    """A folder to export into, with what an earlier export wrote there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, File] = {}
        """By name, those of the sidecar."""
        self.names = set[str]()
        """Files of this export."""
        self.written = self.kept = 0
        self._listing: BinaryIO | None = None
        self.about = read_json(root / METADATA) if (root / METADATA).exists() else {}
        if (root / FILES).exists():
            self.files = {file.name: file for file in _listed(root / FILES)}

    def put(self, file: File, make: Callable[[Path], str]) -> None:
        """Let ``make`` write a file, unless it is up to date. ``make`` returns the hash, or an empty string.

        Raises:
            UsageError: There is a file of this name that no export wrote.
            StoreError: It cannot be written.
        """
        path = self.root / file.name
        known = self.files.get(file.name)
        self.names.add(file.name)
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
            known_hash = make(partial)
            path.unlink(missing_ok=True)  # a rename between two links to one file does nothing
            partial.rename(path)
            self._add(file, known_hash or _hash(path))
        except OSError as error:
            raise as_store_error(error, path) from error

    def add_all(self) -> None:
        """List all files that were written into the folder, and make them durable."""
        for path in sorted(path for path in self.root.rglob("*") if path.is_file() and path.name != FILES):
            sync_file(path)
            sync_folder(path.parent)
            name = path.relative_to(self.root).as_posix()
            self.names.add(name)
            self._add(File(name=name), _hash(path))

    def finish(self, about: Mapping[str, Any]) -> int:
        """Delete files that are no longer wanted and write the sidecar; returns the number of deleted files."""
        stale = self.files.keys() - self.names
        for name in stale:
            self._delete(name)
        lines = [json.dumps(vars(self.files[name])) + "\n" for name in sorted(self.files)]
        write_atomically(self.root / FILES, "".join(lines).encode())
        write_json(self.root / METADATA, {"schema": SCHEMA, **about})
        return len(stale)

    def undo(self) -> tuple[int, list[str]]:
        """Delete exactly the listed files, and folders left empty; returns their number, and the names that stay.

        A file that was changed since stays and is named.
        """
        changed = [finding["path"] for finding in self.findings() if finding["problem"] == "changed"]
        names = [name for name in self.files if name not in changed]
        for name in names:
            self._delete(name)
        for name in (METADATA, FILES, PARTIAL):
            (self.root / name).unlink(missing_ok=True)
        for folder, _, _ in os.walk(self.root, topdown=False):
            if not os.listdir(folder):  # noqa: PTH208 - a list is what is wanted
                Path(folder).rmdir()
        return len(names), changed

    def findings(self) -> Iterator[dict[str, str]]:
        """Yield the files that are missing, or that somebody other than the trainer changed."""
        for file in self.files.values():
            path = self.root / file.name
            state = _state(path)
            if state is None:
                yield {"path": file.name, "problem": "missing", "sample": file.sample}
            elif not file.is_changing and (state[0] != file.size or _hash(path) != file.hash):
                yield {"path": file.name, "problem": "changed", "sample": file.sample}

    @property
    def changing(self) -> list[str]:
        """Files that the trainer writes to, which are not compared."""
        return sorted(file.name for file in self.files.values() if file.is_changing)

    def clear(self) -> None:
        """Delete what an interrupted export left."""
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != FILES:
                path.unlink()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder for this export. Raises UsageError if another export has it."""
        with writing(self.root):
            make_folder(self.root)
            self._listing = (self.root / FILES).open("a+b")
        with self._listing:
            try:
                fcntl.flock(self._listing, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                problem = f"{self.root}: another export writes here"
                fix = "wait for it, or give another folder"
                raise UsageError(problem, where=str(self.root), fix=fix) from error
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise as_store_error(error, self.root) from error
            self._listing.seek(0)
            self._listing.truncate(self._listing.read().rfind(b"\n") + 1)  # after the last whole line
            yield

    def _add(self, file: File, hashed: str) -> None:
        """List a file that was written."""
        state = (self.root / file.name).stat()
        file = replace(file, size=state.st_size, changed_ns=state.st_mtime_ns, hash=hashed)
        assert self._listing is not None  # of ``writing``
        self._listing.write(json.dumps(vars(file)).encode() + b"\n")
        self._listing.flush()
        self.files[file.name] = file
        self.written += 1

    def _delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)
        del self.files[name]


def is_export(folder: Path) -> bool:
    """True if an export is in this folder."""
    return (folder / FILES).is_file()


def verify_export(out: Path, data: Path | None = None) -> Iterator[dict[str, str]]:
    """Compare an exported folder with its sidecar and, if given, the images in ``data``; yields differences.

    Bytes are hashed, never loaded. Each finding has ``path``, ``sample`` and ``problem``: ``missing`` or ``changed``;
    of an image of the data set ``source-changed``, ``source-removed`` or ``source-added``.
    """
    folder = Folder(out)
    yield from folder.findings()
    if data is None:
        return
    if "options" not in folder.about:
        fix = "leave --data out, or verify the cache, which knows its samples"
        raise UsageError(f"--data: {out} does not list images", where=str(out), fix=fix)
    samples = scan(data, SourceOptions.from_json(folder.about["options"]), hash_all=True).samples
    now = {
        name: bytes(content).hex() for name, content in zip(samples.names, samples.first_input.content, strict=True)
    }
    then = {file.sample: file.source for file in folder.files.values() if file.sample}
    for name in sorted({*now, *then}):
        if now.get(name) != then.get(name):
            problem = "removed" if name not in now else "added" if name not in then else "changed"
            yield {"path": name, "problem": f"source-{problem}", "sample": name}


def of_bytes(name: str, data: bytes, **more: Any) -> tuple[File, Callable[[Path], str]]:
    """A file with these bytes, and its writer."""
    return File(name=name, origin=content_hash(data).hex(), **more), lambda path: written(path, data)


def written(path: Path, data: bytes) -> str:
    """Write a file; returns its hash."""
    path.write_bytes(data)
    return content_hash(data).hex()


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
            why="the files hold every value, without our sharing of equal ones",
            fix="free space, export to another disk, or leave the text out with --fields latents",
        )


def _hash(path: Path) -> str:
    """Hex content hash of a file."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def _state(path: Path) -> tuple[int, int] | None:
    """Bytes and time of the last change of a file, links followed; None: there is no file."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def _listed(path: Path) -> Iterator[File]:
    """Lines of the list; the last line of a name counts."""
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

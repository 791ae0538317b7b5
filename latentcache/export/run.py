"""Export a cache as a folder for a trainer: check the settings, then write files and the sidecar.

One way for all formats. An export (:class:`Export`) is of tokens, of images or of whole samples. Everything that can
be wrong is looked for before the first byte.

Guarantee: a new folder gets its name when it is whole. Files that no export wrote are never touched, and of two
exports into one folder one is rejected.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any, Protocol

from latentcache.errors import UsageError
from latentcache.export.folder import Folder, check_room, is_export
from latentcache.export.images import ImageExport
from latentcache.export.settings import IMAGE_FORMATS, Advanced, ExportSettings
from latentcache.export.shards import SampleExport
from latentcache.export.tokens.export import TokenExport
from latentcache.store.atomic_io import as_store_error, sync_folder


class Export(Protocol):
    """One export: everything is checked when it is made."""

    resumes: bool
    """True: an interrupted export goes on, and a later one writes what changed; False: OUT has to be new."""
    noun: str
    """Plural of what progress counts."""

    @property
    def plan(self) -> str:
        """What will be written, as a sentence; empty: nothing to say."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the files, about."""
        ...

    def write(self, folder: Folder, on_progress: Advanced) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write all files; returns what the sidecar says, and what the JSON output says of it."""
        ...


def opened(settings: ExportSettings) -> Export:
    """The export of these settings, checked; raises UsageError, and StoreError for a cache that cannot be read."""
    if settings.format in IMAGE_FORMATS:
        return ImageExport(settings)
    return SampleExport(settings) if settings.is_of_samples else TokenExport(settings)


def write_export(
    settings: ExportSettings, export: Export, on_progress: Advanced = lambda done, total: None
) -> dict[str, Any]:
    """Write the folder, which gets its name when it is whole; returns the JSON output.

    ``on_progress`` is called with samples, rows or documents done and in total.

    Raises:
        UsageError: The folder exists, or a file is in the way that no export wrote.
        StoreError: The cache cannot be read, or the folder not be written.
    """
    out = settings.out.resolve()  # a link to an empty folder stays a link, and "." has a name
    is_new = not settings.beside and not (export.resumes and is_export(out))
    path = out.with_name(f"{out.name}.partial") if is_new else out
    if is_new:
        _require_free(out)
        if not is_export(path):
            _require_free(path)
    check_room(out, export.bytes)
    folder = Folder(path)
    with folder.writing():
        try:
            if not export.resumes:
                folder.clear()
            about, counts = export.write(folder, on_progress)
            deleted = folder.finish(about)
            if is_new:
                _require_free(out)
                path.rename(out)  # fails on a folder that got files meanwhile
                sync_folder(out.parent)
        except BaseException as error:
            if not export.resumes:
                shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, OSError):
                raise as_store_error(error, out) from error
            raise
    written = {"files": len(folder.names), "written": folder.written, "kept": folder.kept, "deleted": deleted}
    return counts | (written if export.resumes else {})


def _require_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        undo = f"latentcache export --undo {shlex.quote(str(out))}, or " if is_export(out) else ""
        raise UsageError(f"{out} exists", where=str(out), fix=f"{undo}give another folder")

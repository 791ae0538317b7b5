"""Write a cache as a folder for a trainer: check the settings, then write the files and the sidecar.

All formats go this way. Every error in the settings or the cache is raised before the first byte.

Guarantee: a new folder gets its name when it is complete. An export never touches files that no export wrote. Of two
exports into one folder, one is rejected.
"""

from __future__ import annotations

import shlex
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from latentcache.errors import UsageError, count_of
from latentcache.export.folder import Folder, check_room, is_export
from latentcache.export.settings import ExportSettings
from latentcache.geometry.like.trainers import TRAINERS
from latentcache.loader.cache import open_cache
from latentcache.store.atomic_io import as_store_error, sync_folder

#: Called with samples, rows or documents done and in total.
Advanced = Callable[[int, int], None]


class Export:
    """One export of a cache. Making it checks everything; raises UsageError, and StoreError for a damaged cache."""

    resumes = True
    """True: an interrupted export goes on, and a later one writes what changed. False: OUT has to be new."""
    noun = "samples"
    """Plural of what progress counts."""
    fields: Iterable[str]
    """Fields of the cache that it writes."""

    def __init__(self, settings: ExportSettings) -> None:
        self.settings = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the command says this itself
            self.cache = open_cache(settings.cache)
        self.snapshot = self.cache.snapshots[0]

    def __len__(self) -> int:
        """Number of samples, rows or documents."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Bytes of the files, about."""
        raise NotImplementedError

    @property
    def plan(self) -> str:
        """A sentence on the files that will be written."""
        return f"{count_of(len(self), self.noun)}, about {self.bytes / 1e6:.1f} MB of {', '.join(self.fields)}"

    @property
    def facts(self) -> dict[str, Any]:
        """Metadata that the sidecar of every export has."""
        snapshot = self.snapshot
        return {
            "format": self.settings.format,
            "cache": str(self.settings.cache.resolve()),
            "snapshot": snapshot.number,
            "fingerprint": snapshot.fingerprint,
            "part": snapshot.part,
            "rejected": sum(rejected.count for rejected in snapshot.rejected),
            "fields": list(self.fields),
            "recipes": {name: snapshot.fields[name].recipe_id.hex() for name in self.fields},
        }

    def write(self, folder: Folder, on_progress: Advanced) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write all files; returns the contents of the sidecar, and of the JSON output."""
        raise NotImplementedError

    def build_command(self, words: str, ending: str = "") -> str:
        """The command that builds the cache, or another one beside it, whose name has this ending."""
        data = shlex.quote(str(self.snapshot.source.get("root", "DATA")))
        return f"latentcache build {data} --out {shlex.quote(f'{self.settings.cache}{ending}')} {words}"

    def check_demo(self) -> None:
        """Raise a UsageError for a cache that no model trains on, unless ``--force`` is there."""
        if self.snapshot.demo and not self.settings.force:
            like = f" --like {self.settings.format}" if self.settings.format in TRAINERS else ""
            raise UsageError(
                f"{self.settings.cache}: a demo encoder made it, which no model trains on",
                fix=f"{self.build_command(f'--model MODEL{like}')}; or --force to try the files",
            )

    def run(self, on_progress: Advanced = lambda done, total: None) -> dict[str, Any]:
        """Write the folder, which gets its name when it is complete; returns the JSON output.

        Raises:
            UsageError: The folder exists, or a file is in the way that no export wrote.
            StoreError: The cache cannot be read, or the folder not be written.
        """
        out = self.settings.out.resolve()  # a link to an empty folder stays a link, and "." has a name
        is_new = not self.settings.beside and not (self.resumes and is_export(out))
        path = out.with_name(f"{out.name}.partial") if is_new else out
        if is_new:
            _require_free(out)
            if not is_export(path):
                _require_free(path)
        check_room(out, self.bytes)
        folder = Folder(path)
        with folder.writing():
            try:
                if not self.resumes:
                    folder.clear()
                about, counts = self.write(folder, on_progress)
                deleted = folder.finish(about)
                if is_new:
                    _require_free(out)
                    path.rename(out)  # fails on a folder that got files meanwhile
                    sync_folder(out.parent)
            except BaseException as error:
                if not self.resumes:
                    shutil.rmtree(path, ignore_errors=True)
                if isinstance(error, OSError):
                    raise as_store_error(error, out) from error
                raise
        written = {"files": len(folder.names), "written": folder.written, "kept": folder.kept, "deleted": deleted}
        return counts | (written if self.resumes else {})


def _require_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        undo = f"latentcache export --undo {shlex.quote(str(out))}, or " if is_export(out) else ""
        raise UsageError(f"{out} exists", where=str(out), fix=f"{undo}give another folder")

"""URLs of caches in place of folders: one way for every command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from latentcache.cli import console
from latentcache.errors import UsageError
from latentcache.store.paths import url_of

#: Commands that take URLs; `pull` brings a cache to the others.
_COMMANDS = ("build", "info", "inspect", "merge", "plan", "report", "show", "verify")
#: Parameters of commands that name caches, or a cache to be written.
_CACHES, _OUT = ("cache", "other", "path", "parts"), "out_folder"


@contextmanager
def as_folders(command: str, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of a command with a local folder for each URL; output has the URL in place of the folder."""
    changed = dict(arguments)
    with ExitStack() as views:

        def folder(path: Path, *, is_out: bool = False) -> Path:
            if not (url := url_of(path)):
                return path
            from latentcache.store.view import local_view, scratch_folder

            scratch = scratch_folder(arguments.get("run", {}).get("scratch")) if is_out else None
            root = views.enter_context(local_view(url, scratch=scratch))
            console.SHOWN_AS[str(root)] = url.rstrip("/")
            return root

        for name, value in arguments.items() if command in _COMMANDS else ():
            if name == "data" and isinstance(value, Path) and url_of(value):
                fix = "mount the bucket (s3fs, gcsfuse, blobfuse), or copy DATA to this machine"
                raise UsageError("DATA: a URL cannot be read", why="images and records are local files", fix=fix)
            if name in _CACHES and isinstance(value, list):
                changed[name] = [folder(path) for path in value]
            elif name in (*_CACHES, _OUT) and isinstance(value, Path):
                changed[name] = folder(value, is_out=name == _OUT)
        yield changed

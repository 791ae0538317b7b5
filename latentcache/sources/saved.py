"""Folders that the library ``datasets`` saved: which Arrow files hold their rows; of a dict of data sets, ``train``.

Decides nothing: a folder with several splits and none of that name is an error that names them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, UsageError
from latentcache.sources.rows import listed

_SPLIT = "train"


def is_saved(folder: Path) -> bool:
    """Whether ``datasets`` saved something as this folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def saved_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path, name below the folder) of the Arrow files that ``state.json`` names, in its order.

    Raises:
        SourceError: What says so cannot be read.
        UsageError: It is a dict of data sets without ``train``.
    """
    root = folder
    if not (folder / "state.json").is_file():
        splits = [str(name) for name in _json(folder / "dataset_dict.json").get("splits", [])]
        if _SPLIT not in splits:
            raise UsageError(
                f"{folder} has no split called {_SPLIT}",
                where=str(folder / "dataset_dict.json"),
                why=f"it has {listed(splits) or 'none'}",
                fix=f"give the folder of one split, e.g. {shlex.quote(str(folder / (splits or ['train'])[0]))}",
            )
        folder = folder / _SPLIT
    for entry in _json(folder / "state.json").get("_data_files", []):
        path = folder / Path(entry["filename"]).name
        yield path, path.relative_to(root).as_posix()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{path.name} cannot be read", where=str(path), why=str(error), fix="save it again"
        ) from error
    return value if isinstance(value, dict) else {}

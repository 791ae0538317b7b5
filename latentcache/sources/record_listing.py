"""The files of DATA as the file system has them: the quick answer to whether any record can have changed.

Guarantee: says yes only where names, sizes, times and inodes of all files are those of the build before, and none
was so young then that it may have changed unseen. Cost: one ``stat`` a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.identity.content import json_hash
from latentcache.identity.stat import RACY_NS, StatMemo


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Every file of DATA as the file system has it. Equal listings mean equal bytes, where none is too young."""

    hash: str
    """Over names and stats."""
    files: int
    newest_ns: int
    """Last change of any of them."""

    def as_json(self, seen_ns: int) -> dict[str, Any]:
        """For the manifest; ``seen_ns`` is when the files were read."""
        return {"hash": self.hash, "files": self.files, "racy": seen_ns - self.newest_ns < RACY_NS}

    def proves(self, said: Mapping[str, Any]) -> bool:
        """Whether no file changed since a build that put ``said`` in its manifest."""
        return bool(said["hash"] == self.hash and not said["racy"])


def list_files(data: Path) -> Listing:
    """Stat every regular file of DATA, a file or a folder.

    Raises:
        OSError: It cannot be listed.
    """
    stats = sorted((name, StatMemo.of(result).identity) for name, result in _files(data))
    newest = max((max(identity[1], identity[2]) for _, identity in stats), default=0)
    names = [[os.fsencode(name).hex(), *identity] for name, identity in stats]
    return Listing(hash=json_hash(names).hex(), files=len(stats), newest_ns=newest)


def _files(data: Path) -> Iterable[tuple[str, os.stat_result]]:
    if data.name == "dataset_info.json":
        data = data.parent  # it names files beside it
    if not data.is_dir():
        yield data.name, data.stat()
        return
    for folder, folders, names in os.walk(data):
        folders.sort()
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                yield str(path.relative_to(data)), path.stat()

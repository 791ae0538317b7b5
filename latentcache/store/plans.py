"""Plans that were worked out once, kept in the cache: CACHE/plans/<name>.npy and, written last, <name>.json.

Decides nothing: a plan follows from what its name stands for, so a lost one is only made again. Guarantee: what comes
back is what was put there for the same facts, or nothing; a plan that is damaged is said to be, and counts as lost.
Files appear whole under their names, also when many processes write at once. A cache that may only be read keeps
no plans and works without. Cost: one read and one xxh3 pass; nothing is synced, because nothing is lost with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.identity.content import checksum, json_hash
from latentcache.store.columns import checked_bytes, npy_array, npy_bytes
from latentcache.store.durable import json_bytes, read_json
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import is_whole, signed

PLAN_VERSION = 1
_MAX = (1 << 32) - 1


class PlanFolder:
    """The plans of one cache.

    Args:
        layout: The cache.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.folder = layout.root / "plans"

    def load(self, facts: Mapping[str, Any]) -> dict[str, NDArray[np.uint32]] | None:
        """The columns that were kept for these facts; none where there are none, or damaged ones.

        Args:
            facts: What the plan follows from, as JSON values without floats.
        """
        path = self._path(facts)
        if not path.exists():
            return None
        try:
            said = read_json(path)
            if not is_whole(said) or said.get("facts") != dict(facts) or said.get("version") != PLAN_VERSION:
                raise CacheDamagedError(f"{path.name} is damaged", where=str(path), why="checksum")
            array = npy_array(checked_bytes(path.with_suffix(".npy"), said["data"]), path)
            return _taken_apart(array, said["columns"], path)
        except CacheDamagedError as error:
            warnings.warn(
                f"a stored plan cannot be used and is made again: {error.where or error.what}: {error.why}",
                stacklevel=2,
            )
            return None

    def kept(self) -> Iterator[tuple[dict[str, Any], dict[str, NDArray[np.uint32]]]]:
        """Facts and columns of every plan that is there and whole, in the order of their names."""
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            try:
                facts = dict(read_json(path)["facts"])
            except (CacheDamagedError, KeyError, TypeError, ValueError):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # who uses a damaged plan is warned, not who counts them
                columns = self.load(facts) if self._path(facts) == path else None
            if columns is not None:
                yield facts, columns

    def save(self, facts: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> bool:
        """Keep columns of numbers from 0 to 2^32 - 1; whether they could be kept.

        Args:
            facts: What the plan follows from, as JSON values without floats.
            columns: (n,) each, of any lengths.
        """
        if any(len(column) and int(column.max()) > _MAX for column in columns.values()):
            return False
        data = npy_bytes(np.concatenate([column.astype("<u4") for column in columns.values()]))
        said = signed(
            {
                "version": PLAN_VERSION,
                "facts": dict(facts),
                "columns": [[name, len(column)] for name, column in columns.items()],
                "data": f"{checksum(data):016x}",
            }
        )
        path = self._path(facts)
        try:
            self.folder.mkdir(exist_ok=True)
            _put(path.with_suffix(".npy"), data)
            _put(path, json_bytes(said))
        except OSError:
            return False
        return True

    def _path(self, facts: Mapping[str, Any]) -> Path:
        return self.folder / f"{json_hash(dict(facts)).hex()}.json"


def _taken_apart(array: NDArray[Any], columns: list[tuple[str, int]], path: Path) -> dict[str, NDArray[np.uint32]]:
    ends = np.cumsum([count for _, count in columns])
    if array.dtype != np.uint32 or array.shape != (int(ends[-1]),):
        raise CacheDamagedError(f"{path.name} contradicts its columns", where=str(path))
    parts = np.split(array, ends[:-1])
    return {name: part for (name, _), part in zip(columns, parts, strict=True)}


def _put(path: Path, data: bytes) -> None:
    """Write under a name of its own, then rename: another process may be writing the same plan."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

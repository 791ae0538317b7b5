"""What lies in a cache besides what readers open: older generations, and what processes that died have left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import StoreError
from latentcache.store.layout import RETIRED_SUFFIX, CacheLayout
from latentcache.store.manifest import load_manifest

#: A report that was not put in place for so long, in seconds, never will be.
_REPORT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OldGeneration:
    """One generation on disk."""

    number: int
    folder: Path
    shards: frozenset[str] | None
    """None where the manifest is damaged, so that nobody knows."""
    replaces: int
    since: float
    """When it stopped being the current one, seconds since 1970."""


def generations_on_disk(layout: CacheLayout, current: int) -> list[OldGeneration]:
    """The generations that are there, upwards."""
    numbers = layout.generations()
    found = []
    for position, number in enumerate(numbers):
        folder = layout.generation(number)
        manifest: dict[str, Any] = {}
        with suppress(StoreError):
            manifest = load_manifest(folder)
        after = layout.generation(numbers[position + 1]) if number < current else folder
        found.append(
            OldGeneration(
                number=number,
                folder=folder,
                shards=frozenset(manifest["shards"]) if manifest else None,
                replaces=int(manifest.get("replaces", 0)),
                since=(after / "manifest.json").stat().st_mtime,
            )
        )
    return found


def sealed_at(folder: Path) -> float:
    """When a shard was sealed; one without shard.json when its folder was last written."""
    facts = folder / "shard.json"
    return (facts if facts.exists() else folder).stat().st_mtime


def leftovers(layout: CacheLayout) -> Iterator[Path]:
    """Files that were never put in place, generations that were never published, marks of shards that are gone."""
    yield from sorted(layout.scratch.glob("*"))
    for pattern in ("*.tmp", "shards/*.tmp", "shards/*/*.tmp", "generations/*/*.tmp"):
        yield from sorted(path for path in layout.root.glob(pattern) if path.is_file())
    for path in sorted(layout.reports.glob("*/.*.tmp")):  # a report may be on its way at this moment
        if time.time() - path.lstat().st_mtime > _REPORT_S:
            yield path
    if layout.coming.exists():  # whoever asks holds the builder lock, so the build that announced it is gone
        yield layout.coming
    for folder in sorted((layout.root / "generations").glob("*")):
        if folder.is_dir() and not (folder / "manifest.json").exists():
            yield folder
    for mark in sorted(layout.shards.glob(f"*{RETIRED_SUFFIX}")):
        if not (layout.shards / mark.stem).exists():
            yield mark


def disk_bytes(path: Path) -> int:
    """Space that a file or folder takes, bytes."""
    total = 0
    for place in [path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names)]:
        with suppress(OSError):
            total += place.lstat().st_blocks * 512
    return total

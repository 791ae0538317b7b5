"""The manifest of a generation: a JSON object that carries its own checksum and the version it needs.

Guarantee: an object of a newer version is told apart from a damaged one before anything else of it is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentcache.errors import CacheDamagedError, CacheFormatError
from latentcache.identity.content import canonical_json, checksum
from latentcache.recipe import Recipe
from latentcache.store.durable import read_json

#: The newest version this release reads. Bumped when an older reader could misread a newer cache.
FORMAT_VERSION = 3
#: What the manifest of a token cache says of its format, and of its kind; one of pictures says no kind.
TOKENS_VERSION, TOKENS = 3, "tokens"


def format_version(recipe: Recipe) -> int:
    """The oldest version that describes such a cache: mirrored entries are not for readers that know nothing of them.

    They would serve every picture twice an epoch.
    """
    return 2 if recipe.geometry.flip else 1


class Told:
    """What the manifest of a generation says of its build, whatever the cache holds."""

    __slots__ = ()
    manifest: Mapping[str, Any]

    @property
    def complete(self) -> bool:
        """False where a repair has removed what no build has made again yet."""
        return bool(self.manifest.get("complete", True))

    @property
    def source_root(self) -> str:
        """DATA of the build, as an absolute path."""
        return str(self.manifest["source"]["root"])

    @property
    def share(self) -> str:
        """``i/n`` where it holds one of n shares of the records; empty where it holds them all."""
        return str(self.manifest["source"].get("options", {}).get("share", ""))

    @property
    def allow_failed(self) -> str:
        """What may be quarantined, as the last build was told: a number, or a share of all samples such as ``2%``."""
        return str(self.manifest.get("allow_failed", "0"))


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a generation, without its columns.

    Raises:
        CacheFormatError: Written by a newer version.
        CacheDamagedError: It is not what was written.
    """
    manifest = read_json(folder / "manifest.json")
    _check_manifest(manifest, folder)
    return manifest


def _check_manifest(manifest: Mapping[str, Any], folder: Path) -> None:
    """Refuse what is newer or damaged; the version comes first, so that a newer checksum rule is not "damage"."""
    form = manifest.get("format")
    version = form.get("version") if isinstance(form, dict) else None
    if not isinstance(version, int):
        raise CacheFormatError("not a latentcache manifest", where=str(folder), fix="check the path")
    if version > FORMAT_VERSION:
        raise CacheFormatError(
            f"this cache has format {version}; this version of latentcache reads up to {FORMAT_VERSION}",
            where=str(folder),
            why="it was written by a newer version",
            fix="upgrade with `pip install -U latentcache`, or build into another folder with --out",
        )
    unsigned = {name: value for name, value in manifest.items() if name != "checksum"}
    if manifest.get("checksum") != own_checksum(unsigned):
        raise CacheDamagedError("the manifest is damaged", where=str(folder / "manifest.json"), why="checksum")


def signed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its own checksum."""
    return {**value, "checksum": own_checksum(value)}


def is_whole(value: Mapping[str, Any]) -> bool:
    """Whether an object is the one that was signed."""
    return value.get("checksum") == own_checksum({k: v for k, v in value.items() if k != "checksum"})


def own_checksum(manifest: Mapping[str, Any]) -> str:
    """xxh3-64 over the manifest's canonical JSON, with floats by their shortest spelling."""
    return f"{checksum(canonical_json(_spelled(manifest))):016x}"


def _spelled(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return {name: _spelled(child) for name, child in value.items()}
    return [_spelled(child) for child in value] if isinstance(value, list | tuple) else value

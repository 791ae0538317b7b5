"""The existing cache of a build: its newest intact snapshot, and the settings of an unfinished build.

Settings that are not given follow the current snapshot. The build state decides only if there is no snapshot. So a
build that failed or was killed never changes what the next build without flags makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

from latentcache.errors import CacheDamagedError, CacheFormatError, CacheNotFoundError, RecipeError, UsageError
from latentcache.fields.protocol import Described, FieldKind
from latentcache.fields.registry import field_kind
from latentcache.pipeline.settings import BuildSettings
from latentcache.sources.options import SourceOptions
from latentcache.sources.part import Part
from latentcache.store.atomic_io import read_json, write_json
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import FieldRows, Snapshot, load_manifest, open_snapshot, own_checksum
from latentcache.value import Value

#: Format of the build state.
_FORMAT = 1


class Existing(Value):
    """The cache as a build finds it."""

    snapshot: Snapshot | None = None
    damage: str = ""
    """Problem of the current snapshot, if an older one or none replaces it."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the newest snapshot with an intact manifest, else of the build state. Empty: no build began.

    ``fields`` {name: {recipe, provenance}}, ``source``, ``part``, ``allow_failed``.
    """
    unfinished: bool = False
    """True if entries may be there that no snapshot names: a build has not ended, or a snapshot is damaged."""

    @property
    def field_names(self) -> tuple[str, ...]:
        """Fields of the cache."""
        return tuple(self.state.get("fields", ()))

    def rows(self, name: str) -> FieldRows | None:
        """The field in the snapshot."""
        return None if self.snapshot is None else self.snapshot.fields.get(name)

    def cached(self, kind: FieldKind) -> dict[str, Any]:
        """Return the ``recipe`` and the ``provenance`` that unset settings of a field follow; empty: none."""
        try:
            stored = self.state["fields"][kind.name]
            return {"recipe": kind.recipe.from_json(stored["recipe"]), "provenance": stored["provenance"]}
        except (RecipeError, KeyError, TypeError):
            return {}

    def options(self, settings: BuildSettings) -> SourceOptions:
        """Return the options for reading DATA: as given, else as before."""
        given = settings.source.as_json() if settings.source is not None else {}
        for name, field_settings in settings.fields.items():
            kind = field_kind(name)
            given |= kind.source_options(field_settings) if kind is not None and field_settings is not None else {}
        options = SourceOptions.from_json({**self.state.get("source", {}), **given})
        part = self.part(settings)
        return replace(options, part=Part.parse(part) if part else None)

    def inputs(self, settings: BuildSettings) -> set[str]:
        """Return the inputs of the fields that are asked for, else of those that the cache has."""
        given = [name for name, requested in settings.fields.items() if requested is not None]
        kinds = [field_kind(name) for name in given or self.field_names]
        return {name for kind in kinds if kind is not None for name in kind.inputs}

    def part(self, settings: BuildSettings) -> str:
        """The part that is built, ``i/n``; empty for all of the data."""
        stored, requested = self.state.get("part"), settings.part
        wanted = "" if requested is not None and requested.endswith("/1") else requested
        if None not in (stored, wanted) and wanted != stored:
            raise UsageError(
                f"this cache holds {f'part {stored}' if stored else 'all'} of its data",
                argument="part",
                value=requested,
                where=str(settings.cache),
                why="the samples of one part would replace those of the other (0/1 is all of them)",
                fix="give each part, and the whole, a folder of its own with --out",
                fix_python="give each part, and the whole, a folder of its own with out=",
            )
        return wanted or stored or ""


def read_existing(settings: BuildSettings) -> Existing:
    """Read what the cache holds. Damage is reported, not raised: entries are found by key without a snapshot."""
    paths = CachePaths(settings.cache)
    begun, state, snapshot = read_state(paths), dict[str, Any](), None
    current, damage = _current(paths)
    for number in dict.fromkeys(filter(None, [current, *reversed(paths.snapshots())])):
        try:
            found = open_snapshot(paths.root, number)
            found.check()  # all of it now: a column that proves damaged later would end the build
        except CacheDamagedError as error:
            damage = damage or f"{error.what}: {error.why}"
            with suppress(CacheDamagedError):
                state = state or _settings_of(load_manifest(paths.snapshot(number)))
        else:
            snapshot, state = found, state or _settings_of(found.manifest)
            break
    state = state or dict(begun)
    if damage and not state and not settings.fields:
        raise CacheDamagedError(
            "the manifest is damaged, so the settings of this cache are unknown",
            where=str(settings.cache),
            why=damage,
            fix="run the build again with --model and the other flags of the first build; no entry is lost",
            fix_python="build again with fields= and the other settings of the first build; no entry is lost",
        )
    return Existing(snapshot=snapshot, damage=damage, state=state, unfinished=bool(begun or damage))


def _settings_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a snapshot, in the form of a build state."""
    source = manifest["source"]
    kept = {name: manifest[name] for name in ("fields", "allow_failed")}
    return {"source": source.get("options") or {}, "part": source.get("part") or "", **kept}


def _current(paths: CachePaths) -> tuple[int, str]:
    """Number of the current snapshot, 0 if none is named, and the problem with its name."""
    try:
        current = paths.current_snapshot()
    except CacheDamagedError as error:
        return 0, f"{error.what}: {error.why}"
    except CacheNotFoundError:
        current = 0
    return current, f"{paths.current.name} is missing" if not current and paths.snapshots() else ""


def write_state(paths: CachePaths, described: Mapping[str, Described], options: SourceOptions, **more: Any) -> None:
    """Record the settings of this build, so that the same command without its flags continues it."""
    fields = {
        name: {"recipe": one.recipe.as_json(), "provenance": dict(one.provenance)} for name, one in described.items()
    }
    state = {"format": _FORMAT, "fields": fields, "source": options.as_json(), **more}
    write_json(paths.building, {**state, "checksum": own_checksum(state)})


def read_state(paths: CachePaths) -> Mapping[str, Any]:
    """The build state; empty if there is none, or it has other bytes than were written."""
    try:
        found = read_json(paths.building) if paths.building.exists() else {}
        version, intact = int(found.get("format", 0)), found.get("checksum") == own_checksum(found)
    except (CacheDamagedError, ValueError, TypeError, OverflowError, RecursionError):
        return {}
    if version > _FORMAT:
        raise CacheFormatError(
            f"a build of format {version} is under way here; this version reads formats up to {_FORMAT}",
            where=str(paths.building),
            fix="upgrade with `pip install -U latentcache`, or build into another folder with --out",
            fix_python="upgrade with `pip install -U latentcache`, or build into another folder with out=",
        )
    return found if intact else {}


def kind_of(name: str) -> FieldKind:
    """The kind of a field."""
    kind = field_kind(name)
    if kind is None:
        raise UsageError(
            f"field {name}: its kind is not installed",
            why="a build that ignored the field would remove it from the cache",
            fix="install the package that provides it, or name it with --field=MODULE:CLASS",
            fix_python="install the package that provides it, or name it in LATENTCACHE_FIELDS=MODULE:CLASS",
        )
    return kind

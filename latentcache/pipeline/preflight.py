"""What a build finds: its cache, with the settings that it follows, and whatever stands against the build.

Settings that are not given follow the current snapshot. The build state decides only if there is no snapshot. So a
build that failed or was killed never changes what the next build without flags makes. All checks run before anything
is encoded or written.

Guarantee: a command that is rejected leaves the cache as it was; a folder that it made is removed again.
"""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.errors import (
    CacheDamagedError,
    CacheFormatError,
    CacheNotFoundError,
    DiskFullError,
    LatentcacheError,
    RecipeError,
    SourceNotFoundError,
    StrictError,
    UsageError,
    option,
)
from latentcache.fields.protocol import Described, FieldKind
from latentcache.fields.registry import field_kind
from latentcache.fields.table import Rejected
from latentcache.pipeline.settings import BuildSettings, beside
from latentcache.sources.options import Part, SourceOptions
from latentcache.store.atomic_io import make_folder, read_json, remove_durably, write_atomically, write_json, writing
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths, url_of
from latentcache.store.snapshot import FieldRows, Snapshot, load_manifest, open_snapshot, own_checksum
from latentcache.value import Value

if TYPE_CHECKING:
    from latentcache.pipeline.publish import BuildPlan
    from latentcache.sources.scan import Listing

#: Bytes left free on the disk beside what the plan needs.
RESERVE_BYTES = 64 << 20
#: Settings of a source that one kind of data has no use for.
_OF_RECORDS = ("text_lines",)
_OF_IMAGES = ("layout", "caption_ext", "default_caption", "caption_prefix", "caption_suffix", "caption_lines",
              "image_column", "caption_column")  # fmt: skip
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
        chosen = dict[str, Any]()
        for name, field_settings in settings.fields.items():
            kind = field_kind(name)
            chosen |= kind.source_options(field_settings) if kind is not None and field_settings is not None else {}
        chosen |= settings.source.as_json() if settings.source is not None else {}
        options = SourceOptions.from_json({**self.state.get("source", {}), **chosen})
        part = self.part(settings)
        return replace(options, part=Part.parse(part) if part else None)

    def inputs(self, settings: BuildSettings) -> set[str]:
        """Return the inputs of the fields that are asked for, else of those that the cache has."""
        names = [name for name, requested in settings.fields.items() if requested is not None]
        kinds = [field_kind(name) for name in names or self.field_names]
        return {name for kind in kinds if kind is not None for name in kind.inputs}

    def part(self, settings: BuildSettings) -> str:
        """The part that is built, ``i/n``; empty for all of the data."""
        stored = self.state.get("part")
        requested = settings.part
        wanted = "" if requested is not None and requested.endswith("/1") else requested
        if None not in (stored, wanted) and wanted != stored:
            raise UsageError(
                f"this cache holds {f'part {stored}' if stored else 'all'} of its data",
                argument="part",
                value=requested,
                where=str(settings.cache),
                why="the samples of one part would replace those of the other (0/1 is all of them)",
                fix="give each part, and the whole, a folder of its own with --out",
            )
        return wanted or stored or ""


def read_existing(settings: BuildSettings) -> Existing:
    """Read what the cache holds. Damage is reported, not raised, because entries are found by key alone."""
    paths = CachePaths(settings.cache)
    begun = read_state(paths)
    state = dict[str, Any]()
    snapshot = None
    current = 0
    damage = ""
    try:
        current = paths.current_snapshot()
    except CacheDamagedError as error:
        damage = f"{error.what}: {error.why}"
    except CacheNotFoundError:
        pass
    if not (current or damage) and paths.snapshots():
        damage = f"{paths.current.name} is missing"
    for number in dict.fromkeys(filter(None, [current, *reversed(paths.snapshots())])):
        try:
            opened = open_snapshot(paths.root, number)
            opened.check()  # all of it now: a column that proves damaged later would end the build
        except CacheDamagedError as error:
            damage = damage or f"{error.what}: {error.why}"
            with suppress(CacheDamagedError):
                state = state or _settings_of(load_manifest(paths.snapshot(number)))
        else:
            snapshot = opened
            state = state or _settings_of(opened.manifest)
            break
    state = state or dict(begun)
    if damage and not state and not settings.fields:
        raise CacheDamagedError(
            "the manifest is damaged, so the settings of this cache are unknown",
            where=str(settings.cache),
            why=damage,
            fix="run the build again with --model and the other flags of the first build; no entry is lost",
        )
    return Existing(snapshot=snapshot, damage=damage, state=state, unfinished=bool(begun or damage))


def _settings_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a snapshot, in the form of a build state."""
    source = manifest["source"]
    kept = {name: manifest[name] for name in ("fields", "allow_failed")}
    return {"source": source.get("options") or {}, "part": source.get("part") or "", **kept}


def write_state(paths: CachePaths, described: Mapping[str, Described], options: SourceOptions, **more: Any) -> None:
    """Record the settings of this build, so that the same command without its flags continues it."""
    fields = {
        name: {"recipe": field.recipe.as_json(), "provenance": dict(field.provenance)}
        for name, field in described.items()
    }
    state = {"format": _FORMAT, "fields": fields, "source": options.as_json(), **more}
    write_json(paths.building, {**state, "checksum": own_checksum(state)})


def read_state(paths: CachePaths) -> Mapping[str, Any]:
    """The build state; empty if there is none, or it has other bytes than were written."""
    try:
        state = read_json(paths.building) if paths.building.exists() else {}
        version = int(state.get("format", 0))
        intact = state.get("checksum") == own_checksum(state)
    except (CacheDamagedError, ValueError, TypeError, OverflowError, RecursionError):
        return {}
    if version > _FORMAT:
        raise CacheFormatError(
            f"a build of format {version} is under way here; this version reads formats up to {_FORMAT}",
            where=str(paths.building),
            fix="`pip install -U latentcache`, or build into another folder with --out",
        )
    return state if intact else {}


def kind_of(name: str) -> FieldKind:
    """The kind of a field."""
    kind = field_kind(name)
    if kind is None:
        raise UsageError(
            f"field {name}: its kind is not installed",
            why="a build that ignored the field would remove it from the cache",
            fix="install its package, or name it: --field MODULE:CLASS, in Python LATENTCACHE_FIELDS=MODULE:CLASS",
        )
    return kind


def check_paths(data: Path, cache: Path) -> None:
    """Reject a cache inside the data, or in a folder that holds something else."""
    if not data.exists():
        raise SourceNotFoundError(f"no such file or folder: {data}", where=str(data), fix="check the path")
    if data.is_dir() and CachePaths(data).is_ours():
        raise UsageError(
            f"{data} is a cache, not data",
            where=str(data),
            fix=f"give the data it was made from: `latentcache info {shlex.quote(str(data))}` names it",
        )
    with writing(cache):
        if cache.resolve().is_relative_to(data.resolve()):
            raise UsageError(
                "the cache would be inside the data folder",
                argument="out",
                value=cache,
                where=str(cache),
                why="data folders are only read; a cache inside one would be taken for data",
                fix=f"use {option('out', str(beside(data)))}",
            )
        check_out(cache)


def check_out(cache: Path) -> None:
    """Reject a folder with files that are not of a cache, and a URL, which a command makes a folder of."""
    if url := url_of(cache):
        raise UsageError(
            "a URL is no folder",
            argument="out",
            value=url,
            fix=f"latentcache build DATA --out {url}, or a folder by latentcache.store.remote.view.local_view",
        )
    if cache.exists() and not cache.is_dir():
        raise UsageError("a file is there", argument="out", value=cache, where=str(cache), fix="give a folder")
    if cache.is_dir() and not CachePaths(cache).is_ours() and any(cache.iterdir()):
        raise UsageError(
            "the folder is not empty and holds no cache",
            argument="out",
            value=cache,
            where=str(cache),
            why="a cache is never mixed with other files",
            fix="give an empty or a new folder",
        )


@contextmanager
def locked(paths: CachePaths) -> Iterator[int]:
    """Hold the cache for building; gives the descriptor for workers.

    If the build fails before anything was committed, folders and the build state are as they were before.
    """
    new_folders = make_folder(paths.root)
    with builder_lock(paths.lock) as descriptor:
        with writing(paths.root):
            shards = _names(paths.shards)
            state = paths.building.read_bytes() if paths.building.is_file() else None
        try:
            yield descriptor
        except LatentcacheError:
            if _names(paths.shards) == shards:
                for folder in (paths.shards, paths.scratch):
                    with suppress(OSError):  # it is not there, or holds something
                        folder.rmdir()
                if state is not None:  # a build that was not finished goes on with its own settings
                    write_atomically(paths.building, state)
                elif paths.building.is_file():
                    remove_durably(paths.building)
            raise
        finally:
            with suppress(OSError):
                if new_folders and _names(paths.root) == {paths.lock.name}:
                    paths.lock.unlink()
                    for folder in new_folders:
                        folder.rmdir()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def free_bytes(cache: Path) -> int:
    """Free bytes on the disk of the cache, which need not exist yet."""
    existing = next(path for path in (cache, *cache.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_space(plan: BuildPlan) -> None:
    """Reject a build that does not fit on the disk."""
    if plan.to_make and plan.bytes_to_write * 11 // 10 + RESERVE_BYTES > plan.free_bytes:
        raise DiskFullError(
            "the disk is too full for this build",
            where=str(plan.cache),
            why=f"the plan needs {plan.bytes_to_write:,} bytes, a tenth more and {RESERVE_BYTES:,} in reserve;"
            f" {plan.free_bytes:,} are free",
            fix="free some space, or build on another disk",
        )


def check_source(options: SourceOptions | None, listing: Listing, data: Path) -> None:
    """Reject settings that DATA would ignore."""
    kind = listing.data_kind
    sets = listing.layout.sets if listing.layout is not None else ()
    unused = dict.fromkeys(_OF_RECORDS, "records") if kind == "images" else dict.fromkeys(_OF_IMAGES, "images")
    if sets and not any(image_set.has_columns for image_set in sets):
        unused |= dict.fromkeys(("image_column", "caption_column"), "tables and archives")
    if sets and not any(image_set.has_caption_files for image_set in sets):
        unused["caption_ext"] = "caption files beside images"
    for name, other in unused.items():
        if getattr(options, name, None) not in (None, "", (), False):
            why = listing.layout.why if listing.layout is not None and other != "records" else f"it holds {kind}"
            raise UsageError(
                f"for {other} only, and DATA has none",
                argument=name,
                where=str(data),
                why=why,
                fix=f"leave {option(name)} out",
            )


def check_notes(notes: Sequence[Rejected], data: Path) -> None:
    """Reject data with unused files; settings of a configuration that have no effect are allowed."""
    notes = [note for note in notes if note.reason != "config-ignored"]
    if not notes:
        return
    counts = Counter[str]()
    for note in notes:
        counts[note.reason] += note.count
    raise StrictError(
        f"{counts.total()} input{'s' * (counts.total() > 1)} of DATA not used as given",
        where=str(data),
        why=", ".join(f"{reason} {count}" for reason, count in counts.most_common()),
        notes=notes,
    )

"""A snapshot: the samples of a finished build, and for each field the entries they need. docs/format/snapshot.md.

A reader opens the snapshot that ``CURRENT`` names and keeps it. Its columns stay on disk and are read when they are
asked for; each is checked when it is first read whole.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CacheFormatError, CacheNotFoundError, RecipeError, StoreError
from latentcache.fields.protocol import FieldKind, FieldPlan, FieldRecipe, FieldSpec, Group
from latentcache.fields.registry import field_kind
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, Rejected, SampleTable
from latentcache.identity.content import CONTENT_SLICE, canonical_json, checksum, equal_hashes
from latentcache.store.atomic_io import read_file, read_json, unreadable
from latentcache.store.columns import ColumnFile
from latentcache.store.lock import Lease, builder_name
from latentcache.store.paths import FORMAT_VERSION, CachePaths, other_format
from latentcache.value import Value, typed

MANIFEST, COLUMNS, REJECTED = "manifest.json", "columns.safetensors", "rejected.jsonl"
#: Columns of the entries and of the rows of a field, with their types.
ENTRY_TYPES = {"shard": "i4", "offset": "u8", "head": "u4", "bytes": "u8", "checksum": "u8"}
ROW_TYPES = {"sample": "i4", "entry": "i4", "group": "i4", "variant": "u1", "start": "u4", "length": "u4"}
#: Tries to lease the current snapshot while ``gc`` removes others, and seconds between two of them.
_TRIES, _WAIT_S = 50, 0.02
_SLICE = 1 << 17
#: The bytes of an entry in a file: its key, the byte at which its payload begins, and the bytes of head and payload.
SPAN_DTYPE = np.dtype([("key", "u1", (32,)), ("offset", "<u8"), ("head", "<u4"), ("bytes", "<u8")])


class FieldRows(Value, eq=False):
    """One field of a snapshot: E entries, R rows in the order of sample, group, variant.

    Columns on disk are read when they are asked for. Entries have a ``key`` (E, 32) and a ``shard``, a position in
    the shards. ``offset`` and ``bytes`` are of the payload in ``data.mdb``, ``head`` are the bytes before it,
    ``checksum`` is its xxh3-64. Rows have a ``sample``, which is a row of the sample table, ``entry``, ``group`` and
    ``variant``. ``start`` and ``length`` are of the item in its entry along the first axis, 0 if the field is not
    ragged. A ragged column is where the values of each row end, and the values. ``shards`` and ``samples`` are those
    of the snapshot, and empty before it is published.
    """

    name: str
    kind_byte: int
    packing: str
    recipe_json: Mapping[str, Any]
    recipe_id: bytes
    spec: FieldSpec
    kind: FieldKind | None
    """None if it is not installed."""
    recipe: FieldRecipe | None
    shards: tuple[str, ...] = ()
    samples: Any = field(default=None, repr=False)
    groups: tuple[Group, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    noise: Mapping[str, Any] = field(default_factory=dict)
    key: Any
    shard: Any
    offset: Any
    head: Any
    bytes: Any
    checksum: Any
    sample: Any
    entry: Any
    group: Any
    variant: Any
    start: Any
    length: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    ragged_columns: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entry)

    @property
    def entries(self) -> int:
        """Number of entries."""
        return len(self.offset)

    def row_keys(self, rows: Any = slice(None)) -> NDArray[np.uint8]:
        """(n, 32) item keys of rows; keys of their blocks if the kind is not installed, which makes item keys."""
        if self.packing != "block" or self.kind is None or self.recipe is None:
            return np.array(self.key[self.entry[rows]])
        content = _content(self.kind, self.samples, np.asarray(self.sample[rows]))
        group, variant = np.asarray(self.group[rows]), np.asarray(self.variant[rows])
        return self.kind.keys(content, group, variant, self.groups, self.recipe)

    def holds(self, plan: FieldPlan, samples: SampleTable, numbers: NDArray[np.integer] | None = None) -> bool:
        """True if these rows are exactly the items of a plan of these samples by the same recipe, in their order.

        ``numbers`` (S,) is the row of each of the plan's samples in this snapshot's table, -1 if it has none. None:
        they are the same samples.
        """
        if self.kind is None or len(plan.sample) != len(self):
            return False
        content = self.kind.content(samples)
        groups = {group: number for number, group in enumerate(self.groups)}
        group_of = np.array([groups.get(group, -1) for group in plan.groups], dtype=np.int32)
        for start in range(0, len(self), _SLICE):
            part = slice(start, start + _SLICE)
            sample = plan.sample[part]
            mine = np.asarray(self.sample[part])
            same = mine == (sample if numbers is None else numbers[sample])
            same &= self.group[part] == group_of[plan.group[part]]
            same &= self.variant[part] == plan.variant[part]
            if self.packing != "block":
                same &= equal_hashes(self.key[self.entry[part]][:, CONTENT_SLICE], content[sample])
            elif samples is not self.samples:  # else both are read from one column
                same &= equal_hashes(_content(self.kind, self.samples, mine), content[sample])
            if not same.all():
                return False
        return True

    def entry_spans(self, entries: NDArray[np.integer]) -> NDArray[Any]:
        """(n,) ``SPAN_DTYPE`` of entries."""
        spans = np.empty(len(entries), dtype=SPAN_DTYPE)
        for name in SPAN_DTYPE.names or ():
            spans[name] = getattr(self, name)[entries]
        return spans


def _content(kind: FieldKind, samples: SampleTable, rows: NDArray[np.integer]) -> NDArray[np.uint8]:
    """(n, 16) what item keys of some samples are made from."""
    inputs = {
        name: Input(content=column.content[rows], file=column.file[rows], line=None)
        for name, column in samples.inputs.items()
        if name in kind.inputs
    }
    return np.asarray(kind.content(SampleTable(names=_NO_NAMES, files=samples.files, inputs=inputs)))


class Snapshot(Value):
    """One finished build. Picklable."""

    number: int
    paths: CachePaths
    manifest: Mapping[str, Any] = field(repr=False)
    samples: SampleTable = field(repr=False)
    fields: Mapping[str, FieldRows] = field(repr=False)
    shards: tuple[str, ...] = field(repr=False)
    """Names of the shards that its entries are in."""
    complete: bool
    """False if a repair removed entries that no build has made again."""
    source: Mapping[str, Any] = field(repr=False)
    """Origin of the samples: ``root`` (absolute), ``data_kind``, options."""
    demo: bool
    """True if the entries are for trying the tool, not for training."""
    allow_failed: str
    """Rejected inputs that the last build tolerated: a number, or a percentage such as ``2%``."""
    building: int = 0
    """Samples that its build will have, which had not ended; 0: it had."""
    fingerprint: str
    """Hex hash of its samples, rows and recipes; the same after entries have moved to other shards."""
    lease: object | None = field(default=None, compare=False, repr=False)
    """Lease that keeps its files from being collected while this object is in use."""
    disk_cache: Any = field(default=None, compare=False, repr=False)
    """The :class:`DiskCache` that fetches its shards; None: they are in the folder."""
    columns: ColumnFile = field(compare=False, repr=False)
    """All columns of samples and fields."""

    def __reduce__(self) -> Any:
        """Another process opens it again."""
        return _reopened, (self.paths, self.number, self.fingerprint, self.lease, self.disk_cache)

    @property
    def part(self) -> str:
        """``i/n`` if it holds one part of the samples; empty if it holds all."""
        return str(self.source.get("part") or "")

    @property
    def empty_by_choice(self) -> bool:
        """True if samples without a text were given one on purpose, which may be the empty one."""
        return self.source.get("options", {}).get("default_caption") is not None

    def check(self) -> None:
        """Read every column and list, and compare each with its checksum; raises CacheDamagedError."""
        _ = self._listed
        self.columns.check()

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """Rejected inputs, read when asked for."""
        return self._listed["rejected"]

    @property
    def notes(self) -> tuple[Rejected, ...]:
        """Inputs that are neither used nor rejected."""
        return self._listed["note"]

    @cached_property
    def _listed(self) -> dict[str, tuple[Rejected, ...]]:
        about = self.manifest["rejected"]
        path = self.paths.snapshot(self.number) / REJECTED
        by_type: dict[str, list[Rejected]] = {"rejected": [], "note": []}
        try:
            data = read_file(path)
            if f"{checksum(data):016x}" != about["checksum"]:
                raise CacheDamagedError(f"{REJECTED} is damaged", where=str(path), why="checksum")
            for value in map(json.loads, data.splitlines()):
                more = {"content": bytes.fromhex(value.get("content", "")), "stat": tuple(value.get("stat", ()))}
                by_type[value.pop("type")].append(Rejected(**{**value, **more}))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise unreadable(path, error) from error
        return {name: tuple(values) for name, values in by_type.items()}


def open_snapshot(cache: Path, number: int | None = None) -> Snapshot:
    """A snapshot of a cache, the current one unless a number is given; raises StoreError."""
    paths = CachePaths(cache)
    number = paths.current_snapshot() if number is None else number
    if number:
        return _read(paths, number)
    holder = builder_name(paths.lock)
    again = "run the same `latentcache build` again: it goes on where it stopped"
    why = f"a build was started here and has not ended{holder and f': {holder}'}{_progress(paths)}"
    if paths.snapshots() and not holder:
        why = "CURRENT is missing"
    raise CacheNotFoundError(
        f"no finished build in {paths.root}",
        where=str(paths.root),
        why=why,
        fix=f"wait until it ends, or build with --publish-every 10m; if it was killed, {again}" if holder else again,
        slug="cache-unfinished",
    )


def _progress(paths: CachePaths) -> str:
    """How far a build is, by its state; empty if it does not say so."""
    try:
        state = read_json(paths.building)
        return "; {done} of {total} {field} are done".format(**state["progress"])
    except (CacheDamagedError, KeyError, TypeError):
        return ""


def open_leased(cache: Path, wanted: int | None = None, disk_cache: Any = None) -> Snapshot:
    """A snapshot, held until the last reference to it is gone. Arguments and errors as :func:`open_snapshot`."""
    paths = CachePaths(cache)
    paths.current_snapshot()  # raises an error if there is no cache
    if wanted is not None and not paths.snapshot(wanted).exists():
        raise CacheNotFoundError(
            f"snapshot {wanted} of {paths.root} is gone",
            where=str(paths.root),
            why=f"of builds the last snapshots stay; the cache has {paths.snapshots()}",
            fix="open the current snapshot: leave snapshot out",
        )
    for _ in range(_TRIES):
        number = wanted or paths.current_snapshot()
        if not number:
            break
        try:
            lease = Lease(paths.snapshot(number) / MANIFEST)
        except BlockingIOError:  # a collector looks at it, or removes it because CURRENT has moved on
            time.sleep(_WAIT_S)
            continue
        except OSError:
            if wanted is None and paths.current_snapshot() != number:
                continue
            break
        try:
            return replace(_read(paths, number), lease=lease, disk_cache=disk_cache)
        except StoreError:
            lease.close()
            raise
    return open_snapshot(cache, wanted)


def _read(paths: CachePaths, number: int) -> Snapshot:
    folder = paths.snapshot(number)
    manifest = load_manifest(folder)
    try:
        shards = manifest["shards"]
        kept = {name: manifest[name] for name in ("complete", "source", "demo", "allow_failed", "fingerprint")}
        if manifest["snapshot"] != number or not all(re.fullmatch(r"[\w-]+", name) for name in shards):
            raise ValueError(f"snapshot {manifest['snapshot']} with shards {shards}")
        file = ColumnFile(folder / COLUMNS, int(manifest["columns"]["checksum"], 16))
        samples = _samples(file, manifest)
        fields = {name: _field_rows(file, name, about, samples, shards) for name, about in manifest["fields"].items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecipeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CacheDamagedError("a snapshot contradicts itself", where=str(folder), why=why) from error
    return Snapshot(
        number=number,
        paths=paths,
        manifest=manifest,
        samples=samples,
        fields=fields,
        shards=tuple(shards),
        columns=file,
        building=manifest.get("building", 0),
        **kept,
    )


def _reopened(paths: CachePaths, number: int, fingerprint: str, lease: object, disk_cache: Any) -> Snapshot:
    snapshot = _read(paths, number)
    if snapshot.fingerprint != fingerprint:
        raise CacheNotFoundError(
            f"{paths.root} is not the cache that was opened",
            why=f"snapshot {number} has the fingerprint {snapshot.fingerprint}, not {fingerprint}: it was made anew",
            fix="open it again",
        )
    return replace(snapshot, lease=lease, disk_cache=disk_cache)


def current_or_none(cache: Path) -> Snapshot | None:
    """The current snapshot, or None while the first build has not ended. Raises as :func:`open_snapshot`."""
    number = CachePaths(cache).current_snapshot()
    return open_snapshot(cache, number) if number else None


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a snapshot. The version is checked first, so that another rule is not taken for damage."""
    manifest = read_json(path := folder / MANIFEST)
    form = manifest.get("format")
    version = form.get("version") if isinstance(form, dict) else None
    if not isinstance(version, int):
        raise CacheFormatError("not a latentcache manifest", where=str(folder), fix="check the path")
    if version != FORMAT_VERSION:
        source = manifest.get("source")
        data = str(source.get("root", "DATA")) if isinstance(source, dict) else "DATA"
        raise other_format(version, folder, folder.parent.parent, data)
    if manifest.get("checksum") != own_checksum(manifest):
        raise CacheDamagedError("the manifest is damaged", where=str(path), why="checksum")
    return manifest


def own_checksum(value: Mapping[str, Any]) -> str:
    """xxh3-64 over an object's canonical JSON without its ``checksum``; floats are texts. 16 hex digits."""
    spelled = json.loads(json.dumps(value), parse_float=str, parse_constant=lambda text: repr(float(text)))
    spelled.pop("checksum", None)
    return f"{checksum(canonical_json(spelled)):016x}"


def _field_rows(
    file: ColumnFile, name: str, about: Mapping[str, Any], samples: SampleTable, shards: Sequence[str]
) -> FieldRows:
    at = f"fields/{name}"
    columns: dict[str, Any] = {column: file[f"{at}/{column}"] for column in ("key", *ENTRY_TYPES, *ROW_TYPES)}
    for column, values in columns.items():
        if len(values) != about["counts"]["rows" if column in ROW_TYPES else "entries"]:
            raise ValueError(f"column {column} of {name} has {len(values)} rows")
    ragged = [(column, f"{at}/ragged/{column}") for column in about["ragged_columns"]]
    kind = field_kind(name)
    kind = kind if kind is not None and kind.kind == about["kind"] else None
    return FieldRows(
        name=name,
        kind=kind,
        kind_byte=about["kind"],
        packing=about["packing"],
        recipe=None if kind is None else kind.recipe.from_json(about["recipe"]),
        recipe_json=about["recipe"],
        recipe_id=bytes.fromhex(about["recipe_id"]),
        provenance=about["provenance"],
        noise=about["noise"],
        spec=FieldSpec(**{**about["spec"], "dims": tuple(about["spec"]["dims"])}),
        groups=tuple(typed(Group, group) for group in about["groups"]),
        shards=tuple(shards),
        columns={column: file[f"{at}/columns/{column}"] for column in about["columns"]},
        ragged_columns={column: (file[f"{prefix}.ends"], file[f"{prefix}.values"]) for column, prefix in ragged},
        samples=samples,
        **columns,
    )


def _samples(file: ColumnFile, manifest: Mapping[str, Any]) -> SampleTable:
    files = Files(
        names=file.strings("files/names"),
        stat=file["files/stat"],  # type: ignore[arg-type]
        content=file["files/content"],  # type: ignore[arg-type]
        reading=file.get("files/reading"),  # type: ignore[arg-type]
    )
    inputs = {}
    for name, parts in manifest["inputs"].items():
        at = f"inputs/{name}"
        columns: dict[str, Any] = {part: file[f"{at}/{part}"] for part in parts if part != "text"}
        inputs[name] = Input(**columns, text=file.strings(f"{at}/text") if "text" in parts else None)
    prefix = "samples/columns/"
    columns = {name.removeprefix(prefix): file[name] for name in file if name.startswith(prefix)}
    samples = SampleTable(names=file.strings("samples/names"), files=files, inputs=inputs, columns=columns)
    lengths = {
        len(samples),
        *(len(column.content) for column in inputs.values()),
        *(len(column) for column in columns.values()),
    }
    if lengths != {manifest["counts"]["samples"]}:
        raise ValueError(f"columns of samples have lengths {sorted(lengths)}")
    return samples


_NO_NAMES = Strings(np.zeros(0, np.uint8), np.zeros(0, np.int64))

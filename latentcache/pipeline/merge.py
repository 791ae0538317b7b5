"""``merge_caches``: finished caches of one DATA and one recipe become one: the parts that several machines built.

Guarantee: the rows and item keys are those of one build. Every copied entry passed its check. Parts are only read.
Missing or unfinished parts, and parts of another recipe or of other files, are rejected before anything is written.
Entries that a merge copied before it failed are used by the next merge.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import (
    CacheDamagedError,
    CacheIncompleteError,
    CorruptEntryError,
    StaleCacheError,
    UsageError,
    count_of,
)
from latentcache.fields.protocol import Described
from latentcache.fields.recipe import join_noise
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Rejected, SampleTable, join_tables
from latentcache.identity.content import HASH_BYTES
from latentcache.pipeline.diff import SLICE, FieldWork, field_work
from latentcache.pipeline.preflight import check_out, free_bytes, kind_of, locked
from latentcache.pipeline.publish import BuildPlan, BuildReport, Observer, Silent, publish, quarantined
from latentcache.plan.numbers import several
from latentcache.sources.known import match_names
from latentcache.sources.options import Part
from latentcache.sources.scan import names_root
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.paths import CachePaths
from latentcache.store.publish import NewSnapshot
from latentcache.store.remote.transfer import remembered
from latentcache.store.remote.view import StoredShards
from latentcache.store.shard import copy_entries
from latentcache.store.snapshot import FieldRows, Snapshot, current_or_none, open_leased


def merge_caches(
    parts: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, observer: Observer | None = None
) -> BuildReport:
    """Merge finished caches of one DATA and one recipe into one snapshot of ``out``.

    Args:
        parts: Caches; of ``--part i/n`` builds all n, in any order. Copies of DATA may lie anywhere.
        out: The merged cache; new, or merged before.
        observer: As of :func:`build_cache`.

    Raises:
        UsageError: A part is missing, or ``out`` cannot be used.
        CacheNotFoundError: A part has no finished build.
        CacheIncompleteError: A part was repaired and not built again.
        StaleCacheError: Recipes differ, or the parts were built from different files; ``differences`` says which.
        CacheDamagedError: Entries of a part fail their check.
        CacheLockedError: A build of ``out`` runs.
    """
    example = "merge_caches([part, part], out)"
    folders = [Path(part) for part in several("parts", parts, fix=example)]
    whole = Path(out)
    started = time.monotonic()
    paths = CachePaths(whole)
    check_out(whole)
    if not folders:
        raise UsageError("there is nothing to merge", fix="give the caches of all parts")
    if whole.resolve() in [part.resolve() for part in folders]:
        raise UsageError("one of the parts", argument="out", value=whole, fix="give another folder")
    snapshots = [_opened(part) for part in folders]
    for part, snapshot in zip(folders, snapshots, strict=True):
        _check_recipe(part, snapshot, folders[0], snapshots[0])
    _check_parts(folders, snapshots)
    _check_data(folders, snapshots)
    table = _table(folders, [snapshot.samples for snapshot in snapshots])
    with locked(paths):
        for snapshot in snapshots:
            _copy(snapshot, paths)
        return _publish(paths, table, snapshots, started, observer or Silent())


def _opened(part: Path) -> Snapshot:
    try:
        snapshot = open_leased(part)
        snapshot.check()
    except CacheDamagedError as error:
        if error.fix == error.default_fix:
            verify = f"latentcache verify {shlex.quote(str(part))} --full"
            error.fix = f"run `{verify}`: it prints the commands that repair it"
        raise
    if not snapshot.complete or CachePaths(part).building.exists():
        raise CacheIncompleteError(
            f"{part}: its last build has not finished, or a repair removed entries",
            where=str(part),
            fix="run the same `latentcache build` again, then merge",
        )
    return snapshot


def _check_recipe(part: Path, snapshot: Snapshot, other: Path, first: Snapshot) -> None:
    """Reject a cache whose fields or recipes differ from the first one's."""
    differences = list[tuple[str, str, str]]()
    for name in sorted({*first.fields, *snapshot.fields}):
        kind, rows, more_rows = kind_of(name), first.fields.get(name), snapshot.fields.get(name)
        of_field: list[tuple[str, Any, Any]] = []
        if rows is None or more_rows is None:
            of_field = [("stored", rows is not None, more_rows is not None)]
        elif rows.recipe_json != more_rows.recipe_json:
            both = rows.provenance, more_rows.provenance
            mine, theirs = (kind.recipe.from_json(side.recipe_json) for side in (rows, more_rows))
            of_field = mine.differences(theirs, both)
            of_field = of_field or [("recipe", rows.recipe_json, more_rows.recipe_json)]
        differences += [(f"{name}.{setting}", str(was), str(now)) for setting, was, now in of_field]
    if differences:
        raise StaleCacheError(
            f"{part} was made by another recipe than {other}",
            where=str(part),
            why="; ".join(f"{name}: {was} and {now}" for name, was, now in differences),
            fix="build it again with the flags and fields of the other parts, or leave it out",
            differences=tuple(differences),
        )


def _check_parts(parts: Sequence[Path], snapshots: Sequence[Snapshot]) -> None:
    """Reject an incomplete set of parts, or parts of several divisions."""
    numbers = [Part.parse(snapshot.part or "0/1") for snapshot in snapshots]
    wanted = {f"{index}/{numbers[0].of}" for index in range(numbers[0].of)}
    names = [f"{number.index}/{number.of}" for number in numbers]
    missing, others = sorted(wanted.difference(names)), sorted(set(names) - wanted)
    if missing or others:
        wrong = [*(f"{name} is missing" for name in missing), *(f"{name} is of another one" for name in others)]
        raise UsageError(
            f"the caches are not all parts of one division: {', '.join(wrong)}",
            why=", ".join(f"{part}: {name}" for part, name in zip(parts, names, strict=True)),
            fix=f"build DATA with --part={missing[0]}, and add its cache" if missing else "leave the others out",
        )


def _check_data(parts: Sequence[Path], snapshots: Sequence[Snapshot]) -> None:
    """Reject caches of different DATA: its folder would not have the samples of the merged cache."""
    first = parts[0]
    digests = [str(snapshot.source.get("inventory", "")) for snapshot in snapshots]
    for part, snapshot, digest in zip(parts, snapshots, digests, strict=True):
        if digest == digests[0]:
            continue
        roots = [str(source["root"]) for source in (snapshots[0].source, snapshot.source)]
        if is_same := roots[0] == roots[1]:
            why = f"files in {roots[0]} were added, removed or changed between the builds"
        else:
            why = f"the files of {roots[0]} and {roots[1]} have other names or sizes"
        again = f"run `latentcache build` on every {'part' if snapshot.part else 'cache'} again, then merge"
        both = f"to train on both, use latentcache.combine([open_cache({str(first)!r}), open_cache({str(part)!r})])"
        raise StaleCacheError(
            f"{part} was built from other data than {first}",
            where=str(part),
            why=why,
            fix=again if is_same else f"{both}; for parts of one DATA, {again}",
            differences=(("inventory", digest, digests[0]),),
        )


def _table(parts: Sequence[Path], tables: Sequence[SampleTable]) -> SampleTable:
    """The merged table in the order of one build: by file, then by line. A sample of several parts is kept once."""
    if len({frozenset(table.inputs) for table in tables}) > 1:
        raise UsageError("the caches hold different kinds of data", fix="merge caches of images, or of records")
    files, numbers = _files(parts, [table.files for table in tables])
    name = next(iter(tables[0].inputs))
    inputs = [table.inputs[name] for table in tables]
    file = np.concatenate([number[np.asarray(held.file)] for held, number in zip(inputs, numbers, strict=True)])
    line = np.concatenate(
        [np.zeros(len(held.file), np.uint32) if held.line is None else held.line for held in inputs]
    )
    content = np.concatenate([held.content for held in inputs])
    order = np.lexsort((line, file))
    repeated = np.flatnonzero((np.diff(file[order]) == 0) & (np.diff(line[order].astype(np.int64)) == 0)) + 1
    different = repeated[(content[order[repeated]] != content[order[repeated - 1]]).any(axis=1)]
    if len(different):
        raise _stale(parts, files.names[int(file[order[different[0]]])])
    return join_tables(tables, numbers, files, np.delete(order, repeated))


def _stale(parts: Sequence[Path], name: str) -> StaleCacheError:
    return StaleCacheError(
        f"the caches were built from different versions of {name}",
        where=name,
        why=", ".join(map(str, parts)),
        fix="run `latentcache build` on every part again, then merge",
        differences=(("source", name, name),),
    )


def _files(parts: Sequence[Path], files: Sequence[Files]) -> tuple[Files, list[NDArray[np.int64]]]:
    """All files, and the number that each file of each part has among them."""
    lists = [list(part.names) for part in files]
    every = Strings.of(lists[0])
    if any(names != lists[0] for names in lists):
        every = Strings.of(sorted({*chain(*lists)}, key=lambda name: name.encode("utf-8", "surrogateescape")))
    numbers = [match_names(part.names, every).astype(np.int64) for part in files]
    stat, content = np.zeros((len(every), STAT_WIDTH), np.uint64), np.zeros((len(every), HASH_BYTES), np.uint8)
    reading = None if files[0].reading is None else np.zeros_like(content)
    for part, number in zip(reversed(files), reversed(numbers), strict=True):
        known = content[number]
        theirs = np.asarray(part.content)
        different = known.any(axis=1) & theirs.any(axis=1) & (known != theirs).any(axis=1)
        if different.any():
            raise _stale(parts, every[int(number[np.flatnonzero(different)[0]])])
        stat[number], content[number] = np.asarray(part.stat), theirs
        if reading is not None and part.reading is not None:
            reading[number] = np.asarray(part.reading)
    return Files(names=every, stat=stat, content=content, reading=reading), numbers


def _copy(snapshot: Snapshot, paths: CachePaths) -> None:
    """Copy the entries of a part that are not there yet; each one is checked.

    At a URL, a shard of which nothing is there is copied whole, and is not read.
    """
    catalog = load_catalog(paths)
    root = snapshot.paths.root
    url = remembered(paths)["url"]
    stored = StoredShards(url) if url else None
    for number, shard in enumerate(snapshot.shards):
        spans = np.concatenate([_spans(rows, number, catalog) for rows in snapshot.fields.values()])
        try:
            if stored is not None and len(spans) == _count(snapshot, number):
                stored.take(snapshot.paths, shard)
            elif len(spans):
                copy_entries(paths, snapshot.paths.shard(shard), spans)
        except (CacheDamagedError, CorruptEntryError) as error:
            mend = f"latentcache verify {shlex.quote(str(root))} --full --repair --yes"
            raise CacheDamagedError(
                f"{root}: an entry is damaged",
                where=error.where or str(snapshot.paths.shard(shard)),
                why=error.what,
                fix=f"run `{mend}`, build again, then merge",
            ) from error
    if stored is not None:
        stored.fill(paths)


def _count(snapshot: Snapshot, shard: int) -> int:
    """Entries of a snapshot in one shard."""
    return sum(int((np.asarray(rows.shard) == shard).sum()) for rows in snapshot.fields.values())


def _spans(rows: FieldRows, shard: int, catalog: Catalog) -> NDArray[Any]:
    """Entries of a field in one shard with an item that is not committed yet, for ``copy_entries``."""
    entry = np.asarray(rows.entry)
    lacking = np.zeros(rows.entries, dtype=np.bool_)
    items = np.flatnonzero((np.asarray(rows.shard) == shard)[entry])
    for start in range(0, len(items), SLICE):
        some = items[start : start + SLICE]
        lacking[entry[some[catalog.find(rows.row_keys(some)) < 0]]] = True
    return rows.entry_spans(np.flatnonzero(lacking))


def _publish(
    paths: CachePaths, table: SampleTable, snapshots: Sequence[Snapshot], started: float, observer: Observer
) -> BuildReport:
    """Publish one snapshot with the items of all parts, as a build of all samples would."""
    catalog = load_catalog(paths)
    first = snapshots[0]
    rejected = {(item.name, item.line, item.target): item for part in snapshots for item in part.rejected}
    notes = {(note.name, note.line, note.reason): note for part in snapshots for note in part.notes}
    works = [_work(name, snapshots, table, catalog, rejected.values()) for name in first.fields]
    listed = {(item.name, item.line, item.target) for work in works for item in work.rejected.values()}
    others = [item for sample, item in rejected.items() if sample not in listed]
    options = {name: value for name, value in first.source.get("options", {}).items() if name != "part"}
    base = NewSnapshot(
        samples=table,
        fields=(),
        shards=(),
        source={**first.source, "relative": "", "options": options, "part": ""},
        rejected=others,
        notes=list(notes.values()),
        allow_failed=first.allow_failed,
    )
    plan = BuildPlan(
        cache=paths.root,
        data=Path(str(first.source["root"])),
        data_kind=str(first.source.get("data_kind", "")),
        samples=len(table) + quarantined(others),
        fields={work.name: work for work in works},
        rejected=tuple(rejected.values()),
        notes=tuple(notes.values()),
        free_bytes=free_bytes(paths.root),
        allow_failed=first.allow_failed,
    )
    observer.planned(plan)
    root = names_root(plan.data, first.source)
    current = current_or_none(paths.root)
    return publish(paths, base, works, catalog, plan=plan, root=root, current=current, started=started)


def _work(
    name: str,
    snapshots: Sequence[Snapshot],
    table: SampleTable,
    catalog: Catalog,
    rejected: Iterable[Rejected],
) -> FieldWork:
    """The items of one field that the merged table needs; all are committed, but those of rejected samples."""
    first = snapshots[0].fields[name]
    kind = kind_of(name)
    label = str(first.provenance.get("label", ""))
    demo = snapshots[0].demo
    recipe = kind.recipe.from_json(first.recipe_json)
    described = Described(recipe=recipe, label=label, provenance=first.provenance, demo=demo)
    of_field = [item for item in rejected if item.target == name]
    rows = match_names(Strings.of(item.label for item in of_field), table.names).tolist()
    known = {row: item for row, item in zip(rows, of_field, strict=True) if row >= 0}
    work = field_work(kind, described, None, table, catalog, known)
    for snapshot in snapshots:
        work.noise = join_noise(work.noise, snapshot.fields[name].noise)
    if (lost := np.unique(work.plan.sample[work.catalog_item < 0])).size:
        raise CacheDamagedError(
            f"{count_of(len(lost), 'samples have')} no {name} in any part, {table.where(lost[0])[0]} for one",
            where=str(snapshots[0].paths.root),
            fix="run `latentcache verify PART --full` on every part",
        )
    return work

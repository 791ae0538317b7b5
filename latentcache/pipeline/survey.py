"""The plan of a build, before a pixel is decoded: which samples are known, which must be read, which are refused.

Decides what work there is. A file whose stat memo still holds is not opened at all; of any other file only the
header is read here. Cost: one dictionary look-up per known file; about 0.1 ms per unknown one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from latentcache.errors import UnusableSampleError
from latentcache.geometry.buckets import BucketTable
from latentcache.geometry.placement import Placement, mirrored, place, refusal
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.key import EntryKey
from latentcache.identity.stat import StatMemo
from latentcache.pipeline.headers import picture_size, refused
from latentcache.pipeline.work import Failed, Planned, refuse, refused_by
from latentcache.recipe import Recipe
from latentcache.sources.reading import open_source, read_source
from latentcache.sources.sample import Refusal, Sample, Scan
from latentcache.store.catalog import Catalog
from latentcache.store.generation import Generation, unpack_memo

#: Causes that other flags, another machine or time may take away while the file stays as it is.
_LOOK_AGAIN = frozenset(
    {"too-many-pixels", "out-of-memory", "entry-lost", "permission", "io-error", "changing", "vanished"}
)
_ANY: Mapping[str, str] = MappingProxyType({})
#: Where header reads wait for the disk and not for a core. Where they do not, threads cost four times as much as
#: they help: 0.11 ms a file without, 0.4 ms with eight that hand the interpreter to each other.
_HEADER_THREADS = 8
#: Headers between two looks whether the disk is slow, and those that are read to find out.
_HEADER_CHUNK, _HEADER_PROBE = 1024, 8

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a build has to do."""

    known: tuple[Planned, ...]
    """Samples whose every entry is committed already."""
    todo: tuple[Planned, ...]
    """Samples to be read, in the order they will be: by bucket, then by name."""
    failed: tuple[Failed, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """What the last build knew of the files, by name."""

    samples: Mapping[str, tuple[StatMemo, bytes, Size]]
    refused: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, generation: Generation | None, recipe: Recipe, decoders: Mapping[str, str] = _ANY) -> Memory:
        """From the last generation; refusals count only while the recipe and the decoders are the same.

        Args:
            generation: The last one.
            recipe: Of the build.
            decoders: Versions of the libraries that say whether a file is a picture; any, where none are given.
        """
        if generation is None:
            return cls({}, {})
        samples = generation.samples
        sizes = samples.original_size.tolist()
        stats = samples.stat.tolist()
        contents = samples.content.tobytes()
        known = {
            name: (unpack_memo(stats[i]), contents[16 * i : 16 * i + 16], Size(*sizes[i]))
            for i, name in enumerate(samples.names)
        }
        same = generation.recipe.as_json() == recipe.as_json() and same_decoders(generation, decoders)
        return cls(known, {str(item["name"]): item for item in generation.refused} if same else {})


def same_decoders(generation: Generation, decoders: Mapping[str, str]) -> bool:
    """Whether files were refused by the decoders of today: another version may read what the last one could not."""
    made = generation.manifest["provenance"]
    then = {"latentcache": made.get("latentcache"), **made.get("libraries", {})}
    return all(then.get(name) == number for name, number in decoders.items())


def survey(
    scan: Scan,
    recipe: Recipe,
    catalog: Catalog,
    memory: Memory,
    *,
    max_pixels: int,
    retry_failed: bool = False,
    stopping: Callable[[], bool] = bool,
) -> Survey:
    """Sort the samples of a scan into known, to do and refused.

    Args:
        scan: The data folder.
        recipe: Whose buckets decide the placements.
        catalog: What is committed.
        memory: What the last build knew.
        max_pixels: Larger pictures are refused.
        retry_failed: Look again at files that were refused before.
        stopping: Asked before each header; once True, no more are read and the survey is not whole.
    """
    tables = recipe.geometry.tables()
    known: list[Planned] = []
    todo: list[Planned] = []
    failed: list[Failed] = []
    unknown: list[tuple[int, Sample]] = []
    for index, sample in enumerate(scan.samples):
        again = None if retry_failed else refused_before(sample, memory)
        planned = None if again else _from_memory(index, sample, tables, memory)
        if again is not None:
            failed.append(Failed(index=index, refusal=again))
        elif planned is None:
            unknown.append((index, sample))
        elif not planned.content:
            todo.append(planned)
        elif all(key in catalog for key in keys_of(planned.content, planned.placements, recipe)):
            known.append(planned)
        else:
            todo.append(planned)
    for outcome in _read_headers(scan.root, unknown, tables, max_pixels, stopping):
        (failed if isinstance(outcome, Failed) else todo).append(outcome)  # type: ignore[arg-type]
    todo.sort(key=lambda planned: (_bucket_order(planned), planned.index))
    return Survey(known=tuple(known), todo=tuple(todo), failed=tuple(failed))


def placements_for(size: Size, tables: Sequence[BucketTable]) -> tuple[Placement, ...]:
    """Where a picture of this size goes: one placement per resolution, each bucket once.

    Raises:
        UnusableSampleError: The picture is too small or too long for every table.
    """
    causes = [refusal(size, table) for table in tables]
    fitting = [place(size, table) for table, cause in zip(tables, causes, strict=True) if not cause]
    if not fitting:
        raise refused(causes[0], f"{size} pixels (height x width)")
    return tuple({placement.bucket: placement for placement in fitting}.values())


def keys_of(content: bytes, placements: Iterable[Placement], recipe: Recipe) -> list[bytes]:
    """Entry keys of one picture, one per placement, then those of its mirror image where that is stored."""
    part, wanted = recipe.key_part, tuple(placements)
    return [
        EntryKey(content=content, bucket=placement.bucket, recipe=part, variant=variant).pack()
        for variant in range(recipe.variants)
        for placement in wanted
    ]


def stored_placements(placements: Sequence[Placement], recipe: Recipe) -> list[Placement]:
    """What the entries under :func:`keys_of` say of where they were cut, in the same order."""
    return [*placements, *map(mirrored, placements)][: len(placements) * recipe.variants]


def refused_before(sample: Sample, memory: Memory) -> Refusal | None:
    """The old refusal, where the file is still the one that was refused."""
    old = memory.refused.get(sample.name)
    if old is None or old["cause"] in _LOOK_AGAIN or not old.get("stat"):
        return None
    memo = unpack_memo(old["stat"])
    if not memo.trusts(sample.stat):
        return None
    content, hint = bytes.fromhex(old.get("content", "")), old.get("hint", "")
    return refuse(sample, old["cause"], old.get("detail", ""), hint=hint, stat=memo, content=content)


def _from_memory(index: int, sample: Sample, tables: Sequence[BucketTable], memory: Memory) -> Planned | None:
    """A plan without opening the file, where its stat memo still holds."""
    found = memory.samples.get(sample.name)
    if found is None or not found[0].same_stat(sample.stat):
        return None
    memo, content, size = found
    try:
        placements = placements_for(size, tables)
    except UnusableSampleError:
        return None  # the recipe changed: the header pass will refuse it with its cause
    planned = Planned(index=index, sample=sample, size=size, placements=placements, expected=content)
    return planned if memo.racy else replace(planned, content=content, memo=memo)


def _read_headers(
    root: Path,
    unknown: Sequence[tuple[int, Sample]],
    tables: Sequence[BucketTable],
    max_pixels: int,
    stopping: Callable[[], bool],
) -> Iterable[Planned | Failed]:
    def read(item: tuple[int, Sample]) -> Planned | Failed | None:
        index, sample = item
        if stopping():
            return None
        try:
            with open_source(root / sample.name) as file:
                size = picture_size(file, max_pixels=max_pixels)
            placements = placements_for(size, tables)
        except UnusableSampleError as error:
            return Failed(index=index, refusal=_refuse_with_content(root, sample, error))
        return Planned(index=index, sample=sample, size=size, placements=placements)

    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        starts = range(0, len(unknown), _HEADER_CHUNK)
        found = (_read_all(pool, read, unknown[start : start + _HEADER_CHUNK]) for start in starts)
        return [outcome for outcome in chain.from_iterable(found) if outcome is not None]


def _read_all(pool: Executor, read: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """``map(read, items)``, by one thread, or by all where the first items show that it would mostly wait.

    Never by the caller: a signal is not heard in a read that does not end.
    """
    found = pool.submit(_read_while_quick, read, items).result()
    return [*found, *pool.map(read, items[len(found) :])]


def _read_while_quick(read: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """Of all items, or of the first alone where they are slow."""
    began, worked = time.perf_counter(), time.thread_time()
    first = [read(item) for item in items[:_HEADER_PROBE]]
    elapsed, worked = time.perf_counter() - began, time.thread_time() - worked
    if elapsed > 3 * worked:  # below that, more threads are no cheaper
        return first
    return first + [read(item) for item in items[_HEADER_PROBE:]]


def _refuse_with_content(root: Path, sample: Sample, error: UnusableSampleError) -> Refusal:
    """A refusal that remembers the bytes it was made for, so that it stands until they change."""
    try:
        data, memo = read_source(root / sample.name)
    except UnusableSampleError:
        return refused_by(sample, error)
    return refused_by(sample, error, stat=memo, content=content_hash(data))


def _bucket_order(planned: Planned) -> tuple[int, int]:
    bucket = planned.placements[0].bucket
    return (-bucket.area, bucket.width)

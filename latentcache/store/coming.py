"""A build that readers may follow: what it will hold, said once it is planned, and what has arrived of it.

``CACHE/coming/`` has the columns of the generation to be, without keys and places, and a log that says which content
each sample turned out to have. Entries themselves are found where they always are, in sealed shards, which such a
build seals every few seconds. Guarantee: rows, buckets and so the length of an epoch are exact from the start; a
log that was cut inside a record is read up to it. The folder goes when the build ends: ``CURRENT`` says the rest.
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CacheFormatError, RecipeError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import HASH_BYTES, checksum
from latentcache.recipe import Recipe
from latentcache.store.columns import StringColumn, load_columns, save_columns
from latentcache.store.durable import as_store_error, make_folder, open_file, read_json, write_json, writing
from latentcache.store.generation import Generation, Rows, Samples
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import is_whole, signed

#: Of pictures, and of tokens: a release that knows no tokens to come refuses them by their number.
COMING_VERSION, TOKENS_COMING_VERSION = 1, 2
Made = TypeVar("Made")
_RECORD = struct.Struct(f"<II{HASH_BYTES}sQ")
_USABLE, _REFUSED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a build sets out to make. N rows, S samples, both in the order of the generation to be."""

    recipe: Recipe
    names: StringColumn
    captions: StringColumn
    content: NDArray[np.uint8]
    """(S, 16) content hashes; zeros where the file was not read yet."""
    original_size: NDArray[np.uint32]
    """(S, 2) pixels, from the header of the file."""
    sample: NDArray[np.int32]
    """(N,) position in the samples."""
    bucket: NDArray[np.int32]
    """(N,) position in ``buckets``."""
    crop: NDArray[np.uint32]
    """(N, 2) top and left, pixels."""
    resize: NDArray[np.uint32]
    """(N, 2) height and width, pixels."""
    buckets: tuple[Size, ...]
    facts: Mapping[str, Any]
    """More for the manifest: ``source``, ``demo``."""
    before: int = 0
    """Generation that was current when the build began, 0 without one."""


_COLUMNS = ("content", "original_size", "sample", "bucket", "crop", "resize")
_STRINGS = ("names", "captions")


def announce(layout: CacheLayout, coming: Announcement) -> Path:
    """Say what will be there; gives the path of the log to be. An older announcement is replaced.

    Raises:
        DiskFullError: No space.
        CacheReadOnlyError: The cache cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {name: getattr(coming, name) for name in _COLUMNS}
    for name in _STRINGS:
        arrays |= string_arrays(name, getattr(coming, name))
    about = {
        "version": COMING_VERSION,
        "before": coming.before,
        "recipe": coming.recipe.as_json(),
        "buckets": [[size.height, size.width] for size in coming.buckets],
        **coming.facts,
    }
    return put_announcement(layout, about, arrays)


def put_announcement(layout: CacheLayout, about: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> Path:
    """Say what will be there, of whatever kind; gives the path of the log to be. An older announcement is replaced.

    Args:
        layout: The cache.
        about: For its manifest, ``version`` and ``before`` among it.
        columns: Its columns.

    Raises:
        DiskFullError: No space.
        CacheReadOnlyError: The cache cannot be written.
    """
    withdraw(layout)
    make_folder(layout.coming)
    number = secrets.token_hex(8)  # samples are counted anew: those who follow an older log must not read this one
    manifest = {**about, "log": number, "columns": save_columns(layout.coming, columns)}
    write_json(layout.coming / "manifest.json", signed(manifest))
    return log_path(layout, number)


def string_arrays(name: str, column: StringColumn) -> dict[str, NDArray[Any]]:
    """A column of strings as two of numbers."""
    return {f"{name}_bytes": column.data, f"{name}_ends": column.ends}


def log_path(layout: CacheLayout, number: str) -> Path:
    """The log of one announcement."""
    return layout.coming / f"arrived-{number}.log"


def withdraw(layout: CacheLayout) -> None:
    """Take the announcement away, which readers have in memory. Raises StoreError where the disk refuses."""
    with writing(layout.coming):
        (layout.coming / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(layout.coming, ignore_errors=True)


def load_announced(layout: CacheLayout) -> Generation | None:
    """The generation to be, with zeros for keys and places; None where no build is announced.

    Raises:
        CacheFormatError: Announced by a newer version, or a build of tokens.
        CacheDamagedError: It is not what was written.
    """
    return find_announcement(layout, _generation, version=COMING_VERSION)


def find_announcement(
    layout: CacheLayout, make: Callable[[Mapping[str, Any], Mapping[str, NDArray[Any]]], Made], *, version: int
) -> Made | None:
    """What is made of an announcement's manifest and columns; None where no build is announced.

    Args:
        layout: The cache.
        make: Makes it; says with a ``ValueError`` or ``KeyError`` that they contradict each other.
        version: The kind of announcement that it can read.

    Raises:
        CacheFormatError: Announced by another version, or a build of another kind.
        CacheDamagedError: It is not what was written.
    """
    path = layout.coming / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = read_json(path)
        if manifest.get("version") != version:
            raise _unknown(manifest.get("version"), path)
        if not is_whole(manifest):
            raise ValueError("checksum")
        return make(manifest, load_columns(layout.coming, manifest["columns"]))
    except CacheDamagedError:
        if not path.exists():
            return None  # the build has ended between two looks
        raise
    except (KeyError, TypeError, ValueError, RecipeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CacheDamagedError("the announcement of a build is damaged", where=str(path), why=why) from error


def _unknown(version: object, path: Path) -> CacheFormatError:
    kinds = {COMING_VERSION: ("pictures", "open_cache"), TOKENS_COMING_VERSION: ("tokens", "open_tokens")}
    if version in kinds:
        kind, opener = kinds[version]
        return CacheFormatError(
            f"the build that is under way makes {kind}",
            where=str(path),
            fix=f"open it with latentcache.{opener}(path, follow=True)",
            slug="cache-kind",
        )
    return CacheFormatError(
        f"a build of another version is under way ({version!r})",
        where=str(path),
        fix="wait for its end, or upgrade latentcache",
    )


def _generation(manifest: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> Generation:
    count, samples = len(columns["sample"]), len(columns["content"])
    buckets = tuple(Size(height, width) for height, width in manifest["buckets"])
    if {len(columns[name]) for name in ("bucket", "crop", "resize")} != {count}:
        raise ValueError("rows of different length")
    if count and not (columns["sample"].max() < samples and columns["bucket"].max() < len(buckets)):
        raise ValueError("a position that points nowhere")
    rows = Rows(
        key=np.zeros((count, 32), dtype=np.uint8),
        shard=np.full(count, -1, dtype=np.int32),
        offset=np.zeros(count, dtype=np.uint64),
        bucket=columns["bucket"],
        sample=columns["sample"],
        crop=columns["crop"],
        resize=columns["resize"],
        pixel_hash=np.zeros((count, 16), dtype=np.uint8),
    )
    return Generation(
        number=int(manifest["before"]) + 1,
        recipe=Recipe.from_json(manifest["recipe"]),
        rows=rows,
        samples=Samples(
            names=StringColumn(columns["names_bytes"], columns["names_ends"]),
            captions=StringColumn(columns["captions_bytes"], columns["captions_ends"]),
            content=columns["content"].copy(),  # filled in while the build goes on; what was loaded is read-only
            original_size=columns["original_size"],
            stat=np.zeros((samples, 6), dtype=np.uint64),
        ),
        buckets=buckets,
        shards=(),
        refused=(),
        notes=(),
        manifest=manifest,
    )


class ArrivalLog:
    """Says which content samples turned out to have. One process writes; use as a context manager.

    Args:
        path: Of ``announce``.

    Raises:
        StoreError: The file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise as_store_error(error, path) from error
        self._path = path

    def usable(self, found: Iterable[tuple[int, bytes]]) -> None:
        """These samples have this content.

        Raises:
            DiskFullError: No space.
        """
        self._append(found, _USABLE)

    def refused(self, samples: Iterable[int]) -> None:
        """These samples cannot be used after all.

        Raises:
            DiskFullError: No space.
        """
        self._append(((sample, bytes(HASH_BYTES)) for sample in samples), _REFUSED)

    def _append(self, found: Iterable[tuple[int, bytes]], state: int) -> None:
        records = b"".join(_record(sample, state, content) for sample, content in found)
        try:
            if records and os.write(self._descriptor, records) < len(records):
                raise OSError(28, "No space left on device")
        except OSError as error:
            raise as_store_error(error, self._path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _record(sample: int, state: int, content: bytes) -> bytes:
    front = _RECORD.pack(sample, state, content, 0)[:-8]
    return front + struct.pack("<Q", checksum(front))


def read_arrivals(path: Path, start: int = 0) -> tuple[list[tuple[int, bytes | None]], int]:
    """Samples and contents (None: refused) from a place of the log on, and the place behind the last of them."""
    try:
        descriptor = open_file(path)
    except OSError:
        return [], start
    try:
        data = os.pread(descriptor, max(os.fstat(descriptor).st_size - start, 0), start)
    finally:
        os.close(descriptor)
    found: list[tuple[int, bytes | None]] = []
    for place in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
        sample, state, content, check = _RECORD.unpack_from(data, place)
        if check != checksum(data[place : place + _RECORD.size - 8]):
            break
        found.append((sample, None if state == _REFUSED else content))
    return found, start + len(found) * _RECORD.size


def sealed_since(layout: CacheLayout, seen: Sequence[str]) -> list[Path]:
    """Sealed shards that were not there before, retired ones among them: their entries are whole."""
    known = set(seen)
    return [path for path in layout.all_sealed() if path.name not in known]

"""Every way latentcache can fail, each saying what, where, why and how to mend it.

    LatentcacheError                    slug, what, where, why, fix, exit_code
      UsageError(ValueError)            exit 2: settings that contradict each other or cannot be
        RecipeError                     a recipe that cannot be
      SourceError                       exit 2: the data folder as a whole cannot be used
        SourceNotFoundError(FileNotFoundError)
        EmptySourceError
        TableError                      a metadata table that cannot be read: file and line
        UnusableSampleError             one file that cannot be used; the build quarantines it and goes on
      EncoderError                      exit 2: the model cannot be used
        ModelNotFoundError(FileNotFoundError)
        UnsupportedModelError           GGUF, pickle, not a picture encoder, ...
      DeviceError                       exit 3: the device failed
        DeviceMemoryError(MemoryError)  caught by the pipeline: it halves the batch
      WorkerError                       exit 3: processes of a build died
      StoreError                        exit 3: the cache cannot be used
        CacheNotFoundError(FileNotFoundError)
        CacheFormatError                newer than this version, or not a cache
        CacheDamagedError               a shard or a manifest that is not what it was
        CacheIncompleteError            a repair took entries out that no build has made again yet
        StaleCacheError                 made with another tokenizer or recipe than the one that is asked for
        CorruptEntryError               one entry fails its check
        MissingEntryError(LookupError)  one entry is not there
        NotYetEncodedError(TimeoutError)  an entry of a build under way did not come in time
        CacheLockedError                another build holds the cache (``holder``)
        DiskFullError(OSError)
        CacheReadOnlyError(PermissionError)
      PlanError                         exit 1: an epoch that would train on nothing
        EmptyPlanError
      ExportError                       exit 1: rows that a trainer would read wrongly
      InterruptedBuildError             exit 130 or 143: work is committed, run again to go on

Guarantee: ``slug``, ``what`` and ``fix`` are never empty. The command line prints four lines made of these
attributes and the JSON form carries them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any


class LatentcacheError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: What went wrong, one sentence without a final full stop.
        where: File, line, entry or option it is about; may be empty.
        why: What was expected and found, or the cause; may be empty.
        fix: What the reader can do about it, a command where there is one.
        slug: Stable machine-readable name; defaults to the class's own.
    """

    slug: str = "error"
    exit_code: int = 2
    default_fix: str = "run `latentcache --help`"

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "", slug: str = "") -> None:
        self.what, self.where, self.why = what, where, why
        self.fix = fix or self.default_fix
        self.slug = slug or self.slug
        super().__init__(what)

    def __str__(self) -> str:
        """All four parts in one paragraph, so that a bare traceback is as clear as the command line."""
        parts = [self.what, f"at {self.where}" if self.where else "", self.why, f"fix: {self.fix}"]
        return "; ".join(part for part in parts if part)

    def as_json(self) -> dict[str, Any]:
        """The ``error`` object of the JSON contract."""
        return {"slug": self.slug, "what": self.what, "where": self.where, "why": self.why, "fix": self.fix}


class UsageError(LatentcacheError, ValueError):
    """Settings that contradict each other or cannot be."""

    slug = "usage"


class RecipeError(UsageError):
    """A recipe that cannot be: unknown value, impossible bucket table, contradicting fields."""

    slug = "recipe"


class SourceError(LatentcacheError):
    """The data folder as a whole cannot be used."""

    slug = "source"


class SourceNotFoundError(SourceError, FileNotFoundError):
    """The data folder does not exist."""

    slug = "source-not-found"


class EmptySourceError(SourceError):
    """The data folder holds nothing that could be encoded."""

    slug = "source-empty"


class TableError(SourceError):
    """A metadata table that cannot be read. ``where`` is ``file:line``."""

    slug = "table"


class UnusableSampleError(SourceError):
    """One file that cannot be used. ``slug`` is the cause word, ``what`` the detail, ``fix`` the hint."""

    slug = "unusable"
    default_fix = "replace or remove the file"


class EncoderError(LatentcacheError):
    """The model cannot be used."""

    slug = "model"


class ModelNotFoundError(EncoderError, FileNotFoundError):
    """No model at this path, and none under this name that can be fetched."""

    slug = "model-not-found"


class UnsupportedModelError(EncoderError):
    """The file is no picture encoder we can load: GGUF, pickle, a text model, ..."""

    slug = "model-unsupported"


class DeviceError(LatentcacheError):
    """The device failed or is not there."""

    slug = "device"
    exit_code = 3
    default_fix = "run again; with `--device cpu` if it happens again"


class DeviceMemoryError(DeviceError, MemoryError):
    """The device ran out of memory for one batch."""

    slug = "device-memory"
    default_fix = "use a smaller --batch-size or --resolution"


class WorkerError(LatentcacheError):
    """Processes of a build died, and none of its inputs is to blame."""

    slug = "worker"
    exit_code = 3
    default_fix = "look into the system's log (is there enough memory?), then run again: committed work is kept"


class StoreError(LatentcacheError):
    """The cache cannot be used."""

    slug = "store"
    exit_code = 3


class CacheNotFoundError(StoreError, FileNotFoundError):
    """There is no finished cache at this path."""

    slug = "cache-not-found"


class CacheFormatError(StoreError):
    """Not a cache, or one written by a newer version."""

    slug = "cache-format"


class CacheDamagedError(StoreError):
    """A shard, a manifest or a column is not what it was when it was written."""

    slug = "cache-damaged"
    default_fix = "run `latentcache verify --full` on the cache: it prints the commands that mend it"


class CacheIncompleteError(StoreError):
    """A repair took damaged entries out of this cache, and no build has made them again yet."""

    slug = "cache-incomplete"
    default_fix = "run `latentcache build` again: it encodes what was removed"


class StaleCacheError(StoreError):
    """The cache was made with something else than what it is opened for.

    Args:
        what: As in the base class.
        differences: (field, as it is cached, as it is asked for), the fields that differ.
        **parts: ``where``, ``why``, ``fix`` of the base class.
    """

    slug = "stale-cache"

    def __init__(self, what: str, *, differences: tuple[tuple[str, str, str], ...] = (), **parts: str) -> None:
        self.differences = differences
        super().__init__(what, **parts)


class CorruptEntryError(StoreError):
    """One entry fails its check.

    Args:
        what: As in the base class.
        sample: Name of the sample the entry belongs to.
        key: Entry key in hex.
        **parts: ``where``, ``why``, ``fix`` of the base class.
    """

    slug = "entry-corrupt"
    default_fix = "run `latentcache verify --full` on the cache: it prints the commands that mend it"

    def __init__(self, what: str, *, sample: str = "", key: str = "", **parts: str) -> None:
        self.sample, self.key = sample, key
        super().__init__(what, **parts)


class MissingEntryError(StoreError, LookupError):
    """One entry that the plan names is not in the store."""

    slug = "entry-missing"
    default_fix = "run `latentcache build` again: it encodes what is missing"


class NotYetEncodedError(StoreError, TimeoutError):
    """A build that is followed has not made an entry in time."""

    slug = "not-yet-encoded"
    default_fix = "wait longer with open_cache(..., timeout_s=...), or open_tokens"


class CacheLockedError(StoreError):
    """Another process holds the cache.

    Args:
        what: As in the base class.
        holder: ``{"pid", "host", "since"}`` of the process that holds it, as far as it is known.
        **parts: ``where``, ``why``, ``fix`` of the base class.
    """

    slug = "locked"

    def __init__(self, what: str, *, holder: Mapping[str, Any], **parts: str) -> None:
        self.holder = dict(holder)
        super().__init__(what, **parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """The way between processes: ``args`` alone would not do for a required keyword."""
        return partial(type(self), holder=self.holder), self.args, self.__dict__

    def as_json(self) -> dict[str, Any]:
        """As in the base class, with the holder."""
        return {**super().as_json(), "holder": self.holder}


class DiskFullError(StoreError, OSError):
    """The disk is full. What was committed is safe."""

    slug = "disk-full"
    default_fix = "free some space and run the same command again: committed work is kept"


class CacheReadOnlyError(StoreError, PermissionError):
    """The cache folder cannot be written."""

    slug = "read-only"


class PlanError(LatentcacheError):
    """The plan cannot be made as asked."""

    slug = "plan"
    exit_code = 1


class EmptyPlanError(PlanError):
    """An epoch of zero steps: training would run and learn nothing."""

    slug = "plan-empty"


class ExportError(LatentcacheError):
    """Rows that are not what a trainer would take them for; nothing is written."""

    slug = "export"
    exit_code = 1
    default_fix = "report this with `latentcache info CACHE --json`: a view made rows that cannot be"


class InterruptedBuildError(LatentcacheError):
    """A signal ended the build; everything acknowledged is committed."""

    slug = "interrupted"
    default_fix = "run the same command again: it goes on where this run stopped"

    def __init__(self, what: str, *, signal_number: int, **parts: str) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(what, **parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """The way between processes: ``args`` alone would not do for a required keyword."""
        return partial(type(self), signal_number=self.exit_code - 128), self.args, self.__dict__

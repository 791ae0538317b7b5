"""Errors of latentcache: each names the problem, the place, the cause and the fix.

Guarantee: ``slug``, ``what`` and ``fix`` are never empty. The command line prints these attributes on four lines and
JSON output carries them unchanged. ``exit_code`` is 2 unless a class says another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any


class LatentcacheError(Exception):
    """Base class of all errors raised on purpose.

    Args:
        what: The problem, one sentence without a final full stop.
        where: File, line, entry or option; may be empty.
        why: Expected and found values, or the cause; may be empty.
        fix: The action that solves the problem, a command if there is one.
        slug: Stable machine-readable name [default: the class's slug].
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
        """All four parts in one paragraph."""
        parts = [self.what, f"at {self.where}" if self.where else "", self.why, f"fix: {self.fix}"]
        return "; ".join(part for part in parts if part)

    def as_json(self) -> dict[str, Any]:
        """The ``error`` object of the JSON contract."""
        return {"slug": self.slug, "what": self.what, "where": self.where, "why": self.why, "fix": self.fix}


class UsageError(LatentcacheError, ValueError):
    """Invalid or contradicting arguments."""

    slug = "usage"


class StrictError(UsageError):
    """Data that a build notices and does not use, rejected because ``strict`` was asked for: ``notes`` names it."""

    slug = "strict"
    default_fix = "mend the data, or leave --strict out"

    def __init__(self, what: str, *, notes: Sequence[Any] = (), **parts: str) -> None:
        self.notes = tuple(notes)
        super().__init__(what, **parts)


class RecipeError(UsageError):
    """An invalid recipe: unknown value, empty bucket table, contradicting settings."""

    slug = "recipe"


class SourceError(LatentcacheError):
    """DATA as a whole cannot be used."""

    slug = "source"


class SourceNotFoundError(SourceError, FileNotFoundError):
    """DATA does not exist."""

    slug = "source-not-found"


class EmptySourceError(SourceError):
    """DATA holds no input of the requested fields."""

    slug = "source-empty"


class SourceAmbiguousError(SourceError):
    """DATA has the form of two layouts; ``--layout`` decides."""

    slug = "source-ambiguous"


class TableError(SourceError):
    """An unreadable metadata table. ``where`` is ``file:line``."""

    slug = "table"


class UnusableSampleError(SourceError):
    """One unusable file or record. ``slug`` is the reason, ``what`` the detail, ``fix`` the hint."""

    slug = "unusable"
    default_fix = "replace or remove the file"


class EncoderError(LatentcacheError):
    """The model cannot be used."""

    slug = "model"


class ModelNotFoundError(EncoderError, FileNotFoundError):
    """No model at this path, and no downloadable model of this name."""

    slug = "model-not-found"


class UnsupportedModelError(EncoderError):
    """A file that is not a supported encoder: GGUF, pickle, another kind of model, ..."""

    slug = "model-unsupported"


class DeviceError(LatentcacheError):
    """The device failed or does not exist."""

    slug = "device"
    exit_code = 3
    default_fix = "run again; with `--device cpu` if it happens again"


class DeviceMemoryError(DeviceError, MemoryError):
    """The device ran out of memory for one batch."""

    slug = "device-memory"
    default_fix = "use a smaller --batch-size or --resolution"


class WorkerError(LatentcacheError):
    """Worker processes of a build died, and no input caused it."""

    slug = "worker"
    exit_code = 3
    default_fix = (
        "check the system log (is there enough memory?), then run the same command again: committed work is kept"
    )


class StoreError(LatentcacheError):
    """The cache cannot be used."""

    slug = "store"
    exit_code = 3


class CacheNotFoundError(StoreError, FileNotFoundError):
    """No finished cache at this path."""

    slug = "cache-not-found"


class CacheFormatError(StoreError):
    """Not a cache, or a cache written by a newer version."""

    slug = "cache-format"


class CacheDamagedError(StoreError):
    """A shard, a manifest or a column has other bytes than were written."""

    slug = "cache-damaged"
    default_fix = "run `latentcache verify --full` on the cache: it prints the commands that repair it"


class CacheIncompleteError(StoreError):
    """A repair removed damaged entries from this cache, and no build has made them again."""

    slug = "cache-incomplete"
    default_fix = "run `latentcache build` again: it encodes the removed entries"


class StaleCacheError(StoreError):
    """The cache was made with another tokenizer or recipe than the requested one.

    ``differences``: (setting, cached value, requested value) of each setting that differs.
    """

    slug = "stale-cache"

    def __init__(self, what: str, *, differences: tuple[tuple[str, str, str], ...] = (), **parts: str) -> None:
        self.differences = differences
        super().__init__(what, **parts)


class CorruptEntryError(StoreError):
    """One entry fails its check: of which ``sample``, and its ``key`` in hex."""

    slug = "entry-corrupt"
    default_fix = "run `latentcache verify --full` on the cache: it prints the commands that repair it"

    def __init__(self, what: str, *, sample: str = "", key: str = "", **parts: str) -> None:
        self.sample, self.key = sample, key
        super().__init__(what, **parts)


class MissingEntryError(StoreError, LookupError):
    """One entry of the snapshot is not in the store."""

    slug = "entry-missing"
    default_fix = "run `latentcache build` again: it encodes missing entries"


class NotYetEncodedError(StoreError, TimeoutError):
    """A streaming build did not make an entry in time."""

    slug = "not-yet-encoded"
    default_fix = "wait longer: open_cache(..., timeout_s=...)"


class CacheLockedError(StoreError):
    """Another build holds the cache; ``holder``: ``{"pid", "host", "since"}`` of that process, as far as known."""

    slug = "locked"

    def __init__(self, what: str, *, holder: Mapping[str, Any], **parts: str) -> None:
        self.holder = dict(holder)
        super().__init__(what, **parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the required keyword."""
        return partial(type(self), holder=self.holder), self.args, self.__dict__

    def as_json(self) -> dict[str, Any]:
        """The ``error`` object with the holder."""
        return {**super().as_json(), "holder": self.holder}


class DiskFullError(StoreError, OSError):
    """The disk is full. Committed work is safe."""

    slug = "disk-full"
    default_fix = "free some space and run the same command again: committed work is kept"


class CacheReadOnlyError(StoreError, PermissionError):
    """The cache folder is not writable."""

    slug = "read-only"


class PlanError(LatentcacheError):
    """The plan cannot be made as requested."""

    slug = "plan"
    exit_code = 1


class EmptyPlanError(PlanError):
    """An epoch of zero steps: nothing would be trained."""

    slug = "plan-empty"


class InterruptedBuildError(LatentcacheError):
    """A signal ended the build; acknowledged work is committed."""

    slug = "interrupted"
    default_fix = "run the same command again: it continues where this run stopped"

    def __init__(self, what: str, *, signal_number: int, **parts: str) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(what, **parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the required keyword."""
        return partial(type(self), signal_number=self.exit_code - 128), self.args, self.__dict__


# the words of the caller

#: Flags whose argument in Python has another name.
_ARGUMENTS = {"resolution": "resolutions", "bucket": "buckets", "dataset": "datasets"}
_FLAG = re.compile(r"--(no-)?([a-z]+(?:-[a-z]+)*)(?:=(\S*[^\s;:,.)]))?")
_COMMAND = re.compile(r"(?:run |start )?(the same |the )?`latentcache (build|merge)`")
_shell_depth = 0


@contextmanager
def shell_words() -> Iterator[None]:
    """Run a block whose errors are printed for a shell: they keep the flags of commands."""
    global _shell_depth
    _shell_depth += 1
    try:
        yield
    finally:
        _shell_depth -= 1


@contextmanager
def python_words() -> Iterator[None]:
    """Name arguments of Python in the errors of a block, unless a command runs it; also a decorator."""
    try:
        yield
    except LatentcacheError as error:
        if not _shell_depth:
            error.what, error.why, error.fix = map(as_python, (error.what, error.why, error.fix))
        raise


def as_python(text: str) -> str:
    """A text with arguments of Python in place of flags: ``--device=gpu`` becomes ``device='gpu'``.

    Commands in backquotes that have no function in Python stay as they are.
    """
    functions = {"build": "build_cache()", "merge": "merge_caches()"}
    text = _COMMAND.sub(lambda found: f"call {found[1] or ''}{functions[found[2]]}", text)
    parts = text.split("`")
    parts[::2] = [part if part.startswith("latentcache ") else _FLAG.sub(_argument, part) for part in parts[::2]]
    return "`".join(parts)


def _argument(found: re.Match[str]) -> str:
    name = _ARGUMENTS.get(found[2], found[2].replace("-", "_"))
    if found[3]:
        return f"{name}={found[3] if found[3].lstrip('-').isdecimal() else repr(found[3])}"
    return f"{name}=False" if found[1] else name


def count_of(number: int, words: str) -> str:
    """A number with its noun and verb, which are given in the plural: ``1 image has no caption`` for one."""
    if number == 1:
        words = re.sub(r"\b(\w+?)(?:(ie)s|s)\b", lambda found: found[1] + "y" * bool(found[2]), words, count=1)
        words = re.sub(r"\b(have|are|belong)\b", lambda found: _SINGULAR[found[1]], words, count=1)
    return f"{number} {words}"


_SINGULAR = {"have": "has", "are": "is", "belong": "belongs"}

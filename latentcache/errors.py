"""Errors of latentcache: each names the problem, the place, the cause and the fix.

Guarantee: ``slug``, ``what`` and ``fix`` are never empty. The command line prints these attributes on four lines and
JSON output carries them unchanged. ``str(error)`` has the words of a Python caller. ``exit_code`` is 2 unless a class
says another.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

#: A URL with a password, or with something that may be one.
_PASSWORD = re.compile(r"([a-z][a-z0-9+.-]*:/+)[^\s'\"]*@")


def _masked(text: str) -> str:
    """A text without passwords in its URLs."""
    return _PASSWORD.sub(r"\1...@", text)


class LatentcacheError(Exception):
    """Base class of all errors raised on purpose.

    Args:
        what: The problem, one sentence without a final full stop. The name of an argument is put before it.
        argument: The argument that is wrong, as Python names it; may be empty.
        value: Its value; None: not shown.
        where: File, line or entry; may be empty.
        why: Expected and found values, or the cause; may be empty.
        fix: The action that solves the problem, a command if there is one. Options are written ``--name=value``; a
            Python caller reads ``name='value'``.
        slug: Stable machine-readable name [default: the class's slug].
    """

    slug: str = "error"
    exit_code: int = 2
    default_fix: str = "run `latentcache --help`"

    def __init_subclass__(cls, *, slug: str = "", exit_code: int = 0, fix: str = "") -> None:
        cls.slug, cls.exit_code = slug or cls.slug, exit_code or cls.exit_code
        cls.default_fix = fix or cls.default_fix

    def __init__(
        self,
        what: str,
        *,
        argument: str = "",
        value: object = None,
        where: str = "",
        why: str = "",
        fix: str = "",
        slug: str = "",
    ) -> None:
        self.what = _masked(f"{option(argument, value)}: {what}" if argument else what)
        self.what_python = _masked(f"{keyword(argument, value)}: {what}" if argument else what)
        self.where, self.why, self.fix = map(_masked, (where, why, fix or self.default_fix))
        self.slug = slug or self.slug
        super().__init__(what)

    def __str__(self) -> str:
        """All four parts in one paragraph, for a Python caller."""
        fix = f"fix: {in_python(self.fix)}"
        parts = [self.what_python, f"at {self.where}" if self.where else "", self.why, fix]
        return "; ".join(part for part in parts if part)

    def as_json(self) -> dict[str, Any]:
        """The ``error`` object of the JSON contract."""
        return {"slug": self.slug, "what": self.what, "where": self.where, "why": self.why, "fix": self.fix}


class UsageError(LatentcacheError, ValueError, slug="usage"):
    """Invalid or contradicting arguments."""


class StrictError(UsageError, slug="strict", fix="mend the data, or build without strict"):
    """Data that a build with ``strict`` rejects because it would not use all of it: ``notes`` names the rest."""

    def __init__(self, what: str, *, notes: Sequence[Any] = (), **parts: Any) -> None:
        self.notes = tuple(notes)
        super().__init__(what, **parts)


class RecipeError(UsageError, slug="recipe"):
    """An invalid recipe: unknown value, empty bucket table, contradicting settings."""


class SourceError(LatentcacheError, slug="source"):
    """DATA as a whole cannot be used."""


class SourceNotFoundError(SourceError, FileNotFoundError, slug="source-not-found"):
    """DATA does not exist."""


class EmptySourceError(SourceError, slug="source-empty"):
    """DATA holds no input of the requested fields."""


class SourceAmbiguousError(SourceError, slug="source-ambiguous"):
    """DATA has the form of two layouts; ``--layout`` decides."""


class TableError(SourceError, slug="table"):
    """An unreadable metadata table. ``where`` is ``file:line``."""


class UnusableSampleError(SourceError, slug="unusable", fix="replace the file, or move it elsewhere"):
    """One unusable file or record. ``slug`` is the reason, ``what`` the detail, ``fix`` the hint."""


class EncoderError(LatentcacheError, slug="model"):
    """The model cannot be used."""


class ModelNotFoundError(EncoderError, FileNotFoundError, slug="model-not-found"):
    """No model at this path, and no downloadable model of this name."""


class UnsupportedModelError(EncoderError, slug="model-unsupported"):
    """A file that is not a supported encoder, such as GGUF, pickle or a language model."""


class DeviceError(LatentcacheError, slug="device", exit_code=3):
    """The device failed or does not exist."""

    default_fix = "run it again, on another device if it fails again"


class DeviceMemoryError(DeviceError, MemoryError, slug="device-memory", fix="use a smaller batch size or resolution"):
    """The device ran out of memory for one batch."""


class WorkerError(LatentcacheError, slug="worker", exit_code=3):
    """Worker processes of a build died, and no input caused it."""

    default_fix = "check the system log (is there enough memory?), then run it again: committed work is kept"


class StoreError(LatentcacheError, slug="store", exit_code=3):
    """The cache cannot be used."""


class CacheNotFoundError(StoreError, FileNotFoundError, slug="cache-not-found"):
    """No finished cache at this path."""


class CacheFormatError(StoreError, slug="cache-format"):
    """Not a cache, or a cache written by a newer version."""


class CacheDamagedError(StoreError, slug="cache-damaged"):
    """A shard, a manifest or a column has other bytes than were written."""

    default_fix = "run `latentcache verify --full` on the cache: it prints the commands that repair it"


class CacheIncompleteError(StoreError, slug="cache-incomplete"):
    """A repair removed damaged entries from this cache, and no build has made them again."""

    default_fix = "run `latentcache build` again: it encodes the removed entries"


class StaleCacheError(StoreError, slug="stale-cache"):
    """The cache was made with another tokenizer or recipe than the requested one.

    ``differences``: (setting, cached value, requested value) of each setting that differs.
    """

    def __init__(self, what: str, *, differences: tuple[tuple[str, str, str], ...] = (), **parts: Any) -> None:
        self.differences = differences
        super().__init__(what, **parts)


class CorruptEntryError(StoreError, slug="entry-corrupt"):
    """One entry fails its check: of which ``sample``, its ``key`` in hex, and which part of it is damaged.

    ``reason``: ``truncated``, ``header`` or ``payload``; ``io-error``: it cannot be read now, which is no damage.
    """

    default_fix = "run `latentcache verify --full` on the cache: it prints the commands that repair it"

    def __init__(self, what: str, *, sample: str = "", key: str = "", reason: str = "payload", **parts: Any) -> None:
        self.sample, self.key, self.reason = sample, key, reason
        super().__init__(what, **parts)


class MissingEntryError(StoreError, LookupError, slug="entry-missing"):
    """One entry of the snapshot is not in the store."""

    default_fix = "run `latentcache build` again: it encodes missing entries"


class CacheLockedError(StoreError, slug="locked"):
    """Another build holds the cache; ``holder``: ``{"pid", "host", "since"}`` of that process, as far as known."""

    def __init__(self, what: str, *, holder: Mapping[str, Any] = {}, **parts: Any) -> None:
        self.holder = dict(holder)
        super().__init__(what, **parts)

    def as_json(self) -> dict[str, Any]:
        """The ``error`` object with the holder."""
        return {**super().as_json(), "holder": self.holder}


class RemoteError(StoreError, OSError, slug="remote"):
    """Object storage cannot be used, or holds another cache."""

    def __init__(self, what: str, *, is_transient: bool = False, **parts: Any) -> None:
        self.is_transient = is_transient
        """True if another try may work."""
        super().__init__(what, **parts)


class DiskFullError(StoreError, OSError, slug="disk-full"):
    """The disk is full. Committed work is safe."""

    default_fix = "free some space and run it again: committed work is kept"


class CacheReadOnlyError(StoreError, PermissionError, slug="read-only"):
    """The cache folder is not writable."""


class PlanError(LatentcacheError, slug="plan", exit_code=1):
    """The plan cannot be made as requested."""


class EmptyPlanError(PlanError, slug="plan-empty"):
    """An epoch of zero steps: nothing would be trained."""


class InterruptedBuildError(LatentcacheError, slug="interrupted"):
    """A signal ended the build; acknowledged work is committed."""

    default_fix = "run the same build again: it continues where this one stopped"

    def __init__(self, what: str, *, signal_number: int = 2, **parts: Any) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(what, **parts)


# arguments in words

#: Arguments of Python whose option has another name.
_OPTIONS = {
    "buckets": "--bucket",
    "format": "--to",
    "resolutions": "--resolution",
    "template_options": "--template-option",
    "trainer": "--for",
}
_KEYWORDS = {flag: name for name, flag in _OPTIONS.items()}
#: Arguments of Python that are lists.
_SEVERAL = frozenset(("buckets", "frames", "resolutions", "template_options"))
#: An option in a sentence; or a command, which stays as it is.
_OPTION = re.compile(r"`[^`]*`|(?<![\w-])(?P<flag>--[a-z][a-z-]*)(?:=(?P<value>'[^']*'|([^\s,.:;)]|[,.:](?=\S))+))?")


def option(name: str, value: object = None) -> str:
    """An argument as the command line takes it: ``--batch-size=2``."""
    flag = _OPTIONS.get(name) or f"--{name.replace('_', '-')}"
    return flag if value is None else f"{flag}={shlex.quote(str(value))}"


def keyword(name: str, value: object = None) -> str:
    """An argument as Python takes it: ``batch_size=2``."""
    return name if value is None else f"{name}={str(value) if isinstance(value, PathLike) else value!r}"


def in_python(fix: str) -> str:
    """A fix with its options as Python takes them: ``--split=train`` becomes ``split='train'``; commands stay."""
    return fix if fix.startswith("latentcache ") else _OPTION.sub(_in_python, fix)


def _in_python(match: re.Match[str]) -> str:
    if not match["flag"]:
        return match[0]
    name = _KEYWORDS.get(match["flag"]) or match["flag"].removeprefix("--").replace("-", "_")
    if not match["value"]:
        return name
    words = shlex.split(match["value"])[0].split("|")
    value = "|".join(word if word.isdigit() or word.isupper() else repr(word) for word in words)
    return f"{name}=[{value}]" if name in _SEVERAL else f"{name}={value}"


def count_of(number: int, words: str) -> str:
    """A number with its noun and verb, which are given in the plural: ``1 image has no caption`` for one."""
    if number == 1:
        parts = words.split(" ")
        noun = next((at for at, part in enumerate(parts) if part.endswith("s")), 0)
        verb = next((at for at, part in enumerate(parts) if part in _SINGULAR), noun)
        parts[verb] = _SINGULAR.get(parts[verb], parts[verb])
        parts[noun] = f"{parts[noun][:-3]}y" if parts[noun].endswith("ies") else parts[noun].removesuffix("s")
        words = " ".join(parts)
    return f"{number} {words}"


_SINGULAR = {"have": "has", "are": "is", "belong": "belongs"}

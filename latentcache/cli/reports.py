"""The report of each build, merge and verify: an object in ``report.json``, its items as JSON lines beside it.

``CACHE/reports/COMMAND/`` holds the latest report of each command; ``--report FILE`` writes it elsewhere, ``--report
none`` writes none. Guarantee: a report appears whole or not at all, latentcache never reads it, and a report that
cannot be written (a read-only cache) changes neither the findings nor the exit status.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from latentcache.cli import console
from latentcache.errors import CacheFormatError, CacheLockedError, CacheNotFoundError, LatentcacheError, UsageError

#: Examples of a cause.
EXAMPLES = 3
_OF_EXAMPLES = ("path", "path_b64", "key", "field", "file", "found")
NAME, ITEMS_SUFFIX = "report.json", ".items.jsonl"
_NONE = Path("none")
#: Errors after which nothing may be written into the cache.
_UNTOUCHED = (CacheNotFoundError, CacheFormatError, CacheLockedError, UsageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a command."""

    command: str
    cache: Path
    wanted: Path | None
    """``--report``."""
    silent: bool = False
    """Write none: an untrusted cache, in which ``reports`` may be a link to anywhere."""
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    clock: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.wanted is not None and self.wanted != _NONE and not self.wanted.absolute().parent.is_dir():
            raise UsageError(
                f"--report={self.wanted}: the folder does not exist",
                where=str(self.wanted),
                fix=f"mkdir -p {self.wanted.absolute().parent}, then run the same command again",
            )

    @contextlib.contextmanager
    def told(self, so_far: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Write a report if the block ends with an error or a signal.

        Args:
            so_far: The object of the run until then.
        """
        try:
            yield
        except BaseException as error:
            known = console.as_known(error)
            self.leave(so_far(), exit_code=known.exit_code, error=known)
            raise

    def leave(self, payload: Mapping[str, Any], *, exit_code: int, error: LatentcacheError | None = None) -> None:
        """Write the report of a run that ends with this object; its ``items`` go to the file beside."""
        place = self._place(error)
        if place is None:
            return
        try:
            _write(place, self._object(payload, exit_code, error), payload.get("items", ()))
        except OSError as failure:
            if self.wanted is not None:
                console.say(f"warning: the report cannot be written: {failure}")

    def _place(self, error: LatentcacheError | None) -> Path | None:
        """The file of the report; None: write none."""
        if self.silent:
            return None
        if self.wanted is not None:
            return None if self.wanted == _NONE else self.wanted
        is_cache = any(os.path.lexists(self.cache / name) for name in ("CURRENT", "BUILDING", "shards"))
        if not is_cache or isinstance(error, _UNTOUCHED):
            return None
        return self.cache / "reports" / self.command / NAME

    def _object(self, payload: Mapping[str, Any], exit_code: int, error: LatentcacheError | None) -> dict[str, Any]:
        from latentcache import __version__

        facts = {name: value for name, value in payload.items() if name not in ("items", "elapsed_s")}
        run = {
            "started": self.started,
            "elapsed_s": round(time.monotonic() - self.clock, 3),
            "versions": {"latentcache": __version__, "python": platform.python_version()},
            "causes": causes(payload.get("items", ())),
        }
        return console.as_object(self.command, facts | run, exit_code=exit_code, error=error)


def causes(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items by category and reason, most frequent first: count, hint and examples."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for item in items:
        name = (item["category"], item["reason"])
        cause = found.setdefault(name, dict(zip(("category", "reason"), name, strict=True)))
        cause["count"] = cause.get("count", 0) + int(item.get("count", 1))
        cause.setdefault("hint", item["hint"])
        examples = cause.setdefault("examples", [])
        if len(examples) < EXAMPLES:
            examples.append({key: item[key] for key in _OF_EXAMPLES if item.get(key)})
    return sorted(found.values(), key=lambda cause: -int(cause["count"]))


def _write(place: Path, report: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
    """Items first: the report has their number, so a report beside the items of another run is recognized."""
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(place.stem + ITEMS_SUFFIX)
    _put(beside, "".join(json.dumps(item) + "\n" for item in items))
    _put(place, json.dumps({**report, "items_file": beside.name, "num_items": len(items)}, indent=1) + "\n")


def _put(path: Path, text: str) -> None:
    """Write a file whole or not at all; two runs use two temporary files."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

"""The report that every build and verify leaves: an object in ``report.json``, its items as JSON lines beside it.

It lies in ``CACHE/reports/build/`` or ``CACHE/reports/verify/`` and is the last one of its command; ``--report FILE``
puts it elsewhere, ``--report none`` leaves none. Guarantee: a report appears whole or not at all, nothing ever reads
it back, and one that cannot be written (a read-only cache) never changes what the command finds or how it ends.
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
from typing import Annotated, Any

import typer

from latentcache.cli import console
from latentcache.cli.failures import as_known
from latentcache.errors import CacheFormatError, CacheLockedError, CacheNotFoundError, LatentcacheError, UsageError

#: Files that a cause names as examples.
EXAMPLES = 3
_OF_EXAMPLES = ("path", "path_b64", "key", "field", "file", "found")
NAME, ITEMS_SUFFIX = "report.json", ".items.jsonl"
_NONE = Path("none")
#: Errors after which nothing was done here, or nothing may be written here.
_NOT_OURS = (CacheNotFoundError, CacheFormatError, CacheLockedError, UsageError)

Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", help="Where the report goes (CACHE/reports/); none: nowhere.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a command, from its start."""

    command: str
    cache: Path
    wanted: Path | None
    """What ``--report`` said."""
    silent: bool = False
    """Leave none: a dry run, or a stranger's cache, in which ``reports`` may be a link to anywhere."""
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    clock: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.wanted is not None and self.wanted != _NONE and not self.wanted.absolute().parent.is_dir():
            raise UsageError(
                f"--report {self.wanted}: there is no such folder",
                where=str(self.wanted),
                fix=f"mkdir -p {self.wanted.absolute().parent}, then run the same command again",
            )

    @contextlib.contextmanager
    def told(self, so_far: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Leave a report of what ends with an error or a signal.

        Args:
            so_far: The object of a run that came no further.
        """
        try:
            yield
        except BaseException as error:
            known = as_known(error)
            self.leave(so_far(), exit_code=known.exit_code, error=known)
            raise

    def leave(self, payload: Mapping[str, Any], *, exit_code: int, error: LatentcacheError | None = None) -> None:
        """Write the report of a run that ends with this object; ``items`` of it go to the file beside."""
        place = self._place(error)
        if place is None:
            return
        try:
            _write(place, self._object(payload, exit_code, error), payload.get("items", ()))
        except OSError as failure:
            if self.wanted is not None:
                console.say(f"warning: the report cannot be written: {failure}")

    def _place(self, error: LatentcacheError | None) -> Path | None:
        """The file of the report; none where it is not wanted, or there is no cache to lie in."""
        if self.silent:
            return None
        if self.wanted is not None:
            return None if self.wanted == _NONE else self.wanted
        ours = any(os.path.lexists(self.cache / name) for name in ("CURRENT", "BUILDING", "shards"))
        return self.cache / "reports" / self.command / NAME if ours and not isinstance(error, _NOT_OURS) else None

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


def causes(items: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Items by category and reason, most first: how many, what to do, and a few of them."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for item in items:
        name = (item["category"], item["reason"])
        cause = found.setdefault(name, dict(zip(("category", "reason"), name, strict=True)))
        cause["count"] = cause.get("count", 0) + 1
        cause.setdefault("hint", item["hint"])
        examples = cause.setdefault("examples", [])
        if len(examples) < EXAMPLES:
            examples.append({key: item[key] for key in _OF_EXAMPLES if item.get(key)})
    return sorted(found.values(), key=lambda cause: -int(cause["count"]))


def _write(place: Path, report: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
    """Items first: a report names how many there are, so that one beside other items is seen to be another's.

    Raises:
        OSError: The place cannot be written.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(place.stem + ITEMS_SUFFIX)
    _put(beside, "".join(json.dumps(item) + "\n" for item in items))
    _put(place, json.dumps({**report, "items_file": beside.name, "num_items": len(items)}, indent=1) + "\n")


def _put(path: Path, text: str) -> None:
    """Whole or not at all; two runs at once do not meet in one temporary file."""
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

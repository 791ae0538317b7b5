"""What the command line prints: one JSON object on stdout, or text; talk and progress on stderr."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from latentcache.errors import LatentcacheError

#: Version of the JSON objects.
SCHEMA = 1
#: Items of one kind that text output shows; JSON always has all of them.
SHOWN = 10


def prepare_streams() -> None:
    """Names that are not UTF-8 must never stop a message."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def emit(command: str, payload: Mapping[str, Any], *, exit_code: int, error: LatentcacheError | None = None) -> None:
    """The one JSON object of a command."""
    found = None if error is None else error.as_json()
    value = {"schema": SCHEMA, "command": command, "exit_code": exit_code, "error": found, **payload}
    sys.stdout.write(json.dumps(value, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def fail(command: str, error: LatentcacheError, *, as_json: bool, payload: Mapping[str, Any] | None = None) -> None:
    """Say an error: four lines on stderr, and the JSON object where it was asked for."""
    say(f"error[{error.slug}]: {error.what}")
    for name, text in (("where", error.where), ("why", error.why)):
        if text:
            say(f"  {name}: {text}")
    say(f"  fix: {error.fix}")
    if as_json:
        emit(command, payload or {}, exit_code=error.exit_code, error=error)


def say(text: str) -> None:
    """A line of talk, on stderr."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def out(text: str = "") -> None:
    """A line of result, on stdout."""
    sys.stdout.write(printable(text) + "\n")


def printable(text: str) -> str:
    """Without control characters, so that a file name cannot steer a terminal. Line ends stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else _escaped(letter) for letter in text)


def path_fields(name: str) -> dict[str, str]:
    """``path``, and ``path_b64`` for a name that is not UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return {"path": name, "path_b64": base64.b64encode(os.fsencode(name)).decode("ascii")}
    return {"path": name}


def item(category: str, reason: str, name: str, **more: str) -> dict[str, str]:
    """One entry of ``items``; empty values are left out."""
    fields = {"category": category, "reason": reason, **(path_fields(name) if name else {"path": ""})}
    return fields | {key: value for key, value in more.items() if value}


def human_bytes(size: float) -> str:
    """A size for people: 3.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def table(rows: Iterable[Iterable[object]]) -> list[str]:
    """Rows as aligned text; the first row is the head, all columns but the first are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii") if not "\ud800" <= letter <= "\udfff" else letter

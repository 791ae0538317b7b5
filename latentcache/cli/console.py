"""What the command line prints: one JSON object on stdout, or text; talk and progress on stderr.

Guarantee: a reader that goes away (``| head``), a closed stream or a name that is not UTF-8 never stops a command;
control characters in names are shown, never sent to the terminal; after the JSON object nothing else decides the
exit status.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from latentcache.errors import LatentcacheError

#: Version of the JSON objects.
SCHEMA = 1
#: Items of one kind that text output shows; JSON always has all of them.
SHOWN = 10


class OutputError(LatentcacheError):
    """Standard output cannot be written: a full disk, a failing device."""

    slug = "output"
    exit_code = 3
    default_fix = "write the output to another place"


def prepare_streams() -> None:
    """Names that are not UTF-8 must never stop a message, nor a stream that the caller has closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for as long as the process lives
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def emit(command: str, payload: Mapping[str, Any], *, exit_code: int, error: LatentcacheError | None = None) -> None:
    """The one JSON object of a command; signals that come later change nothing.

    Raises:
        OutputError: It cannot be written.
    """
    text = json.dumps(as_object(command, payload, exit_code=exit_code, error=error), ensure_ascii=True) + "\n"
    ignore_signals()
    _write(sys.stdout, text)
    flush()


def as_object(
    command: str, payload: Mapping[str, Any], *, exit_code: int, error: LatentcacheError | None = None
) -> dict[str, Any]:
    """What every object of a command begins with, and its own keys."""
    found = None if error is None else error.as_json()
    return {"schema": SCHEMA, "command": command, "exit_code": exit_code, "error": found, **payload}


def last_words(command: str, error: LatentcacheError, *, as_json: bool) -> None:
    """As :func:`fail`, from a signal handler that ends the process: past the streams, which may be in use."""
    ignore_signals()
    texts = [(2, "".join(f"{line}\n" for line in _lines(error)))]
    if as_json:
        texts.append((1, json.dumps(as_object(command, {}, exit_code=error.exit_code, error=error)) + "\n"))
    for descriptor, text in texts:
        with contextlib.suppress(OSError):
            os.write(descriptor, text.encode("ascii", "backslashreplace"))


def fail(command: str, error: LatentcacheError, *, as_json: bool, payload: Mapping[str, Any] | None = None) -> None:
    """Say an error: four lines on stderr, and the JSON object where it was asked for."""
    for line in _lines(error):
        say(line)
    if as_json:
        emit(command, payload or {}, exit_code=error.exit_code, error=error)


def _lines(error: LatentcacheError) -> list[str]:
    """An error for people."""
    more = [f"  {name}: {text}" for name, text in (("where", error.where), ("why", error.why)) if text]
    return [f"error[{error.slug}]: {error.what}", *more, f"  fix: {error.fix}"]


def say(text: str) -> None:
    """A line of talk, on stderr. A terminal that is gone is no reason to stop working."""
    with contextlib.suppress(OutputError):
        _write(sys.stderr, printable(text) + "\n", flush_now=True)


def out(text: str = "") -> None:
    """A line of result, on stdout.

    Raises:
        OutputError: It cannot be written.
    """
    _write(sys.stdout, printable(text) + "\n")


def flush() -> None:
    """Send what is still in the buffer.

    Raises:
        OutputError: It cannot be written.
    """
    _write(sys.stdout, "", flush_now=True)


def ignore_signals() -> None:
    """From here on the exit status is decided."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def printable(text: str) -> str:
    """One line without control characters, so that a file name can neither steer a terminal nor forge a line."""
    return (
        text
        if text.isprintable()
        else "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)
    )


def path_fields(name: str) -> dict[str, str]:
    """``path``, and ``path_b64`` for a name that is not UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return {"path": name, "path_b64": base64.b64encode(os.fsencode(name)).decode("ascii")}
    return {"path": name}


def item(category: str, reason: str, name: str, *, hint: str, **more: str) -> dict[str, str]:
    """One entry of ``items``; empty values are left out, but for the hint."""
    fields = {"category": category, "reason": reason, **path_fields(name), "hint": hint}
    return fields | {key: value for key, value in more.items() if value}


def human_bytes(size: float) -> str:
    """A size for people: 3.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: 1 picture, 2 pictures; 1 entry, 2 entries."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def kept(posterior: str) -> str:
    """`` sample`` or `` moments``, said behind a storage type; the mode goes without saying."""
    return "" if posterior == "mode" else f" {posterior}"


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
    """As Python would write it in quotes; a byte that is not UTF-8 as the byte it is."""
    if "\udc80" <= letter <= "\udcff":
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def _write(stream: TextIO, text: str, *, flush_now: bool = False) -> None:
    """Write to a stream; when its reader is gone, what is left goes nowhere.

    Raises:
        OutputError: The stream fails in another way.
    """
    try:
        stream.write(text)
        if flush_now:
            stream.flush()
    except BrokenPipeError:
        _mute(stream)
    except OSError as error:
        _mute(stream)
        raise OutputError("the output cannot be written", where=stream.name, why=str(error)) from error


def _mute(stream: TextIO) -> None:
    """Point a stream at nothing: its buffer would fail again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

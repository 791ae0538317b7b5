"""Output of the command line: one JSON object on stdout or text; messages, progress and errors on stderr.

Guarantee: a broken stream (``| head``) and a name that is not UTF-8 never stop a command. Control characters in names
are escaped. After the JSON object no signal changes the exit status.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import typer

from latentcache.errors import InterruptedBuildError, LatentcacheError, UsageError, count_of

if TYPE_CHECKING:
    from latentcache.fields.table import Rejected
    from latentcache.verify.findings import Finding

#: Version of the JSON objects.
SCHEMA = 2
#: Local folder -> the URL that output names in its place.
SHOWN_AS: dict[str, str] = {}
#: Items of one category in text output; JSON output has all items.
SHOWN = 10
#: Different details in the line of one kind of note.
_DETAILS = 5
EXIT_BUG = 70
#: Base class of typer's own errors about arguments.
_CallError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class OutputError(LatentcacheError, slug="output", exit_code=3, fix="write the output to another place"):
    """Standard output is not writable: a full disk, a failing device."""


class Signalled(BaseException):
    """SIGINT or SIGTERM outside a build; a build handles both itself."""


# the result of a command


class Result(NamedTuple):
    """The outcome of a command."""

    payload: Mapping[str, Any] = {}
    """Content of the JSON object."""
    lines: Iterable[str] = ()
    """The same as text."""
    exit_code: int = 0
    error: LatentcacheError | None = None
    """Reported after the lines, or beside the payload; its exit status counts."""

    @property
    def status(self) -> int:
        """The exit status."""
        return self.exit_code if self.error is None else self.error.exit_code


def finish(command: str, result: Result, *, as_json: bool) -> int:
    """Write what a command gives, as text or as JSON; errors on stderr. Returns the exit status."""
    for line in () if as_json else result.lines:
        out(line)
    for line in error_lines(result.error):
        say(line)
    if as_json:
        emit(command, result)
    return result.status


def emit(command: str, result: Result) -> None:
    """Write the one JSON object of a command; later signals change nothing."""
    error = None if result.error is None else result.error.as_json()
    head = {"schema": SCHEMA, "command": command, "exit_code": result.status, "error": error}
    text = json.dumps({**head, **result.payload}, ensure_ascii=True)
    ignore_signals()
    _write(sys.stdout, text + "\n")
    flush()


# errors


def error_lines(error: LatentcacheError | None) -> list[str]:
    """An error as up to four lines."""
    if error is None:
        return []
    more = [f"  {name}: {text}" for name, text in (("where", error.where), ("why", error.why)) if text]
    return [f"error[{error.slug}]: {error.what}", *more, f"  fix: {error.fix}"]


def as_known(error: BaseException) -> LatentcacheError:
    """Any exception of a command line as a LatentcacheError; an unexpected one becomes status 70."""
    if isinstance(error, LatentcacheError):
        return error
    if isinstance(error, _CallError):
        context = getattr(error, "ctx", None)
        where = getattr(context, "command_path", "latentcache")
        return UsageError(error.format_message().strip().rstrip("."), where=where, fix=f"{where} --help")
    if isinstance(error, Signalled | KeyboardInterrupt | typer.Abort):
        number = signal.Signals(error.args[0] if isinstance(error, Signalled) else signal.SIGINT)
        return InterruptedBuildError(
            f"interrupted by {number.name}", signal_number=number, fix="run the command again"
        )
    is_of_system = isinstance(error, OSError | MemoryError)
    why = str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        slug, problem, fix = "disk-full", "the disk is full", "free some space, then run again"
    elif isinstance(error, OSError):
        slug = "system"
        problem = f"the operating system reports: {error.strerror or error}"
        fix = "check the path and its permissions, then run again"
    elif isinstance(error, MemoryError):
        slug, problem = "memory", "this machine is out of memory"
        fix = "use a smaller --batch-size, --decode-threads or --host-memory, or a machine with more memory"
    else:
        slug, problem, why = "bug", f"unexpected {type(error).__name__}: {error}", ""
        fix = "report it with the output of the same command under LATENTCACHE_DEBUG=1"
    where = str(getattr(error, "filename", "") or _place(error))
    known = LatentcacheError(problem, slug=slug, where=where, why=why, fix=fix)
    known.exit_code = 3 if is_of_system else EXIT_BUG
    return known


def _place(error: BaseException) -> str:
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


# streams


def prepare_streams() -> None:
    """Make stdout and stderr accept every name; replace a stream that the caller has closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open until the process ends
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Write a line to stderr; a broken stderr is ignored."""
    with contextlib.suppress(OutputError):
        _write(sys.stderr, printable(text) + "\n", flush_now=True)


def out(text: str) -> None:
    """Write a line to stdout."""
    _write(sys.stdout, printable(text) + "\n")


def flush() -> None:
    """Flush stdout."""
    _write(sys.stdout, "", flush_now=True)


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM: the exit status is decided."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _write(stream: TextIO, text: str, *, flush_now: bool = False) -> None:
    try:
        stream.write(as_shown(text))
        if flush_now:
            stream.flush()
    except BrokenPipeError:
        _mute(stream)
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        _mute(stream)
        raise OutputError("the output cannot be written", where=str(stream.name), why=str(error)) from error


def as_shown(text: str) -> str:
    """A text with the URLs of caches in place of their local folders."""
    for folder, url in SHOWN_AS.items():
        text = text.replace(folder, url)
    return text


def _mute(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null: its buffer would fail again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


# text


def printable(text: str) -> str:
    """One line with control characters escaped, so that a file name cannot steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # a byte that is not UTF-8
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def repeats_lines(repeats: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Yield a line with the occurrences of samples per epoch, unless each occurs once."""
    if any(entry["times"] != 1 for entry in repeats):
        some = ", ".join(f"{count_of(entry['samples'], 'samples')} {entry['times']} times" for entry in repeats)
        yield f"repeats: {some} per epoch"


def table_lines(rows: Sequence[Sequence[object]], *, indent: str = "") -> Iterator[str]:
    """Yield rows in columns; the first row is the head, and all columns but the first are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for label, *rest in cells:
        numbers = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield indent + "  ".join([label.ljust(widths[0]), *numbers]).rstrip()


def findings(rejected: Iterable[Rejected], notes: Iterable[Rejected]) -> list[Finding]:
    """Rejected inputs and notes as findings."""
    from latentcache.verify.findings import Finding

    every = {"quarantined": rejected, "note": notes}
    return [Finding.of_rejected(category, sample) for category, some in every.items() for sample in some]


def finding_lines(items: Iterable[Finding]) -> Iterator[str]:
    """Findings as text: a line for the notes of one reason; of other categories the first ones, and their number."""
    from latentcache.verify.findings import grouped

    for category, groups in groupby(grouped(items), key=lambda group: group[0].category):
        if category == "note":
            for group in groups:
                details = [*dict.fromkeys(note.found for note in group)]
                shown = "; ".join(details[:_DETAILS]) + "; ..." * (len(details) > _DETAILS)
                yield from _finding_lines(replace(group[0], found=shown), len(group) - 1)
            continue
        every = [finding for group in groups for finding in group]
        yield from chain.from_iterable(map(_finding_lines, every[:SHOWN]))
        if len(every) > SHOWN:
            yield f"... and {len(every) - SHOWN} more {word_of(category)} (all of them with --json)"


def word_of(category: str) -> str:
    """A category as text says it; JSON keeps ``quarantined``."""
    return "rejected" if category == "quarantined" else category


def _finding_lines(finding: Finding, more: int = 0) -> Iterator[str]:
    line = f":{finding.line}" if finding.line else ""
    rejected = finding.category == "quarantined"
    name = f"{finding.path}{line}" if finding.path else finding.file or finding.key
    if finding.names:
        name = f"{count_of(finding.count, 'samples')}{f' of {name}' if name else ''}"
    field = f" {finding.field}" if finding.field and finding.category in ("quarantined", "note") else ""
    sides = f"expected {finding.expected}, found {finding.found}" if finding.expected else finding.found
    name += f" and {more} more" if more else ""
    if finding.category == "missing" and finding.reason == "not-built":
        yield f"new {name}: not in the cache yet"
    elif finding.category == "stale" and finding.reason == "source-removed":
        yield f"removed {name}: in the cache, but {finding.found or 'gone from DATA'}"
    else:
        name = f" {name}" if name else ""
        yield f"{word_of(finding.category)}{name}{field} [{finding.reason}]{': ' + sides if sides else ''}"
    if finding.names:
        left = finding.count - len(finding.names)
        yield f"  {', '.join(finding.names)}{f' and {left} more' if left > 0 else ''}"
    if rejected and finding.hint:  # no command repairs it: the fix differs per file
        yield f"  fix: {finding.hint}"

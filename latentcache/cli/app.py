"""``latentcache``: the commands, their exit codes, and the one place that turns exceptions into errors.

Guarantee: no traceback, and with ``--json`` exactly one object on stdout, also after an error or a signal.
Cost: ``latentcache --help`` imports neither torch nor numpy nor lmdb.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Any

from latentcache import __version__, failpoint
from latentcache.cli import console, flags
from latentcache.cli.parser import Command, Program, asks_for_help
from latentcache.errors import UsageError, shell_words

_HELP = """Compute latents, embeddings and tokens once, verify them on demand, and train on correct batches.

Start with:  latentcache build DATA        (images, a table, JSONL or parquet)
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: In the order of the help. The module of a command has its function, under the same name, and ``HELP``.
COMMANDS = ("build", "merge", "verify", "inspect", "doctor", "info", "gc", "export", "plan")


def application(commands: Sequence[str] = COMMANDS) -> Program:
    """The command line with these commands. A module is imported here, the options of field kinds when needed."""
    modules = {name: import_module(f"latentcache.cli.{name}") for name in commands}
    made = {
        name: Command(name=name, help=module.HELP, load=partial(_function, module, name))
        for name, module in modules.items()
    }
    return Program(help=_HELP, commands=made)


def _function(module: Any, name: str) -> Callable[..., int]:
    return flags.with_settings(getattr(module, name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. The caller's signal handlers are restored."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def run() -> None:
    """Entry point of the console script."""
    _in_utf8()
    status = _run(sys.argv[1:])
    console.ignore_signals()
    sys.exit(status)


def _in_utf8() -> None:
    """Start again in UTF-8 mode if the locale is not UTF-8: a cache keeps names as UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and sys.executable and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _listen() -> None:
    """Handle signals, also those that came before this line; signals that the caller ignores stay ignored."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _stop(number: int, frame: FrameType | None) -> None:
    raise console.Signalled(number)


def _run(given: list[str]) -> int:
    with shell_words():
        return _ran(given)


def _ran(given: list[str]) -> int:
    command = next((word for word in given if not word.startswith("-")), "")
    try:
        console.prepare_streams()
        _listen()
        failpoint.arm(os.environ.get(failpoint.VARIABLE))
        _reject_empty(given)
        flags.register(_values(given, "--field"))
        return _carried_out(command, given)
    except BaseException as error:  # noqa: BLE001 - the one place that turns every exception into a status
        return _fail(command, error, as_json="--json" in given)


def _carried_out(command: str, given: list[str]) -> int:
    """Show the help or the version, or run the command; returns the exit status."""
    program, status = application([command] if command in COMMANDS else COMMANDS), 0
    if asks_for_help(given):
        text = program.command(command).show() if command else program.show()
        if "--json" in given:
            console.emit(command, {"help": text}, exit_code=0)
            return 0
        console.out_lines(text)
    elif given[:1] == ["--version"]:
        console.out(f"latentcache {__version__}")
    elif given:
        status = program.command(given[0]).run(given[1:])
    else:
        for line in program.show().splitlines():
            console.say(line)
        status = UsageError.exit_code
    console.flush()
    return status


def _reject_empty(given: list[str]) -> None:
    """Reject an empty argument: as a path it would mean the current folder."""
    may_be_empty = ("--default-caption", "--caption-prefix", "--caption-suffix")
    pairs = enumerate(zip(["", *given], given, strict=False), start=1)
    empty = [number for number, (before, one) in pairs if not one and before not in may_be_empty]
    if empty:
        raise UsageError(
            "one of the arguments is empty",
            where=f"argument {empty[0]}",
            why="a shell variable without a value gives an empty argument",
            fix="give the argument a value, or leave it out; . is the current folder",
        )


def _values(given: list[str], flag: str) -> Iterator[str]:
    """Values of a flag, before options are parsed."""
    for word, following in zip(given, [*given[1:], ""], strict=False):
        if word == flag and following:
            yield following
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]


def _fail(command: str, error: BaseException, *, as_json: bool) -> int:
    """Report an error and return its exit status; later signals are ignored."""
    console.ignore_signals()
    known = console.as_known(error)
    if os.environ.get("LATENTCACHE_DEBUG"):
        import traceback

        traceback.print_exception(error)
    with contextlib.suppress(console.OutputError):
        console.fail(command, known, as_json=as_json)
    return known.exit_code

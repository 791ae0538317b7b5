"""``latentcache``: the commands, their exit codes, and the one place that turns exceptions into errors.

Guarantee: no traceback, and with ``--json`` exactly one object on stdout, also after an error or a signal.
Cost: ``latentcache --help`` imports neither torch nor numpy nor lmdb.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from textwrap import dedent
from types import FrameType
from typing import Any

import typer

from latentcache import failpoint
from latentcache.cli import console, flags
from latentcache.cli.help import Command, suggest
from latentcache.errors import UsageError

_HELP = """Compute latents, embeddings and tokens once, verify them on demand, and train on correct batches.

Start with:  latentcache build DATA
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: In the order of the help. A command is a function of this name, and its docstring is the help.
COMMANDS = ("build", "merge", "verify", "inspect", "info", "show", "report", "gc", "export", "plan", "push", "pull")
#: Command -> module, if its name is another one.
_MODULES = {
    "merge": "build", "show": "info", "report": "info", "gc": "verify", "push": "transfer", "pull": "transfer",
}  # fmt: skip


def _show_version(value: bool) -> None:
    if value:
        from latentcache import __version__

        typer.echo(f"latentcache {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Options of every command."""
    failpoint.arm(os.environ.get(failpoint.VARIABLE))


def application(command: str | None = None) -> typer.Typer:
    """The command line.

    Args:
        command: The one that will run: no other is there. Empty or unknown: all of them without their options, for
            the list of commands. None: all of them.
    """
    app = typer.Typer(
        name="latentcache",
        help=_HELP,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 1000},
    )
    app.callback()(_options)
    for name in [command] if command in COMMANDS else COMMANDS:
        function = getattr(import_module(f"latentcache.cli.commands.{_MODULES.get(name, name)}"), name)
        text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
        short = re.split(r"[;(\n]|\. ", text)[0].strip(" .")
        if command not in (None, name):
            app.command(name, short_help=short)(lambda: None)
        else:
            add = app.command(name, cls=Command, help=text, epilog=dedent(examples), short_help=short)
            add(flags.as_command(name, function))
    return app


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
    warnings.showwarning = lambda message, *about: console.say(f"warning: {message}")
    status = _run(sys.argv[1:])
    console.ignore_signals()
    gc.freeze()  # the interpreter would look through all modules for cycles before it ends, for 20 ms
    sys.exit(status)


def _listen() -> None:
    """Handle signals, also those that came before this line; signals that the caller ignores stay ignored."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _stop(number: int, frame: FrameType | None) -> None:
    raise console.Signalled(number)


def _run(argv: list[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), "")
    try:
        console.prepare_streams()
        _listen()
        _reject_empty(argv)
        asks_help = not {"--help", "-h", "--help-all"}.isdisjoint(argv)
        if command in COMMANDS and not asks_help:
            _load_numpy()
        flags.register(value for word, value in pairwise(argv) if word == "--field")
        flags.register(word.partition("=")[2] for word in argv if word.startswith("--field="))
        program: Any = typer.main.get_command(application(command))
        more = {"prog_name": "latentcache", "standalone_mode": False}
        if asks_help and "--json" in argv:
            with contextlib.redirect_stdout(io.StringIO()) as text:
                program.main([word for word in argv if word != "--json"], **more)
            result = console.Result({"help": text.getvalue().removesuffix("\n")})
            return console.finish(command, result, as_json=True)
        result = program.main(argv, **more)
        console.flush()
        return int(result or 0)
    except BaseException as error:  # noqa: BLE001 - the one place that turns every exception into a status
        return _fail(command, error, argv)


def _load_numpy() -> None:
    """Import numpy without the threads of its linear algebra: no command uses them, and starting them takes 50 ms."""
    variable = "OPENBLAS_NUM_THREADS"
    if variable not in os.environ:
        os.environ[variable] = "1"
        import numpy  # noqa: F401 - for its effect

        del os.environ[variable]  # the encoder of a worker process may use them


def _reject_empty(argv: list[str]) -> None:
    """Reject an empty argument: as a path it would mean the current folder."""
    may_be_empty = ("--default-caption", "--caption-prefix", "--caption-suffix")
    pairs = enumerate(zip(["", *argv], argv, strict=False), start=1)
    empty = [number for number, (before, word) in pairs if not word and before not in may_be_empty]
    if empty:
        raise UsageError(
            "one of the arguments is empty",
            where=f"argument {empty[0]}",
            why="a shell variable without a value gives an empty argument",
            fix="give the argument a value, or leave it out; . is the current folder",
        )


def _fail(command: str, error: BaseException, argv: Sequence[str]) -> int:
    """Report an error and return its exit status; later signals are ignored."""
    console.ignore_signals()
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, SystemExit):  # shell completion ends this way
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if type(error).__name__ == "NoArgsIsHelpError":  # a bare `latentcache`
        typer.echo(str(error), err=True)
        return UsageError.exit_code
    suggest(error, lambda: vars(typer.main.get_command(application()))["commands"])
    known = console.as_known(error, argv)
    if os.environ.get("LATENTCACHE_DEBUG"):
        import traceback

        traceback.print_exception(error)
    with contextlib.suppress(console.OutputError):
        console.finish(command, console.Result(error=known), as_json="--json" in argv)
    return known.exit_code

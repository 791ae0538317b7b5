"""``latentcache``: commands, exit codes and the one place where errors become words.

Guarantee: a traceback is never shown, and with ``--json`` exactly one object is on stdout, also after an error
or a signal. Cost: ``--help`` imports neither torch nor numpy nor lmdb; commands import what they need.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType

import typer

from latentcache import failpoint
from latentcache.cli import build, console, export, gc, info, plan, verify
from latentcache.cli.failures import Signalled, as_known
from latentcache.errors import UsageError

_HELP = """Compute latents once, prove that they are still true, and train on batches that are right.

Start with:  latentcache build DATA        (a folder of pictures)
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

app = typer.Typer(
    name="latentcache",
    help=_HELP,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("build", help="Encode what is missing and make the cache true for DATA.")(build.build)
app.command("verify", help="Is the cache still true? Exit 1 with everything that is stale, missing or damaged.")(
    verify.verify
)
app.command("info", help="What a cache holds.")(info.info)
app.command("gc", help="What nobody needs any more; --apply removes it.")(gc.gc)
app.command("export", help="A token cache as files, for trainers that take no loader of ours.")(export.export)
app.command("plan", help="Steps per epoch, bucket by bucket, before anything is trained.")(plan.plan)


def _show_version(value: bool) -> None:
    if value:
        from latentcache import __version__

        typer.echo(f"latentcache {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
    ),
) -> None:
    """Options of every command."""
    failpoint.arm(os.environ.get(failpoint.VARIABLE))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. The signal handlers of the caller are put back."""
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
    """Start over where the locale is not UTF-8: a cache keeps names as UTF-8, and no file would be found by them."""
    if sys.getfilesystemencoding() != "utf-8" and sys.executable and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _listen() -> None:
    """Turn signals into words, those too that came since our first line; what the caller has us ignore stays so."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Signalled(number)


def _run(given: list[str]) -> int:
    """Run one command; whatever it raises becomes words and a status."""
    command = next((word for word in given if not word.startswith("-")), "")
    try:
        console.prepare_streams()
        _listen()
        _refuse_empty(given)
        result = typer.main.get_command(app).main(args=given, prog_name="latentcache", standalone_mode=False)
        console.flush()
        return int(result or 0)
    except BaseException as error:  # noqa: BLE001 - the one place where every error becomes words and a status
        return _fail(command, error, as_json="--json" in given)


def _refuse_empty(given: list[str]) -> None:
    """An empty word is a variable of a shell without a value; taken for a path it would be the folder we are in."""
    if "" in given:
        raise UsageError(
            "one of the arguments is empty",
            where=f"argument {given.index('') + 1}",
            why="as when a variable of the shell has no value",
            fix="give it a value, or leave it out; . is the folder you are in",
        )


def _fail(command: str, error: BaseException, *, as_json: bool) -> int:
    """Say what went wrong; returns the exit status. A signal that comes now finds it decided."""
    console.ignore_signals()
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, SystemExit):  # shell completion ends this way
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if type(error).__name__ == "NoArgsIsHelpError":  # a bare `latentcache`
        typer.echo(str(error), err=True)
        return UsageError.exit_code
    known = as_known(error)
    if os.environ.get("LATENTCACHE_DEBUG"):
        traceback.print_exception(error)
    with contextlib.suppress(console.OutputError):
        console.fail(command, known, as_json=as_json)
    return known.exit_code


if __name__ == "__main__":
    run()

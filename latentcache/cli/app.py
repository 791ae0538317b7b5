"""``latentcache``: the commands, their help and exit codes, and the one place that turns exceptions into errors.

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
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from textwrap import dedent, fill
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from latentcache import failpoint
from latentcache.cli import console, flags
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
#: Section -> its options in the order of the help. ``--help`` shows those before the bar, ``--help-all`` all of them.
_SECTIONS = {
    "Model": "--model | --model-config --tiling --compute-dtype --text-compute-dtype --storage-dtype "
    "--text-storage-dtype --latents --text-length",
    "Sizes": "--resolution --crop --flip --frames --like | --plan-buckets --max-crop --max-buckets --replan --bucket "
    "--bucket-step --min-side --max-side --upscale --min-pixels --trainer-config --crop-variants --fps --resample "
    "--max-pixels",
    "Data": "--repeats --split | --layout --masks --controls --image-column --text-lines --follow-links",
    "Captions": "--text-encoder --default-caption --shuffle-tags | --caption-ext --caption-lines --caption-column "
    "--caption-prefix --caption-suffix --caption-variants --keep-tags --tag-separator --empty-prompt "
    "--negative-prompt --prompt-ids",
    "Tokens": "--tokenizer --loss | --chat-template --template-option --add-bos --add-eos --control-tokens",
    "Performance": "--device --batch-size | --workers --decode-threads --host-memory --part",
    "Output": "--out --allow-failed --strict --quiet --json | --publish-every --commit-every --events",
}
#: Options without a section, and those of field kinds of other packages.
_REST = "Advanced"
_ARGUMENTS, _OWN, _HELP = "Arguments", "Options", "Help"
_COLUMN = 34


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
    _suggest(error)
    known = console.as_known(error)
    if os.environ.get("LATENTCACHE_DEBUG"):
        import traceback

        traceback.print_exception(error)
    with contextlib.suppress(console.OutputError):
        console.finish(command, console.Result(error=known), as_json="--json" in argv)
    return known.exit_code


# help: plain text, because help that rich draws takes three times as long to start


class Command(TyperCommand):
    """A command with plain metavars in its usage line, options in sections and examples at the end."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """DATA instead of {DATA}."""
        return [re.sub(r"\{(.*)\}(\.\.\.)?", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def get_params(self, ctx: Any) -> list[Any]:
        """All options, and ``--help-all`` if ``--help`` leaves some out."""
        parameters = super().get_params(ctx)
        if any(not _is_short(self, parameter) for parameter in parameters):
            parameters.append(_help_all())
        return parameters

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options in sections, then those that only ``--help-all`` explains by name."""
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        records = dict[str, list[tuple[str, str]]]()
        hidden = list[str]()
        parameters = [(_section(self, parameter), parameter) for parameter in self.get_params(ctx)]
        for section, parameter in sorted(parameters, key=_rank):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if shows_all or _is_short(self, parameter):
                records.setdefault(section, []).append(record)
            else:
                hidden.append(parameter.opts[0])
        for section, lines in records.items():
            with formatter.section(section):
                formatter.write_dl(lines, col_max=_COLUMN)
        if hidden:
            with formatter.section(f"Explained by `latentcache {self.name} --help-all`"):
                indent = " " * 2
                names = fill(", ".join(hidden), formatter.width, initial_indent=indent, subsequent_indent=indent,
                             break_on_hyphens=False)  # fmt: skip
                formatter.write(names + "\n")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Commands to copy, one a line."""
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in self.epilog.splitlines()))


_SHOWS_ALL = "latentcache.help_all"
_ORDER = {word: rank for rank, word in enumerate(" ".join(_SECTIONS.values()).split())}
_SECTION_OF = {word: section for section, words in _SECTIONS.items() for word in words.split()}
_SHORT = {word for words in _SECTIONS.values() for word in words.partition("|")[0].split()}


def _name(parameter: Any) -> str:
    """The long form of an option."""
    return next((word for word in parameter.opts if word.startswith("--")), "")


def _rank(parameter: tuple[str, Any]) -> int:
    """The place of a parameter in the help; those of a command itself keep their order."""
    section, option = parameter
    if section in (_ARGUMENTS, _OWN):
        return -1
    return len(_ORDER) + 1 if section == _HELP else _ORDER.get(_name(option), len(_ORDER))


def _section(command: Command, parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _ARGUMENTS
    if _name(parameter) in ("--help", "--help-all"):
        return _HELP
    if command.name != "build" and not getattr(parameter, "rich_help_panel", None):
        return _OWN
    return _SECTION_OF.get(_name(parameter), _REST)


def _is_short(command: Command, parameter: Any) -> bool:
    """True for the parameters that ``--help`` explains."""
    if _section(command, parameter) in (_ARGUMENTS, _HELP, _OWN):
        return True
    return command.name == "build" and _name(parameter) in _SHORT


def _help_all() -> Any:
    def show(ctx: Any, parameter: Any, value: bool) -> None:
        if value:
            ctx.meta[_SHOWS_ALL] = True
            typer.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return TyperOption(
        param_decls=["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options and exit.",
    )


def _suggest(error: Any) -> None:
    """Give the error of an unknown option the options that the user may have meant."""
    context = getattr(error, "ctx", None)
    if context is None or not hasattr(error, "possibilities"):
        return
    words = [word for parameter in context.command.params for word in parameter.opts if word.startswith("--")]
    begun = [word for word in words if word.startswith(error.option_name)]
    common = [word for word in begun if word in _SHORT]
    error.possibilities = common or begun or get_close_matches(error.option_name, words, n=1)

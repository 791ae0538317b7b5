"""Writes the reference pages that code already knows: the command line, the errors and Python.

``docs/reference/cli.md`` comes from the commands and options as they are declared, ``docs/reference/errors.md`` from
the classes of ``latentcache.errors``, ``docs/reference/python.md`` from signatures and docstrings. The same code
gives the same pages with any version of typer. A test fails while a page is not what this tool would write, or names
other options than the real ``--help``.

    python tools/make_reference.py            writes the pages
    python tools/make_reference.py --check    exit 1 when one is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import python_reference

from latentcache import errors
from latentcache.cli.app import app

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
_FIX = "python tools/make_reference.py"
_WRITTEN_BY = "<!-- Written by tools/make_reference.py; change the code and run it again. -->"
_INTRO = """\
`latentcache COMMAND --help` says the same on the terminal. Options that several commands share mean the same in all
of them. What is not said follows the cache ([why](../adr/0004-unsaid-settings-follow-the-cache.md)).
"""
_ERRORS_INTRO = """\
Every error raised on purpose is one of these, in Python, on the command line and in JSON. Each has `what`, `where`,
`why`, `fix`, `slug` and `exit_code`; `what`, `slug` and `fix` are never empty.
"""
_STATUSES = """\
## Exit statuses

The same for all commands.

| status | meaning |
|---|---|
| 0 | fine |
| 1 | findings: stale, missing, corrupt, more quarantined than allowed, an epoch without a step |
| 2 | usage, configuration or preflight |
| 3 | environment: no cache here, locked, disk full, read-only, device failed, format newer than this version |
| 70 | a bug of latentcache |
| 130, 143 | interrupted by SIGINT, SIGTERM: what was acknowledged is committed, the same command goes on |

With `--json` exactly one object is on stdout ([its keys](json.md)), also after an error. Progress and talk go to
stderr. An error is up to four lines there: `error[slug]: what`, `where:`, `why:` and `fix:`
([all of them](errors.md)). `LATENTCACHE_DEBUG=1` shows the traceback of status 70.
"""


def cli_page() -> str:
    """``cli.md``: the commands, then a section with a table of options for each."""
    commands = app.registered_commands
    listed = [f"| [`latentcache {c.name}`](#latentcache-{c.name}) | {c.help} |" for c in commands]
    table = "\n".join(["| command | what it does |", "|---|---|", *listed])
    return _page("# Command line", _WRITTEN_BY, _INTRO, table, *map(_command, commands), _STATUSES)


def errors_page() -> str:
    """``errors.md``: one heading per class, in the order of the module."""
    drawing = (errors.__doc__ or "").split("\n\n")[1]
    tree = f"```text\n{textwrap.dedent(drawing)}\n```"
    return _page("# Errors", _WRITTEN_BY, _ERRORS_INTRO, tree, *map(_error, error_classes()))


def python_page() -> str:
    """``python.md``: what a program imports."""
    return _page("# Python", _WRITTEN_BY, python_reference.INTRO, *python_reference.sections())


def pages() -> dict[Path, str]:
    """What every page should hold."""
    return {
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "errors.md": errors_page(),
        REFERENCE / "python.md": python_page(),
    }


def outdated() -> list[Path]:
    """Pages that hold something else."""
    return [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]


def error_classes() -> Iterator[type[errors.LatentcacheError]]:
    """The classes of ``latentcache.errors`` in the order of their definition."""
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.LatentcacheError):
            yield value


def options_of(command: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """The arguments and options of a registered command: (name, type, declaration, default or ``empty``)."""
    for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
        kind, declared, *_ = get_args(parameter.annotation)
        yield parameter.name, kind, declared, parameter.default


def _command(command: Any) -> str:
    rows = [_row(*option) for option in options_of(command)]
    arguments = [_names(name, declared) for name, _, declared, _ in options_of(command) if not words_of(declared)]
    usage = f"```text\nlatentcache {command.name} [OPTIONS] {arguments[0].strip('`')}\n```"
    table = "\n".join(["| option | value | meaning |", "|---|---|---|", *rows])
    described = inspect.cleandoc(command.callback.__doc__ or command.help)
    return "\n\n".join([f"## latentcache {command.name}", usage, described, table])


def _row(name: str, kind: Any, declared: Any, default: Any) -> str:
    facts = []
    if words_of(declared) and default is inspect.Parameter.empty:
        facts.append("Required.")
    if default not in (None, False, inspect.Parameter.empty):
        facts.append(f"Default: {default}.")
    cells = _names(name, declared), _value(kind, declared), " ".join([declared.help, *facts])
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _names(name: str, declared: Any) -> str:
    """``--out``, ``-o``; for an argument what stands for it in the usage line."""
    return ", ".join(f"`{word}`" for word in words_of(declared) or [declared.metavar or name.upper()])


def words_of(declared: Any) -> list[str]:
    """The words of an option, none for an argument; beside Annotated typer keeps the first one as the default."""
    said = declared.default, *(declared.param_decls or ())
    parts = (part for word in said if isinstance(word, str) for part in word.split("/"))  # --flip/--no-flip
    return [part for part in parts if part.startswith("-")]


def _value(kind: Any, declared: Any) -> str:
    """What an option takes; nothing for a switch."""
    if kind is bool or bool in get_args(kind) or not words_of(declared):
        return ""
    words = {Path: "PATH", int: "N", str: "TEXT"}
    types = {kind, *get_args(kind), *(inner for part in get_args(kind) for inner in get_args(part))}
    found = declared.metavar or next(word for type_, word in words.items() if type_ in types)
    return f"`{found}`"


def _error(kind: type[errors.LatentcacheError]) -> str:
    parent = kind.__bases__[0].__name__
    status = "130 or 143" if kind is errors.InterruptedBuildError else str(kind.exit_code)
    also = "".join(f", a `{base.__name__}`" for base in kind.__bases__[1:])
    facts = [
        f"- slug: `{kind.slug}`" if "slug" in vars(kind) else f"- slug: that of its parent, `{kind.slug}`",
        f"- exit status: {status}",
        f"- is a: {f'[`{parent}`](#{parent.lower()})' if parent != 'Exception' else '`Exception`'}{also}",
    ]
    if "default_fix" in vars(kind):
        facts.append(f"- fix, where nothing better is known: {kind.default_fix}")
    return "\n\n".join([f"## {kind.__name__}", "\n".join(facts), _described(inspect.cleandoc(kind.__doc__ or ""))])


def _described(docstring: str) -> str:
    """A docstring as Markdown: double backticks become single ones, arguments a list."""
    text, _, arguments = docstring.replace("``", "`").partition("\n\nArgs:\n")
    if not arguments:
        return text
    items = re.sub(r"^ {4}(\S.*?): ", r"- `\1`: ", arguments, flags=re.M)
    return f"{text}\n\n" + re.sub(r"\n\s+", "\n  ", items)


def _page(*parts: str) -> str:
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the generated reference pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    if parser.parse_args().check:
        old = [path.name for path in outdated()]
        if old:
            sys.exit(f"out of date: {', '.join(old)}\nfix: {_FIX}")
        print("reference: current")
        return
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(REFERENCE.parent.parent)}")


if __name__ == "__main__":
    main()

"""Write the reference pages that the code determines: the command line, the errors and Python.

``docs/reference/cli.md`` comes from the commands and their options, ``docs/reference/errors.md`` from the classes and
the catalog of ``latentcache.errors``, ``docs/reference/python.md`` from signatures and docstrings,
``docs/reference/rejected-inputs.md`` from ``latentcache.sources.causes``, ``docs/reference/changes.md`` from plans
of builds. A test fails if a page differs from the output of this tool.

    python tools/make_reference.py            write the pages
    python tools/make_reference.py --check    exit 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import changes_reference
import python_reference
import typer

from latentcache import errors
from latentcache.cli.app import application
from latentcache.sources.causes import CAUSES

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
_FIX = "python tools/make_reference.py"
_WRITTEN_BY = "<!-- Written by tools/make_reference.py; change the code and run it again. -->"
_INTRO = """\
`latentcache COMMAND --help` shows the same text. An option has one meaning in all commands. Settings that are not
given follow the cache ([why](../concepts.md#settings-follow-the-cache)).
"""
_ERRORS_INTRO = """\
Python, the command line and JSON use the same errors. Each error has `what`, `where`, `why`, `fix`, `slug` and
`exit_code`; `what`, `slug` and `fix` are never empty.
"""
_STATUSES = """\
## Exit statuses

The same for all commands.

| status | meaning |
|---|---|
| 0 | fine |
| 1 | findings: stale, missing, corrupt, more rejected than allowed, an epoch without a step |
| 2 | usage, configuration or preflight |
| 3 | environment: no cache, locked, disk full, read-only, device failed, newer format |
| 70 | a bug of latentcache |
| 130, 143 | interrupted by SIGINT, SIGTERM: acknowledged work is committed, the same command continues |

With `--json` exactly one object is on stdout ([its keys](json.md)), also after an error. Progress and messages go to
stderr. An error has up to four lines: `error[slug]: what`, `where:`, `why:` and `fix:` ([all errors](errors.md)).
`LATENTCACHE_DEBUG=1` shows the traceback of status 70.
"""


_CAUSES_INTRO = """\
Each file or record that is not used has a reason, a detail and a fix. A build
[leaves it out and goes on](../guides/build.md#rejected-inputs). Reasons are stable, so scripts can use them. A *note*
has a reason too. Its input is used in another way than given, or not at all. Notes never change the exit status.
"""


class Slug(NamedTuple):
    """One row of the catalog of errors."""

    name: str
    exit_code: int
    meaning: str


#: Slugs without a class: name -> (exit code, meaning).
SPECIFIC: Mapping[str, tuple[int, str]] = {
    "bug": (70, "A fault of latentcache itself; LATENTCACHE_DEBUG=1 shows the traceback."),
    "cache-kind": (3, "DATA holds other inputs than the fields of the cache."),
    "cache-unfinished": (3, "The first build of this cache has not finished."),
    "extra-missing": (2, "An optional package is not installed."),
    "foreign-sampler": (2, "A DataLoader or accelerate put its own sampler in place of the loader's."),
    "load-truncated": (2, "Another package has set Pillow to accept truncated images."),
    "memory": (3, "This machine is out of memory."),
    "no-prompt": (2, "The cache does not hold this prompt."),
    "no-posterior": (2, "The encoder has no posterior to sample from."),
    "no-tiling": (2, "The encoder cannot work in tiles."),
    "other-captions": (2, "Two fields hold other variants of the same captions."),
    "output": (3, "Standard output is not writable."),
    "resume-mismatch": (2, "A loader state belongs to another cache or other options."),
    "resume-version": (2, "A loader state was written by a newer version."),
    "served-by-workers": (2, "A DataLoader served batches that the loader's state does not count."),
    "sharded-twice": (2, "A loader of one rank was given to accelerator.prepare inside a DataLoader."),
    "system": (3, "The operating system rejected a file operation."),
    "too-long": (1, "A document is longer than a row."),
    "tokenizer-missing": (2, "Records need a tokenizer, and none was given."),
}


def catalog() -> tuple[Slug, ...]:
    """Return every error slug with its exit code and meaning, sorted by name."""
    found = {name: Slug(name=name, exit_code=code, meaning=text) for name, (code, text) in SPECIFIC.items()}
    classes: list[type[errors.LatentcacheError]] = errors.LatentcacheError.__subclasses__()
    for cls in classes:
        classes += cls.__subclasses__()
        if cls.__module__ == errors.__name__ and cls is not errors.InterruptedBuildError:
            meaning = (cls.__doc__ or "").partition("\n")[0].partition(". ")[0].rstrip(".") + "."
            found[cls.slug] = Slug(name=cls.slug, exit_code=cls.exit_code, meaning=meaning)
    meaning = "A signal ended the command; acknowledged work of a build is committed. 143 after SIGTERM."
    found["interrupted"] = Slug(name="interrupted", exit_code=130, meaning=meaning)
    return tuple(found[name] for name in sorted(found))


def commands() -> dict[str, Any]:
    """Return the commands with their options, by name, in the order of the help."""
    group: Any = typer.main.get_command(application())
    return dict(group.commands)


def cli_page() -> str:
    """Write ``cli.md``: the commands, then a section with an option table for each."""
    listed = [f"| [`latentcache {name}`](#latentcache-{name}) | {_first(c.help)} |" for name, c in commands().items()]
    table = "\n".join(["| command | purpose |", "|---|---|", *listed])
    sections = [_command(name, command) for name, command in commands().items()]
    return _page("# Command line", _WRITTEN_BY, _INTRO, table, *sections, _STATUSES)


def errors_page() -> str:
    """Write ``errors.md``: the slugs, then one heading per class, in module order."""
    rows = [f"| `{one.name}` | {one.exit_code} | {one.meaning.replace('``', '`')} |" for one in catalog()]
    slugs = "\n".join(["| slug | exit status | meaning |", "|---|---|---|", *rows])
    return _page("# Errors", _WRITTEN_BY, _ERRORS_INTRO, slugs, "## Classes", *map(_error, error_classes()))


def python_page() -> str:
    """Write ``python.md``: the public names."""
    return _page("# Python", _WRITTEN_BY, python_reference.INTRO, *python_reference.sections())


def causes_page() -> str:
    """Write ``rejected-inputs.md``: each cause with its reason words and its fix."""
    rows = [f"| {c.name} | {' '.join(f'`{word}`' for word in c.words)} | {c.fix} |" for c in CAUSES]
    table = "\n".join(["| cause | reasons | fix |", "|---|---|---|", *rows])
    return _page("# Rejected inputs", _WRITTEN_BY, _CAUSES_INTRO, table)


def changes_page() -> str:
    """Write ``changes.md``: what a build encodes again after each change."""
    return _page("# I change X: what is encoded again?", _WRITTEN_BY, changes_reference.page())


def pages() -> dict[Path, str]:
    """Map every generated page to its expected text."""
    return {
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "errors.md": errors_page(),
        REFERENCE / "python.md": python_page(),
        REFERENCE / "rejected-inputs.md": causes_page(),
        REFERENCE / "changes.md": changes_page(),
    }


def outdated() -> list[Path]:
    """Return the outdated pages."""
    return [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]


def error_classes() -> Iterator[type[errors.LatentcacheError]]:
    """Return the classes of ``latentcache.errors`` in the order of their definition."""
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.LatentcacheError):
            yield value


def _first(text: str) -> str:
    return text.strip().partition("\n\n")[0].replace("\n", " ")


def _command(name: str, command: Any) -> str:
    arguments = " ".join(p.metavar for p in command.params if not words_of(p))
    usage = f"```text\nlatentcache {name} [OPTIONS] {arguments}\n```"
    table = "\n".join(["| option | value | meaning |", "|---|---|---|", *map(_row, command.params)])
    examples = f"```text\n{(command.epilog or '').strip()}\n```"
    return "\n\n".join([f"## latentcache {name}", usage, inspect.cleandoc(command.help), table, examples])


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{word}`" for word in words_of(parameter)) or f"`{parameter.metavar}`"
    takes_value = words_of(parameter) and not getattr(parameter, "is_flag", False)
    required = " Required." if words_of(parameter) and parameter.required else ""
    cells = names, f"`{parameter.metavar}`" if takes_value else "", f"{parameter.help}{required}"
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def words_of(parameter: Any) -> list[str]:
    """Return the flags of an option; empty for an argument."""
    return [word for word in (*parameter.opts, *parameter.secondary_opts) if word.startswith("-")]


def _error(kind: type[errors.LatentcacheError]) -> str:
    parent = kind.__bases__[0].__name__
    status = "130 or 143" if kind is errors.InterruptedBuildError else str(kind.exit_code)
    also = "".join(f", a `{base.__name__}`" for base in kind.__bases__[1:])
    lines = [
        f"- slug: `{kind.slug}`" if "slug" in vars(kind) else f"- slug: that of its parent, `{kind.slug}`",
        f"- exit status: {status}",
        f"- is a: {f'[`{parent}`](#{parent.lower()})' if parent != 'Exception' else '`Exception`'}{also}",
    ]
    if "default_fix" in vars(kind):
        lines.append(f"- default fix: {kind.default_fix}")
    return "\n\n".join([f"## {kind.__name__}", "\n".join(lines), _described(inspect.cleandoc(kind.__doc__ or ""))])


def _described(docstring: str) -> str:
    """Convert a docstring to Markdown: double backticks become single ones, arguments a list."""
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

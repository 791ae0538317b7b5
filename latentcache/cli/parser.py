"""Commands made of functions: their options, the values of a command line, and the text of --help.

A parameter of a function becomes an option if its default or its annotation holds an :class:`Option`; its type says
how many values there are and what they are converted to: ``bool`` a switch, ``list[T]`` any number, others one.
Cost: the standard library only, about 2 ms; a library that converts arguments costs 100 ms at each start.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Union, get_args, get_origin

from latentcache.errors import UsageError

_HELP = ("-h", "--help")
_COLUMN, _MOST_WIDTH = 32, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a parameter is on the command line."""

    words: tuple[str, ...] = ()
    """``--out``, ``-o``; none: a positional argument."""
    off: str = ""
    """Switches it off: ``--no-flip``."""
    metavar: str = ""
    help: str
    least: float | None = None
    """Smallest value."""
    default: Any = None
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a command."""

    name: str
    option: Option
    kind: Callable[[str], Any]
    """Of one value; ``bool``: a switch, which takes none."""
    several: bool

    @property
    def is_switch(self) -> bool:
        """True if no value follows it."""
        return self.kind is bool

    @property
    def label(self) -> str:
        """Its first long word, or its metavar."""
        return next((word for word in self.option.words if word.startswith("--")), self.option.metavar)

    @classmethod
    def of(cls, one: inspect.Parameter) -> Parameter:
        """From a signature whose annotations are values."""
        hint, option, default = one.annotation, one.default, one.default
        for said in getattr(hint, "__metadata__", ()):
            option, hint = said, get_args(hint)[0]
        assert isinstance(option, Option), one.name
        if option is default:
            default = option.default
        if get_origin(hint) in (Union, types.UnionType):
            hint = next(each for each in get_args(hint) if each is not types.NoneType)
        several = get_origin(hint) is list
        option = replace(option, default=default)
        return cls(name=one.name, option=option, kind=get_args(hint)[0] if several else hint, several=several)

    def value(self, text: str) -> Any:
        """One value of this parameter.

        Raises:
            ValueError: The text is none; what is expected instead.
        """
        try:
            found = self.kind(text)
        except ValueError:
            word = {int: "an integer", float: "a number"}.get(self.kind, "a value")  # type: ignore[call-overload]
            raise ValueError(f"{text!r} is not {word}") from None
        if self.option.least is not None and not found >= self.option.least:
            raise ValueError(f"{text} is not greater than or equal to {self.option.least:g}")
        return found


@dataclass(kw_only=True)
class Command:
    """One command.

    Args:
        name: As it is called.
        help: Its help; the first sentence is shown in the list of commands.
        load: Gives the function; called when the command runs or shows its help.
    """

    name: str
    help: str
    load: Callable[[], Callable[..., int]]

    @cached_property
    def function(self) -> Callable[..., int]:
        """What runs."""
        return self.load()

    @cached_property
    def params(self) -> list[Parameter]:
        """Its parameters, arguments first as they are written."""
        return [Parameter.of(one) for one in inspect.signature(self.function, eval_str=True).parameters.values()]

    @property
    def usage(self) -> str:
        """The first line of the help."""
        arguments = [one.option.metavar for one in self.params if not one.option.words]
        return " ".join(["Usage:", "latentcache", self.name, "[OPTIONS]", *arguments])

    def show(self) -> str:
        """The text of --help."""
        arguments = [(one.option.metavar, _about(one)) for one in self.params if not one.option.words]
        options = [(_shown(one), _about(one)) for one in self.params if one.option.words]
        options.append(("-h, --help", "Show this message and exit."))
        sections = [("Arguments", arguments)] * bool(arguments) + [("Options", options)]
        return _page(self.usage, self.help, sections)

    def run(self, words: Sequence[str]) -> int:
        """Run with these words.

        Raises:
            UsageError: A word is unknown, or a value is missing or invalid.
        """
        return self.function(**self.values(words))

    def values(self, words: Sequence[str]) -> dict[str, Any]:
        """The value of each parameter.

        Raises:
            UsageError: As :meth:`run`.
        """
        given, rest = self._sorted_out(words)
        for one in (one for one in self.params if not one.option.words):
            count = len(rest) if one.several else 1
            given[one.name], rest = rest[:count], rest[count:]
        if rest:
            raise self._error(f"Got unexpected extra argument{'s' * (len(rest) > 1)} ({' '.join(rest)})")
        return {one.name: self._converted(one, given.get(one.name, [])) for one in self.params}

    def _sorted_out(self, words: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
        """The texts given for each option, and the other words."""
        known = {word: (one, True) for one in self.params for word in one.option.words}
        known |= {one.option.off: (one, False) for one in self.params if one.option.off}
        given, rest, left = dict[str, list[Any]](), list[str](), list(words)
        while left:
            word = left.pop(0)
            if word == "--":
                return given, rest + left
            if not word.startswith("-") or word == "-":
                rest.append(word)
                continue
            name, joined, text = word.partition("=")
            if not word.startswith("--") and word[:2] in known:
                name, joined, text = word[:2], word[2:], word[2:].removeprefix("=")
            if name not in known:
                raise self._error(f"No such option: {name}{_nearest(name, [*known, *_HELP])}")
            one, on = known[name]
            if one.is_switch and joined:
                raise self._error(f"Option '{name}' does not take a value")
            if not one.is_switch and not joined and not left:
                raise self._error(f"Option '{name}' requires an argument")
            given.setdefault(one.name, []).append(on if one.is_switch else text if joined else left.pop(0))
        return given, rest

    def _converted(self, one: Parameter, given: list[Any]) -> Any:
        """The value of a parameter; of an option with one value that is given twice the last counts."""
        kind = "option" if one.option.words else "argument"
        if not given:
            if one.option.required:
                raise self._error(f"Missing {kind} '{one.label}'")
            return one.option.default
        if one.is_switch:
            return given[-1]
        try:
            values = [one.value(text) for text in given]
        except ValueError as error:
            raise self._error(f"Invalid value for '{one.label}': {error}") from None
        return values if one.several else values[-1]

    def _error(self, what: str) -> UsageError:
        return _unusable(what, f"latentcache {self.name}")


@dataclass(frozen=True, kw_only=True)
class Program:
    """All commands."""

    help: str
    commands: Mapping[str, Command]

    def show(self) -> str:
        """The text of --help."""
        options = [("--version", "Show the version and exit."), ("-h, --help", "Show this message and exit.")]
        commands = [(name, _first(one.help)) for name, one in self.commands.items()]
        usage = "Usage: latentcache [OPTIONS] COMMAND [ARGS]..."
        return _page(usage, self.help, [("Options", options), ("Commands", commands)])

    def command(self, name: str) -> Command:
        """A command by its name.

        Raises:
            UsageError: There is no such command.
        """
        if name in self.commands:
            return self.commands[name]
        if name.startswith("-"):
            raise _unusable(f"No such option: {name}{_nearest(name, ['--version', *_HELP])}")
        raise _unusable(f"No such command '{name}'{_nearest(name, self.commands)}")


def asks_for_help(words: Sequence[str]) -> bool:
    """True if a command line has -h or --help."""
    end = words.index("--") if "--" in words else len(words)
    return not set(_HELP).isdisjoint(words[:end])


def _unusable(what: str, where: str = "latentcache") -> UsageError:
    """The error of a command line that cannot be understood."""
    return UsageError(what, where=where, fix=f"{where} --help")


def _nearest(word: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _shown(one: Parameter) -> str:
    option = one.option
    words = sorted(option.words, key=lambda word: word.startswith("--"))
    text = ", ".join(words) + (f" / {option.off}" if option.off else "")
    return text if one.is_switch else f"{text} {option.metavar}"


def _about(one: Parameter) -> str:
    least = f"  [x>={one.option.least:g}]" if one.option.least is not None else ""
    return one.option.help + least + "  [required]" * one.option.required


def _first(text: str) -> str:
    return text.strip().partition("\n\n")[0].replace("\n", " ")


def _page(usage: str, text: str, sections: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """A help page, as wide as the terminal and at most 80 columns."""
    width = max(min(shutil.get_terminal_size().columns, _MOST_WIDTH), 40)
    lines = [usage]
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines += ["", *textwrap.wrap(paragraph, width - 2, initial_indent="  ", subsequent_indent="  ")]
    for title, rows in sections:
        lines += ["", f"{title}:", *_rows(rows, width)]
    return "\n".join(lines)


def _rows(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Names with what they are: beside them, or below names that are too long."""
    column = min(max(len(name) for name, _ in rows) + 4, _COLUMN)
    for name, text in rows:
        first, *more = textwrap.wrap(text, width - column) or [""]
        if len(name) + 4 <= column:
            yield f"  {name}".ljust(column) + first
        else:
            yield f"  {name}"
            yield " " * column + first
        yield from (" " * column + line for line in more)

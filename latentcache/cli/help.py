"""Help of commands: sections, the options most people need before all others, examples, and suggestions.

Plain text: help that rich draws takes three times as long to start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from textwrap import fill
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

#: ``rich_help_panel`` of the options that field kinds and DATA have in every command: only ``build`` explains them.
OF_BUILD = "build"
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
        shows_all, records, hidden = ctx.meta.get(_SHOWS_ALL, False), dict[str, list[tuple[str, str]]](), list[str]()
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


def suggest(error: Any, commands: Callable[[], Mapping[str, Any]]) -> None:
    """Give the error of an unknown option the options that the user may have meant.

    Args:
        error: Any exception.
        commands: All commands by name, with their options; called only if this command has nothing alike.
    """
    context = getattr(error, "ctx", None)
    if context is None or not hasattr(error, "possibilities"):
        return
    names, name = _names(context.command), error.option_name
    begun = [known for known in names if known.startswith(name)]
    common = [known for known in begun if known in _SHORT]
    error.possibilities = common or begun or get_close_matches(name, names, n=1)
    if not error.possibilities:
        owners = [command.name for command in commands().values() if name in _names(command)]
        error.message += f": it is an option of {', '.join(owners)}" if owners else ""


def _names(command: Any) -> list[str]:
    return [name for parameter in command.params for name in parameter.opts if name.startswith("--")]

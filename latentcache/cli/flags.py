"""Options of the command line that are generated from the settings of field kinds, and options that commands share.

A kind's ``settings`` is a frozen dataclass whose fields default to None ("not given"). Each field becomes an option.
A ``bool`` gives a switch ``--x/--no-x``, or ``--x`` if it is False by default; ``tuple[T, ...]`` a repeatable option.
``metadata`` of the field may hold ``flag`` (None: no option), ``help``, ``metavar``, ``choices``, ``min`` and
``parse`` (text -> value). Kinds may share a flag; its value goes to each requested kind. ``SourceOptions`` gives the
options of DATA.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shlex
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from latentcache.cli import console
from latentcache.cli.console import Result
from latentcache.errors import UsageError
from latentcache.store.paths import url_of
from latentcache.value import Value


def option(default: Any, flag: str, text: str, **more: Any) -> Any:
    """One option.

    Args:
        default: Its value if it is not given; ``...``: required, or given by the parameter in an annotation.
        flag: Its flags and its metavar: ``--out -o PATH``.
        text: Its help, with the default at the end.
        more: Further arguments of typer: ``min``, ``max``.
    """
    words = flag.split()
    metavar = None if words[-1].startswith("-") else words.pop()
    return typer.Option(default, *words, help=text, metavar=metavar, show_default=False, **more)


def argument(metavar: str, text: str, default: Any = ...) -> Any:
    """One positional argument: a path, or several; required without a default."""
    return typer.Argument(default, metavar=metavar, help=text, readable=False, show_default=False)


#: An option of several commands, as an annotation.
_shared = functools.partial(option, ...)
_KINDS = "Load a field kind that is not installed. Repeatable."
_OVERFLOW = "Policy for documents longer than a row: error, drop, truncate_right, truncate_left or split."
_NAMES = "Fields to build. [default: as the cache; a new cache: by what DATA contains]"
_CHECKED = "Fields to compare. [default: as the recipe flags]"
Json = Annotated[bool, _shared("--json", "Write one JSON object to stdout.")]
Quiet = Annotated[bool, _shared("--quiet -q", "Hide the plan and the progress.")]
Cache = Annotated[Path, typer.Argument(metavar="CACHE", help="A cache folder.", readable=False)]
CacheOrUrl = Annotated[Path, typer.Argument(metavar="CACHE", help="A cache folder, or its URL.", readable=False)]
Out = Annotated[Path | None, _shared("--out -o CACHE", "The cache folder, or a URL. [default: DATA.latentcache]")]
Seed = Annotated[int, _shared("--seed N", "Seed for random choices. [default: 0]", min=0)]
Kinds = Annotated[list[str] | None, _shared("--field MODULE:NAME", _KINDS)]
Pad = Annotated[int | None, _shared("--pad N", "Make rows with N tokens and one document each.", min=1)]
Pack = Annotated[int | None, _shared("--pack N", "Make rows with N tokens and several documents each.", min=1)]
Chunk = Annotated[int | None, _shared("--chunk N", "Make rows with N tokens cut from joined documents.", min=1)]
Overflow = Annotated[str | None, _shared("--overflow POLICY", _OVERFLOW)]


#: The options of DATA on the command line; None if there are none.
Source = Any
#: The settings of a build on the command line, without data, cache and fields.
Run = Any
#: Command -> module and name of the class of its settings.
_SETTINGS = {
    "build": ("latentcache.pipeline.settings", "BuildSettings"),
    "export": ("latentcache.export.settings", "ExportSettings"),
}
#: Commands that take URLs; `pull` brings a cache to the others.
_COMMANDS = ("build", "info", "inspect", "merge", "plan", "report", "show", "verify")
#: Parameters of commands that name caches, or a cache to be written.
_CACHES, _OUT = ("cache", "other", "path", "parts"), "out_folder"
#: ``rich_help_panel`` of the options that field kinds and DATA have in every command: only ``build`` explains them.
_OF_BUILD = "build"
#: Settings of a build that change nothing before it encodes.
_OF_WORK = ("publish_every", "commit_every", "events", "engine", "address", "scratch")


class Requested(Value):
    """The fields and settings that a command line asks for."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Field name -> settings of its kind; None in an attribute: not given."""
    kinds: tuple[str, ...] = ()
    """Values of ``--field``."""
    exact: bool = False
    """True: ``--fields`` names every field."""

    words: str = ""
    """The recipe flags as they were given."""
    source: str = ""
    """The options of DATA as they were given."""

    @property
    def build(self) -> dict[str, Any]:
        """Its arguments of ``BuildSettings``."""
        return {"fields": self.fields, "related": not self.exact}

    @property
    def common(self) -> str:
        """Flags that every later command needs too."""
        return shlex.join(word for kind in self.kinds for word in ("--field", kind))


def build_command(data: Path, out: Path | None, requested: Requested, device: str, more: str) -> str:
    """The build that was asked for, as a command with the further options ``more``."""
    words = ["latentcache build", shlex.quote(str(data))]
    words += [f"--out {shlex.quote(str(out))}"] if out and "--out" not in more else []
    words += [f"--fields {','.join(requested.fields)}"] if requested.exact else []
    words += [requested.words, requested.common, requested.source]
    words += [f"--device {device}"] if device != "auto" and "--device" not in more else []
    return " ".join(word for word in (*words, more) if word)


def register(targets: Iterable[str]) -> None:
    """Load the kinds of ``--field MODULE:NAME``."""
    if wanted := list(targets):
        from latentcache.fields import registry

        registry.register(wanted)


def as_command(name: str, command: Callable[..., Result]) -> Callable[..., int]:
    """A function for typer, which reads options from the signature: this makes a signature.

    It has the options of all field kinds in place of the parameter ``requested``, those of DATA in place of
    ``source``, those of the command's own settings in place of ``run``, and ``--json``. It writes the result of the
    command, and returns the exit status.
    """
    signature = inspect.signature(command, eval_str=True)
    options, of_data, instead = dict[str, _Option](), dict[str, _Option](), dict[str, list[inspect.Parameter]]()
    if "requested" in signature.parameters:
        from latentcache.fields.registry import field_kinds

        options = _options((kind.name, kind.settings) for kind in field_kinds().values())
        names = Annotated[
            str | None, _shared("--fields NAME,...", _NAMES if "source" in signature.parameters else _CHECKED)
        ]
        instead["requested"] = [option.parameter for option in options.values()]
        instead["requested"] += [_parameter("fields", names), _parameter("field", Kinds)]
    if "source" in signature.parameters:
        from latentcache.sources.options import SourceOptions

        of_data = _options([("DATA", SourceOptions)])
        instead["source"] = [option.parameter for option in of_data.values()]
    of_run = _run_options(name) if "run" in signature.parameters else {}
    instead |= {"run": [option.parameter for option in of_run.values()]} if of_run else {}
    parameters = [new for old in signature.parameters.values() for new in instead.get(old.name, [old])]
    if "as_json" not in signature.parameters:
        parameters.append(_parameter("as_json", Json, False))

    @functools.wraps(command)
    def with_options(**arguments: Any) -> int:
        as_json = arguments["as_json"]
        values, source, run = ({flag: arguments.pop(flag) for flag in group} for group in (options, of_data, of_run))
        if "source" in instead:
            arguments["source"] = _by_setting(of_data, "DATA", source) or None
        if of_run:
            arguments["run"] = _by_setting(of_run, "", run)
        if "requested" in instead:
            requested = _requested(options, values, arguments.pop("fields"), tuple(arguments.pop("field") or ()))
            arguments["requested"] = dataclasses.replace(requested, source=_words(of_data, source))
        if "as_json" not in signature.parameters:
            del arguments["as_json"]
        with _as_folders(name, arguments) as local:
            result = command(**local)
            result = result._replace(lines=tuple(result.lines))
        return console.finish(name, result, as_json=as_json)

    vars(with_options)["__signature__"] = signature.replace(parameters=parameters, return_annotation=int)
    return with_options


@contextmanager
def _as_folders(command: str, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of a command with a local folder for each URL; output has the URL in place of the folder."""
    changed = dict(arguments)
    with ExitStack() as views:

        def folder(path: Path, *, is_out: bool = False) -> Path:
            if not (url := url_of(path)):
                return path
            from latentcache.store.remote.view import local_view, scratch_folder

            scratch = scratch_folder(arguments.get("run", {}).get("scratch")) if is_out else None
            root = views.enter_context(local_view(url, scratch=scratch))
            console.SHOWN_AS[str(root)] = url.rstrip("/")
            return root

        for name, value in arguments.items() if command in _COMMANDS else ():
            if name == "data" and isinstance(value, Path) and url_of(value):
                fix = "mount the bucket (s3fs, gcsfuse, blobfuse), or copy DATA to this machine"
                raise UsageError("DATA: a URL cannot be read", why="images and records are local files", fix=fix)
            if name in _CACHES and isinstance(value, list):
                changed[name] = [folder(path) for path in value]
            elif name in (*_CACHES, _OUT) and isinstance(value, Path):
                changed[name] = folder(value, is_out=name == _OUT)
        yield changed


class _Option(Value):
    """One option, and the settings it sets: field name -> attribute."""

    parameter: inspect.Parameter
    targets: dict[str, dataclasses.Field[Any]]
    flag: str


def _options(kinds: Iterable[tuple[str, Any]]) -> dict[str, _Option]:
    """Options of (field, settings class)."""
    options: dict[str, _Option] = {}
    for field, settings in kinds:
        hints = get_type_hints(settings) if dataclasses.is_dataclass(settings) else {}
        for attribute in dataclasses.fields(settings) if hints else ():
            flag = attribute.metadata.get("flag", "--" + attribute.name.replace("_", "-"))
            if flag is None:
                continue
            name = flag.lstrip("-").replace("-", "_")
            name = f"{name}_" if iskeyword(name) else name
            if name not in options:
                parameter = _parameter(name, _annotation(field, flag, attribute, hints[attribute.name]))
                options[name] = _Option(parameter=parameter, targets={}, flag=flag)
            options[name].targets[field] = attribute
    return options


def _by_setting(options: Mapping[str, _Option], field: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given, by the setting of a field instead of the option."""
    return {options[flag].targets[field].name: value for flag, value in values.items() if value not in (None, [])}


def _run_options(command: str) -> dict[str, _Option]:
    """Options of the settings of a command; ``build`` has all of ``BuildSettings``."""
    module, name = _SETTINGS.get(command, _SETTINGS["build"])
    kind = getattr(import_module(module), name)
    options = _options([("", kind)])
    names = {field.name for field in dataclasses.fields(kind) if field.metadata}
    names -= set() if command == "build" else {*_OF_WORK}
    return {name: option for name, option in options.items() if option.targets[""].name in names}


def _annotation(field: str, flag: str, attribute: dataclasses.Field[Any], hint: Any) -> Any:
    """The annotated type that typer makes an option of."""
    about, kind, several = attribute.metadata, *_plain(hint)
    panel = {"rich_help_panel": _OF_BUILD} if field else {}
    text = {"help": about.get("help", ""), "show_default": False, **panel}
    if kind is bool:
        both = flag if attribute.default is False else f"{flag}/--no-{flag.lstrip('-')}"
        return Annotated[bool | None, typer.Option(both, **text)]
    choices = about.get("choices", ())
    metavar = about.get("metavar") or "|".join(choices) or {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")
    kind = str if "parse" in about else kind
    option = typer.Option(flag, metavar=metavar, readable=False, **text)
    return Annotated[(list[kind] if several else kind) | None, option]  # type: ignore[valid-type]


def _plain(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and True if the option is repeatable."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not types.NoneType)
    if get_origin(hint) is tuple:
        return (_plain(get_args(hint)[0])[0], True)
    return (hint if hint in (bool, int, float, str, Path) else str, False)


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _requested(
    options: Mapping[str, _Option], values: Mapping[str, Any], names: str | None, kinds: tuple[str, ...]
) -> Requested:
    """Settings of each requested field."""
    from latentcache.fields import registry

    known = registry.field_kinds()
    wanted = None if names is None else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted or ():
        if name not in known:
            raise UsageError(f"--fields={name}: unknown field", fix=f"--fields {'|'.join(known)}")
    passed = {name: option for name, option in options.items() if values[name] is not None}
    settings: dict[str, dict[str, Any]] = {name: {} for name in wanted or ()}
    if wanted is None:
        targets = {name: f"{type(kind).__module__}:{type(kind).__qualname__}" for name, kind in known.items()}
        settings = {name: {} for name, target in targets.items() if target in kinds}
        targeted = ((name, field) for option in passed.values() for name, field in option.targets.items())
        # A field that follows another one, and some options, are not enough to ask for a field.
        asked = {name for name, field in targeted if not known[name].follows and field.metadata.get("asks", True)}
        settings |= {name: {} for name in asked - set(settings)}
    for name, option in passed.items():
        takers = [field for field in option.targets if field in settings]
        if not takers:
            owner = next(iter(option.targets))
            fix = f"add {owner} to --fields, or leave {option.flag} out"
            raise UsageError(f"{option.flag}: belongs to the field {owner}, which --fields leaves out", fix=fix)
        for field in takers:
            attribute = option.targets[field]
            value = values[name]
            value = list(dict.fromkeys(value)) if isinstance(value, list) else value
            settings[field][attribute.name] = value
    fields = {name: registry.settings_of(name, field_values) for name, field_values in settings.items()}
    return Requested(fields=fields, kinds=kinds, exact=wanted is not None, words=_words(options, values))


def _words(options: Mapping[str, _Option], values: Mapping[str, Any]) -> str:
    """Options as they were given: ``--flip --bucket 64x96``."""
    words = list[str]()
    for flag, value in ((option.flag, values[name]) for name, option in options.items()):
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.lstrip('-')}")
        elif value is not None:
            words += [word for item in (value if isinstance(value, list) else [value]) for word in (flag, str(item))]
    return shlex.join(words)

"""Options of fields, builds and exports: declared once, as fields of a dataclass, and checked here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, TypeVar, cast

from latentcache.errors import UsageError, option
from latentcache.value import Value, typed_parts

S = TypeVar("S")


def setting(
    text: str,
    *,
    flag: str = "",
    metavar: str = "",
    choices: Sequence[str] = (),
    min: int | None = None,
    max: int | None = None,
    parse: Callable[[str], Any] | None = None,
    default: Any = None,
    asks: bool = True,
) -> Any:
    """A field of a settings dataclass, an option of the command line; ``parse`` makes the value of a word.

    ``asks`` is False for an option of another field that this one takes too: alone it does not ask for this field.
    """
    known = {
        "flag": flag,
        "asks": None if asks else False,
        "metavar": metavar,
        "choices": tuple(choices),
        "min": min,
        "max": max,
        "parse": parse,
    }
    metadata = {"help": text, **{name: value for name, value in known.items() if value not in (None, "", ())}}
    return field(default=default, metadata=metadata)


class Settings(Value):
    """Options of a recipe or a command, made with :func:`setting`; checked by :func:`checked`."""

    def __repr__(self) -> str:
        """Show only the options that differ from their defaults."""
        values = [(option, getattr(self, option.name)) for option in fields(self)]
        shown = ", ".join(f"{option.name}={value!r}" for option, value in values if value != option.default)
        return f"{type(self).__name__}({shown})"


def followed(settings: S, **cached: Any) -> S:
    """Settings with values of the cache in place of those that were not given."""
    values = {name: value for name, value in cached.items() if getattr(settings, name) is None}
    return cast("S", replace(cast("Any", settings), **values))


def checked(kind: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a settings class: texts are parsed, types and what :func:`setting` says are checked."""
    known = {option.name: option.metadata for option in fields(kind)}
    return {name: _checked(kind, name, value, known.get(name, {})) for name, value in arguments.items()}


def _checked(kind: Any, name: str, value: Any, about: Mapping[str, Any]) -> Any:
    """One argument; ``about`` is the metadata of its setting, empty if there is no such setting."""
    parse, choices, least, most = about.get("parse"), about.get("choices", ()), about.get("min"), about.get("max")
    if parse and isinstance(value, list | tuple):
        value = [parse(word) if isinstance(word, str) else word for word in value]
    elif parse and isinstance(value, str):
        value = parse(value)
    try:
        value = typed_parts(kind, {name: value})[name]
    except TypeError as error:
        raise UsageError(str(error), fix=f"leave {name} out{_allowed(about)}") from error
    for item in [] if value is None else value if isinstance(value, tuple) else [value]:
        bounds = f"{least} {'or more' if most is None else f'to {most}'}"
        if choices and item not in choices:
            problem = "not a known value"
        elif least is not None and not least <= item <= (item if most is None else most):
            problem = f"must be {bounds}"
        else:
            continue
        raise UsageError(
            problem,
            argument=name,
            value=item,
            fix=f"leave {option(name)} out{_allowed(about)}",
        )
    return value


def _allowed(about: Mapping[str, Any]) -> str:
    words = " or ".join(about.get("choices", ())) or about.get("metavar", "")
    return f", or give {words}" if words else ""


def flat_settings(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"geometry.resolutions": [512], ...}``: one value per setting of a recipe's JSON."""
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        flat |= flat_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def differing(cached: Mapping[str, Any], requested: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, cached, requested) of the settings that differ; None where one side lacks a setting."""
    pairs = [(name, cached.get(name), requested.get(name)) for name in {**cached, **requested}]
    return [pair for pair in pairs if pair[1] != pair[2]]

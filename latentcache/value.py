"""The base class of immutable values with named parts."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, dataclass_transform, get_args, get_origin, get_type_hints

_hints = cache(get_type_hints)
#: Type of an annotation -> types of values that are accepted for it, and what converts them.
_ACCEPTED: Mapping[Any, tuple[Any, Callable[[Any], Any]]] = {
    str: ((str, PathLike), fspath),
    Path: ((str, PathLike), Path),
    int: (Integral, int),
    float: (Real, float),
}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Value:
    """Base class of frozen dataclasses with keyword arguments.

    Args:
        eq: False: an instance equals itself alone, for parts such as arrays that ``==`` compares by element.
    """

    def __init_subclass__(cls, *, eq: bool = True) -> None:
        dataclass(frozen=True, kw_only=True, eq=eq, repr=False)(cls)

    def __repr__(self) -> str:
        shown = (f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)  # type: ignore[arg-type]
        return f"{type(self).__qualname__}({', '.join(shown)})"


def _each(inner: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The type of each of the values of a tuple."""
    return inner[:1] * count if inner[1:] == (Ellipsis,) else inner


def typed(kind: Any, value: Any) -> Any:
    """A caller's value, or one from JSON, in the type of an annotation.

    A list becomes a tuple, text a path, a mapping or a list of all values a dataclass.

    Raises:
        TypeError: It has another type.
    """
    inner = get_args(kind)
    outer = get_origin(kind) or kind
    if NoneType in inner:
        others = tuple(member for member in inner if member is not NoneType)
        return None if value is None else typed(Union[others], value)  # noqa: UP007 - no | of a tuple
    if outer is tuple and isinstance(value, list | tuple) and len(_each(inner, len(value))) == len(value):
        return tuple(typed(part_kind, part) for part_kind, part in zip(_each(inner, len(value)), value, strict=True))
    if is_dataclass(kind) and isinstance(value, list | tuple) and len(value) == len(fields(kind)):
        value = {item.name: part for item, part in zip(fields(kind), value, strict=True)}
    if is_dataclass(kind) and isinstance(value, Mapping):
        return kind(**typed_parts(kind, value))  # type: ignore[operator]
    if outer in (Union, UnionType):
        for member in inner:
            with suppress(TypeError):
                return typed(member, value)
    accepted, convert = _ACCEPTED.get(outer, (kind if outer in (Union, UnionType) else outer, lambda same: same))
    if kind is Any or (isinstance(value, accepted) and (outer is bool or not isinstance(value, bool))):
        return value if kind is Any else convert(value)
    raise TypeError(f"must be {_plain_name(kind)}")


def typed_parts(kind: Any, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a dataclass, each as :func:`typed`; raises TypeError for an unknown one."""
    hints = _hints(kind)
    converted = dict[str, Any]()
    for name, value in parts.items():
        try:
            if name not in hints:
                raise TypeError(f"unknown; known are {', '.join(item.name for item in fields(kind))}")
            converted[name] = typed(hints[name], value)
        except TypeError as error:
            raise TypeError(f"{name}={reprlib.repr(value)}: {error}") from None
    return converted


def _plain_name(kind: Any) -> str:
    """The type that a caller gives for an annotation: ``list[int]``, ``dict``, ``str``."""
    if get_origin(kind) is tuple:
        return f"list[{_plain_name(get_args(kind)[0])}]"
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_plain_name, get_args(kind)))
    return "dict" if is_dataclass(kind) or get_origin(kind) is Mapping else getattr(kind, "__name__", str(kind))

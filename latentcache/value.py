"""The base class of immutable values with named parts."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, Union, dataclass_transform, get_args, get_origin, get_type_hints

_hints = cache(get_type_hints)
#: Type of an annotation -> types of values that are accepted for it, and what converts them.
_ACCEPTED: Mapping[Any, tuple[Any, Callable[[Any], Any]]] = {
    str: ((str, PathLike), fspath),
    Path: ((str, PathLike), Path),
    int: (Integral, int),
    float: (Real, float),
}


class _Parts(NamedTuple):
    names: Mapping[str, None] = {}
    shown: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    factories: Mapping[str, Callable[[], Any]] = {}


class _Signature:
    """The signature of a class for ``help`` and ``inspect.signature``, made when they ask."""

    def __get__(self, _: object, kind: type) -> inspect.Signature:
        parameters = []
        for one in fields(kind):
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            parameters.append(
                inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=one.type)
            )
        return inspect.Signature(parameters)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Value:
    """Base class of frozen dataclasses with keyword arguments; ``replace`` and ``fields`` of dataclasses work.

    Its methods serve every subclass. ``@dataclass(frozen=True)`` compiles methods for each class instead, 0.7 ms at
    each start of a program that has a hundred of them.

    Args:
        eq: False: an instance equals itself alone, for parts such as arrays that ``==`` compares by element.
    """

    __parts: ClassVar[_Parts] = _Parts()
    __signature__: ClassVar[_Signature] = _Signature()

    def __init_subclass__(cls, *, eq: bool = True) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)
        own = fields(cls)  # type: ignore[arg-type]
        cls.__parts = _Parts(
            names=dict.fromkeys(one.name for one in own),
            shown=tuple(one.name for one in own if one.repr),
            compared=tuple(one.name for one in own if one.compare),
            defaults={one.name: one.default for one in own if one.default is not MISSING},
            factories={one.name: one.default_factory for one in own if one.default_factory is not MISSING},
        )
        if not eq:
            cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__  # type: ignore[method-assign]

    def __init__(self, **given: Any) -> None:
        parts = self.__parts
        held = {**parts.defaults, **given}
        for name, make in parts.factories.items():
            if name not in held:
                held[name] = make()
        if held.keys() != parts.names.keys():
            wrong = [f"lacks {name}" for name in parts.names if name not in held]
            wrong += [f"has no {name}" for name in held if name not in parts.names]
            raise TypeError(f"{type(self).__qualname__} {', '.join(wrong)}")
        vars(self).update(held)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the parts."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__qualname__}.{name} cannot be changed: use dataclasses.replace()")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__compared() == other.__compared()

    def __hash__(self) -> int:
        return hash(self.__compared())

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={vars(self)[name]!r}" for name in self.__parts.shown)
        return f"{type(self).__qualname__}({parameters})"

    def __compared(self) -> tuple[Any, ...]:
        return tuple(map(vars(self).__getitem__, self.__parts.compared))


def parsed(kind: Any, data: Any) -> Any:
    """A value of a type from JSON: tuples and dataclasses inside it are made again, other parts are as they are.

    Only a part that is None by default may be missing. A list makes a dataclass of its values in order.

    Raises:
        KeyError, TypeError, ValueError: A part is missing, unknown or of another form.
    """
    inner = get_args(kind)
    if NoneType in inner:
        return None if data is None else parsed(next(one for one in inner if one is not NoneType), data)
    if get_origin(kind) is tuple:
        return tuple(parsed(one, value) for one, value in zip(_each(inner, len(data)), data, strict=True))
    if not is_dataclass(kind):
        return data
    hints = _hints(kind)  # type: ignore[arg-type]
    optional = {one.name for one in fields(kind) if one.default is None}
    names = [one.name for one in fields(kind) if one.init]
    found = dict(zip(names, data, strict=True)) if isinstance(data, list) else data
    made = {name: parsed(hints[name], found[name]) for name in names if name in found or name not in optional}
    return kind(**{**found, **made})  # type: ignore[operator]


def _each(inner: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The type of each of the values of a tuple."""
    return inner[:1] * count if inner[1:] == (Ellipsis,) else inner


def typed(kind: Any, value: Any) -> Any:
    """A caller's value in the type of an annotation: a list becomes a tuple, text a path, a mapping a dataclass.

    Raises:
        TypeError: It has another type.
    """
    inner, outer = get_args(kind), get_origin(kind) or kind
    if NoneType in inner:
        others = tuple(one for one in inner if one is not NoneType)
        return None if value is None else typed(Union[others], value)  # noqa: UP007 - no | of a tuple
    if outer is tuple and isinstance(value, list | tuple) and len(_each(inner, len(value))) == len(value):
        return tuple(typed(one, part) for one, part in zip(_each(inner, len(value)), value, strict=True))
    if is_dataclass(kind) and isinstance(value, list | tuple) and len(value) == len(fields(kind)):
        value = {one.name: part for one, part in zip(fields(kind), value, strict=True)}
    if is_dataclass(kind) and isinstance(value, Mapping):
        return kind(**typed_parts(kind, value))  # type: ignore[operator]
    accepted, convert = _ACCEPTED.get(outer, (kind if outer in (Union, UnionType) else outer, lambda same: same))
    if kind is Any or (isinstance(value, accepted) and (outer is bool or not isinstance(value, bool))):
        return value if kind is Any else convert(value)
    raise TypeError(f"must be {_plain_name(kind)}")


def typed_parts(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a dataclass, each as :func:`typed`; raises TypeError for an unknown one."""
    hints, made = _hints(kind), dict[str, Any]()
    names = [one.name for one in fields(kind)]
    for name, value in given.items():
        try:
            if name not in names:
                raise TypeError(f"unknown; known are {', '.join(names)}")
            made[name] = typed(hints[name], value)
        except TypeError as error:
            raise TypeError(f"{name}={reprlib.repr(value)}: {error}") from None
    return made


def _plain_name(kind: Any) -> str:
    """The type that a caller gives for an annotation: ``list[int]``, ``dict``, ``str``."""
    if get_origin(kind) is tuple:
        return f"list[{_plain_name(get_args(kind)[0])}]"
    return "dict" if is_dataclass(kind) or get_origin(kind) is Mapping else getattr(kind, "__name__", str(kind))

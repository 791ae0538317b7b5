"""The base class of immutable values with named parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, ClassVar, NamedTuple, dataclass_transform, get_args, get_origin, get_type_hints

_hints = cache(get_type_hints)


class _Parts(NamedTuple):
    names: Mapping[str, None] = {}
    shown: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    factories: Mapping[str, Callable[[], Any]] = {}


class _Signature:
    """What ``help`` and ``inspect.signature`` say of a class, made when they ask."""

    def __get__(self, _: object, kind: type) -> inspect.Signature:
        told = []
        for one in fields(kind):
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            told.append(
                inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=one.type)
            )
        return inspect.Signature(told)


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
        told = ", ".join(f"{name}={vars(self)[name]!r}" for name in self.__parts.shown)
        return f"{type(self).__qualname__}({told})"

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
    said = dict(zip(names, data, strict=True)) if isinstance(data, list) else data
    made = {name: parsed(hints[name], said[name]) for name in names if name in said or name not in optional}
    return kind(**{**said, **made})  # type: ignore[operator]


def _each(inner: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The type of each of the values of a tuple."""
    return inner[:1] * count if inner[1:] == (Ellipsis,) else inner

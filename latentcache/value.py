"""The base class of immutable values with named parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, dataclass_transform


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

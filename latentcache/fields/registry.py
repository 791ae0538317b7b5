"""Finds field kinds: the package's own, those of installed packages, and ``module:name``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

from latentcache.errors import UsageError
from latentcache.fields.protocol import FieldKind
from latentcache.fields.settings import checked

GROUP = "latentcache.fields"
#: Environment variable that carries ``--field module:name`` to worker processes; separated by commas.
VARIABLE = "LATENTCACHE_FIELDS"
_OWN = {
    "latents": "latentcache.fields.latents:Latents",
    "input_ids": "latentcache.fields.input_ids:InputIds",
    "prompt_embeds": "latentcache.fields.prompt_embeds:PromptEmbeds",
    "pooled_prompt_embeds": "latentcache.fields.prompt_embeds:PooledPromptEmbeds",
    "prompt_ids": "latentcache.fields.prompt_embeds:PromptIds",
    "mask": "latentcache.fields.paired:Mask",
    **{name: f"latentcache.fields.paired:{name.upper()}" for name in ("control", "control_2", "control_3")},
}


def load(target: str) -> Any:
    """The object that ``module:name`` names; raises UsageError."""
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            "cannot be imported",
            argument="field",
            value=target,
            why=str(error),
            fix="--field=MODULE:CLASS, importable from here",
        ) from error


def register(targets: Iterable[str]) -> None:
    """Make kinds known to this process and to the workers it starts; raises UsageError."""
    for target in targets:
        load(target)
        os.environ[VARIABLE] = ",".join(dict.fromkeys([*_registered(), target]))
    field_kinds.cache_clear()


@cache
def field_kinds() -> dict[str, FieldKind]:
    """All kinds that are known, by field name; this package's own first."""
    from importlib.metadata import entry_points  # 10 ms

    installed = (point.value for point in entry_points(group=GROUP))
    kinds = {name: _kind(target) for name, target in _OWN.items()}
    for kind in map(_kind, [*installed, *_registered()]):
        kinds.setdefault(kind.name, kind)
    return kinds


def _registered() -> list[str]:
    return [target for target in os.environ.get(VARIABLE, "").split(",") if target]


@cache
def _kind(target: str) -> FieldKind:
    kind: Any = load(target)
    return kind() if isinstance(kind, type) else kind  # type: ignore[no-any-return]


def field_kind(name: str) -> FieldKind | None:
    """The kind of a field; None if its package is not installed. Kinds of this package are imported one by one."""
    return _kind(_OWN[name]) if name in _OWN else field_kinds().get(name)


def settings_of(field: str, raw: Any) -> Any:
    """Settings of a field as the dataclass of its kind, checked; None and settings of unknown kinds stay."""
    kind = field_kind(field)
    if kind is None or raw is None or not is_dataclass(kind.settings):
        return raw
    if isinstance(raw, kind.settings):
        raw = {option.name: getattr(raw, option.name) for option in fields(raw)}
    if not isinstance(raw, Mapping):
        raise UsageError(f"fields={{{field!r}: {raw!r}}}: must be dict", fix=f"fields={{{field!r}: {{}}}}")
    return kind.settings(**checked(kind.settings, raw))

"""Whether a token cache was made with the tokenizer of a model, and if not, in which part they differ.

Decides by content: the parts of a tokenizer that move ids, and its chat template where the cache holds conversations
and was given no template of its own. Guarantee: neither a tokenizer library nor a network is asked. How texts end and
which tokens carry loss is the build's word and no tokenizer's; a whole recipe is compared in these too. Cost: half a
second of CPU for 128 000 entries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentcache.errors import ModelNotFoundError, StaleCacheError, UnsupportedModelError
from latentcache.identity.template import template_hash
from latentcache.identity.tokenizer import differing_parts, tokenizer_fingerprint, tokenizer_parts
from latentcache.identity.tokenizer_files import JSON_NAME, LoadedTokenizer, from_loaded, read_tokenizer
from latentcache.store.token_generation import TokenGeneration
from latentcache.token_recipe import TokenRecipe, short, token_differences

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
#: Roles that a text needs, by the field of the recipe that asks for them.
_ENDS = (("add_bos", "bos_id", "bos_token"), ("add_eos", "eos_id", "eos_token"))
#: A loaded tokenizer has roles that its class names and its files do not: they move no id.
_ROLES = "special_tokens"


def refuse_other(generation: TokenGeneration, wanted: TokenRecipe | str | os.PathLike[str] | Any, where: str) -> None:
    """Refuse a cache of another tokenizer than the one that is named.

    Args:
        generation: Of the cache.
        wanted: A recipe; the fingerprint of a tokenizer, 32 hex digits; a ``tokenizer.json`` or the folder of one;
            or a tokenizer of ``transformers`` that is loaded.
        where: The cache, for messages.

    Raises:
        StaleCacheError: They differ; the fields are named.
        ModelNotFoundError: There is nothing at this path.
        UnsupportedModelError: It is no tokenizer that can be compared.
    """
    different = token_mismatch(generation.recipe, _made(generation), wanted)
    if not different:
        return
    changes = ", ".join(f"{name}: {short(was)} -> {short(now)}" for name, was, now in different)
    raise StaleCacheError(
        f"{where} was made with another tokenizer or recipe",
        where=where,
        why=changes,
        fix="build the cache again with the tokenizer of the model, or load the model that fits",
        differences=tuple((name, str(was), str(now)) for name, was, now in different),
    )


def token_mismatch(cached: TokenRecipe, made: Mapping[str, Any], wanted: Any) -> list[tuple[str, Any, Any]]:
    """(field, as it is cached, as it is asked for) of all that differs.

    Args:
        cached: Recipe of the cache.
        made: Its provenance: ``parts`` of its tokenizer, and the path of its ``chat_template`` where one was given.
        wanted: As in :func:`refuse_other`.

    Raises:
        ModelNotFoundError: There is nothing at this path.
        UnsupportedModelError: It is no tokenizer that can be compared.
    """
    if isinstance(wanted, TokenRecipe):
        return token_differences(cached, wanted)
    if isinstance(wanted, str) and _FINGERPRINT.fullmatch(wanted) and not Path(wanted).exists():
        return [("tokenizer", cached.tokenizer, wanted)] if wanted != cached.tokenizer else []
    is_path = isinstance(wanted, str | os.PathLike)
    found = _read(Path(wanted).expanduser()) if is_path else from_loaded(wanted)
    different = _parts(cached, dict(made.get("parts") or {}), found, roles=is_path)
    if cached.chat_template and not made.get("chat_template"):
        now = template_hash(found.chat_template, dict(cached.template_options))
        different += [("chat_template", cached.chat_template, now)] if now != cached.chat_template else []
    return different


def _parts(
    cached: TokenRecipe, parts: Mapping[str, str], found: LoadedTokenizer, *, roles: bool
) -> list[tuple[str, Any, Any]]:
    """The parts that differ, or the whole where the parts were not written down."""
    now = tokenizer_parts(found.json, found.special)
    fingerprint = tokenizer_fingerprint(now)
    if fingerprint == cached.tokenizer:
        return []
    if not parts:
        return [("tokenizer", cached.tokenizer, fingerprint)]
    different: list[tuple[str, Any, Any]] = [
        part for part in differing_parts(parts, now) if roles or part[0] != _ROLES
    ]
    if not roles and not cached.chat_template:
        ends = [(name, getattr(cached, name), found.id_of(role)) for said, name, role in _ENDS if _asks(cached, said)]
        different += [end for end in ends if end[1] != end[2]]
    return different


def _asks(recipe: TokenRecipe, field: str) -> bool:
    return bool(getattr(recipe, field))


def _made(generation: TokenGeneration) -> Mapping[str, Any]:
    made = generation.manifest.get("provenance")
    return made if isinstance(made, Mapping) else {}


def _read(path: Path) -> LoadedTokenizer:
    """The tokenizer at a path.

    Raises:
        ModelNotFoundError: There is nothing.
        UnsupportedModelError: It needs a conversion, or is no tokenizer.
    """
    advice = "give its folder, its fingerprint (32 hex digits), or the tokenizer that you loaded"
    if not path.exists():
        raise ModelNotFoundError(f"there is no tokenizer at {path}", where=str(path.absolute()), fix=advice)
    found = read_tokenizer(path)
    if found is None:
        raise UnsupportedModelError(f"{path} has no {JSON_NAME}", where=str(path), fix=advice)
    return found

"""Compare a model's tokenizer with the one that a cache was made with, by content, without a tokenizer library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.errors import ModelNotFoundError, UnsupportedModelError
from latentcache.identity.tokenizer import (
    LoadedTokenizer,
    differing_parts,
    from_loaded,
    read_tokenizer,
    template_hash,
    tokenizer_fingerprint,
    tokenizer_parts,
)

if TYPE_CHECKING:
    from latentcache.fields.input_ids import InputIdsRecipe

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
#: Recipe setting -> the role whose id it needs: how a text begins and ends.
_ENDS = (("add_bos", "bos_id", "bos_token"), ("add_eos", "eos_id", "eos_token"))
_ADVICE = "give its folder, its fingerprint (32 hex digits), or the tokenizer that you loaded"


def tokenizer_differences(
    cached: InputIdsRecipe, provenance: Mapping[str, Any], wanted: Any
) -> list[tuple[str, Any, Any]]:
    """(setting, cached, wanted) of everything that differs.

    ``wanted`` is the fingerprint of a tokenizer (32 hex digits); a ``tokenizer.json`` or its folder; or a loaded
    tokenizer of transformers. ``provenance`` of the cache has the ``parts`` of its tokenizer.
    """
    if isinstance(wanted, str) and _FINGERPRINT.fullmatch(wanted) and not Path(wanted).exists():
        return [("tokenizer", cached.tokenizer, wanted)] if wanted != cached.tokenizer else []
    is_path = isinstance(wanted, str | os.PathLike)
    found = _read(Path(wanted).expanduser()) if is_path else from_loaded(wanted)
    parts, now = dict(provenance.get("parts") or {}), tokenizer_parts(found.json, found.special)
    fingerprint, different = tokenizer_fingerprint(now), list[tuple[str, Any, Any]]()
    if fingerprint != cached.tokenizer:
        different += differing_parts(parts, now) if parts else [("tokenizer", cached.tokenizer, fingerprint)]
        if parts and not is_path:
            # A loaded tokenizer has roles that its class names and its files lack; they move no id, but for ends.
            different = [one for one in different if one[0] != "special_tokens"]
            used = [] if cached.chat_template else [end for end in _ENDS if getattr(cached, end[0])]
            ends = [(name, getattr(cached, name), found.id_of(role)) for _, name, role in used]
            different += [end for end in ends if end[1] != end[2]]
    if cached.chat_template and not provenance.get("chat_template"):
        template = template_hash(found.chat_template, dict(cached.template_options))
        different += [("chat_template", cached.chat_template, template)] if template != cached.chat_template else []
    return different


def _read(path: Path) -> LoadedTokenizer:
    if not path.exists():
        raise ModelNotFoundError(f"there is no tokenizer at {path}", where=str(path.absolute()), fix=_ADVICE)
    found = read_tokenizer(path)
    if found is None:
        raise UnsupportedModelError(f"{path} has no tokenizer.json", where=str(path), fix=_ADVICE)
    return found

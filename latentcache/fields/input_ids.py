"""The recipe of a token cache: what turned records into ids and labels, its canonical JSON and its id.

Decides what makes a stored document reusable. Everything here moves ids or labels; what only decides how they are
served (lengths, packing, padding, overflow) belongs to a view, and who did the work (engine, library versions,
worker count, batch size) is provenance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from latentcache.errors import RecipeError
from latentcache.identity.content import json_hash
from latentcache.identity.key import RECIPE_BYTES
from latentcache.identity.tokenizer import differing_parts

#: Bumped when the same record and tokenizer would give other ids or labels.
TOKEN_RULE = 1
#: Which tokens carry loss. ``all``: every one. ``assistant``: what assistants say, with the token that ends a turn.
LOSSES = ("all", "assistant")


@dataclass(frozen=True, kw_only=True)
class TokenRecipe:
    """What a token cache holds. Two equal recipes give equal ids and labels for equal records."""

    tokenizer: str
    """Hex fingerprint of the tokenizer's content (``identity.tokenizer``), without truncation and padding state."""
    num_ids: int
    """One more than the largest id, added tokens included: decides uint16 or uint32."""
    chat_template: str = ""
    """Hex hash of the template's text; empty for plain text."""
    template_options: tuple[tuple[str, str], ...] = ()
    """Sorted (name, canonical JSON) of what is passed to the template beside the messages."""
    loss: str = "all"
    add_bos: bool = False
    """Whether a plain text begins with the token that begins a text; chat templates say so themselves."""
    add_eos: bool = True
    """Whether a plain text ends with the token that ends a text."""
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    """Only the default of the views: recorded, and no part of the identity."""
    split_control: bool = True
    """Whether control strings that stand in content (``<|endoftext|>`` in a blog post) are taken as plain text."""
    rule: int = TOKEN_RULE

    @property
    def dtype(self) -> str:
        """Storage type of ids: ``uint16`` where every id fits, else ``uint32``."""
        return "uint16" if self.num_ids <= 1 << 16 else "uint32"

    def identity(self) -> dict[str, Any]:
        """What enters the id, as JSON values."""
        return {name: value for name, value in self.as_json().items() if name != "pad_id"}

    @cached_property
    def recipe_id(self) -> bytes:
        """16 bytes; the first 8 are in every key, all 16 in every entry header."""
        return json_hash({"tokens": self.identity()})

    @property
    def key_part(self) -> bytes:
        """The bytes of the id that enter a key."""
        return self.recipe_id[:RECIPE_BYTES]

    def as_json(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return asdict(self) | {"template_options": [list(pair) for pair in self.template_options]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TokenRecipe:
        """Inverse of :meth:`as_json`.

        Raises:
            RecipeError: A part is missing or has a field this version does not know.
        """
        try:
            options = tuple((str(name), str(value)) for name, value in data["template_options"])
            return cls(**{**data, "template_options": options})
        except (KeyError, TypeError, ValueError) as error:
            raise RecipeError(
                "the recipe in the manifest cannot be read", why=str(error), fix="build the cache again"
            ) from error


def token_differences(
    cached: TokenRecipe,
    requested: TokenRecipe,
    *,
    cached_parts: Mapping[str, str] | None = None,
    parts: Mapping[str, str] | None = None,
) -> list[tuple[str, Any, Any]]:
    """The fields of the identity in which two recipes differ: (field, cached, requested).

    Args:
        cached: Of the cache.
        requested: What is asked for.
        cached_parts: Hash of each part of the tokenizer of ``cached``, where they are known.
        parts: Of ``requested``. With both, a tokenizer that differs is given by its parts that differ.
    """
    mine, theirs = cached.identity(), requested.identity()
    names = [field.name for field in fields(TokenRecipe) if field.name in mine]
    different = [(name, mine[name], theirs[name]) for name in names if mine[name] != theirs[name]]
    found = differing_parts(cached_parts, parts) if cached_parts and parts else []
    return [one for row in different for one in (found if found and row[0] == "tokenizer" else [row])]


def short(value: Any) -> str:
    """A value of a recipe for people: of a hash the first 8 digits."""
    text = value if isinstance(value, str) else repr(value)
    return text[:8] if len(text) == 32 else text or "none"

"""Token ids back to text, for people: special tokens stay visible and apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from latentcache.encoders.hub import is_stub
from latentcache.errors import UnsupportedModelError
from latentcache.fields.input_ids import InputIdsRecipe, InputIdsSettings
from latentcache.fields.protocol import DescribeContext, Described

#: Names of the ids of the stub tokenizer above the bytes.
_STUB = {256: "<bos>", 257: "<eos>", 258: "<pad>", 259: "<turn>", 260: "<end>"}
Pieces = list[tuple[str, bool]]
"""Texts, each with True if it is a special token."""


def decoder(recipe: InputIdsRecipe, provenance: Mapping[str, Any]) -> Callable[[Sequence[int]], Pieces]:
    """What decodes ids to pieces of text, with the tokenizer that the cache records; nothing is downloaded.

    Raises:
        LatentcacheError: The tokenizer is not here, or it is not the one that made the ids.
    """
    word = str(provenance.get("tokenizer", ""))
    if is_stub(word):
        return lambda ids: _pieces(ids, _STUB, lambda some: bytes(some).decode("utf-8", "replace"))
    from latentcache.encoders.text.describe import describe

    context = DescribeContext(recipe=recipe, provenance=provenance, check=True)
    described: Described = describe(InputIdsSettings(), context)
    if not isinstance(described.recipe, InputIdsRecipe) or described.recipe.tokenizer != recipe.tokenizer:
        what = f"the tokenizer {word} is not the one that made these ids"
        raise UnsupportedModelError(what, where=word, fix="build the cache again with it")
    from tokenizers import Tokenizer

    opened: Any = Tokenizer.from_str(described.producer["tokenizer"])
    special = {number: token.content for number, token in opened.get_added_tokens_decoder().items() if token.special}
    return lambda ids: _pieces(ids, special, lambda some: str(opened.decode(some, skip_special_tokens=False)))


def _pieces(ids: Sequence[int], special: Mapping[int, str], decode: Callable[[list[int]], str]) -> Pieces:
    """Special tokens one by one, and the text between them decoded together."""
    pieces = Pieces()
    for is_special, group in groupby(map(int, ids), key=lambda number: number in special):
        some = list(group)
        pieces += [(special[number], True) for number in some] if is_special else [(decode(some), False)]
    return pieces

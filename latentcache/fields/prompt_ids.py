"""Token ids of captions: what each tokenizer of a pipeline gives, with its attention mask.

Trainers that have no tokenizer at hand, or write text caches with masks, need them beside the embeddings. An item is
(2, tokens) int32: ids in the first row, 1 for a token of the caption and 0 for padding in the second. The tokenizers
are side by side, in the order of the pipeline: ``tokenizer``, ``tokenizer_2``, ``tokenizer_3``. Padding is that of
``encode_prompt``; ids that it pads to the longest text of a call are padded to the full length here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from latentcache.fields.prompt_embeds import PromptEmbeds, PromptRecipe
from latentcache.fields.protocol import Array, FieldSpec
from latentcache.fields.table import SampleTable


class PromptIdsRecipe(PromptRecipe):
    """The settings that decide the ids of a caption: of a :class:`PromptRecipe` those of the tokenizers."""

    id_name = "prompt_ids"
    output: str = "prompt_ids"
    fingerprint: str = ""
    config: str = ""
    width: int = 2
    compute_dtype: str = ""
    storage_dtype: str = "int32"
    lengths: tuple[int, ...] = ()
    """Ids of each tokenizer, padding included."""

    @property
    def spec(self) -> FieldSpec:
        """Storage and collation."""
        return replace(super().spec, dims=("ids and mask", "tokens"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Ids and mask of all tokenizers."""
        return 2, sum(self.lengths)

    def split(self, item: Array) -> list[Array]:
        """Return (..., 2, tokens) of each tokenizer, from ids as a cache or a batch holds them."""
        return np.split(item, np.cumsum(self.lengths)[:-1], axis=-1)


class PromptIds(PromptEmbeds):
    """Token ids and attention masks of captions."""

    name = "prompt_ids"
    kind = 4
    follows = PromptEmbeds.name
    recipe = PromptIdsRecipe
    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    encoder = "tokenizer"
    describer = "latentcache.encoders.prompt.describe:describe_ids"
    producer = "latentcache.encoders.prompt.ids:IdsProducer"

    def resolved(self, fields: Mapping[str, Any], samples: SampleTable, *, held: bool = False) -> Any:
        """If asked for, if the cache has it, and in a build for a trainer; as the embeddings then."""
        shown = fields.get(PromptEmbeds.name)
        asked = getattr(shown, "prompt_ids", None)
        if asked is None:
            asked = held or self.name in fields or getattr(fields.get("latents"), "like", None) is not None
            return super().resolved(fields, samples, held=held) if asked else None
        return super().resolved(fields, samples, held=held) or shown if asked else None

    def describe(self, recipe: PromptRecipe, provenance: Mapping[str, Any]) -> dict[str, str]:
        """Lengths."""
        assert isinstance(recipe, PromptIdsRecipe)
        return {"token ids": f"{recipe.pipeline}, {' + '.join(map(str, recipe.lengths))} with their masks"}

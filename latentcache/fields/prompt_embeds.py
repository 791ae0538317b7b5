"""Embeddings of captions: what a diffusion pipeline makes of a prompt, one item per distinct caption.

``prompt_embeds`` is the sequence that a model attends to; ``pooled_prompt_embeds`` is the vector that some models get
beside it. Both are what the ``encode_prompt`` of the pipeline's class returns. Padding is stored only if the model
attends to it; else an item has its true length, and the loader pads with zeros to the length of the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import RecipeError, UsageError
from latentcache.fields.noise import compare_floats, is_finite
from latentcache.fields.protocol import (
    Difference,
    FieldKind,
    FieldPlan,
    FieldRecipe,
    FieldSpec,
    Group,
    ReadSpec,
    WorkSize,
    recipe_id,
    setting,
)
from latentcache.fields.registry import load
from latentcache.fields.table import Rejected, SampleTable

STORAGE_DTYPES = ("float16", "bfloat16", "float32")
COMPUTE_DTYPES = ("auto", *STORAGE_DTYPES)
#: Value of ``--text-encoder`` that builds no embeddings.
NONE = "none"
#: Increased if the same caption and pipeline give other embeddings.
PROMPT_RULE = 1
_FOLLOWED = "latentcache.encoders.prompt.locate:text_settings"
#: Cost of a caption beside its characters: every pipeline adds some tokens.
_FIXED_COST = 32


@dataclass(frozen=True, kw_only=True)
class PromptRecipe:
    """The settings that decide the embeddings of a caption. Two equal recipes give equal embeddings."""

    output: str
    """``prompt_embeds`` or ``pooled_prompt_embeds``."""
    pipeline: str
    """Class whose ``encode_prompt`` defines the values, such as ``FluxPipeline``; ``stub``."""
    fingerprint: str
    """Hex hash of the weights of the text encoders in use."""
    config: str
    """Hex hash of their configurations."""
    tokenizer: str
    """Hex hash of the files of their tokenizers."""
    width: int
    """Values of one token, or of the vector."""
    length: int
    """Tokens that a model gets, padding included; 1 for a vector."""
    trimmed: bool = False
    """True: padding is not stored."""
    arguments: tuple[tuple[str, str], ...] = ()
    """Sorted (name, canonical JSON): what ``encode_prompt`` gets beside the text, and libraries that clean it."""
    compute_dtype: str = "float32"
    storage_dtype: str = "bfloat16"
    rule: int = PROMPT_RULE

    @property
    def is_sequence(self) -> bool:
        """True for one vector per token."""
        return self.output == "prompt_embeds"

    @property
    def spec(self) -> FieldSpec:
        """Storage and collation."""
        if not self.is_sequence:
            return FieldSpec(dtype=self.storage_dtype, dims=("width",))
        if not self.trimmed:
            return FieldSpec(dtype=self.storage_dtype, dims=("tokens", "width"))
        return FieldSpec(
            dtype=self.storage_dtype, dims=("tokens", "width"), ragged=True, collate="pad", length=self.length
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one item; -1 is its true length."""
        if not self.is_sequence:
            return (self.width,)
        return (-1 if self.trimmed else self.length, self.width)

    @property
    def read_time(self) -> ReadSpec:
        """Nothing."""
        return ReadSpec()

    def identity(self) -> dict[str, Any]:
        """All of the recipe."""
        return self.as_json()

    @cached_property
    def recipe_id(self) -> bytes:
        """16 bytes of the identity."""
        return recipe_id("prompt_embeds", self.identity())

    def as_json(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return asdict(self) | {"arguments": [list(pair) for pair in self.arguments]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PromptRecipe:
        """Inverse of :meth:`as_json`.

        Raises:
            RecipeError: A part is missing or has a field that this version does not have.
        """
        try:
            arguments = tuple((str(name), str(value)) for name, value in data["arguments"])
            return cls(**{**data, "arguments": arguments})
        except (KeyError, TypeError, ValueError) as error:
            raise RecipeError(
                "the recipe in the manifest cannot be read", why=str(error), fix="build the cache again"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """Options of the recipe of embeddings; None means "not given"."""

    text_encoder: str | None = setting(
        "Pipeline whose text encoders encode the captions: a diffusers folder, a hub id, stub, or none "
        "[default: --model, if it is a pipeline]",
        metavar="MODEL",
    )
    text_length: int | None = setting("Tokens of a prompt [default: of the pipeline]", metavar="N", min=1)
    text_compute_dtype: str | None = setting("Precision of text encoders [default: auto]", choices=COMPUTE_DTYPES)
    text_storage_dtype: str | None = setting(
        "Type of stored embeddings [default: float16 for CLIP alone, else bfloat16]", choices=STORAGE_DTYPES
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value, choices = getattr(self, one.name), one.metadata.get("choices")
            if choices and value is not None and value not in choices:
                flag = f"--{one.name.replace('_', '-')}"
                raise UsageError(f"{flag}={value}: not a known value", fix=f"{flag} {'|'.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSettings:
    """The settings of ``prompt_embeds``, which has the options of the command line."""

    text_encoder: str | None = field(default=None, metadata={"flag": None})
    text_length: int | None = field(default=None, metadata={"flag": None})
    text_compute_dtype: str | None = field(default=None, metadata={"flag": None})
    text_storage_dtype: str | None = field(default=None, metadata={"flag": None})


class PromptEmbeds(FieldKind):
    """Embeddings of captions, one vector per token."""

    name = "prompt_embeds"
    kind = 2
    inputs = ("caption",)
    settings: type[Any] = PromptSettings
    packing = "block"
    columns = {"cut": ("<u4", ())}  # noqa: RUF012 - never written
    work = WorkSize(unit_cost=1 << 18, unit_jobs=512, batch_cost=1 << 16, batch_items=128)
    encoder = "text encoder"
    describer = "latentcache.encoders.prompt.describe:describe_sequence"
    producer = "latentcache.encoders.prompt.producer:PromptProducer"

    def asked(self, fields: Mapping[str, Any], samples: SampleTable) -> Any:
        """As given; else the text encoders of the pipeline that encodes the images, if there are captions."""
        said = fields.get("prompt_embeds") or PromptSettings()
        if said.text_encoder == NONE:
            return None
        model = said.text_encoder or getattr(fields.get("latents"), "model", None)
        if model is None or "caption" not in samples.inputs:
            return fields.get(self.name)
        if said.text_encoder is None and not _has_text(samples):
            return fields.get(self.name)
        return load(_FOLLOWED)(self.name, model, said) or fields.get(self.name)

    def recipe_from_json(self, data: Mapping[str, Any]) -> PromptRecipe:
        """See :meth:`FieldKind.recipe_from_json`."""
        return PromptRecipe.from_json(data)

    def plan(self, samples: SampleTable, recipe: FieldRecipe) -> FieldPlan:
        """One item per sample with a caption; the content of a caption is known before it is encoded."""
        assert isinstance(recipe, PromptRecipe)
        caption = samples.inputs["caption"]
        assert caption.text is not None
        size = np.diff(np.asarray(caption.text.ends), prepend=0)
        there = (size > 0) | (np.asarray(caption.file) >= 0)
        rows, group = np.flatnonzero(there).astype(np.int32), (Group(label="", shape=recipe.shape),)
        zeros = np.zeros(len(rows), dtype=np.uint8)
        return FieldPlan(
            sample=rows,
            group=np.zeros(len(rows), dtype=np.int32),
            variant=zeros,
            cost=size[rows].astype(np.int64) + _FIXED_COST,
            key=self.keys(self.content(samples)[rows], zeros, zeros, group, recipe),
            groups=group,
            rejected=tuple((row, self._without(samples, row)) for row in np.flatnonzero(~there).tolist()),
        )

    def _without(self, samples: SampleTable, row: int) -> Rejected:
        hint = "write one beside the image (an empty .txt is an empty prompt), or give --default-caption TEXT"
        return Rejected(
            name=samples.names[row],
            reason="no-caption",
            detail="it has no caption to encode",
            hint=hint,
            target=self.name,
        )

    def check(self, group: Group, payload: NDArray[Any], row: Mapping[str, Any], recipe: FieldRecipe) -> str:
        """Values that are not finite, and more tokens than the model gets."""
        assert isinstance(recipe, PromptRecipe)
        if recipe.trimmed and not 0 < len(payload) <= recipe.length:
            return f"{len(payload)} tokens, expected 1 to {recipe.length}"
        return "" if is_finite(payload) else "not finite"

    def compare(
        self, stored: NDArray[Any], made: NDArray[Any], noise: Mapping[str, Any], recipe: FieldRecipe
    ) -> Difference:
        """Different if beyond the noise of the build; see ``fields.noise``."""
        assert isinstance(recipe, PromptRecipe)
        return compare_floats(
            stored, made, noise, compute_dtype=recipe.compute_dtype, storage_dtype=recipe.storage_dtype
        )

    def describe(self, recipe: FieldRecipe, provenance: Mapping[str, Any]) -> dict[str, str]:
        """Pipeline, model and shape."""
        assert isinstance(recipe, PromptRecipe)
        tokens = f"{recipe.length} x " if recipe.is_sequence else ""
        padding = "" if not recipe.is_sequence else ", without padding" if recipe.trimmed else ", with padding"
        shape = f"{tokens}{recipe.width}, {recipe.storage_dtype}{padding}"
        return {
            "text encoder": f"{recipe.pipeline} {recipe.fingerprint[:8]}, {shape}",
            "model": str(provenance.get("text_encoder", "")),
        }

    def numbers(self, recipe: FieldRecipe, columns: Mapping[str, Any]) -> dict[str, int]:
        """Captions that are longer than the model takes."""
        return {"truncated_captions": int(np.count_nonzero(np.asarray(columns["cut"])))}


class PooledPromptEmbeds(PromptEmbeds):
    """Embeddings of captions, one vector per caption."""

    name = "pooled_prompt_embeds"
    kind = 3
    settings = PooledSettings
    describer = "latentcache.encoders.prompt.describe:describe_vector"


def _has_text(samples: SampleTable) -> bool:
    text = samples.inputs["caption"].text
    return text is not None and len(text.ends) > 0 and int(text.ends[-1]) > 0

"""Embeddings and token ids of captions: what a pipeline makes of a prompt, an item per distinct caption and variant.

``prompt_embeds`` is the sequence that a model attends to; ``pooled_prompt_embeds`` is the vector that some models get
beside it. Both are what the ``encode_prompt`` of the pipeline's class returns. Padding is stored only if the model
attends to it. Otherwise the loader pads with zeros to the length of the recipe. Prompts that belong to no sample, the
empty and the negative one, are variants of the first sample. Their keys are their own.

``prompt_ids`` has the token ids of each tokenizer, with its attention mask. Trainers that have no tokenizer at hand,
or write text caches with masks, need them beside the embeddings. An item is (2, tokens) int32: ids in the first row,
1 for a token of the caption and 0 for padding in the second. The tokenizers are side by side, in the order of the
pipeline: ``tokenizer``, ``tokenizer_2``, ``tokenizer_3``. Padding is that of ``encode_prompt``; ids that it pads to
the longest text of a call are padded to the full length here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import count_of
from latentcache.fields.captions import BETWEEN, DEFAULT_VARIANTS, MOST_VARIANTS, CaptionVariants, captions_at_most
from latentcache.fields.dtypes import FLOATS
from latentcache.fields.protocol import (
    Array,
    FieldKind,
    FieldPlan,
    FieldRecipe,
    FieldSpec,
    Group,
    Ints,
    ReadSpec,
    WorkSize,
)
from latentcache.fields.registry import load
from latentcache.fields.settings import Settings, setting
from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import canonical_json, content_hash

#: Value of ``--text-encoder`` that builds no embeddings.
NONE = "none"
#: Increased if the same caption and pipeline give other embeddings.
PROMPT_RULE = 1
_FOLLOWED = "latentcache.encoders.prompt.describe:text_settings"
#: Cost of a caption beside its characters: every pipeline adds some tokens.
_FIXED_COST = 32
#: Characters of a token, of captions that are padded to one length.
_PER_TOKEN = 4
#: Variant numbers of the prompts of a field.
EMPTY_VARIANT, NEGATIVE_VARIANT = 255, 254
_BLOCK = 1 << 14


class PromptRecipe(FieldRecipe):
    """The settings that decide the embeddings of a caption. Two equal recipes give equal embeddings."""

    id_name = "prompt_embeds"
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
    captions: CaptionVariants = field(default_factory=CaptionVariants)
    """The variants of a caption."""
    empty_prompt: bool = False
    """True: the empty prompt is stored beside the captions."""
    negative_prompt: str | None = None
    """Stored beside the captions."""

    @property
    def prompts(self) -> dict[str, int]:
        """Prompts of the field -> variant."""
        negative = {} if self.negative_prompt is None else {self.negative_prompt: NEGATIVE_VARIANT}
        return negative | ({"": EMPTY_VARIANT} if self.empty_prompt else {})

    def text(self, text: str, variant: int) -> str:
        """The text of a caption's variant, or of a prompt."""
        prompt = next((prompt for prompt, number in self.prompts.items() if number == variant), None)
        return self.captions.text(text, variant) if prompt is None else prompt

    @property
    def is_sequence(self) -> bool:
        """True for one vector per token."""
        return self.output != "pooled_prompt_embeds"

    @property
    def spec(self) -> FieldSpec:
        """Storage and collation."""
        dims = ("tokens", "width") if self.is_sequence else ("width",)
        padded: Any = {"ragged": True, "collate": "pad", "length": self.length} if self.trimmed else {}
        most: Any = {"variants": self.captions.number, "first_prompt": NEGATIVE_VARIANT}
        return FieldSpec(dtype=self.storage_dtype, dims=dims, **most, **padded)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one item; -1 is its true length."""
        return (-1 if self.trimmed else self.length, self.width) if self.is_sequence else (self.width,)

    @property
    def read_time(self) -> ReadSpec:
        """Texts of the variants."""
        texts = canonical_json(asdict(self.captions)).decode()
        return ReadSpec(prompts=self.prompts, texts=texts)

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a variant's embeddings, without the number of variants and the prompts."""
        shown = self.as_json()
        rule = self.captions.rule()
        for name in ("captions", "empty_prompt", "negative_prompt"):
            del shown[name]
        return shown | ({"captions": rule} if rule else {})


class PromptSettings(Settings):
    """Options of the recipe of embeddings."""

    text_encoder: str | None = setting(
        "Pipeline whose text encoders encode the captions: a diffusers folder, a hub id, stub, or none "
        "[default: --model, if it is a pipeline]",
        metavar="MODEL",
    )
    text_length: int | None = setting("Tokens per prompt [default: the pipeline's]", metavar="N", min=1)
    text_compute_dtype: str | None = setting(
        "Text encoder precision [default: --compute-dtype]", choices=("auto", *FLOATS)
    )
    text_storage_dtype: str | None = setting(
        "Type of stored embeddings [default: --storage-dtype, else float16 for CLIP alone, else bfloat16]",
        choices=FLOATS,
    )
    caption_variants: int | None = setting(
        f"Texts to store per image at most [default: its captions; {DEFAULT_VARIANTS} with --shuffle-tags]",
        metavar="N",
        min=1,
        max=MOST_VARIANTS,
    )
    shuffle_tags: bool | None = setting("Also store captions with their tags in other orders.")
    keep_tags: str | None = setting(
        "Tags at the start that keep their place: a number, or the text that ends them [default: 0]",
        metavar="N|TEXT",
    )
    tag_separator: str | None = setting("Text between two tags [default: ,]", metavar="TEXT")
    prompt_ids: bool | None = setting("Also store the captions' token ids and attention masks [default: with --like]")
    empty_prompt: bool | None = setting("Store the empty prompt, which read(caption_dropout=) serves.")
    negative_prompt: str | None = setting("Store this prompt as well, for cache.prompt().", metavar="TEXT")
    compute_dtype: str | None = setting("Precision [default: auto]", choices=("auto", *FLOATS), asks=False)
    storage_dtype: str | None = setting("Type of stored values", choices=FLOATS, asks=False)


class PromptEmbeds(FieldKind):
    """Embeddings of captions, one vector per token."""

    name = "prompt_embeds"
    kind = 2
    inputs = ("caption",)
    settings: type[Any] = PromptSettings
    recipe = PromptRecipe
    packing = "block"
    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {"cut": ("<u4", ())}
    work = WorkSize(unit_cost=1 << 18, unit_jobs=512, batch_cost=1 << 18, batch_items=512)
    encoder = "text encoder"
    describer = "latentcache.encoders.prompt.describe:describe_sequence"
    producer = "latentcache.encoders.prompt.producer:PromptProducer"

    def resolved(self, fields: Mapping[str, Any], samples: SampleTable, *, held: bool = False) -> Any:
        """As given; else the text encoders of the pipeline that encodes the images, if there are captions."""
        latents, settings = fields.get("latents"), fields.get(PromptEmbeds.name if held else self.name)
        types = {name: getattr(latents, name, None) for name in ("compute_dtype", "storage_dtype")}
        shown = fields.get("prompt_embeds") or PromptSettings(**types)
        if shown.text_encoder == NONE:
            return None
        model = shown.text_encoder or getattr(latents, "model", None)
        settings = shown if held and settings is None and any(types.values()) else settings
        if model is None or "caption" not in samples.inputs:
            return settings
        if shown.text_encoder is None and not np.asarray(samples.inputs["caption"].content).any():
            return settings
        return load(_FOLLOWED)(self.name, model, shown) or settings

    def plan(self, samples: SampleTable, recipe: PromptRecipe) -> FieldPlan:
        """Items of the samples with a caption, and of the prompts; the content of a caption is known before."""
        caption = samples.inputs["caption"]
        assert caption.text is not None
        there = np.asarray(caption.content).any(axis=1)
        rows = np.flatnonzero(there).astype(np.int32)
        counts, notes = self._counts(samples, rows, recipe)
        sample, first = np.repeat(rows, counts), np.repeat(np.cumsum(counts) - counts, counts)
        variant = (np.arange(len(sample)) - first).astype(np.uint8)
        if len(rows):
            prompts = sorted(recipe.prompts.values())
            sample = np.insert(sample, counts[0], [rows[0]] * len(prompts))
            variant = np.insert(variant, counts[0], prompts)
        detail = "it has no caption to encode"
        hint = "write one beside the image, or give --default-caption TEXT; an empty .txt or TEXT is the empty prompt"
        lacking = np.flatnonzero(~there).tolist()
        without = [(row, samples.note([row], self.name, "no-caption", detail=detail, hint=hint)) for row in lacking]
        size = np.diff(np.asarray(caption.text.ends), prepend=0)[sample].astype(np.int64)
        cost = size if -1 in recipe.shape else np.full_like(size, _PER_TOKEN * recipe.length)
        return FieldPlan(
            sample=sample,
            group=np.zeros(len(sample), dtype=np.int32),
            variant=variant,
            cost=cost + _FIXED_COST,
            groups=(Group(label="", shape=recipe.shape),),
            rejected=tuple(without),
            notes=notes,
        )

    def _counts(
        self, samples: SampleTable, rows: NDArray[np.int32], recipe: PromptRecipe
    ) -> tuple[NDArray[np.int64], tuple[Rejected, ...]]:
        """(n,) variants of each row, and a note if some have more captions than variants."""
        texts = samples.inputs["caption"].text
        number = recipe.captions.number
        assert texts is not None
        counts = np.ones(len(rows), dtype=np.int64)
        left = list[int]()
        if number == 1 and captions_at_most(texts) == 1:
            return counts, ()
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            some = texts.take(block)
            counts[start : start + _BLOCK] = [recipe.captions.count(text) for text in some]
            left += [row for row, text in zip(block.tolist(), some, strict=True) if text.count(BETWEEN) >= number]
        detail = f"{count_of(len(left), 'samples have')} more captions than --caption-variants {number} stores"
        hint = "a larger --caption-variants stores all of them"
        return counts, (samples.note(left, self.name, "captions-left", detail=detail, hint=hint),) if left else ()

    def keys(
        self, content: NDArray[np.uint8], group: Ints, variant: Ints, groups: Sequence[Group], recipe: PromptRecipe
    ) -> NDArray[np.uint8]:
        """The content of a prompt is that of its own text."""
        for text, number in recipe.prompts.items():
            prompt_content = np.frombuffer(content_hash(text.encode()), dtype=np.uint8)
            content = np.where((variant == number)[:, None], prompt_content, content)
        return super().keys(content, group, variant, groups, recipe)

    def describe(self, recipe: PromptRecipe, provenance: Mapping[str, Any]) -> dict[str, str]:
        """Pipeline, model and shape."""
        shape = f"{recipe.width}, {recipe.storage_dtype}"
        if recipe.is_sequence:
            shape = f"{recipe.length} x {shape}, {'without' if recipe.trimmed else 'with'} padding"
        texts = [f"up to {recipe.captions.number} per sample"] if recipe.captions.number > 1 else []
        texts += ["tags in other orders"] if recipe.captions.reorder else []
        texts += [f"prompt {text!r}" for text in recipe.prompts]
        return {
            "text encoder": f"{recipe.pipeline} {recipe.fingerprint[:8]}, {shape}",
            "model": str(provenance.get("text_encoder", "")),
            **({"texts": ", ".join(texts)} if texts else {}),
        }

    def remarks(self, columns: Mapping[str, Any]) -> list[tuple[str, str, NDArray[np.intp]]]:
        """Captions that are longer than the model takes."""
        cut = np.asarray(columns.get("cut", ()))
        words = f"{self.name}: captions are cut to the length of the pipeline, by {cut.max(initial=0)} tokens at most"
        return [("caption-cut", words, np.flatnonzero(cut))] if cut.any() else []

    def numbers(self, recipe: PromptRecipe, columns: Mapping[str, Any]) -> Mapping[str, float]:
        """Captions that are longer than the model takes."""
        return {"truncated_captions": int(np.count_nonzero(columns["cut"]))} if "cut" in columns else {}


class PooledPromptEmbeds(PromptEmbeds):
    """Embeddings of captions, one vector per caption."""

    name = "pooled_prompt_embeds"
    kind = 3
    follows = PromptEmbeds.name
    describer = "latentcache.encoders.prompt.describe:describe_vector"


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
    producer = "latentcache.encoders.prompt.producer:IdsProducer"

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

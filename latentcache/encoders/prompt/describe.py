"""Describe the text encoders of a pipeline without loading them: the recipe of the embeddings they make.

Identity: the weights of the text encoders in use, their configurations, the files of their tokenizers, and everything
that ``encode_prompt`` gets beside the text. Cost: reading the weights once at disk speed; not again while the stat of
the files is the one in the provenance of the last build.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.encoders.hub import expanded, is_stub, stub_delay
from latentcache.encoders.prompt.locate import Pipeline, locate_pipeline
from latentcache.encoders.prompt.pipelines import FROM_CALL
from latentcache.encoders.versions import installed, on_cuda
from latentcache.encoders.weights import fingerprint_memo, read_headers
from latentcache.errors import UsageError
from latentcache.fields.captions import DEFAULT_VARIANTS, MOST_VARIANTS, CaptionVariants, captions_at_most
from latentcache.fields.prompt_embeds import PromptRecipe, PromptSettings
from latentcache.fields.protocol import Cached, DescribeContext, Described
from latentcache.fields.table import SampleTable
from latentcache.identity.content import content_hash, json_hash

_LIBRARIES = ("torch", "transformers", "diffusers", "tokenizers")
_PROBE = "latentcache.encoders.prompt.producer:call_default"
#: Fields of a configuration that say who wrote it and not what it computes.
_IRRELEVANT = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
)
_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_STUB_WIDTH, _STUB_LENGTH = 8, 77


def describe_sequence(settings: PromptSettings, cached: Cached, context: DescribeContext) -> Described:
    """Description of ``prompt_embeds``. Settings that were not given follow the cache."""
    return _describe("prompt_embeds", settings, cached, context)


def describe_vector(settings: PromptSettings, cached: Cached, context: DescribeContext) -> Described:
    """Description of ``pooled_prompt_embeds``. Settings that were not given follow the cache."""
    return _describe("pooled_prompt_embeds", settings, cached, context)


def _describe(name: str, settings: PromptSettings, cached: Cached, context: DescribeContext) -> Described:
    before, made = cached.recipe if isinstance(cached.recipe, PromptRecipe) else None, cached.provenance
    model = settings.text_encoder or str(made.get("text_encoder") or "")
    if context.check and before is not None and settings.text_encoder is None and not context.check_encoder:
        found = Described(recipe=before, label=model, provenance=made)
    elif not model:
        raise UsageError(f"field {name}: no pipeline was named", fix="--text-encoder PIPELINE")
    else:
        found = _stub(name, model) if is_stub(model) else _pipeline(name, model, settings, before, made, context)
    recipe, followed = found.recipe, context.followed.recipe if context.followed is not None else None
    assert isinstance(recipe, PromptRecipe)
    given: dict[str, Any] = {
        "length": settings.text_length if recipe.is_sequence else None,
        "compute_dtype": None if settings.text_compute_dtype == "auto" else settings.text_compute_dtype,
        "storage_dtype": settings.text_storage_dtype,
    }
    if before is not None and before.pipeline == recipe.pipeline:  # its choices, and for equal weights its precision
        same = all(getattr(before, one) == getattr(recipe, one) for one in ("fingerprint", "config", "tokenizer"))
        recipe = replace(recipe, length=before.length, storage_dtype=before.storage_dtype)
        recipe = replace(recipe, compute_dtype=before.compute_dtype) if same else recipe
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    beside = followed if isinstance(followed, PromptRecipe) else None
    samples = None if found.recipe is before else context.samples
    return replace(found, recipe=replace(recipe, **_texts(settings, before or beside, samples)))


def _pipeline(
    name: str,
    model: str,
    settings: PromptSettings,
    before: PromptRecipe | None,
    made: Mapping[str, Any],
    context: DescribeContext,
) -> Described:
    """The recipe of one output of a pipeline, with the best precision of this machine."""
    revision = str(made.get("revision", "")) if made.get("text_encoder") == model else ""
    found, path = locate_pipeline(model, name, revision=revision), expanded(model)
    output, known = found.output, made.get("weights") or {}
    if settings.text_length is not None and output.fixed:
        raise UsageError(
            f"--text-length={settings.text_length}: {found.cls} takes prompts of {output.length} tokens",
            fix="leave --text-length out",
        )
    memos = {part.name: fingerprint_memo(read_headers(part.weights), known.get(part.name)) for part in found.parts}
    half = "float16" if output.clip else "bfloat16"
    recipe = PromptRecipe(
        output=name,
        pipeline=found.cls,
        fingerprint=json_hash([memos[part.name]["fingerprint"] for part in found.parts]).hex(),
        config=json_hash([{"class": part.cls, "config": _relevant(part.config)} for part in found.parts]).hex(),
        tokenizer=json_hash([_tokenizer(part.tokenizer) for part in found.parts]).hex(),
        width=output.width_of({part.name: part.config for part in found.parts}),
        length=output.length if name == "prompt_embeds" else 1,
        trimmed=output.trim,
        arguments=_arguments(found, before, context),
        compute_dtype=half if not context.check and on_cuda(context.device) else "float32",
        storage_dtype=half,
    )
    missing = [library for library in output.libraries if not installed((library,))[library]]
    return Described(
        recipe=recipe,
        label=model,
        producer={"pipeline": str(found.folder)},
        provenance={
            "text_encoder": str(path.resolve()) if path.exists() else model,
            "revision": found.revision,
            "weights": memos,
            "libraries": installed(_LIBRARIES),
        },
        notes=tuple(
            f"{library} is not installed, so captions are cleaned less than {found.cls} does; pip install {library}"
            for library in missing
        ),
        needs_torch=True,
    )


def _stub(name: str, model: str) -> Described:
    """Description of the stub: numpy, one token per word."""
    sequence = name == "prompt_embeds"
    recipe = PromptRecipe(
        output=name,
        pipeline="stub",
        fingerprint=json_hash({"stub": name}).hex(),
        config="",
        tokenizer="",
        width=_STUB_WIDTH,
        length=_STUB_LENGTH if sequence else 1,
        trimmed=sequence,
        storage_dtype="float16",
    )
    producer = {"stub": stub_delay(model, "--text-encoder")}
    return Described(recipe=recipe, label=model, producer=producer, provenance={"text_encoder": model})


def _texts(settings: PromptSettings, before: PromptRecipe | None, samples: SampleTable | None) -> dict[str, Any]:
    """The texts that are encoded: variants of captions, and prompts."""
    old = before.captions if before is not None else CaptionVariants()
    said: dict[str, Any] = {
        "reorder": settings.shuffle_tags,
        "keep": settings.keep_tags,
        "separator": settings.tag_separator,
    }
    made = replace(old, **{name: value for name, value in said.items() if value is not None})
    if not made.reorder and (settings.keep_tags or settings.tag_separator):
        flag = "--keep-tags" if settings.keep_tags else "--tag-separator"
        fix = f"add --shuffle-tags, or leave {flag} out"
        raise UsageError(f"{flag}: only shuffled tags are taken apart", fix=fix)
    number = settings.caption_variants or (old.number if old.number > 1 else 0)
    if not number:
        text = samples.inputs["caption"].text if samples is not None else None
        several = captions_at_most(text) if text is not None else 1
        number = min(max(several, DEFAULT_VARIANTS if made.reorder else 1), MOST_VARIANTS)
    empty, negative = settings.empty_prompt, settings.negative_prompt
    return {
        "captions": replace(made, number=number),
        "empty_prompt": before is not None and before.empty_prompt if empty is None else empty,
        "negative_prompt": before.negative_prompt if negative is None and before is not None else negative,
    }


def _arguments(found: Pipeline, before: PromptRecipe | None, context: DescribeContext) -> tuple[tuple[str, str], ...]:
    """What ``encode_prompt`` gets, and which libraries clean the text, as canonical JSON."""
    values: dict[str, Any] = dict(found.output.arguments)
    known = dict(before.arguments) if before is not None and before.pipeline == found.cls else {}
    for name in (name for name, value in values.items() if value == FROM_CALL):
        ask, old = context.ask, json.loads(known.get(name, "null"))
        values[name] = old if ask is None else ask(_PROBE, pipeline=found.cls, name=name)
    values |= {f"has {library}": bool(installed((library,))[library]) for library in found.output.libraries}
    return tuple(sorted((name, json.dumps(value, sort_keys=True)) for name, value in values.items()))


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the model computes with, also of the models inside."""
    kept = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    return {name: _relevant(value) if isinstance(value, dict) else repr(value) for name, value in kept.items()}


def _tokenizer(folder: Path) -> list[list[str]]:
    """(File, hash) of everything that decides the ids of a text."""
    files = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)})
    return [[path.name, content_hash(path.read_bytes()).hex()] for path in files]

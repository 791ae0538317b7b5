"""Find and describe the text encoders of a pipeline without loading them: the recipe of the embeddings they make.

Identity: the weights of the text encoders in use, their configurations, the files of their tokenizers, and everything
that ``encode_prompt`` gets beside the text. Classes come from the table of pipelines and from transformers, never
from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from latentcache.encoders import files
from latentcache.encoders.devices import installed, precision
from latentcache.encoders.prompt.pipelines import FROM_CALL, PIPELINES, Output, outputs_of, tokenizer_of
from latentcache.errors import UnsupportedModelError, UsageError
from latentcache.fields.captions import DEFAULT_VARIANTS, MOST_VARIANTS, CaptionVariants, captions_at_most
from latentcache.fields.prompt_embeds import PromptIdsRecipe, PromptRecipe, PromptSettings
from latentcache.fields.protocol import DescribeContext, Described
from latentcache.fields.settings import followed
from latentcache.fields.table import SampleTable
from latentcache.identity.content import content_hash, json_hash
from latentcache.value import Value

INDEX = "model_index.json"
_WEIGHTS = "model.safetensors"
_LIBRARIES = ("torch", "transformers", "diffusers", "tokenizers")
_LENGTHS = "latentcache.encoders.prompt.producer:lengths"
_CALL_DEFAULT = "latentcache.encoders.prompt.producer:call_default"
#: Fields of a configuration that say who wrote it and not what it computes.
_IRRELEVANT = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
)
_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_STUB_WIDTH, _STUB_LENGTH = 8, 77
_WANTED = files.Wanted(
    argument="text_encoder",
    takes="a pipeline folder, a hub id, stub or none",
    files=(INDEX, *(f"{part}*/*.{end}" for part in ("text_encoder", "tokenizer")
                    for end in ("json", "txt", "model", "jinja", "safetensors"))),
)  # fmt: skip


def _describe(name: str, settings: PromptSettings, context: DescribeContext) -> Described:
    """The recipe of one output of a pipeline. Settings that were not given follow the cache."""
    before = _cached_recipe(context)
    model = settings.text_encoder or str(context.provenance.get("text_encoder") or "")
    if not model:
        options = [option.name for option in fields(settings) if getattr(settings, option.name) is not None]
        raise UsageError(
            "needs a text encoder" if options else f"field {name}: no pipeline was named",
            argument=options[0] if options else "",
            fix="--text-encoder=PIPELINE",
        )
    described = _stub(name, model) if files.is_stub(model) else _pipeline(name, model, settings, context)
    recipe = described.recipe
    beside = context.followed.recipe if context.followed is not None else None
    assert isinstance(recipe, PromptRecipe)
    kept = before if before is not None and before.pipeline == recipe.pipeline else recipe
    is_same = all(getattr(kept, part) == getattr(recipe, part) for part in ("fingerprint", "config", "tokenizer"))
    return replace(
        described,
        recipe=replace(
            recipe,
            length=settings.text_length if settings.text_length and recipe.is_sequence else kept.length,
            compute_dtype=precision(
                settings.text_compute_dtype or settings.compute_dtype,
                cached=kept.compute_dtype if kept is before and (is_same or context.check) else "",
                half=recipe.compute_dtype,
                context=context,
            ),
            storage_dtype=settings.text_storage_dtype or settings.storage_dtype or kept.storage_dtype,
            **_texts(settings, before or (beside if isinstance(beside, PromptRecipe) else None), context.samples),
        ),
    )


describe_sequence = partial(_describe, "prompt_embeds")
describe_vector = partial(_describe, "pooled_prompt_embeds")


def describe_ids(settings: PromptSettings, context: DescribeContext) -> Described:
    """Describe token ids, which depend on the tokenizers alone and not on weights or types of text encoders."""
    beside = context.followed if context.recipe is None else None
    if beside is not None:
        settings = followed(settings, text_encoder=beside.provenance.get("text_encoder"))
    described = _describe("prompt_ids", settings, context)
    recipe = described.recipe
    before = context.recipe
    assert isinstance(recipe, PromptRecipe)
    kept = ("pipeline", "tokenizer", "length", "arguments", "captions", "empty_prompt", "negative_prompt")
    ids = PromptIdsRecipe(**{name: getattr(recipe, name) for name in kept})
    if beside is not None and settings.text_length is None and getattr(beside.recipe, "pipeline", "") == ids.pipeline:
        ids = replace(ids, length=getattr(beside.recipe, "length", ids.length))
    if isinstance(before, PromptIdsRecipe) and replace(ids, lengths=before.lengths).recipe_id == before.recipe_id:
        lengths = before.lengths
    elif "stub" in described.producer:
        lengths = (recipe.length,)
    elif context.ask is None:
        lengths = ()
    else:
        lengths = tuple(context.ask(_LENGTHS, producer=dict(described.producer), recipe=ids.as_json()))
    notes = () if context.followed is not None else described.notes  # the embeddings have the same
    return replace(described, recipe=replace(ids, lengths=lengths), notes=notes)


def _cached_recipe(context: DescribeContext) -> PromptRecipe | None:
    return context.recipe if isinstance(context.recipe, PromptRecipe) else None


def _pipeline(name: str, model: str, settings: PromptSettings, context: DescribeContext) -> Described:
    """Describe one output of a pipeline, in half precision."""
    provenance = context.provenance
    offline = context.check and settings.text_encoder is None
    pipeline = locate_pipeline(model, name, provenance, offline=offline)
    output, known, parts = pipeline.output, provenance.get("weights") or {}, pipeline.parts
    problem, fix = "", "leave it out"
    if settings.text_length is not None and output.fixed:
        problem = f"{pipeline.cls} takes prompts of {output.length} tokens"
    elif settings.text_length is not None and settings.text_length <= output.before:
        problem = f"{pipeline.cls} has {output.before} tokens of CLIP before those of T5"
        fix = f"give the sum: --text-length {output.before + 77} for 77 tokens of T5"
    if problem:
        raise UsageError(problem, argument="text_length", value=settings.text_length, fix=fix)
    memos = {
        part.name: files.fingerprint_memo(files.read_headers(part.weights), known.get(part.name)) for part in parts
    }
    half = "float16" if all(part.cls.startswith("CLIP") for part in parts) else "bfloat16"
    recipe = PromptRecipe(
        output=name,
        pipeline=pipeline.cls,
        fingerprint=json_hash([memos[part.name]["fingerprint"] for part in parts]).hex(),
        config=json_hash([{"class": part.cls, "config": _relevant(part.config)} for part in parts]).hex(),
        tokenizer=json_hash([_tokenizer(part.tokenizer) for part in parts]).hex(),
        width=output.width_of({part.name: part.config for part in parts}),
        length=1 if name == "pooled_prompt_embeds" else output.length,
        trimmed=output.trim,
        arguments=_arguments(pipeline, context),
        compute_dtype=half,
        storage_dtype=half,
    )
    cleaned_less = f"is not installed, so captions are cleaned less than {pipeline.cls} does"
    return Described(
        recipe=recipe,
        label=model,
        producer={"pipeline": str(pipeline.folder)},
        provenance={
            "text_encoder": files.recorded_name(model),
            "revision": pipeline.revision,
            "weights": memos,
            "libraries": installed(_LIBRARIES),
        },
        notes=tuple(
            f"{library} {cleaned_less}; pip install {library}"
            for library, version in installed(output.libraries).items()
            if not version
        ),
        needs_torch=True,
    )


def _stub(name: str, model: str) -> Described:
    is_sequence = name != "pooled_prompt_embeds"
    recipe = PromptRecipe(
        output=name,
        pipeline="stub",
        fingerprint=json_hash({"stub": name}).hex(),
        config="",
        tokenizer="",
        width=_STUB_WIDTH,
        length=_STUB_LENGTH if is_sequence else 1,
        trimmed=is_sequence,
        storage_dtype="float16",
    )
    producer = {"stub": files.stub_delay(model, "text_encoder")}
    return Described(recipe=recipe, label=model, producer=producer, provenance={"text_encoder": model})


def _texts(settings: PromptSettings, before: PromptRecipe | None, samples: SampleTable | None) -> dict[str, Any]:
    """The texts that are encoded: variants of captions, and prompts."""
    old = before.captions if before is not None else CaptionVariants()
    if before is not None:
        settings = followed(settings, empty_prompt=before.empty_prompt, negative_prompt=before.negative_prompt)
    tags = followed(settings, shuffle_tags=old.reorder, keep_tags=old.keep, tag_separator=old.separator)
    if not tags.shuffle_tags and (settings.keep_tags or settings.tag_separator):
        raise UsageError(
            "only shuffled tags are taken apart",
            argument="keep_tags" if settings.keep_tags else "tag_separator",
            fix="add --shuffle-tags, or leave it out",
        )
    number = settings.caption_variants or (old.number if old.number > 1 else 0)
    if not number:
        text = samples.inputs["caption"].text if samples is not None else None
        several = captions_at_most(text) if text is not None else 1
        number = min(max(several, DEFAULT_VARIANTS if tags.shuffle_tags else 1), MOST_VARIANTS)
    variants: Any = {"reorder": tags.shuffle_tags, "keep": tags.keep_tags, "separator": tags.tag_separator}
    return {
        "captions": CaptionVariants(number=number, **variants),
        "empty_prompt": bool(settings.empty_prompt),
        "negative_prompt": settings.negative_prompt,
    }


def _arguments(pipeline: Pipeline, context: DescribeContext) -> tuple[tuple[str, str], ...]:
    """Return the arguments of ``encode_prompt``, and which libraries clean the text, as canonical JSON."""
    values: dict[str, Any] = dict(pipeline.output.arguments)
    before = _cached_recipe(context)
    known = dict(before.arguments) if before is not None and before.pipeline == pipeline.cls else {}
    for name in (name for name, value in values.items() if value == FROM_CALL):
        if context.ask is None:
            values[name] = json.loads(known.get(name, "null"))
        else:
            values[name] = context.ask(_CALL_DEFAULT, pipeline=pipeline.cls, name=name)
    values |= {f"has {library}": bool(version) for library, version in installed(pipeline.output.libraries).items()}
    return tuple(sorted((name, json.dumps(value, sort_keys=True)) for name, value in values.items()))


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the fields that the model computes with, also those of models inside it."""
    kept = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    return {name: _relevant(value) if isinstance(value, dict) else repr(value) for name, value in kept.items()}


def _tokenizer(folder: Path) -> list[list[str]]:
    """Hash every file that decides the ids of a text: (name, hash)."""
    paths = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)})
    return [[path.name, content_hash(path.read_bytes()).hex()] for path in paths]


# files


class Part(Value):
    """One text encoder with its tokenizer."""

    name: str
    """Folder in the pipeline: ``text_encoder``, ``text_encoder_2``, ..."""
    folder: Path
    cls: str
    """Class in transformers."""
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    tokenizer: Path
    tokenizer_cls: str


class Pipeline(Value):
    """The files of a pipeline that make one output."""

    cls: str
    folder: Path
    output: Output
    parts: tuple[Part, ...]
    revision: str = ""
    """Commit, for a folder of the local hub cache."""


def text_settings(name: str, model: str, settings: PromptSettings) -> PromptSettings | None:
    """Make a model the text encoder of a field; None if it has no such output, or is no pipeline and not named."""
    is_named = settings.text_encoder is not None
    if not files.is_stub(model):
        folder = _pipeline_folder(model)[0] if is_named else _index_folder(model)
        if not (folder / INDEX).is_file() or name not in _outputs(folder):
            return None
    elif not is_named:
        return None
    return replace(settings, text_encoder=model)


def _index_folder(model: str) -> Path:
    """Locate ``model_index.json``, if there is one; of a hub id nothing else is downloaded."""
    if (path := files.expanded(model)).exists() or not files.is_hub_id(model):
        return path
    return files.download(model, replace(_WANTED, argument="model", files=(INDEX,)))


def _pipeline_folder(
    model: str, cached: Mapping[str, Any] = MappingProxyType({}), *, offline: bool = False
) -> tuple[Path, str]:
    """Folder of a pipeline, and its commit if it is one of the local hub cache; arguments as of ``files.find``."""
    path, commit = files.find(model, _WANTED, cached, offline=offline)
    if not (path / INDEX).is_file():
        raise UnsupportedModelError(
            "not a pipeline",
            argument="text_encoder",
            value=model,
            where=str(path),
            why=f"it lacks {INDEX}, which names the text encoders and the class that uses them",
            fix="give the folder that DiffusionPipeline.save_pretrained wrote, or none",
        )
    return path, commit


def locate_pipeline(
    model: str, name: str, cached: Mapping[str, Any] = MappingProxyType({}), *, offline: bool = False
) -> Pipeline:
    """Files of a pipeline that make one output; ``cached`` and ``offline`` as of ``files.find``."""
    folder, commit = _pipeline_folder(model, cached, offline=offline)
    index = files.read_json(folder / INDEX)
    outputs = _outputs(folder)
    if name not in outputs:
        raise UnsupportedModelError(
            f"{index['_class_name']} has no {name}", where=str(folder), fix=f"leave {name} out of the fields"
        )
    parts = tuple(_part(folder, index, part) for part in outputs[name].parts)
    return Pipeline(cls=index["_class_name"], folder=folder, output=outputs[name], parts=parts, revision=commit)


def _outputs(folder: Path) -> Mapping[str, Output]:
    name = files.read_json(folder / INDEX).get("_class_name")
    if not isinstance(name, str) or name not in PIPELINES:
        raise UnsupportedModelError(
            f"the prompts of {name} cannot be encoded",
            where=str(folder / INDEX),
            why=f"known pipelines: {', '.join(sorted(PIPELINES))}",
            fix="build latents alone: --text-encoder=none",
        )
    return outputs_of(name)


def _part(folder: Path, index: Mapping[str, Any], name: str) -> Part:
    tokenizer = tokenizer_of(name)
    for part in (name, tokenizer):
        library, cls = (index.get(part) or (None, None))[:2]
        if library != "transformers" or not (folder / part).is_dir():
            raise UnsupportedModelError(
                f"the pipeline has no {part}",
                where=str(folder / INDEX),
                why=f"{INDEX} says {library}.{cls}" if cls else f"{INDEX} names none",
                fix=f"download {part}/ of this pipeline as well, or build latents alone: --text-encoder=none",
            )
    return Part(
        name=name,
        folder=folder / name,
        cls=index[name][1],
        config=files.read_json(folder / name / "config.json"),
        weights=files.weights_in(folder / name, _WEIGHTS),
        tokenizer=folder / tokenizer,
        tokenizer_cls=index[tokenizer][1],
    )

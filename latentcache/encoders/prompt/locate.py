"""From the name of a pipeline to the files of its text encoders.

Guarantee: a path that does not exist is never looked up on the network; pickle weights are never chosen; classes come
from the table of pipelines and from transformers, never from the folder. No torch; huggingface_hub only for a hub id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.encoders.hub import Wanted, expanded, find, hub_folder, is_hub_id, is_stub
from latentcache.encoders.prompt.pipelines import PIPELINES, Output, tokenizer_of
from latentcache.encoders.weights import read_json, weights_in
from latentcache.errors import UnsupportedModelError
from latentcache.fields.prompt_embeds import PromptSettings
from latentcache.value import Value

INDEX = "model_index.json"
_WEIGHTS = "model.safetensors"


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


def text_settings(name: str, model: str, said: PromptSettings) -> PromptSettings | None:
    """Settings of a field that a pipeline has; None if it has no such output, or is no pipeline and was not named."""
    stub = is_stub(model)
    if said.text_encoder is None and (stub or not (_index_folder(model) / INDEX).is_file()):
        return None
    if not stub and name not in _row(pipeline_folder(model)[0] if said.text_encoder else _index_folder(model)):
        return None
    return replace(said, text_encoder=model)


def _index_folder(model: str) -> Path:
    """Where ``model_index.json`` is, if there is one; of a hub id nothing else is downloaded."""
    path = expanded(model)
    if path.exists() or not is_hub_id(model):
        return path
    index = replace(_WANTED, what="model", flag="--model", files=(INDEX,), look=lambda folder: None)
    return hub_folder(model, index)


def pipeline_folder(model: str, *, revision: str = "") -> tuple[Path, str]:
    """Folder of a pipeline, and its commit if it is one of the local hub cache."""
    path, commit = find(model, _WANTED, revision=revision)
    if not (path / INDEX).is_file():
        raise UnsupportedModelError(
            f"--text-encoder {model}: not a pipeline",
            where=str(path),
            why=f"it lacks {INDEX}, which names the text encoders and the class that uses them",
            fix="give the folder that DiffusionPipeline.save_pretrained wrote, or --text-encoder none",
        )
    return path, commit


def locate_pipeline(model: str, name: str, *, revision: str = "") -> Pipeline:
    """Files of a pipeline that make one output."""
    folder, commit = pipeline_folder(model, revision=revision)
    index, row = read_json(folder / INDEX), _row(folder)
    if name not in row:
        what, fix = f"{index['_class_name']} has no {name}", f"leave {name} out of --fields"
        raise UnsupportedModelError(what, where=str(folder), fix=fix)
    parts = tuple(_part(folder, index, part) for part in row[name].parts)
    return Pipeline(cls=index["_class_name"], folder=folder, output=row[name], parts=parts, revision=commit)


def _row(folder: Path) -> Mapping[str, Output]:
    """The outputs of the class of a pipeline."""
    index = read_json(folder / INDEX)
    name = index.get("_class_name")
    if not isinstance(name, str) or name not in PIPELINES:
        raise UnsupportedModelError(
            f"the prompts of {name} cannot be encoded",
            where=str(folder / INDEX),
            why=f"known pipelines: {', '.join(sorted(PIPELINES))}",
            fix="build latents alone: --text-encoder none",
        )
    return PIPELINES[name]


def _part(folder: Path, index: Mapping[str, Any], name: str) -> Part:
    """One text encoder of a pipeline, with its tokenizer."""
    tokenizer = tokenizer_of(name)
    for part in (name, tokenizer):
        library, cls = (index.get(part) or (None, None))[:2]
        if library != "transformers" or not (folder / part).is_dir():
            raise UnsupportedModelError(
                f"the pipeline has no {part}",
                where=str(folder / INDEX),
                why=f"{INDEX} says {library}.{cls}" if cls else f"{INDEX} names none",
                fix=f"download {part}/ of this pipeline as well, or build latents alone: --text-encoder none",
            )
    return Part(
        name=name,
        folder=folder / name,
        cls=index[name][1],
        config=read_json(folder / name / "config.json"),
        weights=weights_in(folder / name, _WEIGHTS),
        tokenizer=folder / tokenizer,
        tokenizer_cls=index[tokenizer][1],
    )


def _look(folder: Path) -> None:
    """Raise unless a folder of the local hub cache holds every file that decides a recipe."""
    for output in _row(folder).values():
        for part in output.parts:
            _part(folder, read_json(folder / INDEX), part)


_WANTED = Wanted(
    what="pipeline",
    flag="--text-encoder",
    takes="a pipeline folder, a hub id, stub or none",
    files=(INDEX, *(f"{part}*/*.{end}" for part in ("text_encoder", "tokenizer")
                    for end in ("json", "txt", "model", "jinja", "safetensors"))),
    look=_look,
)  # fmt: skip

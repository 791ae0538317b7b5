"""Configurations of SimpleTuner, of OneTrainer, and our own ``latentcache.toml``.

SimpleTuner's ``multidatabackend.json`` (bghira/SimpleTuner bc8e6ab, ``documentation/DATALOADER.md``,
``helpers/prompts.py``): ``repeats`` counts further passes, so 0 is once; folders are recursive. ``caption_strategy``
is ``filename`` (the default: the stem with blanks for underscores), ``textfile``, ``instanceprompt`` or ``parquet``.
Each line of a text file ``a.txt`` is a caption of its own unless ``disable_multiline_split`` is set.

OneTrainer's ``concepts.json`` (Nerogar/OneTrainer 23df383, ``ConceptConfig.py``, ``DataLoaderText2ImageMixin.py``;
Nerogar/mgds 3a6994a): ``text.prompt_source`` is ``sample`` (``a.txt``), ``concept`` (the file ``prompt_path``) or
``filename`` (the stem). Of several lines one is drawn, so each is a caption. ``-masklabel`` and ``-condlabel`` are no
samples; the type ``VALIDATION`` is a split. ``balancing`` 2.0 is twice per epoch with the strategy ``REPEATS``.

[[sets]]                    # latentcache.toml: several data sets as one
path = "portraits"          # a folder, an archive or a configuration, beside this file; required
layout = "kohya"            # as --layout; split = "train" as --split; name = "people"
repeats = 2                 # times those of the layout itself
caption_ext = ".txt"        # as --caption-ext; also default_caption, caption_prefix, caption_suffix, caption_lines
masks = "masks"             # folder of masks, or "alpha"
controls = ["edges"]        # folders of control images
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, UnusableSampleError, count_of
from latentcache.fields.captions import BETWEEN
from latentcache.sources.captions import read_caption
from latentcache.sources.layout import CAPTION_OPTIONS, CaptionRule, Layout
from latentcache.sources.partners import INPUTS
from latentcache.sources.recognize.config import Config, Pair, Trainer, joined, of_set, partners, pixels_in

_SIMPLE = ("id", "type", "dataset_type", "instance_data_dir", "repeats", "caption_strategy", "instance_prompt",
           "prepend_instance_prompt", "only_instance_prompt", "disable_multiline_split", "disabled", "disable",
           "parquet", "metadata_backend", "conditioning_type", "conditioning_data",
           "is_regularisation_data")  # fmt: skip
_CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds")
_CONCEPT = ("name", "path", "enabled", "include_subdirectories", "balancing", "balancing_strategy", "repeats",
            "type", "text", "image", "seed", "concept_stats", "__version", "validation_concept")  # fmt: skip
_WITH_BLANKS = methodcaller("replace", "_", " ")
_TEXT_DEFAULTS = {"tag_delimiter": ",", "keep_tags_count": 1, "tag_dropout_mode": "FULL"}
_SETTINGS = {"path": str, "repeats": int, "controls": list} | dict.fromkeys(
    ("masks", "layout", "split", *CAPTION_OPTIONS, "name"), str
)


def _is_list(value: Any, required: str, others: set[str]) -> bool:
    """True for a list of objects that all have one name, and some of which have one of others."""
    is_list = isinstance(value, list) and len(value) > 0 and all(isinstance(item, dict) for item in value)
    return is_list and all(required in item for item in value) and any(others & set(item) for item in value)


# SimpleTuner


def _simpletuner(config: Config, base: Path | None, _: Any) -> Layout:
    parts, further = [], dict[str, Pair]()
    for dataset in config.value:
        is_local = not _is_off(dataset) and dataset.get("type", "local") == "local"
        if is_local and dataset.get("dataset_type") == "conditioning":
            role = "mask" if dataset.get("conditioning_type") == "mask" else "control"
            config.take(dataset, _SIMPLE)
            folder = config.place(dataset.get("instance_data_dir"), "instance_data_dir")
            further[str(dataset["id"])] = role, str(folder)
    for dataset in config.value:
        kind = dataset.get("dataset_type", "image")
        if str(dataset["id"]) in further:
            role, path = further[str(dataset["id"])]
            parts.append(Layout(word="", why="", root=Path(path), sets=(), aside={"": role}))
        elif _is_off(dataset) or kind in _CACHES:
            config.ignored.add(f"{dataset['id']} ({'disabled' if kind not in _CACHES else kind})")
        elif kind != "image":
            config.note(f"data set {dataset['id']} ({kind}) is not read: it is not one of images")
        elif dataset.get("type", "local") != "local":
            raise _elsewhere(config, dataset)
        else:
            parts.append(_backend(config, dataset, _conditioning(config, dataset, further)))
    sets = count_of(sum(len(part.sets) for part in parts), "data sets")
    return joined(config, "simpletuner", f"{config.path.name} has {sets} of SimpleTuner", parts, base)


def _is_off(dataset: Mapping[str, Any]) -> bool:
    return bool(dataset.get("disabled") or dataset.get("disable"))


def _conditioning(config: Config, dataset: Mapping[str, Any], further: Mapping[str, Pair]) -> tuple[Pair, ...]:
    """Inputs of a data set and the folders of its conditioning data sets, in their order."""
    named, free, pairs = dataset.get("conditioning_data") or [], list(INPUTS["controls"]), list[Pair]()
    named = [named] if isinstance(named, str) else named
    for name in dict.fromkeys(named):
        if name not in further:
            config.note(f"data set {dataset['id']}: its conditioning data set {name} is not there")
    for role, folder in [further[name] for name in named if name in further]:
        name = "mask" if role == "mask" else free.pop(0) if free else ""
        pairs += [(name, folder)] if name else []
    return tuple(pairs)


def _backend(config: Config, dataset: Mapping[str, Any], paired: tuple[Pair, ...]) -> Layout:
    dataset = {"resolution_type": "", **dataset}  # of the trainer's other file
    config.take(dataset, _SIMPLE)
    config.resolutions.update(pixels_in(dataset))
    repeats = str(dataset.get("repeats") or 0).removesuffix(".0")
    if not repeats.isdecimal():
        raise ValueError(f"repeats: expected a whole number from 0, found {dataset['repeats']!r}")
    folder, table = config.place(dataset.get("instance_data_dir"), "instance_data_dir"), None
    if dataset.get("caption_strategy") == "parquet" and not dataset.get("only_instance_prompt"):
        table = config.place(dataset.get("parquet", {}).get("path"), "parquet.path")
    elif dataset.get("metadata_backend") == "parquet":
        config.note(f"data set {dataset['id']}: images without a row of its parquet file are used, too")
    return of_set(
        folder,
        _simple_rule(config, dataset),
        table,
        name=str(dataset["id"]),
        repeats=int(repeats) + 1,
        is_reg=bool(dataset.get("is_regularisation_data")),
        paired=paired,
        paired_by_path=True,
    )


def _elsewhere(config: Config, dataset: Mapping[str, Any]) -> SourceError:
    fetch = {
        "aws": f"`aws s3 sync s3://{dataset.get('aws_bucket_name')} FOLDER`, and give FOLDER with the type local",
        "huggingface": f"`hf download --repo-type dataset {dataset.get('dataset_name')} --local-dir FOLDER`, and "
        "give FOLDER in a latentcache.toml",
    }.get(dataset["type"], "copy its images here, and name their folder with the type local")
    what = f"data set {dataset['id']} has the type {dataset['type']}"
    return config.error(
        what, fetch + '; "disabled": true leaves it out', "only folders of images on this disk are read"
    )


def _simple_rule(config: Config, dataset: Mapping[str, Any]) -> CaptionRule:
    strategy, prompt = dataset.get("caption_strategy", "filename"), dataset.get("instance_prompt") or ""
    prompts = [str(text).strip() for text in (prompt if isinstance(prompt, list) else [prompt])]
    prefix = f"{prompts[0]} " if dataset.get("prepend_instance_prompt") else ""
    if strategy == "instanceprompt" or dataset.get("only_instance_prompt"):
        return CaptionRule(extensions=(), text=BETWEEN.join(prompts), text_source="instance prompt")
    if strategy == "filename":
        return CaptionRule(extensions=(), from_name=_WITH_BLANKS, prefix=prefix)
    if strategy == "textfile":
        lines = "" if dataset.get("disable_multiline_split") else "all"
        return CaptionRule(extensions=(".txt",), lines=lines, prefix=prefix)
    if strategy != "parquet":
        what = f"data set {dataset['id']}: caption_strategy {strategy!r} is not read"
        raise config.error(what, "give textfile, filename, instanceprompt or parquet")
    table = dataset.get("parquet", {})
    captions = table.get("caption_column")
    return CaptionRule(
        image_column=str(table.get("filename_column") or ""),
        caption_columns=tuple(str(name) for name in (captions if isinstance(captions, list) else [captions]) if name),
        table_fallback=str(table.get("fallback_caption_column") or ""),
        table_stems=not table.get("identifier_includes_extension"),
        prefix=prefix,
    )


# OneTrainer


def _onetrainer(config: Config, base: Path | None, _: Any) -> Layout:
    parts = []
    for concept in config.value:
        repeats = float(concept.get("balancing", concept.get("repeats", 1.0)))
        off = "disabled" if not concept.get("enabled", True) else "" if repeats else "balancing 0"
        if off:
            config.ignored.add(f"{concept.get('name') or concept['path']} ({off})")
        else:
            parts.append(_concept(config, concept, repeats))
    why = f"{config.path.name} has {count_of(len(parts), 'concepts')} of OneTrainer"
    return joined(config, "onetrainer", why, parts, base)


def _concept(config: Config, concept: Mapping[str, Any], repeats: float) -> Layout:
    text, kind = concept.get("text") or {}, str(concept.get("type", "STANDARD"))
    label = concept.get("name") or concept["path"]
    config.take(concept, _CONCEPT)
    image = {name: value for name, value in (concept.get("image") or {}).items() if name.startswith("enable_")}
    resolution = str((concept.get("image") or {}).get("resolution_override", ""))
    follows = bool(image.get("enable_resolution_override")) and resolution.isdecimal()
    config.resolutions.update([int(resolution)] if follows else [])
    used = ("image.enable_resolution_override",) if follows else ()
    config.take({f"image.{name}": value for name, value in image.items()}, used)
    config.take({k: v for k, v in text.items() if v != _TEXT_DEFAULTS.get(k)}, ("prompt_source", "prompt_path"))
    if concept.get("balancing_strategy", "REPEATS") != "REPEATS":
        config.note(f"concept {label} asks for {count_of(int(repeats), 'samples')} per epoch; each is seen once")
        repeats = 1
    elif repeats < 1 or repeats != int(repeats):
        config.note(f"concept {label} asks for {repeats:g} repeats; whole numbers from 1 are used")
    layout = of_set(
        config.place(concept["path"], "path"),
        _concept_rule(config, text),
        name=str(concept.get("name") or ""),
        recursive=bool(concept.get("include_subdirectories")),
        repeats=max(1, int(repeats)),
        is_reg=kind == "PRIOR_PREDICTION",
        split="validation" if kind == "VALIDATION" or concept.get("validation_concept") else "",
    )
    if text.get("prompt_source") != "concept":
        return layout
    return replace(layout, used=frozenset((str(config.place(text["prompt_path"], "text.prompt_path")),)))


def _concept_rule(config: Config, text: Mapping[str, Any]) -> CaptionRule:
    source = text.get("prompt_source", "sample")
    if source == "filename":
        return CaptionRule(extensions=(), from_name=str)
    if source == "sample":
        return CaptionRule(extensions=(".txt",), lines="all")
    if source != "concept":
        raise config.error(f"text.prompt_source {source!r} is not read", "give sample, concept or filename")
    path = config.place(text.get("prompt_path"), "text.prompt_path")
    try:
        prompt = read_caption(str(path.parent), path.name)[0]
    except UnusableSampleError as error:
        raise config.error(f"text.prompt_path: {error.what}", error.fix) from error
    return CaptionRule(extensions=(), text=prompt, lines="all", text_source="concept prompt")


# latentcache.toml


def _own(config: Config, base: Path | None, find: Callable[[Path, str, str], Layout]) -> Layout:
    parts = []
    if others := set(config.value) - {"sets"}:
        raise config.error(f"unknown table {min(others)!r}", "keep [[sets]] only")
    for values in config.value["sets"]:
        for name, value in values.items():
            is_lines = name != "caption_lines" or value in ("", "first", "all")
            if type(value) is not _SETTINGS.get(name) or not is_lines or (name == "repeats" and values[name] < 1):
                raise config.error(f"{name} = {value!r} is no setting of a set", f"expected {', '.join(_SETTINGS)}")
        layout = find(config.place(values.get("path"), "path"), values.get("layout", ""), values.get("split", ""))
        if values.get("caption_ext") and not any(image_set.has_caption_files for image_set in layout.sets):
            raise config.error(f"caption_ext: {values['path']} has no caption files beside images", "leave it out")
        masks = [("masks", values["masks"])] if values.get("masks") else []
        controls = [("controls", folder) for folder in values.get("controls", []) if folder]
        paired = partners(config, {"masks": masks, "controls": controls})
        sets = [
            replace(
                image_set,
                captions=image_set.captions.with_options(values),
                repeats=image_set.repeats * values.get("repeats", 1),
                name=values.get("name", image_set.name),
                paired=paired or image_set.paired,
            )
            for image_set in layout.sets
        ]
        parts.append(replace(layout, sets=tuple(sets)))
    why = f"{config.path.name} has {count_of(len(config.value['sets']), 'sets')}"
    return joined(config, OWN.word, why, parts, base)


OWN = Trainer(
    "latentcache",
    ("latentcache.toml",),
    lambda value: isinstance(value, dict) and isinstance(value.get("sets"), list),
    _own,
)
SIMPLETUNER = Trainer(
    "simpletuner",
    ("multidatabackend.json",),
    lambda value: _is_list(value, "id", {"instance_data_dir", "dataset_type", "cache_dir_vae", "aws_bucket_name"}),
    _simpletuner,
)
ONETRAINER = Trainer(
    "onetrainer",
    ("concepts.json",),
    lambda value: _is_list(value, "path", {"text", "image", "include_subdirectories", "balancing", "enabled"}),
    _onetrainer,
)

"""Configurations of kohya's sd-scripts, SimpleTuner, OneTrainer, musubi-tuner and ai-toolkit.

kohya's ``dataset.toml`` (kohya-ss/sd-scripts 48d368f, ``library/config_util.py``, ``library/train_util.py``): a
setting is looked for in the subset, in its data set, in ``general``. Subsets are folders, not recursive, with
captions in ``.caption`` files by default. ``conditioning_data_dir`` has control images. Within one data set a folder
counts once, in several data sets once for each, or once for all if a build makes their resolutions. Fewer repeats
than one leave a subset out. With ``enable_wildcard`` one line is drawn, so each is a caption; ``{a|b}`` stays as it
is. Metadata for fine-tuning is refused.

SimpleTuner's ``multidatabackend.json`` (bghira/SimpleTuner bc8e6ab, ``documentation/DATALOADER.md``,
``helpers/prompts.py``): ``repeats`` counts further passes, so 0 is once; folders are recursive. ``caption_strategy``
is ``filename`` (the default: the stem with blanks for underscores), ``textfile`` or ``instanceprompt``; others are
refused. Each line of a text file ``a.txt`` is a caption of its own unless ``disable_multiline_split`` is set.

OneTrainer's ``concepts.json`` (Nerogar/OneTrainer 23df383, ``ConceptConfig.py``, ``DataLoaderText2ImageMixin.py``;
Nerogar/mgds 3a6994a): ``text.prompt_source`` is ``sample`` (``a.txt``), ``concept`` (the file ``prompt_path``) or
``filename`` (the stem). Of several lines one is drawn, so each is a caption. ``-masklabel`` and ``-condlabel`` are no
samples; the type ``VALIDATION`` is a split. ``balancing`` 2.0 is twice per epoch with the strategy ``REPEATS``.

The data set configuration of musubi-tuner (kohya-ss/musubi-tuner 30c658c, ``dataset/config_utils.py``) and the job of
ai-toolkit (ostris/ai-toolkit 27a03a9, ``toolkit/config_modules.py``) name folders; musubi-tuner reads no subfolders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

from latentcache.errors import UnusableSampleError, count_of
from latentcache.fields.captions import BETWEEN
from latentcache.geometry.like.aitoolkit import is_job, read_job
from latentcache.geometry.like.musubi import is_musubi
from latentcache.sources.captions import read_caption
from latentcache.sources.layout import INPUTS, CaptionRule, ImageSet, Trigger, kohya_rule
from latentcache.sources.recognize.config import Config, Pair, Trainer, pixels_in

_SUBSET = ("image_dir", "num_repeats", "caption_extension", "class_tokens", "is_reg", "metadata_file", "subsets",
         "conditioning_data_dir", "alpha_mask", "enable_wildcard",
         "caption_prefix", "caption_suffix")  # fmt: skip
#: Settings of a type; the trainer takes no other.
_TYPES = {"num_repeats": int, "is_reg": bool, "alpha_mask": bool, "enable_wildcard": bool} | dict.fromkeys(
    ("caption_extension", "class_tokens", "caption_prefix", "caption_suffix", "caption_separator"), str
)
_OF_IMAGES = frozenset(("caption", "tags", "train_resolution", "image_size"))
_SIMPLE = ("id", "type", "dataset_type", "instance_data_dir", "repeats", "caption_strategy", "instance_prompt",
           "prepend_instance_prompt", "only_instance_prompt", "disable_multiline_split", "disabled", "disable",
           "conditioning_type", "conditioning_data", "is_regularisation_data")  # fmt: skip
_CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds")
_CONCEPT = ("name", "path", "enabled", "include_subdirectories", "balancing", "balancing_strategy", "repeats",
            "type", "text", "image", "seed", "concept_stats", "__version", "validation_concept")  # fmt: skip
_WITH_BLANKS = methodcaller("replace", "_", " ")
_TEXT_DEFAULTS = {"tag_delimiter": ",", "keep_tags_count": 1, "tag_dropout_mode": "FULL"}


def _is_list(value: Any, required: str, others: set[str]) -> bool:
    """True for a list of objects: all have the required name, and at least one has one of the others."""
    is_list = isinstance(value, list) and len(value) > 0 and all(isinstance(item, dict) for item in value)
    return is_list and all(required in item for item in value) and any(others & set(item) for item in value)


# kohya


def _kohya(config: Config) -> list[ImageSet]:
    sets = list[ImageSet]()
    general = config.value.get("general", {})
    config.take(general, _SUBSET)
    seen = dict[str, Any]()
    for number, dataset in enumerate(config.value["datasets"]):
        config.take(dataset, _SUBSET)
        seen = seen if config.is_followed else {}
        for subset in dataset.get("subsets", []):
            config.take(subset, {*_SUBSET, *general, *dataset})
            entries = {**general, **dataset, **subset}
            for name in _TYPES.keys() & entries:
                if type(entries[name]) is not _TYPES[name]:
                    raise TypeError(f"{name}: expected {_TYPES[name].__name__}, found {entries[name]!r}")
            if entries.get("metadata_file"):
                _refuse(config)
            path = str(entries.get("image_dir"))
            resolution = entries.get("resolution")
            if seen.get(path, resolution) != resolution:
                continue  # the build makes all resolutions of a folder
            if path in seen or entries.get("num_repeats", 1) < 1:
                why = "it is there twice in one data set" if path in seen else "num_repeats is less than 1"
                config.note(f"subset {path} is left out, as by the trainer: {why}")
                continue
            seen[path] = resolution
            config.resolutions.update(pixels_in(entries))
            sets.append(_subset(config, entries, number))
    return sets


def _subset(config: Config, entries: Mapping[str, Any], dataset: int) -> ImageSet:
    words = str(entries.get("class_tokens") or "")
    prefix = f"{entries['caption_prefix']} " if entries.get("caption_prefix") else ""
    suffix = f" {entries['caption_suffix']}" if entries.get("caption_suffix") else ""
    bare = bool(prefix or suffix) and not words  # ``process_caption`` adds them to an empty caption too
    rule = replace(
        kohya_rule(words, (str(entries.get("caption_extension") or ".caption"),)),
        prefix=prefix,
        suffix=suffix,
        bare=bare,
        text_source="class words" if words else "prefix and suffix" if bare else "",
        lines="all" if entries.get("enable_wildcard") else "first",
    )
    controls = entries.get("conditioning_data_dir")
    paired = [("control", config.path_of(controls, "conditioning_data_dir"))] if controls else []
    paired += [("mask", "")] if entries.get("alpha_mask") else []
    return ImageSet(
        folder=config.path_of(entries.get("image_dir"), "image_dir"),
        name=f"{dataset}:{entries['image_dir']}",
        recursive=False,
        captions=rule,
        repeats=entries.get("num_repeats", 1),
        class_words=words,
        is_reg=bool(entries.get("is_reg")),
        balance=f"{dataset}:{config.path}",
        paired=tuple(paired),
    )


def _refuse(config: Config) -> list[ImageSet]:
    """Refuse metadata of kohya: its captions and tags would be lost if its images were read alone."""
    raise config.error(
        "captions in metadata files of kohya are not read",
        "write each caption as a text file beside its image, or all as metadata.jsonl: one object per line, "
        "with file_name and text",
    )


def _is_kohya(value: Any) -> bool:
    datasets = value.get("datasets") if isinstance(value, dict) else None
    return isinstance(datasets, list) and any(
        isinstance(dataset, dict) and "subsets" in dataset for dataset in datasets
    )


def _is_metadata(value: Any) -> bool:
    first = next(iter(value.values()), None) if isinstance(value, dict) else None
    return isinstance(first, dict) and bool(_OF_IMAGES & set(first))


# SimpleTuner


def _simpletuner(config: Config) -> list[ImageSet]:
    sets = list[ImageSet]()
    conditioning = dict[str, Pair]()
    for dataset in config.value:
        is_local = not _is_off(dataset) and dataset.get("type", "local") == "local"
        if is_local and dataset.get("dataset_type") == "conditioning":
            role = "mask" if dataset.get("conditioning_type") == "mask" else "control"
            config.take(dataset, _SIMPLE)
            folder = config.path_of(dataset.get("instance_data_dir"), "instance_data_dir")
            conditioning[str(dataset["id"])] = role, folder
    for dataset in config.value:
        kind = dataset.get("dataset_type", "image")
        if str(dataset["id"]) in conditioning:
            continue
        if _is_off(dataset) or kind in _CACHES:
            config.ignored.add(f"{dataset['id']} ({'disabled' if kind not in _CACHES else kind})")
        elif kind != "image":
            config.note(f"data set {dataset['id']} ({kind}) is not read: it is not one of images")
        elif dataset.get("type", "local") != "local":
            raise config.error(
                f"data set {dataset['id']} has the type {dataset['type']}",
                'copy its images here, and name their folder with the type local; "disabled": true leaves it out',
                "only folders of images on this disk are read",
            )
        else:
            sets.append(_backend(config, dataset, conditioning))
    config.aside += conditioning.values()
    return sets


def _is_off(dataset: Mapping[str, Any]) -> bool:
    return bool(dataset.get("disabled") or dataset.get("disable"))


def _conditioning(config: Config, dataset: Mapping[str, Any], conditioning: Mapping[str, Pair]) -> tuple[Pair, ...]:
    """Inputs of a data set and the folders of its conditioning data sets, in their order."""
    named, free, pairs = dataset.get("conditioning_data") or [], list(INPUTS["controls"]), list[Pair]()
    named = [named] if isinstance(named, str) else named
    for name in dict.fromkeys(named):
        role, folder = conditioning.get(name, ("", ""))
        if not role:
            config.note(f"data set {dataset['id']}: its conditioning data set {name} is not there")
        elif role == "mask":
            pairs.append((role, folder))
        elif free:
            pairs.append((free.pop(0), folder))
    return tuple(pairs)


def _backend(config: Config, dataset: Mapping[str, Any], conditioning: Mapping[str, Pair]) -> ImageSet:
    dataset = {"resolution_type": "", **dataset}  # of the trainer's other file
    config.take(dataset, _SIMPLE)
    config.resolutions.update(pixels_in(dataset))
    repeats = str(dataset.get("repeats") or 0).removesuffix(".0")
    if not repeats.isdecimal():
        raise ValueError(f"repeats: expected a whole number from 0, found {dataset['repeats']!r}")
    return ImageSet(
        folder=config.path_of(dataset.get("instance_data_dir"), "instance_data_dir"),
        name=str(dataset["id"]),
        captions=_simple_rule(config, dataset),
        repeats=int(repeats) + 1,
        is_reg=bool(dataset.get("is_regularisation_data")),
        paired=_conditioning(config, dataset, conditioning),
        paired_by_path=True,
    )


def _simple_rule(config: Config, dataset: Mapping[str, Any]) -> CaptionRule:
    strategy = dataset.get("caption_strategy", "filename")
    prompt = dataset.get("instance_prompt") or ""
    prompts = [str(text).strip() for text in (prompt if isinstance(prompt, list) else [prompt])]
    prefix = f"{prompts[0]} " if dataset.get("prepend_instance_prompt") else ""
    if strategy == "instanceprompt" or dataset.get("only_instance_prompt"):
        return CaptionRule(extensions=(), text=BETWEEN.join(prompts), text_source="instance prompt")
    if strategy == "filename":
        return CaptionRule(extensions=(), from_name=_WITH_BLANKS, prefix=prefix)
    if strategy == "textfile":
        lines = "" if dataset.get("disable_multiline_split") else "all"
        return CaptionRule(extensions=(".txt",), lines=lines, prefix=prefix)
    problem = f"data set {dataset['id']}: caption_strategy {strategy!r} is not read"
    raise config.error(problem, "write each caption in a file beside its image, and give textfile")


# OneTrainer


def _onetrainer(config: Config) -> list[ImageSet]:
    sets = list[ImageSet]()
    for concept in config.value:
        repeats = float(concept.get("balancing", concept.get("repeats", 1.0)))
        off = "disabled" if not concept.get("enabled", True) else "" if repeats else "balancing 0"
        if off:
            config.ignored.add(f"{concept.get('name') or concept['path']} ({off})")
        else:
            sets.append(_concept(config, concept, repeats))
    return sets


def _concept(config: Config, concept: Mapping[str, Any], repeats: float) -> ImageSet:
    text = concept.get("text") or {}
    kind = str(concept.get("type", "STANDARD"))
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
    return ImageSet(
        folder=config.path_of(concept["path"], "path"),
        name=str(concept.get("name") or ""),
        recursive=bool(concept.get("include_subdirectories")),
        captions=_concept_rule(config, text),
        repeats=max(1, int(repeats)),
        is_reg=kind == "PRIOR_PREDICTION",
        split="validation" if kind == "VALIDATION" or concept.get("validation_concept") else "",
    )


def _concept_rule(config: Config, text: Mapping[str, Any]) -> CaptionRule:
    source = text.get("prompt_source", "sample")
    if source == "filename":
        return CaptionRule(extensions=(), from_name=str)
    if source == "sample":
        return CaptionRule(extensions=(".txt",), lines="all")
    if source != "concept":
        raise config.error(f"text.prompt_source {source!r} is not read", "give sample, concept or filename")
    path = Path(config.path_of(text.get("prompt_path"), "text.prompt_path"))
    config.used.add(path)
    try:
        prompt = read_caption(str(path.parent), path.name)[0]
    except UnusableSampleError as error:
        raise config.error(f"text.prompt_path: {error.what}", error.fix) from error
    return CaptionRule(extensions=(), text=prompt, lines="all", text_source="concept prompt")


# musubi-tuner and ai-toolkit


class _Names(NamedTuple):
    """Names of settings of a data set, where it is a folder."""

    folders: tuple[str, ...]
    captions: str
    controls: tuple[str, ...]
    used: tuple[str, ...]
    """Others that count here."""
    is_recursive: bool


_OF_MUSUBI = _Names(
    ("image_directory", "video_directory"), "caption_extension", ("control_directory",),
    ("cache_directory", "batch_size", "target_frames", "frame_extraction"), False,
)  # fmt: skip
_OF_AI_TOOLKIT = _Names(
    ("folder_path", "dataset_path"), "caption_ext", ("control_path", *(f"control_path_{n}" for n in (1, 2, 3))),
    ("is_reg", "default_caption", "mask_path", "alpha_mask", "trigger_word", "buckets", "flip_x", "square_crop",
     "cache_latents", "cache_latents_to_disk", "cache_text_embeddings", "caption_dropout_rate"), True,
)  # fmt: skip


def _musubi(config: Config) -> list[ImageSet]:
    general = config.value.get("general", {})
    return _of_folders(config, [{**general, **dataset} for dataset in config.value["datasets"]], _OF_MUSUBI)


def _ai_toolkit(config: Config) -> list[ImageSet]:
    return _of_folders(config, read_job(config.value).datasets, _OF_AI_TOOLKIT)


def _of_folders(config: Config, datasets: Sequence[Mapping[str, Any]], names: _Names) -> list[ImageSet]:
    firsts = dict[str, Mapping[str, Any]]()
    for dataset in datasets:
        config.take(dataset, (*names.folders, names.captions, *names.controls, *names.used, "num_repeats"))
        config.resolutions.update(pixels_in(dataset))
        setting = next((name for name in names.folders if dataset.get(name)), names.folders[0])
        folder = config.path_of(dataset.get(setting), setting)
        first = firsts.setdefault(folder, dataset)  # the build makes all resolutions of a folder
        if dataset.get("num_repeats", 1) != first.get("num_repeats", 1):
            config.note(f"{setting} {folder} is there with several values of num_repeats: the first counts")
    return [_folder(config, folder, dataset, names) for folder, dataset in firsts.items()]


def _folder(config: Config, folder: str, dataset: Mapping[str, Any], names: _Names) -> ImageSet:
    listed = [dataset.get(name) for name in names.controls]
    controls = [path for value in listed for path in (value if isinstance(value, list) else [value]) if path]
    paired = [
        (role, config.path_of(path, names.controls[0]))
        for role, path in zip(INPUTS["controls"], controls, strict=False)
    ]
    if dataset.get("alpha_mask"):
        paired.append(("mask", ""))
    elif dataset.get("mask_path"):
        paired.append(("mask", config.path_of(dataset["mask_path"], "mask_path")))
    is_reg = bool(dataset.get("is_reg"))
    word = str(dataset.get("trigger_word") or "")
    text = str(dataset.get("default_caption") or "")
    rule = CaptionRule(
        extensions=("." + str(dataset.get(names.captions) or "txt").removeprefix("."),),
        text=text,
        text_source="default caption" if text else "",
        trigger=Trigger(word=word, is_added=not is_reg) if names is _OF_AI_TOOLKIT else None,
        bare=bool(word) and not is_reg,
    )
    return ImageSet(
        folder=folder,
        recursive=names.is_recursive,
        captions=rule,
        repeats=max(int(dataset.get("num_repeats", 1)), 1),
        is_reg=is_reg,
        paired=tuple(paired),
    )


MUSUBI = Trainer("musubi", (), lambda value: isinstance(value, dict) and is_musubi(value), _musubi)
AI_TOOLKIT = Trainer("ai-toolkit", (), is_job, _ai_toolkit)
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
KOHYA = Trainer("kohya-config", ("dataset.toml", "dataset_config.toml"), _is_kohya, _kohya)
#: Names of the files: those that kohya's scripts and their documentation use, the last step first.
METADATA = Trainer(
    "kohya-metadata", ("meta_lat.json", "meta_clean.json", "meta_cap_dd.json", "meta_cap.json"), _is_metadata, _refuse
)
#: Kinds of configurations by their word.
CONFIGS = {trainer.word: trainer for trainer in (KOHYA, SIMPLETUNER, ONETRAINER, MUSUBI, AI_TOOLKIT, METADATA)}

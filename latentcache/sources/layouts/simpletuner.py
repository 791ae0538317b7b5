"""SimpleTuner's ``multidatabackend.json``: a list of data sets and caches.

Rule (bghira/SimpleTuner bc8e6ab, ``documentation/DATALOADER.md``, ``helpers/prompts.py``): ``repeats`` counts further
passes, so 0 is once; folders are recursive; ``caption_strategy`` is ``textfile`` (``a.txt``, each line a caption of
its own unless ``disable_multiline_split``), ``filename`` (the stem with blanks for underscores, the default),
``instanceprompt``, or ``parquet``. ``prepend_instance_prompt`` puts the prompt and a blank before captions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, count_of
from latentcache.fields.captions import BETWEEN
from latentcache.sources.layouts.config import Config, aside, joined, of_folder, of_table
from latentcache.sources.layouts.partners import INPUTS
from latentcache.sources.layouts.sets import CaptionRule, Layout

WORD = "simpletuner"
NAMES = ("multidatabackend.json",)
_USED = ("id", "type", "dataset_type", "instance_data_dir", "repeats", "caption_strategy", "instance_prompt",
         "prepend_instance_prompt", "only_instance_prompt", "disable_multiline_split", "disabled", "disable",
         "parquet", "metadata_backend", "conditioning_type", "conditioning_data",
         "is_regularisation_data")  # fmt: skip
_CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds")


def fits(value: Any) -> bool:
    """True if a parsed file has this form."""
    names = ("instance_data_dir", "dataset_type", "cache_dir_vae", "aws_bucket_name")
    found = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    return (
        len(found) > 0 and all("id" in one for one in found) and any(name in one for one in found for name in names)
    )


def read(config: Config, base: Path | None) -> Layout:
    """The layout that a file describes."""
    parts, further = [], dict[str, Layout]()
    for one in config.value:
        if one.get("dataset_type") == "conditioning" and _is_read(one):
            role = "mask" if one.get("conditioning_type") == "mask" else "control"
            config.take(one, _USED)
            further[str(one["id"])] = aside(config.place(one.get("instance_data_dir"), "instance_data_dir"), role)
    for one in config.value:
        kind = one.get("dataset_type", "image")
        if str(one["id"]) in further:
            parts.append(further[str(one["id"])])
        elif one.get("disabled") or one.get("disable") or kind in _CACHES:
            config.ignored[f"{one['id']} ({'disabled' if kind not in _CACHES else kind})"] += 1
        elif kind != "image":
            config.note(f"data set {one['id']} ({kind}) is not read: it is not one of images")
        elif not _is_read(one):
            raise _elsewhere(config, one)
        else:
            parts.append(_part(config, one, further))
    sets = sum(len(part.sets) for part in parts)
    return joined(config, WORD, f"{config.path.name} has {count_of(sets, 'data sets')} of SimpleTuner", parts, base)


def _is_read(one: Mapping[str, Any]) -> bool:
    return one.get("type", "local") == "local" and not (one.get("disabled") or one.get("disable"))


def _paired(one: Mapping[str, Any], further: Mapping[str, Layout]) -> tuple[tuple[str, str], ...]:
    """Inputs of a data set and the folders of its conditioning data sets, in their order."""
    named, free, found = one.get("conditioning_data") or [], list(INPUTS["controls"]), list[tuple[str, str]]()
    for part in [further[name] for name in ([named] if isinstance(named, str) else named) if name in further]:
        name = "mask" if part.aside[""] == "mask" else free.pop(0) if free else ""
        found += [(name, str(part.root))] if name else []
    return tuple(found)


def _part(config: Config, one: Mapping[str, Any], further: Mapping[str, Layout]) -> Layout:
    config.take(one, _USED)
    repeats, is_reg = int(one.get("repeats") or 0) + 1, bool(one.get("is_regularisation_data"))
    more: dict[str, Any] = {"name": str(one["id"]), "repeats": repeats, "is_reg": is_reg}
    more |= {"paired": _paired(one, further), "paired_by_path": True}
    folder = config.place(one.get("instance_data_dir"), "instance_data_dir")
    if one.get("caption_strategy") != "parquet" or one.get("only_instance_prompt"):
        if one.get("metadata_backend") == "parquet":
            config.note(f"data set {one['id']}: images without a row of its parquet file are used, too")
        return of_folder(folder, _rule(config, one), **more)
    table = config.place(one.get("parquet", {}).get("path"), "parquet.path")
    return of_table(folder, table, _rule(config, one), **more)


def _elsewhere(config: Config, one: Mapping[str, Any]) -> SourceError:
    """The error for a data set of another type than ``local``."""
    places = {"aws": "aws_bucket_name", "huggingface": "dataset_name"}
    fetch = {
        "aws": "`aws s3 sync s3://{} FOLDER`, and name FOLDER as instance_data_dir with the type local",
        "huggingface": "`hf download --repo-type dataset {} --local-dir FOLDER`, and name it in a latentcache.toml",
    }.get(one["type"], "copy its images here, and name their folder with the type local")
    return config.error(
        f"data set {one['id']} has the type {one['type']}",
        fetch.format(one.get(places.get(one["type"], ""))) + '; "disabled": true leaves it out',
        "only folders of images on this disk are read",
    )


def _rule(config: Config, one: Mapping[str, Any]) -> CaptionRule:
    """Where captions are."""
    strategy, said = one.get("caption_strategy", "filename"), one.get("instance_prompt") or ""
    prompts = [str(one).strip() for one in (said if isinstance(said, list) else [said])]
    prefix = f"{prompts[0]} " if one.get("prepend_instance_prompt") else ""
    if strategy == "instanceprompt" or one.get("only_instance_prompt"):
        return CaptionRule(extensions=(), text=BETWEEN.join(prompts), text_source="instance prompt")
    if strategy == "filename":
        return CaptionRule(extensions=(), from_name=with_blanks, prefix=prefix)
    if strategy == "textfile":
        lines = "" if one.get("disable_multiline_split") else "all"
        return CaptionRule(extensions=(".txt",), lines=lines, prefix=prefix)
    if strategy == "parquet":
        said = one.get("parquet", {})
        captions = said.get("caption_column")
        columns = said.get("filename_column"), *(captions if isinstance(captions, list) else [captions])
        return CaptionRule(
            table_columns=tuple(str(name) for name in columns if name),
            table_fallback=str(said.get("fallback_caption_column") or ""),
            table_stems=not said.get("identifier_includes_extension"),
            prefix=prefix,
        )
    raise config.error(
        f"data set {one['id']}: caption_strategy {strategy!r} is not read",
        "give textfile, filename, instanceprompt or parquet",
    )


def with_blanks(stem: str) -> str:
    """A file name as a caption."""
    return stem.replace("_", " ")

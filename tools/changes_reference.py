"""Generate ``docs/reference/changes.md``: what a build encodes again after a change.

Builds two tiny caches, makes each change, and asks the plan of the next build.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from make_images import make_images
from PIL import Image, ImageOps

from latentcache import BuildSettings, build_cache, open_cache
from latentcache.pipeline.build import plan_build

INTRO = """\
The tables come from plans of real builds, and a test compares them. "the new ones" leaves all stored entries in use.
Old entries stay in the cache, so going back encodes nothing.
"""
OUTRO = """\
Never encoded again: a moved cache or folder, other times or inodes, another machine, other versions of libraries and
drivers, another row length, packing, `remainder`, seed or number of ranks. An image whose bytes change but not its
pixels, for example by a new EXIF comment, is decoded and its latents are copied.
"""


class Change(NamedTuple):
    """One change of a build: of its settings, or of a copy of DATA."""

    words: str
    settings: Mapping[str, Any] = {}
    """Arguments of BuildSettings."""
    edit: Callable[[Path], None] | None = None
    """Changes the copy of DATA."""
    recipe: Mapping[str, Callable[[Any], Any]] = {}
    """Field -> change of its recipe, for settings of models that this tool does not have."""


def _latents(words: str, **settings: Any) -> Change:
    return Change(words, {"fields": {"latents": settings}})


def _captions(words: str, **settings: Any) -> Change:
    return Change(words, {"fields": {"prompt_embeds": settings}})


def _tokens(words: str, **values: Any) -> Change:
    return Change(words, recipe={"input_ids": lambda recipe: replace(recipe, **values)})


def _computed_in_bfloat16(recipe: Any) -> Any:
    return replace(recipe, encoder=replace(recipe.encoder, compute_dtype="bfloat16"))


def _flip(data: Path) -> None:
    path = data / "image_0003.jpg"
    with Image.open(path) as image:
        ImageOps.mirror(image).save(path)


def _rewrite(name: str, replace: Callable[[str], str]) -> Callable[[Path], None]:
    def edit(data: Path) -> None:
        path = data / name if data.is_dir() else data
        path.write_text(replace(path.read_text("utf-8")), "utf-8")

    return edit


def _draw_mask(data: Path, gray: int = 200) -> None:
    Image.new("L", (64, 64), gray).save(data / "image_0000-masklabel.png")


def _add(data: Path) -> None:
    Image.new("RGB", (128, 128), "teal").save(data / "new.png")
    (data / "new.txt").write_text("a teal square")


IMAGES = (
    Change("edit an image", edit=_flip),
    Change("edit a caption", edit=_rewrite("image_0003.txt", lambda text: text + " at night")),
    Change("edit a mask", edit=_draw_mask),
    Change("add an image with a caption", edit=_add),
    Change("rename or remove an image", edit=lambda data: (data / "image_0003.jpg").unlink()),
    _latents("`--model`: other weights of a VAE", model="demo"),
    Change(
        "`--text-encoder`: other weights or another pipeline",
        recipe={"prompt_embeds": lambda recipe: replace(recipe, fingerprint="0")},
    ),
    _latents("`--resolution`: another one", resolutions=(320,)),
    _latents("`--resolution`: one more", resolutions=(256, 320)),
    _latents("`--bucket`, `--bucket-step`, `--min-side`, `--max-side`", buckets=("320x320",)),
    _latents("`--like TRAINER`", like="kohya"),
    _latents("`--crop`", crop="top"),
    _latents("`--crop random`, or another `--crop-variants`", crop="random"),
    _latents("`--min-pixels`", min_pixels=2),
    _latents("`--no-upscale`", upscale=False),
    _latents("`--flip`", flip=True),
    _latents("`--latents moments`", latents="moments"),
    Change("`--compute-dtype`", recipe={"latents": _computed_in_bfloat16}),
    Change(
        "`--storage-dtype`",
        {"fields": {name: {"storage_dtype": "float32"} for name in ("latents", "prompt_embeds")}},
    ),
    _latents("`--resample`", resample="lanczos-u8"),
    _captions("`--text-length`", text_length=40),
    _captions("`--text-storage-dtype`", text_storage_dtype="float32"),
    Change("`--caption-prefix`, `--caption-suffix`", {"source": {"caption_prefix": "photo of "}}),
    Change("`--default-caption`", {"source": {"default_caption": "an image"}}),
    _captions("`--shuffle-tags`, `--keep-tags`, `--tag-separator`", shuffle_tags=True),
    _captions("`--empty-prompt`, `--negative-prompt`", empty_prompt=True),
    Change("`--no-repeats`, `--allow-failed`", {"source": {"repeats": False}, "allow_failed": "1"}),
    Change(
        "`--batch-size`, `--device`, `--decode-threads`, `--host-memory`",
        {"batch_size": 2, "device": "cpu*2", "decode_threads": 1, "host_memory": 1 << 28},
    ),
)
RECORDS = (
    Change("edit a line", edit=_rewrite("", lambda text: text.replace("answer 3", "another answer"))),
    Change(
        "add a line", edit=_rewrite("", lambda text: text + text.splitlines()[0].replace("answer 0", "more") + "\n")
    ),
    Change("move or remove lines", edit=_rewrite("", lambda text: "\n".join(text.splitlines()[:0:-1]) + "\n")),
    _tokens("`--tokenizer`: another vocabulary, merges or special tokens", tokenizer="0"),
    _tokens("`--chat-template`", chat_template="0"),
    _tokens("`--template-option`", template_options=(("enable_thinking", "false"),)),
    _tokens("`--loss`", loss="all"),
    _tokens("`--add-bos`, `--add-eos`", add_bos=True),
    _tokens("`--control-tokens`", split_control=False),
    _tokens("the padding id", pad_id=7),
    Change("`--workers`", {"workers": 0}),
)


def page() -> str:
    """Return the text of the page after its first heading."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        images, records = "\n".join(_image_rows(folder)), "\n".join(_record_rows(folder))
    return "\n".join(
        [
            INTRO,
            "## Images and captions\n",
            "| you change | latents | embeddings | masks |\n|---|---|---|---|",
            images,
            "\n## Texts and conversations\n",
            "| you change | tokens |\n|---|---|",
            records,
            f"\n## Nothing\n\n{OUTRO}",
        ]
    )


def _image_rows(folder: Path) -> Iterator[str]:
    data = folder / "images"
    make_images(data, count=5, side=256)
    _draw_mask(data, gray=100)
    (data / "image_0004.txt").unlink()
    latents = {"model": "stub", "resolutions": (256,)}
    fields = {"latents": latents, "prompt_embeds": {"text_encoder": "stub"}, "mask": {}}
    build_cache(BuildSettings(data=data, fields=fields))
    for change in IMAGES:
        yield _row(change, data, ("latents", "prompt_embeds", "mask"))


def _record_rows(folder: Path) -> Iterator[str]:
    data = folder / "chats.jsonl"
    turns = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"answer {n}"}] for n in range(5)]
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    build_cache(BuildSettings(data=data, fields={"input_ids": {"tokenizer": "stub"}}))
    for change in RECORDS:
        yield _row(change, data, ("input_ids",))


def _row(change: Change, data: Path, names: tuple[str, ...]) -> str:
    """Plan the build of a copy of DATA and of the cache after the change."""
    cache = data.with_name(data.name + ".latentcache")
    if change.recipe:
        return _other_recipe(change, cache, names)
    with TemporaryDirectory() as name:
        edited, kept = Path(name) / data.name, Path(name) / cache.name
        (shutil.copytree if data.is_dir() else shutil.copy2)(data, edited)
        shutil.copytree(cache, kept)
        if change.edit:
            change.edit(edited)
        plan = plan_build(BuildSettings(data=edited, **change.settings))
    effects = (_effect(plan.fields.get(field)) for field in names)
    return f"| {change.words} | {' | '.join(effects)} |"


def _other_recipe(change: Change, cache: Path, names: tuple[str, ...]) -> str:
    """Compare the ids of recipes, which are in every key."""
    effects = dict.fromkeys(names, "nothing")
    for field, changed in change.recipe.items():
        recipe = open_cache(cache).recipe(field)
        other = changed(recipe)
        assert other != recipe
        if other.recipe_id != recipe.recipe_id:
            effects[field] = "everything"
    return f"| {change.words} | {' | '.join(effects.values())} |"


def _effect(work: Any) -> str:
    if work is None or not work.to_make:
        return "nothing"
    return "the new ones" if work.cached else "everything"

"""The recipe flags that ``build``, ``verify`` and ``plan`` share, and what they mean."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.pipeline.settings import RecipeSettings

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Encoder: demo (default), a diffusers VAE or pipeline folder, a .safetensors file, a hub id, "
        "or stub[:delay_ms=N].",
        show_default=False,
    ),
]
ModelConfig = Annotated[
    Path | None,
    typer.Option(
        "--model-config", metavar="FILE", help="config.json for a lone .safetensors file.", show_default=False
    ),
]
Resolution = Annotated[
    list[int] | None,
    typer.Option(
        "--resolution",
        metavar="PIXELS",
        help="Side of a square of equal area, pixels (512). Repeat for several.",
        show_default=False,
    ),
]
Bucket = Annotated[
    list[str] | None,
    typer.Option(
        "--bucket",
        metavar="HxW",
        help="An explicit bucket, HEIGHTxWIDTH pixels. Repeat for several.",
        show_default=False,
    ),
]
BucketStep = Annotated[
    int | None,
    typer.Option("--bucket-step", metavar="PIXELS", help="Sides are multiples of this (64).", show_default=False),
]
MinSide = Annotated[
    int | None, typer.Option("--min-side", metavar="PIXELS", help="Shortest side of a bucket.", show_default=False)
]
MaxSide = Annotated[
    int | None, typer.Option("--max-side", metavar="PIXELS", help="Longest side of a bucket.", show_default=False)
]
Flip = Annotated[
    bool | None,
    typer.Option("--flip/--no-flip", help="Store pictures mirrored as well.", show_default=False),
]
ComputeDtype = Annotated[
    str | None,
    typer.Option("--compute-dtype", metavar="TYPE", help="auto|float16|bfloat16|float32", show_default=False),
]
Tiling = Annotated[
    bool | None,
    typer.Option(
        "--tiling/--no-tiling",
        help="Encode large pictures in tiles: less memory, other latents (another recipe).",
        show_default=False,
    ),
]
StorageDtype = Annotated[
    str | None,
    typer.Option("--storage-dtype", metavar="TYPE", help="float16 (default)|bfloat16|float32", show_default=False),
]
Latents = Annotated[
    str | None,
    typer.Option(
        "--latents",
        metavar="KIND",
        help="Of the posterior: mode (default: its mean); sample (one draw); moments (the loader draws).",
        show_default=False,
    ),
]
Resample = Annotated[
    str | None, typer.Option("--resample", metavar="NAME", help="auto|lanczos-u8|lanczos-pil", show_default=False)
]
Icc = Annotated[
    str | None,
    typer.Option(
        "--icc", metavar="POLICY", help="srgb (default): convert embedded profiles; or ignore.", show_default=False
    ),
]
Alpha = Annotated[
    str | None,
    typer.Option(
        "--alpha", metavar="COLOUR", help="Colour under transparent pictures (#ffffff).", show_default=False
    ),
]
AllowFailed = Annotated[
    str | None,
    typer.Option(
        "--allow-failed",
        metavar="N|x%",
        help="Quarantined files that are fine (0; verify: as the build was told).",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def recipe_settings(
    *,
    model: Model = None,
    model_config: ModelConfig = None,
    resolution: Resolution = None,
    bucket: Bucket = None,
    bucket_step: BucketStep = None,
    min_side: MinSide = None,
    max_side: MaxSide = None,
    flip: Flip = None,
    compute_dtype: ComputeDtype = None,
    storage_dtype: StorageDtype = None,
    latents: Latents = None,
    tiling: Tiling = None,
    resample: Resample = None,
    icc: Icc = None,
    alpha: Alpha = None,
) -> RecipeSettings:
    """The flags as settings; what was not given stays unsaid.

    Raises:
        UsageError: A bucket that is no size, or flags that contradict each other.
    """
    return RecipeSettings(
        model=model,
        model_config=None if model_config is None else str(model_config),
        resolutions=tuple(dict.fromkeys(resolution or ())),
        buckets=tuple(parse_size(text) for text in bucket or ()),
        bucket_step=bucket_step,
        min_side=min_side,
        max_side=max_side,
        flip=flip,
        compute_dtype=compute_dtype,
        storage_dtype=storage_dtype,
        latents=latents,
        tiling=tiling,
        resample=resample,
        icc=icc,
        alpha=alpha,
    )


def with_recipe(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the recipe flags, in the place of its parameter ``recipe``, which gets them as settings.

    Typer reads a command's options from its signature, so the signature is what is put together here.
    """
    asked = inspect.signature(recipe_settings, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True)
    merged = [new for old in own.parameters.values() for new in (asked.values() if old.name == "recipe" else [old])]

    @functools.wraps(command)
    def with_flags(**given: Any) -> int:
        recipe = recipe_settings(**{name: given.pop(name) for name in asked})
        return command(recipe=recipe, **given)

    vars(with_flags)["__signature__"] = own.replace(parameters=merged)
    return with_flags


def any_said(settings: RecipeSettings) -> bool:
    """Whether any recipe flag was given."""
    return any(getattr(settings, name) not in (None, ()) for name in type(settings).__dataclass_fields__)


def as_words(settings: RecipeSettings) -> str:
    """The flags that say these settings, for a command that is shown."""
    names = {"resolutions": "resolution", "buckets": "bucket"}
    words: list[str] = []
    for name in type(settings).__dataclass_fields__:
        value = getattr(settings, name)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        words += [f"--{names.get(name, name).replace('_', '-')} {shlex.quote(str(one))}" for one in values]
    return " ".join(words)


def parse_size(text: str) -> Size:
    """``704x1152`` as height and width.

    Raises:
        UsageError: It is no size.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    if match is None:
        raise UsageError(f"--bucket {text!r} is no size", why="expected HEIGHTxWIDTH", fix="--bucket 704x1152")
    return Size(int(match[1]), int(match[2]))


def checked_allowed(text: str | None) -> str | None:
    """``--allow-failed`` as it was given, seen to be a number.

    Raises:
        UsageError: It is none.
    """
    if text is not None:
        parse_allowed(text, 0)
    return text


def parse_allowed(text: str, samples: int) -> int:
    """``--allow-failed``: a number, or a share of all samples such as ``2%``.

    Raises:
        UsageError: It is neither, or a share above all of them.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(%?)", text)
    if match is None or (not match[2] and "." in text) or (match[2] and Fraction(match[1]) > 100):
        raise UsageError(
            f"--allow-failed {text!r} is no number", why="expected N or x%, at most 100%", fix="--allow-failed 1%"
        )
    return int(Fraction(match[1]) * samples / 100) if match[2] else int(match[1])

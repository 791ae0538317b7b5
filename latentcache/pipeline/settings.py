"""What a build is asked to do, as plain values. Costs nothing to import: neither Pillow nor an encoder.

Every value is checked when it is made, so a contradiction is said before a folder is looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size

STORAGE_DTYPES = ("float16", "bfloat16", "float32")
COMPUTE_DTYPES = ("auto", *STORAGE_DTYPES)
POSTERIORS = ("mode", "sample", "moments")
RESAMPLERS = ("auto", "lanczos-u8", "lanczos-pil")
_DEVICE = r"(cpu|(cuda|mps|xpu)(:[0-9]+)?)(\*[1-9][0-9]{0,2})?"
_DEVICES = re.compile(rf"auto|{_DEVICE}(,{_DEVICE})*")
#: Pictures with more pixels are refused before a pixel is decoded: 178 of 10^6 cost 8 s and 2 GB.
MAX_PIXELS = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSettings:
    """What a user may say about a recipe; None means "not said"."""

    model: str | None = None
    model_config: str | None = None
    """A ``config.json`` for a lone weights file."""
    resolutions: tuple[int, ...] = ()
    buckets: tuple[Size, ...] = ()
    bucket_step: int | None = None
    min_side: int | None = None
    max_side: int | None = None
    compute_dtype: str | None = None
    storage_dtype: str | None = None
    latents: str | None = None
    """What of the posterior is stored."""
    tiling: bool | None = None
    """Whether large pictures are encoded in tiles, which gives other latents."""
    flip: bool | None = None
    """Whether pictures are stored mirrored as well."""
    resample: str | None = None
    icc: str | None = None
    alpha: str | None = None

    def __post_init__(self) -> None:
        _one_of("--compute-dtype", self.compute_dtype, COMPUTE_DTYPES)
        _one_of("--storage-dtype", self.storage_dtype, STORAGE_DTYPES)
        _one_of("--latents", self.latents, POSTERIORS)
        _one_of("--resample", self.resample, RESAMPLERS)
        _one_of("--icc", self.icc, ("srgb", "ignore"))
        if self.alpha is not None and not _is_colour(self.alpha):
            raise UsageError(f"--alpha {self.alpha!r} is no colour", why="expected #rrggbb", fix="--alpha '#ffffff'")
        if self.buckets and self.resolutions:
            raise UsageError(
                "--bucket and --resolution were both given",
                why="an explicit list of buckets replaces the resolution",
                fix="give one of the two",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """One build."""

    data: Path
    out: Path | None = None
    """The cache; ``DATA.latentcache`` beside the data where it is not given."""
    recipe: RecipeSettings = field(default_factory=RecipeSettings)
    device: str = "auto"
    """``auto`` is every CUDA device, else the CPU; several are separated by commas or said as ``cpu*2``."""
    fold: bool = True
    """Do the causal 3D convolutions of clip encoders as 2D ones; off only to compare."""
    compile: str = "auto"
    """``on``: buckets with many pictures are encoded by compiled code. ``auto`` is ``off`` until it was measured."""
    batch_size: int | None = None
    """Pictures per encoder call, at most; found by timing where it is None. Halved for a bucket when the device runs
    out of memory."""
    decode_threads: int | None = None
    """Of each worker."""
    host_memory: int | None = None
    """Bytes for pictures in work, of all workers together."""
    max_pixels: int = MAX_PIXELS
    commit_every: int | None = None
    """Entries per commit, at most; a commit comes at 16 MiB or 2 s anyway."""
    events: Path | None = None
    stream: bool = False
    """Whether readers may follow: the plan is said, and shards are sealed while the build goes on."""
    allow_failed: str = "0"
    """Quarantined files that are fine: a number, or a share such as ``2%``. Recorded, so that ``verify`` agrees; the
    build itself decides nothing by it."""
    retry_failed: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not _DEVICES.fullmatch(self.device):
            raise UsageError(
                f"--device {self.device!r} is not known", fix="--device auto|cpu|cuda|cuda:0,cuda:1|cpu*2"
            )
        _one_of("--compile", self.compile, ("auto", "on", "off"))
        names = ("batch_size", "decode_threads", "host_memory", "max_pixels", "commit_every")
        at_least(1, **{name: getattr(self, name) for name in names})

    @property
    def cache(self) -> Path:
        """Where the cache is."""
        return self.out or beside(self.data)


def beside(data: Path) -> Path:
    """Where the cache of DATA is, if nothing else was said."""
    whole = data.resolve()
    return whole.with_name(whole.name + ".latentcache")


def at_least(least: int, **given: int | None) -> None:
    """Refuse numbers that are too small; None means "not said".

    Raises:
        UsageError: With the option's name.
    """
    for name, value in given.items():
        if value is not None and value < least:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {value} is below {least}", fix=f"leave {option} out, or give {least} or more")


def _one_of(option: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise UsageError(f"{option} {value!r} is not known", fix=f"{option} {'|'.join(allowed)}")


def _is_colour(text: str) -> bool:
    return len(text) == 7 and text[0] == "#" and all(letter in "0123456789abcdefABCDEF" for letter in text[1:])

"""Latents of images: their recipe, their settings and the plan of their buckets.

Content, bucket and flip of a sample are in its key. Constant settings that move a latent are in the recipe's
*identity*, and so in every key. Settings that decide which entries exist (resolutions, bucket limits) or how they are
read (normalization) are in the recipe but not in its identity. So a new resolution or a corrected scaling factor
encodes nothing again. Library versions, batch size and device are provenance: recorded, never compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError, count_of
from latentcache.fields.clips import (
    CLIP,
    ClipSettings,
    clip_frames,
    clip_label,
    clip_settings,
)
from latentcache.fields.dtypes import FLOATS
from latentcache.fields.protocol import (
    FieldKind,
    FieldPlan,
    FieldRecipe,
    FieldSpec,
    Group,
    ReadSpec,
    WorkSize,
)
from latentcache.fields.settings import Settings, setting
from latentcache.fields.table import Rejected, SampleTable
from latentcache.geometry.like.trainer import Table, Trainer
from latentcache.geometry.like.trainers import TRAINERS, trainer_of
from latentcache.geometry.planned import PlannedTable, Target, planned_table
from latentcache.geometry.sizes import (
    CROPS,
    GEOMETRY_RULE,
    BucketTable,
    Placement,
    Size,
    bucket_table,
    cropped,
    enlarged,
    explicit_table,
    latent_size,
    place_in,
    unusable,
)
from latentcache.identity.content import MAX_DIM, checksum
from latentcache.value import Value

#: Stored crops of an image if they are random and no number is given; more than half of 256 leave none for flips.
DEFAULT_CROPS, MAX_CROPS = 4, 128
_LENGTHS = MAX_DIM + 1
_SLICE = 1 << 17
#: Images with more pixels are rejected before a pixel is decoded: 178 million cost 8 s and 2 GB.
MAX_PIXELS = 100_000_000


#: Column of samples, (S,) uint8: bit n is set if the pixels of an image differ from its file as ``ALTERATIONS[n]``
#: says. Data sets without such images lack it.
ALTERED = "altered"
#: Reason, words, hint.
ALTERATIONS = (
    ("first-frame", "have several frames or pages: the first is used", "save the frames that you want as images"),
    ("cmyk", "are CMYK: converted to RGB", "nothing, if the colors look right; else save them as RGB"),
    ("alpha", "have an alpha channel: laid on white", "save them on the color that you want, if it is another"),
)


class PixelProfile(Value):
    """Conversion of the bytes of a file to the pixels that an encoder gets. Every field is part of the identity."""

    resample: str = "lanczos-pil"
    """``lanczos-pil`` (Pillow) or ``lanczos-u8`` (torch, uint8, antialias): at most 2 levels apart."""
    decoder: str = "libjpeg-turbo"
    """Decoded at full size."""
    orientation: str = "exif"
    """The EXIF orientation is applied before a bucket is chosen."""
    icc: str = "srgb"
    """``srgb``: embedded profiles are converted; ``ignore``: numbers are used as they are."""
    alpha: str = "#ffffff"
    """Color under transparent images, as #rrggbb."""
    deep: str = "high-byte"
    """16-bit samples keep their high byte (Pillow's own conversion clips at 255)."""
    version: int = 1
    """Increased if the same file gives other pixels."""


class Normalization(Value):
    """Conversion of raw latents to the latents that a model trains on; applied at read.

    ``scale-shift``: ``(z - shift) * scale``. ``mean-std``: per channel ``(z - mean) / std * scale``.
    ``batch-norm``: 2x2 patches into channels ``(c, pi, pj)``, then ``(z - mean) / std``. ``none``: as stored.
    """

    kind: str = "none"
    scale: float = 1.0
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    patch: int = 1


class EncoderSpec(Value):
    """Description of an encoder, known without loading it (and without torch)."""

    family: str
    """Class name of the encoder: ``AutoencoderKL``, ..., or ``demo``, ``stub``."""
    fingerprint: str
    """Hex hash of the encoder half's tensors (name, dtype, shape, bytes)."""
    config: str
    """Hex hash of the configuration fields that ``encode`` uses."""
    channels: int
    """Channels of a latent in a model; stored moments have twice this number."""
    factor: int
    """Pixels per latent cell on each side."""
    multiple: int
    """Image sides are multiples of this number of pixels."""
    compute_dtype: str = "float32"
    storage_dtype: str = "float16"
    posterior: str = "mode"
    """``mode``: the mean of the posterior; the only value for encoders without one. ``moments``: mean and logvar,
    from which a loader draws."""
    tiling: bool = False
    normalization: Normalization = field(default_factory=Normalization)

    @property
    def stored_channels(self) -> int:
        """Channels of an entry: of a latent, or of means and then logvars."""
        return self.channels * (2 if self.posterior == "moments" else 1)

    def identity(self) -> dict[str, Any]:
        """The fields that move the stored bytes."""
        return {name: value for name, value in asdict(self).items() if name not in ("normalization", "multiple")}


class GeometrySettings(Value):
    """Settings for sizes: resolutions in pixels (the side of a square of equal area), or explicit buckets.

    A resolution of unequal sides is one of a trainer (``like``), whose buckets have its area.
    """

    resolutions: tuple[int | Size, ...] = (512,)
    multiple: int = 64
    min_side: int | None = None
    max_side: int | None = None
    buckets: tuple[Size, ...] = ()
    flip: bool = False
    """True if every image is stored a second time, flipped horizontally."""
    upscale: bool = True
    """False: an image is never enlarged; a small one goes to a smaller bucket."""
    min_pixels: int = 0
    """Images with fewer pixels are rejected."""
    crop: str = "center"
    """``center``, ``top`` or ``random``."""
    crops: int = 1
    """Random crops that are stored of every image."""
    clips: ClipSettings | None = None
    """None: images only; latents then have no axis of frames."""
    target: Target | None = None
    """What the buckets are planned for; None: they do not depend on the images."""
    planned: tuple[PlannedTable, ...] = ()
    """The planned buckets of each resolution and length of clips; empty: not planned yet."""
    like: str | None = None
    """Trainer whose buckets, resized sizes and crops these are, of ``TRAINERS``; None: our own."""
    rule: int = GEOMETRY_RULE

    @property
    def variants(self) -> int:
        """Stored of every image and bucket."""
        return self.crops * (2 if self.flip else 1)

    def flips(self, variant: int) -> bool:
        """True for a variant that is a horizontal flip."""
        return variant >= self.crops

    def identity(self) -> dict[str, Any]:
        """The settings that move pixels of a bucket, beside our own centered crop."""
        crop = {} if (self.crop, self.crops) == ("center", 1) else {"crop": self.crop, "crops": self.crops}
        clips = {} if self.clips is None else {"clips": self.clips.identity()}
        like: dict[str, Any] = {"like": self.like} if self.like else {}
        # Then the resolution decides the resized size.
        if self.like and (not self.upscale or self.like_tables()[0].by_edge):
            like["resolutions"] = [side if isinstance(side, int) else str(side) for side in self.resolutions]
        return {"rule": self.rule, **crop, **clips, **like}

    def place(self, image: Size, bucket: Size, draw: int = 0) -> Placement:
        """Placement of an image in one of its buckets; ``draw`` as for :func:`place_in`."""
        resize = None
        if self.like:
            resize = self.like_tables()[0].resized(image, bucket, upscale=self.upscale)
        return place_in(image, bucket, self.crop, draw, resize)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Frames of clips that an entry can have; 1: an image."""
        return tuple(sorted({1, *(self.clips.frames if self.clips else ())}))

    def tables(self, frames: int = 1) -> Sequence[BucketTable | PlannedTable | Table]:
        """One bucket table per resolution, or that of an explicit list, for clips of one length.

        Raises:
            RecipeError: No bucket is left.
        """
        if self.planned:
            return [table for table in self.planned if table.frames == frames]
        if self.like:
            return self.like_tables()
        if self.buckets:
            return (explicit_table(self.buckets, multiple=self.multiple),)
        limits = {"min_side": self.min_side, "max_side": self.max_side}
        sides = [side for side in self.resolutions if isinstance(side, int)]
        return tuple(bucket_table(resolution=side, multiple=self.multiple, **limits) for side in sides)

    def like_tables(self) -> Sequence[Table]:
        """The buckets of the trainer ``like``, one table per resolution; raises RecipeError."""
        return TRAINERS[self.like or ""].tables(
            resolutions=self.resolutions,
            buckets=self.buckets,
            step=self.multiple,
            min_side=self.min_side,
            max_side=self.max_side,
        )


class LatentsRecipe(FieldRecipe):
    """The settings that decide which latents a cache holds. Two equal recipes give equal caches."""

    id_name = "latents"
    geometry: GeometrySettings
    pixels: PixelProfile
    encoder: EncoderSpec

    @property
    def spec(self) -> FieldSpec:
        """Storage and collation."""
        dims = ("C", "h", "w") if self.geometry.clips is None else ("C", "f", "h", "w")
        return FieldSpec(dtype=self.encoder.storage_dtype, dims=dims, variants=self.geometry.variants)

    @property
    def compute_dtype(self) -> str:
        """Type that the encoder computes in."""
        return self.encoder.compute_dtype

    @property
    def read_time(self) -> ReadSpec:
        """Normalization and draw from the posterior."""
        affine = asdict(self.encoder.normalization)
        return ReadSpec(affine=affine, posterior=self.encoder.posterior == "moments")

    def identity(self) -> dict[str, Any]:
        """The part that enters the id, as JSON values without floats; with random crops also their number."""
        pixels = asdict(self.pixels)
        encoder = self.encoder.identity()
        return {**self.geometry.identity(), "pixels": pixels, "encoder": encoder}

    def group(self, bucket: Size, frames: int = 1) -> Group:
        """The items of one bucket: images, or clips of so many frames."""
        cells = latent_size(bucket, self.encoder.factor)
        clips = self.geometry.clips
        dims = (frames, bucket.height, bucket.width)
        axis = () if clips is None else ((frames - 1) // clips.step + 1,)
        shape = (self.encoder.stored_channels, *axis, cells.height, cells.width)
        return Group(label=clip_label(dims), shape=shape, dims=dims)


class LatentsSettings(Settings):
    """Options of the recipe of latents."""

    model: str | None = setting(
        "Encoder: demo, a diffusers VAE or pipeline folder, a .safetensors file, a hub id, or stub[:delay_ms=N] "
        "[default: demo]",
        metavar="MODEL",
    )
    model_config: str | None = setting("config.json for a lone .safetensors file.", metavar="FILE")
    resolutions: tuple[int | Size, ...] | None = setting(
        "Side of a square with the bucket's area; repeat for several [default: as the model]",
        flag="--resolution",
        metavar="PIXELS",
    )
    buckets: tuple[Size, ...] | None = setting(
        "Use this bucket, HEIGHTxWIDTH; repeat for several.", flag="--bucket", metavar="HxW", parse=Size.parse
    )
    bucket_step: int | None = setting("Round sides to this number [default: 64]", metavar="PIXELS", min=1)
    plan_buckets: int | None = setting(
        "Choose buckets so that batches of N samples (of all ranks) are full and no image is lost; 0: do not.",
        metavar="N",
        min=0,
    )
    max_crop: int | None = setting(
        "With --plan-buckets: percent of an image that a crop may cut off [default: 15]",
        metavar="PERCENT",
        min=0,
        max=99,
    )
    max_buckets: int | None = setting("With --plan-buckets: most buckets of a resolution.", metavar="N", min=1)
    replan: bool | None = setting("Plan the buckets again, for the images that are there now.")
    min_side: int | None = setting("Shortest bucket side.", metavar="PIXELS")
    max_side: int | None = setting("Longest bucket side.", metavar="PIXELS")
    upscale: bool | None = setting("Enlarge images that are smaller than their bucket, or use a smaller bucket.")
    min_pixels: int | None = setting("Reject images with fewer pixels (height times width).", metavar="N", min=0)
    like: str | None = setting(
        "Choose sizes and crops as a trainer does [default: none]", choices=("none", *TRAINERS)
    )
    trainer_config: Path | None = setting(
        "Take sizes, flips, captions and --like from a trainer's settings file.", metavar="FILE"
    )
    crop: str | None = setting(
        "Part to keep when a resized image exceeds its bucket [default: center]", choices=CROPS
    )
    crop_variants: int | None = setting(
        "Random crops to store for every image, with --crop random [default: 4]", metavar="N", min=1, max=MAX_CROPS
    )
    frames: tuple[int, ...] | None = setting(
        "Encode videos as clips with N frames; repeat for several lengths", metavar="N", min=1
    )
    fps: int | None = setting("Frames per second to take from a video [default: every frame]", metavar="N", min=1)
    flip: bool | None = setting("Also store every image flipped horizontally.")
    compute_dtype: str | None = setting("Precision of all encoders [default: auto]", choices=("auto", *FLOATS))
    storage_dtype: str | None = setting("Type of all stored values [default: float16]", choices=FLOATS)
    latents: str | None = setting(
        "Store the posterior's mean or its moments [default: mode]", choices=("mode", "moments")
    )
    tiling: bool | None = setting("Encode large images in tiles: less memory, other latents (another recipe).")
    resample: str | None = setting("Resize kernel [default: auto]", choices=("auto", "lanczos-u8", "lanczos-pil"))

    def __post_init__(self) -> None:
        if self.buckets and self.resolutions:
            why = "an explicit list of buckets replaces it"
            raise UsageError("not with a resolution", argument="buckets", why=why, fix="give one of the two")

    def with_trainer(self) -> tuple[LatentsSettings, str]:
        """These settings with those of ``trainer_config`` where none was given, and words on what they are.

        Raises:
            UsageError: The file cannot be read, or asks for what a cache of its sizes cannot hold.
        """
        if self.trainer_config is None:
            return self, ""
        trainer = trainer_of(self.trainer_config, self.like)
        trained = trainer.settings(self.trainer_config)
        if trained.no_latents:
            raise UsageError(
                f"{self.trainer_config}: the trainer takes no cached latents",
                why=", ".join(trained.no_latents),
                fix="turn it off in the trainer's settings",
            )
        wanted = {"like": trainer.name, **trained.options}
        if self.resolutions or self.buckets:
            wanted |= {"resolutions": None, "buckets": None}
        missing = {name: value for name, value in wanted.items() if getattr(self, name) is None}
        words = f"like {trainer.name}, from {self.trainer_config}: {trained.words}"
        return replace(self, trainer_config=None, **missing), words


class Latents(FieldKind):
    """Latents of images, one item per image, bucket, crop and flip."""

    name = "latents"
    kind = 0
    inputs: tuple[str, ...] = ("image",)
    needed: tuple[str, ...] = ("image",)
    """Inputs without which a sample has no item."""
    one_frame: bool = False
    """True if one item counts for all frames of a clip."""
    settings = LatentsSettings
    recipe = LatentsRecipe
    sample_columns = ("original_size", CLIP)
    columns: Mapping[str, tuple[str, tuple[int, ...]]] = {"crop": ("<u4", (2,)), "resize": ("<u4", (2,))}
    work = WorkSize(unit_cost=1 << 28, cost_bytes=25, batch_cost=8 << 20)
    encoder = "VAE"
    describer = "latentcache.encoders.vae.describe:describe"
    producer = "latentcache.encoders.vae.producer:VaeProducer"
    decoder = "latentcache.encoders.vae.describe:decoder"

    def source_options(self, settings: LatentsSettings) -> Mapping[str, Any]:
        """Videos are samples if clips are encoded; the settings file of a trainer says how DATA is read."""
        options: dict[str, Any] = {"videos": True} if settings.frames else {}
        if settings.trainer_config is not None:
            options |= trainer_of(settings.trainer_config, settings.like).settings(settings.trainer_config).source
        return options

    def completed(
        self, recipe: LatentsRecipe, samples: Callable[[], SampleTable], *, again: bool = False
    ) -> LatentsRecipe:
        """The recipe with buckets that are planned for these samples, once; clips of each length have their own.

        A length that no sample has yet gets the buckets that fit all samples, until it is planned again.
        """
        target = recipe.geometry.target
        if target is None or (recipe.geometry.planned and not again):
            return recipe
        geometry = replace(recipe.geometry, planned=())
        table = samples()
        size = np.asarray(table.columns["original_size"])
        repeats = table.columns.get("repeats")
        rows = np.flatnonzero((size > 0).all(axis=1) & (size.prod(axis=1, dtype=np.int64) >= geometry.min_pixels))
        frames, _ = clip_frames(table, rows, geometry.clips, self.name)
        rows = rows[frames > 0]
        frames = frames[frames > 0]
        if not len(rows):  # every image is rejected: the next build plans
            return recipe
        times = np.ones(len(size), dtype=np.int64) if repeats is None else np.asarray(repeats)
        planned = list[PlannedTable]()
        for length in geometry.lengths:
            chosen = rows[frames == length] if (frames == length).any() else rows
            for buckets in geometry.tables():
                assert isinstance(buckets, BucketTable)  # others are not planned
                planned.append(planned_table(size[chosen], times[chosen], buckets.sizes, target, frames=length))
        return replace(recipe, geometry=replace(geometry, planned=tuple(planned)))

    def plan(self, samples: SampleTable, recipe: LatentsRecipe) -> FieldPlan:
        """Buckets of every sample; each distinct size and length is placed once."""
        size = np.asarray(samples.columns["original_size"])
        geometry = recipe.geometry
        has_inputs = [np.asarray(samples.inputs[name].file) >= 0 for name in self.needed]
        rows = np.flatnonzero((size > 0).all(axis=1) & np.logical_and.reduce(has_inputs))
        clips = geometry.clips if self.one_frame or not self.follows else None
        frames, unfit = clip_frames(samples, rows, clips, self.name)
        rows = rows[frames > 0]
        frames = frames[frames > 0]
        images = size[rows]
        size_codes, size_number = _distinct(images[:, 0].astype(np.int64) << 32 | images[:, 1])
        input_codes, input_number = _distinct(size_number.astype(np.int64) * _LENGTHS + frames)
        lengths = (input_codes % _LENGTHS).tolist()
        sizes = [Size(code >> 32, code & 0xFFFFFFFF) for code in size_codes[input_codes // _LENGTHS].tolist()]
        tables = {length: geometry.tables(length) for length in set(lengths)}
        placed = [_buckets_of(image, tables[length], geometry) for image, length in zip(sizes, lengths, strict=True)]
        dims_of_input = [
            [(1 if self.one_frame else length, bucket.height, bucket.width) for bucket in buckets]
            for length, (buckets, _) in zip(lengths, placed, strict=True)
        ]
        dims = sorted(set(chain.from_iterable(dims_of_input)), key=lambda clip: (-math.prod(clip), clip[2], clip[0]))
        group_of = {clip: number for number, clip in enumerate(dims)}
        groups_of_input = [sorted(group_of[clip] for clip in chosen) for chosen in dims_of_input]
        sample, group = _spread(rows, input_number, groups_of_input)
        shapes = np.array(dims, dtype=np.int64).reshape(-1, 3)
        variants = geometry.variants
        variant = np.tile(np.arange(variants, dtype=np.uint8), len(sample))
        group, sample = np.repeat(group, variants), np.repeat(sample, variants)
        notes: list[Rejected] = []
        if not self.follows:
            buckets = [fitting for fitting, _ in placed]
            notes += _notes_on_sizes(samples, rows, input_number, sizes, buckets, geometry)
            notes += _altered(samples, rows)
        unplaced = np.isin(input_number, [number for number, (_, reason) in enumerate(placed) if reason])
        for row, number in zip(rows[unplaced].tolist(), input_number[unplaced].tolist(), strict=True):
            detail = f"{sizes[number]} pixels (height x width)"
            unfit.append((row, samples.note([row], "latents", placed[number][1], detail=detail)))
        return FieldPlan(
            sample=sample,
            group=group,
            variant=variant,
            cost=shapes.prod(axis=1)[group],
            groups=tuple(recipe.group(Size(*clip[1:]), clip[0]) for clip in dims),
            rejected=tuple(unfit),
            notes=tuple(notes),
        )

    def describe(self, recipe: LatentsRecipe, provenance: Mapping[str, Any]) -> dict[str, str]:
        """Encoder, model and pixels."""
        encoder, pixels = recipe.encoder, recipe.pixels
        shape = f"{encoder.channels} channels, f{encoder.factor}, {encoder.storage_dtype}"
        kept = "" if encoder.posterior == "mode" else f", {encoder.posterior} of the posterior"
        demo = "  (demo: not for training)" if encoder.family == "demo" else ""
        scaling = encoder.normalization
        numbers = f"{scaling.kind}, scale {scaling.scale:g}, shift {scaling.shift:g}"
        return {
            "encoder": f"{encoder.family} {encoder.fingerprint[:8]}, {shape}{kept}",
            **({"scaling": numbers} if scaling.kind != "none" else {}),
            "model": f"{provenance.get('model', '')}{demo}",
            **({} if recipe.geometry.clips is None else {"clips": str(recipe.geometry.clips)}),
            "pixels": f"{pixels.resample}, icc {pixels.icc}, alpha on {pixels.alpha}{_chosen(recipe.geometry)}",
        }


def geometry_of(
    settings: LatentsSettings, cached: LatentsRecipe | None, model_multiple: int, frame_step: int = 0
) -> GeometrySettings:
    """Sizes and clips that follow from settings, cache and model; raises RecipeError."""
    base = cached.geometry if cached else GeometrySettings()
    if settings.resolutions:
        base = replace(base, resolutions=tuple(dict.fromkeys(settings.resolutions)), buckets=())
    if settings.buckets:
        base = replace(base, resolutions=(), buckets=settings.buckets)
    step = settings.bucket_step
    if step is None:  # a list of buckets needs no grid, anything else follows the cache
        fresh = cached is not None and settings.resolutions and cached.geometry.buckets
        step = model_multiple if settings.buckets else GeometrySettings().multiple if fresh else base.multiple
        trainer = TRAINERS.get(settings.like or "")
        if trainer is not None and trainer.step and trainer.name != base.like and not settings.buckets:
            step = trainer.step
    plain = ("min_side", "max_side", "flip", "upscale", "min_pixels", "crop")
    options = {name: getattr(settings, name) for name in plain if getattr(settings, name) is not None}
    frame_step = frame_step or (base.clips.step if base.clips else 0)
    clips = clip_settings(settings.frames, settings.fps, base.clips, frame_step)
    if settings.like is not None:
        options["like"] = None if settings.like == "none" else settings.like
    geometry = replace(base, multiple=math.lcm(step, model_multiple), clips=clips, **options)
    geometry = _with_target(geometry, base, settings)
    if geometry.like:
        _check_like(geometry, TRAINERS[geometry.like], step)
    elif oblong := [side for side in geometry.resolutions if not isinstance(side, int)]:
        problem, why = "not without like", "only a trainer's buckets have the area of two sides"
        raise UsageError(problem, argument="resolutions", value=oblong[0], why=why, fix="--resolution PIXELS")
    return replace(geometry, crops=_crops(settings, base, geometry.crop))


def _with_target(geometry: GeometrySettings, base: GeometrySettings, settings: LatentsSettings) -> GeometrySettings:
    """The geometry with what its buckets are planned for; those of the cache stay until something else is asked."""
    names = {"batch": "plan_buckets", "max_crop": "max_crop", "max_buckets": "max_buckets"}
    options = {name: getattr(settings, setting) for name, setting in names.items()}
    options = {name: value for name, value in options.items() if value is not None}
    target = base.target
    if options.get("batch") == 0:
        target = None
    elif target is not None or "batch" in options:
        target = replace(target, **options) if target is not None else Target(**options)
    elif options or settings.replan:
        name = "replan" if not options else names[next(iter(options))]
        raise UsageError(
            "only with --plan-buckets N", argument=name, value=getattr(settings, name), fix="--plan-buckets 16"
        )
    if target is not None:
        wrong = {
            "like": geometry.like,
            "buckets": geometry.buckets,
            "upscale": not geometry.upscale,
        }
        for name in (name for name, value in wrong.items() if value):
            raise UsageError(
                "not with planned buckets", argument=name, fix="leave one of them out, or --plan-buckets 0"
            )
    same = replace(geometry, flip=base.flip, crop=base.crop, crops=base.crops, target=base.target) == base
    keeps = same and target == base.target and not settings.replan
    return replace(geometry, target=target, planned=base.planned if keeps else ())


def _check_like(geometry: GeometrySettings, trainer: Trainer, step: int) -> None:
    """Raise a UsageError for settings that a trainer cannot have, whose geometry is asked for."""
    several = not geometry.upscale and len(geometry.resolutions) > 1
    wrong = {
        "crop": geometry.crop != "center" and "it trains on the middle of images if latents are cached",
        "frames": geometry.clips is not None and not TRAINERS[geometry.like or ""].has_videos and "it has no videos",
        "bucket_step": geometry.multiple != step
        and f"the model needs sides that are multiples of {geometry.multiple}",
        "upscale": several and "without enlarging, one bucket can hold an image in two ways: one cache a resolution",
    }
    for name, why in wrong.items():
        if why:
            raise UsageError(f"not like {geometry.like}", argument=name, why=why, fix="leave one of them out")


def crop_draw(content: bytes, number: int) -> int:
    """64 bits that place random crop ``number`` of a file: xxh3-64 of ``crop``, its content hash and the number."""
    return checksum(b"crop" + content + bytes([number]))


def pixels_of(settings: LatentsSettings, profile: PixelProfile) -> PixelProfile:
    """A profile with the resize kernel that was given."""
    if settings.resample in (None, "auto"):
        return profile
    return replace(profile, resample=settings.resample)


def _crops(settings: LatentsSettings, base: GeometrySettings, crop: str) -> int:
    """Stored crops of an image; raises UsageError for several crops that are not random."""
    number = settings.crop_variants
    if crop == "random":
        return number or (base.crops if base.crop == "random" else DEFAULT_CROPS)
    if number is not None:
        raise UsageError(
            f"not with crop {crop}: only random crops differ",
            argument="crop_variants",
            value=number,
            fix=f"--crop=random --crop-variants={number}",
        )
    return 1


def _chosen(geometry: GeometrySettings) -> str:
    """Choices about crops and sizes that are not the default."""
    words = {"top": ", crops at the top", "random": f", {geometry.crops} random crops"}
    flips = ", with horizontal flips" if geometry.flip else ""
    upscale = "" if geometry.upscale else ", never enlarged"
    least = f", {geometry.min_pixels} pixels or more" if geometry.min_pixels else ""
    like = f", sizes and crops like {geometry.like}" if geometry.like else ""
    planned = f", buckets planned for batches of {geometry.target.batch}" if geometry.target else ""
    return f"{words.get(geometry.crop, '')}{flips}{upscale}{least}{like}{planned}"


def _notes_on_sizes(
    samples: SampleTable,
    rows: NDArray[np.intp],
    input_number: NDArray[np.int32],
    sizes: Sequence[Size],
    buckets: Sequence[Sequence[Size]],
    geometry: GeometrySettings,
) -> list[Rejected]:
    """One note if images are enlarged, and one if planned buckets cut off too much; both name the worst image."""
    notes = list[Rejected]()

    def note(
        measure: Callable[[Size, Size], float], most: int, reason: str, noun: str, words: str, hint: str
    ) -> None:
        pairs = list(zip(sizes, buckets, strict=True))
        amounts = [max((measure(size, bucket) for bucket in fitting), default=0.0) for size, fitting in pairs]
        over = rows[np.isin(input_number, [number for number, amount in enumerate(amounts) if amount > most])]
        if len(over):
            worst = max(range(len(amounts)), key=amounts.__getitem__)
            detail = words.format(
                count=count_of(len(over), noun),
                amount=f"{amounts[worst]:.3g}",
                name=samples.names[int(rows[(input_number == worst).argmax()])],
                size=sizes[worst],
                bucket=max(buckets[worst], key=lambda bucket: measure(sizes[worst], bucket)),
            )
            notes.append(samples.note(over, "latents", reason, detail=detail, hint=hint))

    words = "{count} enlarged, {amount} times at most: {name} from {size} to cover {bucket} pixels"
    hint = "--no-upscale uses smaller buckets, --min-pixels N rejects small images"
    note(enlarged, 1, "upscaled", "images are", words, hint)
    if geometry.target is not None:
        limit = geometry.target.max_crop
        words = f"more than {limit} % is cut off {{count}}, {{amount}} % at most off {{name}}"
        hint = "no table keeps --max-crop for them: raise it, or allow more --max-buckets or a longer --max-side"
        note(cropped, limit, "over-max-crop", "images", words, hint)
    return notes


def _altered(samples: SampleTable, rows: NDArray[np.intp]) -> list[Rejected]:
    """One note for each of ``ALTERATIONS`` with the number of images that it is made to."""
    column = samples.columns.get(ALTERED)
    notes = list[Rejected]()
    for bit, (reason, words, hint) in enumerate(ALTERATIONS if column is not None else ()):
        some = rows[(np.asarray(column)[rows] >> bit & 1).astype(np.bool_)]
        if len(some):
            detail = f"{count_of(len(some), f'images {words}')}, the first is {samples.names[int(some[0])]}"
            notes.append(samples.note(some, "latents", reason, detail=detail, hint=hint))
    return notes


def _buckets_of(
    size: Size, tables: Sequence[BucketTable | PlannedTable | Table], geometry: GeometrySettings
) -> tuple[tuple[Size, ...], str]:
    """Buckets of one size, or the reason why it has none: too small or too long for every table."""
    if size.area < geometry.min_pixels:
        return (), "too-few-pixels"
    buckets = [table.nearest(size) if geometry.upscale else table.within(size) for table in tables]
    reasons = ["too-small" if bucket is None else unusable(size, bucket) for bucket in buckets]
    fitting = [bucket for bucket, reason in zip(buckets, reasons, strict=True) if bucket and not reason]
    return tuple(dict.fromkeys(fitting)), "" if fitting else reasons[0]


def _distinct(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Distinct numbers in order, and (n,) the position of each: ``np.unique`` in 13 bytes less per number."""
    parts = [slice(start, start + _SLICE) for start in range(0, len(numbers), _SLICE)]
    distinct = np.unique(np.concatenate([numbers[:0], *(np.unique(numbers[part]) for part in parts)]))
    which = np.empty(len(numbers), dtype=np.int32)
    for part in parts:
        which[part] = np.searchsorted(distinct, numbers[part])
    return distinct, which


def _spread(
    samples: NDArray[np.intp], input_number: NDArray[np.int32], groups_of_input: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sample and group of every item before flips; each sample has the groups of its ``input_number``."""
    counts = np.array([len(groups) for groups in groups_of_input], dtype=np.int64)
    flat = np.array([group for groups in groups_of_input for group in groups], dtype=np.int32)
    if (counts == 1).all() and len(counts):
        return samples.astype(np.int32), flat[input_number]
    repeats = counts[input_number]
    first = (np.cumsum(counts) - counts)[input_number]
    within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return np.repeat(samples, repeats).astype(np.int32), flat[np.repeat(first, repeats) + within]

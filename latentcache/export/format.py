"""Formats of trainers: the fields that they need, the files of a sample, and the files of their settings."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from latentcache.errors import UsageError
from latentcache.fields.latents import GeometrySettings, LatentsRecipe
from latentcache.fields.prompt_embeds import PromptIdsRecipe
from latentcache.fields.protocol import FieldRecipe
from latentcache.geometry.sizes import Size
from latentcache.value import Value

Array = NDArray[Any]
#: Makes the bytes of a file.
Make = Callable[[], bytes]
#: Fields of a cache.
LATENTS, MASK, CONTROL = "latents", "mask", "control"
TEXT, POOLED, IDS = "prompt_embeds", "pooled_prompt_embeds", "prompt_ids"
#: Pipelines of diffusers whose text is exported.
SD, SDXL, SD3, FLUX = (f"{name}Pipeline" for name in
                       ("StableDiffusion", "StableDiffusionXL", "StableDiffusion3", "Flux"))  # fmt: skip
LUMINA, QWEN, WAN, Z_IMAGE = (f"{name}Pipeline" for name in ("Lumina2", "QwenImage", "Wan", "ZImage"))
#: Encoders of tests and trials, whose latents have the shape of any model.
_TRIALS = ("demo", "stub")
#: Tokens of CLIP; values of the smaller CLIP of SDXL and SD3.
CLIP_TOKENS, CLIP_WIDTH = 77, 768


class Latent(Value, eq=False):
    """Latents of an image in one size, or its mask."""

    bucket: Size
    """Pixels."""
    values: Array
    """(C, h, w) float32, of a clip (C, f, h, w), in the scale that the format asks for; a mask from 0 to 1."""
    flipped: Array | None = None
    """Those of the horizontal flip; None: the cache has none."""


class Sample(Value, eq=False):
    """One image with everything that a format can write."""

    name: str
    """In the data set, with ``/``: ``10_cats/a.png``, ``images.tar/a.png``."""
    target: str
    """Of the image in the exported folder, with ``/``."""
    size: Size
    """Upright, in pixels."""
    caption: str
    frames: int = 0
    """Frames of the clip of a video; 0: an image."""
    has_caption: bool = True
    """False: the data set has no caption for it, so the trainer's own rule applies."""
    repeats: int = 1
    """Occurrences in an epoch, from the configuration of its data set."""
    class_words: str = ""
    is_reg: bool = False
    """True for a regularization image."""
    has_alpha: bool = False
    """True if its mask is its alpha channel."""
    partners: Mapping[str, str] = field(default_factory=dict)
    """Its ``mask``, ``control``, ``control_2``, ``control_3``: name in the exported folder, with ``/``."""
    latents: Sequence[Latent] = ()
    masks: Sequence[Latent] = ()
    controls: Sequence[Latent] = ()
    """Latents of its control image, in the sizes of ``latents``."""
    text: Mapping[str, Array] = field(default_factory=dict)
    """Field of the cache -> its item."""
    further: Sequence[tuple[str, Mapping[str, Array]]] = ()
    """Further captions with their items, for a trainer that draws one."""

    @property
    def captioned(self) -> list[Sample]:
        """The sample with each of its captions."""
        return [self, *(replace(self, caption=caption, text=text) for caption, text in self.further)]

    @property
    def folder(self) -> str:
        """Folder of ``target``."""
        return self.target.rpartition("/")[0]

    @property
    def stem(self) -> str:
        """``target`` without its extension."""
        return self.target.rpartition(".")[0] or self.target


class Dataset(Value):
    """The images of one folder of the export, in one resolution."""

    folder: str
    table: Any
    """Its buckets: see ``geometry.like.trainer.Table``."""
    samples: Sequence[Sample]
    """Without values."""
    roles: Collection[str]
    """Roles of masks and control images that each sample has."""


class Request(Value):
    """Everything that a format is made from."""

    recipes: Mapping[str, FieldRecipe]
    """By field, of all fields of the cache."""
    wanted: Sequence[str]
    """Fields to export."""
    geometry: GeometrySettings
    """The sizes that the trainer chooses, by its settings."""
    root: Path
    """Folder of the data set."""
    folder: str
    """Path at which the trainer sees the export; empty: the files are beside the images."""
    trainer_config: Path | None = None
    prompts: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    """The empty and the negative prompt, if the cache has them: text -> field -> item."""
    architecture: str | None = None
    release: str | None = None

    @property
    def latents(self) -> LatentsRecipe:
        """Recipe of the latents."""
        return cast("LatentsRecipe", self.recipes[LATENTS])


class Text(NamedTuple):
    """Text of one pipeline of diffusers, as a trainer holds it."""

    pipeline: str
    needed: Sequence[str] = ()
    """Fields beside the embeddings of tokens."""
    values: Callable[[Any], Mapping[str, Any]] = dict
    """Makes the named values of a file."""
    name: str = ""
    """Its name in file names."""
    advice: str = ""
    """Line for the user."""


class Architecture(NamedTuple):
    """What a trainer writes for one model."""

    name: str
    channels: int
    """Channels of its latents; these and the next three attributes tell models apart."""
    scale: float = 1.0
    """``scaling_factor`` of the VAE."""
    shift: float = 0.0
    family: str = ""
    """Class of the VAE; empty: any."""
    code: str = ""
    """Its name in file names."""
    texts: Sequence[Text] = ()
    no_text: str = ""
    """Reason why its text is not exported."""
    is_scaled: bool = False
    """See ``Format``."""
    dtype: str = "float32"
    """Of its latents."""
    has_frames: bool = False
    """True: latents have an axis of frames, those of images too."""
    has_control: bool = False
    """True: it takes a control image."""
    has_forms: bool = False
    """True: the form of its files changed over time."""


class Format:
    """One trainer. Making a format raises UsageError for a request that it cannot fulfil."""

    name: str
    """As ``--to``, ``build --like`` and ``plan --for`` name it."""
    is_scaled: bool = False
    """True: latents are written as the model trains on them; False: as the encoder makes them."""
    latent_fields: Sequence[str] = (LATENTS, MASK)
    """Fields of the cache that it writes for ``--fields latents``, if they are there."""
    text_fields: Sequence[str] = (TEXT, POOLED, IDS)
    optional: Sequence[str] = ()
    """Fields that a sample may lack."""
    architectures: Sequence[Architecture] = ()
    """Models whose files differ; empty: files are equal for all."""
    texts: Sequence[Text] = ()
    """Text that its files can hold, if that is equal for all models."""
    extensions: Sequence[str]
    """Images that the trainer finds by their names; others are written as PNG."""
    shared: Sequence[str] = ("repeats", "is_reg")
    """Attributes that all samples of a folder of the export share."""
    has_flips: bool = True
    no_caption: str = ""
    """What the trainer does with an image without a caption."""
    draws_captions: bool = False
    """True: a line of a caption file is a caption, and the trainer draws one."""
    empty_caption: str = ""
    """Caption file of an empty caption."""
    several_lines: str = "the first one"
    """Lines of a caption that the trainer reads if it encodes text itself."""

    def __init__(self, request: Request) -> None:
        if self.architectures:
            self.architecture = self._architecture(request)
            self.texts = self.architecture.texts
            self.is_scaled = self.is_scaled or self.architecture.is_scaled
        wanted = [name for name in request.wanted if name != CONTROL or self.takes_control]
        self.request = replace(request, wanted=wanted)
        self.geometry = request.geometry
        self.tables = request.geometry.like_tables()
        self.samples: Sequence[Sample] = ()
        self.groups: Mapping[str, Sequence[Sample]] = {}
        self.datasets: Sequence[Dataset] = ()
        """Each group in each resolution."""
        if request.geometry.flip and not self.has_flips:
            raise UsageError(
                f"--to {self.name}: the cache has flips, and the trainer has no setting for them",
                fix="build a cache without --flip",
            )
        self.text = self._text() if TEXT in wanted else None

    @property
    def facts(self) -> Mapping[str, str]:
        """The form of the files, for the sidecar and the JSON output."""
        return {"architecture": self.architecture.name} if self.architectures else {}

    @property
    def takes_control(self) -> bool:
        """True if the model takes latents of control images."""
        return CONTROL in self.latent_fields and (not self.architectures or self.architecture.has_control)

    def target(self, sample: Sample) -> str:
        """Name of an image in the exported folder; the given sample still has its name in the data set as target."""
        raise NotImplementedError

    def partner(self, sample: Sample, role: str, extension: str) -> str:
        """Name of its mask or control image in the exported folder; empty: the trainer reads no such files."""
        raise NotImplementedError

    def group(self, sample: Sample) -> str:
        """The folder of the export whose images are one set of the trainer."""
        return sample.folder

    def begin(self, samples: Sequence[Sample]) -> None:
        """Take all samples, without values. Called once, before ``files``."""
        self.samples = samples
        groups = dict[str, list[Sample]]()
        for sample in samples:
            groups.setdefault(self.group(sample), []).append(sample)
        self.groups = dict(sorted(groups.items()))
        self.datasets = [
            Dataset(folder=folder, table=table, samples=group, roles=roles)
            for folder, group in self.groups.items()
            for roles in [common_roles(group)]
            for table in self.tables
        ]

    def files(self, sample: Sample) -> dict[str, Make]:
        """Name of each file of values -> what makes it; a sample that is only planned has no values yet."""
        files = self.latent_files(sample) if LATENTS in self.request.wanted else {}
        return files | (self.text_files(sample, self.text) if self.text is not None else {})

    def latent_files(self, sample: Sample) -> dict[str, Make]:
        """Files of the latents of a sample."""
        raise NotImplementedError

    def text_files(self, sample: Sample, text: Text) -> dict[str, Make]:
        """Files of the text of a sample."""
        raise NotImplementedError

    def settings(self) -> Mapping[str, bytes]:
        """Files of the whole export, such as settings for the trainer, by name."""
        raise NotImplementedError

    @property
    def changing(self) -> Sequence[str]:
        """Names of the settings files that the trainer changes while it trains."""
        return ()

    def advice(self) -> Sequence[str]:
        """Lines on what to set in the trainer, and what must be off."""
        raise NotImplementedError

    def readable(self, name: str) -> str:
        """The name of an image, as PNG if the trainer does not read its kind."""
        stem, _, extension = name.rpartition(".")
        return name if extension.lower() in self.extensions else f"{stem or name}.png"

    def flat(self, name: str) -> str:
        """The name of an image with its folders joined into it, because the trainer reads no folders."""
        stem, _, extension = self.readable(name.replace("/", "_")).rpartition(".")
        return f"{stem}.{extension.lower()}"

    def caption_text(self, text: str) -> str:
        """Contents of a caption file from which the trainer reads this text."""
        return text

    def path(self, name: str) -> str:
        """A file of the export as the trainer's machine writes it."""
        folder = self.request.folder
        separator = "\\" if "\\" in folder else "/"
        return f"{folder.rstrip(separator)}{separator}{name.replace('/', separator)}"

    def tensor(self, latents: Sequence[Latent], bucket: Size, *, is_flipped: bool = False) -> torch.Tensor:
        """Values in one size, as the architecture has them. An image without a flip is symmetric."""
        latent = next(latent for latent in latents if latent.bucket == bucket)
        values = torch.from_numpy(latent.flipped if is_flipped and latent.flipped is not None else latent.values)
        if not self.architectures:
            return values
        if self.architecture.has_frames and values.ndim == 3:
            values = values[:, None]
        elif not self.architecture.has_frames and values.ndim == 4:
            values = values[:, 0]
        return values.to(getattr(torch, self.architecture.dtype))

    def stored(self, text: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Items of fields, in the types of the cache."""
        dtypes = {name: getattr(torch, self.request.recipes[name].spec.dtype) for name in text}
        return {name: torch.from_numpy(values).to(dtypes[name]) for name, values in text.items()}

    def _text(self) -> Text:
        """The text of the pipeline that made the embeddings; raises UsageError."""
        request = self.request
        pipeline = getattr(request.recipes[TEXT], "pipeline", "plug-in")
        text = next((text for text in self.texts if text.pipeline == pipeline), None)
        if text is None:
            known = " or ".join(text.pipeline for text in self.texts)
            model = self.architecture.name if self.architectures else self.name
            no_text = self.architecture.no_text if self.architectures else ""
            raise UsageError(
                f"--fields: text of a {pipeline} cannot be exported",
                why=no_text or f"{model} takes that of a {known or 'pipeline that no cache has'}",
                fix="--fields latents, and let the trainer encode the text",
            )
        if missing := [name for name in text.needed if name not in request.wanted]:
            names = ",".join((LATENTS, TEXT, *text.needed))
            raise UsageError(
                f"{missing[0]}: the cache has no such field, and the trainer's files of text hold it",
                fix=f"run the same `latentcache build` with --fields {names}: only these are made; or export"
                " --fields latents",
            )
        return text

    def _architecture(self, request: Request) -> Architecture:
        """The architecture that is asked for, or the only one whose VAE made the latents; raises UsageError."""
        encoder = request.latents.encoder
        name = request.architecture
        rows = self.architectures
        names = [row.name for row in rows]
        scaling = encoder.normalization
        if name is not None and name not in names:
            fix = f"--architecture {'|'.join(names)}"
            raise UsageError("unknown architecture", argument="architecture", value=name, fix=fix)
        is_known = scaling.kind == "scale-shift"
        is_trial = name is not None and encoder.family in _TRIALS
        fitting = [
            row
            for row in rows
            if name in (None, row.name)
            and (row.channels == encoder.channels or (is_trial and row.family))
            and (row.family in ("", encoder.family) or is_trial)
            and (not is_known or (abs(row.scale - scaling.scale) < 1e-3 and abs(row.shift - scaling.shift) < 1e-3))
        ]
        if len(fitting) == 1:
            return fitting[0]
        numbers = f"{encoder.channels} channels, scale {scaling.scale:g}, shift {scaling.shift:g}"
        if not fitting:
            raise UsageError(
                f"--to {self.name}: no architecture has such latents ({encoder.family}, {numbers})",
                why=f"known are {', '.join(names)}" if name is None else f"those of {name} differ",
                fix=f"build with the VAE of the model that you train: --model MODEL --like {self.name}",
            )
        raise UsageError(
            f"--to {self.name}: these latents fit {' and '.join(row.name for row in fitting)}",
            why=f"their latents are the same ({numbers}), their files are not",
            fix=f"--architecture {fitting[0].name}",
        )


def common_roles(samples: Sequence[Sample]) -> set[str]:
    """Roles of masks and control images that each sample has."""
    return set.intersection(*(set(sample.partners) for sample in samples))


def text_parts(request: Request, sample: Sample) -> dict[str, Array]:
    """Values of each text encoder, which diffusers joins: ``state_1``, ``pooled_1``, ``ids_1``, ``mask_1``, ..."""
    sequence = sample.text[TEXT]
    pooled = sample.text.get(POOLED, np.empty(0))
    pipeline = getattr(request.recipes[TEXT], "pipeline", "")
    parts = {"state_1": sequence}
    if pipeline == SDXL:
        parts = {"state_1": sequence[:, :CLIP_WIDTH], "state_2": sequence[:, CLIP_WIDTH:], "pooled_2": pooled}
    elif pipeline == SD3:
        clip = sequence[:CLIP_TOKENS, : len(pooled)]  # diffusers fills it up to the width of T5
        parts = {"state_1": clip[:, :CLIP_WIDTH], "state_2": clip[:, CLIP_WIDTH:]}
        parts |= {"pooled_1": pooled[:CLIP_WIDTH], "pooled_2": pooled[CLIP_WIDTH:]}
        parts["state_3"] = sequence[CLIP_TOKENS:]
    elif pipeline == FLUX:
        parts = {"pooled_1": pooled, "state_2": sequence}
    if IDS in sample.text:
        recipe = cast("PromptIdsRecipe", request.recipes[IDS])
        for number, item in enumerate(recipe.split(sample.text[IDS].astype(np.int64)), 1):
            parts |= {f"ids_{number}": item[0], f"mask_{number}": item[1]}
    return parts


def npz(arrays: Mapping[str, Array]) -> bytes:
    """Arrays as ``numpy.savez`` stores them: a zip of ``.npy`` members, not compressed.

    The same arrays give the same bytes: members carry no time, unlike those of numpy.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue())
    return buffer.getvalue()


def saved(value: Any) -> bytes:
    """A value of dicts, lists, tuples, strings, numbers and tensors as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def safetensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file with sorted metadata: ``save`` draws their order, so equal exports would differ."""
    data = bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata and dict(metadata)))
    if metadata is None:
        return data
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[start:]


def toml(values: Mapping[str, Any]) -> list[str]:
    """Lines of TOML; strings, numbers, truth values and lists look as in JSON."""
    return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]

"""Files of kohya's musubi-tuner: ``.safetensors`` of latents and of text, one folder for each resolution.

Source: kohya-ss/musubi-tuner 30c658c, ``src/musubi_tuner/dataset/cache_io.py``, ``bucket.py`` and
``image_video_dataset.py``, and the caching script of each model. It trains on the files that it finds in a
``cache_directory``, and its caching scripts delete those whose names they do not know. A name has the size of the
image; that of a video has the size of its bucket, and the frames of the clip.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from latentcache.errors import UsageError
from latentcache.export.format import (
    CONTROL,
    FLUX,
    LATENTS,
    POOLED,
    QWEN,
    TEXT,
    WAN,
    Z_IMAGE,
    Format,
    Latent,
    Make,
    Request,
    Sample,
    architecture_of,
    tensor_of,
    toml,
)
from latentcache.geometry.like.trainer import Table
from latentcache.geometry.like.trainers import TRAINERS
from latentcache.geometry.sizes import Size, square
from latentcache.value import Value


class Architecture(NamedTuple):
    """What musubi-tuner writes for one model."""

    name: str
    code: str
    """At the end of the names of its files."""
    metadata: str
    """Its name in the metadata of a file."""
    family: str
    """Class of its VAE."""
    dtype: str
    """Of its latents."""
    channels: int = 16
    scale: float = 1.0
    shift: float = 0.0
    is_scaled: bool = True
    has_frames: bool = True
    """True: latents have an axis of frames, images too."""
    text: Mapping[str, Mapping[str, str]] = {}
    """Pipeline of diffusers -> name of a tensor -> field."""
    has_control: bool = False


_ROWS = (
    Architecture(
        "qwen-image", "qi", "qwen_image", "AutoencoderKLQwenImage", "bfloat16", text={QWEN: {"varlen_vl_embed": TEXT}}
    ),
    Architecture("wan", "wan", "wan", "AutoencoderKLWan", "bfloat16", text={WAN: {"varlen_t5": TEXT}}),
    Architecture("hunyuan-video", "hv", "hunyuan_video", "AutoencoderKLHunyuanVideo", "float16",
                 scale=0.476986, is_scaled=False),
    Architecture("z-image", "zi", "z_image", "AutoencoderKL", "float32", scale=0.3611, shift=0.1159, is_scaled=False,
                 has_frames=False, text={Z_IMAGE: {"varlen_llm_embed": TEXT}}),
    Architecture("flux-kontext", "fk", "flux_kontext", "AutoencoderKL", "float32", scale=0.3611, shift=0.1159,
                 has_frames=False, text={FLUX: {"t5_vec": TEXT, "clip_l_pooler": POOLED}}, has_control=True),
)  # fmt: skip
#: Other models -> what their files hold and no cache does.
_OTHERS = {
    "framepack": "embeddings of SigLIP and sections of each video",
    "hunyuan-video-1.5": "two texts per caption, and embeddings of SigLIP",
    "qwen-image-edit": "embeddings of the caption together with the control image",
}


class Dataset(Value):
    """Images, or videos of one length, that are repeated as often, in one resolution."""

    folder: str
    table: Table
    resolution: Size
    first: Sample

    @property
    def cache(self) -> str:
        """Its ``cache_directory``."""
        return f"cache/{self.folder}-{self.resolution}"


class Musubi(Format):
    """Files for musubi-tuner. See :class:`~latentcache.export.format.Format`."""

    name = "musubi"
    fields: Mapping[str, Sequence[str]] = {"latents": (LATENTS, CONTROL), "text": (TEXT, POOLED)}
    extensions = ("png", "jpg", "jpeg", "webp", "bmp", "avif", "mp4", "mov", "mkv", "webm", "m4v")
    shared = ()
    has_videos, has_flips = True, False
    no_caption = "leaves them out"
    several_lines = "all of them"

    def __init__(self, request: Request) -> None:
        if request.architecture in _OTHERS:
            why = f"its files hold {_OTHERS[request.architecture]}, and no cache does"
            fix = f"let the trainer encode; known are {', '.join(row.name for row in _ROWS)}"
            raise UsageError(f"--architecture={request.architecture}: cannot be exported", why=why, fix=fix)
        self._architecture = architecture_of(request, _ROWS, self.name)
        has_control = self._architecture.has_control
        wanted = [name for name in request.wanted if name != CONTROL or has_control]
        super().__init__(replace(request, wanted=wanted))
        self.is_scaled = self._architecture.is_scaled
        if has_control and LATENTS in wanted and CONTROL not in wanted:
            raise UsageError(
                "--architecture=flux-kontext: the cache has no latents of control images",
                fix="run the same `latentcache build` with --controls FOLDER: only these are encoded",
            )
        rows = {pipeline: (names, list(names.values())) for pipeline, names in self._architecture.text.items()}
        why = f"{self._architecture.name} takes that of a {' or '.join(rows) or 'pipeline that no cache has'}"
        self._text = self.text_of(rows, why) or {}
        self._datasets: Mapping[str, Sequence[Dataset]] = {}

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sidecar and the JSON output say."""
        return {"architecture": self._architecture.name}

    def target(self, sample: Sample) -> str:
        """``images-2x`` or ``videos-81f-2x``, and the path of the image as one name: folders in it are not read."""
        kind = f"videos-{sample.frames}f" if sample.frames else "images"
        return f"{kind}-{sample.repeats}x/{self.flat(sample.target)}"

    def partner(self, sample: Sample, role: str, extension: str) -> str:
        """See ``Format``: a ``control_directory`` for each folder of images."""
        return f"controls-{sample.stem}{extension.lower()}" if role == CONTROL in self.request.wanted else ""

    def begin(self, samples: Sequence[Sample]) -> None:
        """Sort the images into data sets."""
        super().begin(samples)
        if reg := [sample for sample in samples if sample.is_reg]:
            raise UsageError(
                f"{reg[0].name}: is a regularization image, and musubi-tuner knows none",
                where=reg[0].name,
                fix="build a cache of the other images",
            )
        sides = [*self.geometry.buckets, *map(square, self.geometry.resolutions)]
        self._datasets = {
            folder: [
                Dataset(folder=folder, table=table, resolution=side, first=group[0])
                for table, side in zip(self.geometry.like_tables(), sides, strict=True)
            ]
            for folder, group in self.groups.items()
        }

    def files(self, sample: Sample) -> Mapping[str, Make]:
        """See ``Format``."""
        writers, stem = dict[str, Make](), sample.stem.rpartition("/")[2]
        for dataset in self._datasets[sample.folder]:
            start, end = f"{dataset.cache}/{stem}", f"_{self._architecture.code}"
            if LATENTS in self.request.wanted:
                bucket = self._bucket(sample, dataset)
                size = bucket if sample.frames else sample.size
                clip = f"_00000-{sample.frames:03d}" if sample.frames else ""
                name = f"{start}{clip}_{size.width:04d}x{size.height:04d}{end}.safetensors"
                writers[name] = partial(self._latents, sample, size, bucket)
            if self._text:
                writers[f"{start}{end}_te.safetensors"] = partial(self._texts, sample)
        return writers

    def settings(self) -> Mapping[str, bytes]:
        """See ``Format``."""
        config = self.request.trainer_config
        geometry, batch = self.geometry, TRAINERS[self.name].settings(config).batch if config else 1
        lines = ["# Made by latentcache. Give it to musubi-tuner with --dataset_config.", "[general]"]
        general = {"caption_extension": ".txt", "batch_size": batch}
        general |= {"enable_bucket": not geometry.buckets, "bucket_no_upscale": not geometry.upscale}
        lines += toml(general)
        for dataset in (each for datasets in self._datasets.values() for each in datasets):
            frames, side = dataset.first.frames, dataset.resolution
            settings: dict[str, Any] = {
                "resolution": [side.width, side.height],
                f"{'video' if frames else 'image'}_directory": self.path(dataset.folder),
                "cache_directory": self.path(dataset.cache),
                "num_repeats": dataset.first.repeats,
            }
            settings |= {"target_frames": [frames], "frame_extraction": "head"} if frames else {}
            if CONTROL in self.request.wanted:
                settings["control_directory"] = self.path(f"controls-{dataset.folder}")
            lines += ["", "[[datasets]]", *toml(settings)]
        return {"dataset.toml": "\n".join([*lines, ""]).encode()}

    def advice(self) -> Sequence[str]:
        """See ``Format``."""
        lines = [f"--dataset_config {self.path('dataset.toml')}; batch_size is in this file"]
        lines.append("caching scripts keep only files with names that they know: run none, or with --skip_existing")
        if not self._text:
            lines.append("the trainer has no text: run its script that caches text, into the same folders")
        return lines

    def _bucket(self, sample: Sample, dataset: Dataset) -> Size:
        """The bucket of an image in a data set; that of an export is among those of the cache."""
        table, upscale = dataset.table, self.geometry.upscale
        return (table.nearest(sample.size) if upscale else table.within(sample.size)) or dataset.resolution

    def _latents(self, sample: Sample, size: Size, bucket: Size) -> bytes:
        tensors = dict[str, torch.Tensor]()
        for name, latents in (("latents", sample.latents), ("latents_control", sample.controls)):
            if latents:
                values = self._values(latents, bucket)
                shape = "x".join(map(str, ((1,) if values.ndim == 3 else ()) + values.shape[1:]))
                tensors[f"{name}_{shape}_{self._architecture.dtype}"] = values
        about = {"width": str(size.width), "height": str(size.height)}
        about |= {"frame_count": str(sample.frames)} if sample.frames else {}
        return self._saved(tensors, about)

    def _values(self, latents: Sequence[Latent], bucket: Size) -> torch.Tensor:
        """Those of a bucket: (C, F, h, w), or (C, h, w) for a model without frames."""
        values = tensor_of(latents, bucket)
        if self._architecture.has_frames and values.ndim == 3:
            values = values[:, None]
        elif not self._architecture.has_frames and values.ndim == 4:
            values = values[:, 0]
        return values.to(getattr(torch, self._architecture.dtype)).contiguous()

    def _texts(self, sample: Sample) -> bytes:
        tensors = dict[str, torch.Tensor]()
        for name, field in self._text.items():
            dtype = self.request.recipes[field].spec.dtype
            tensors[f"{name}_{dtype}"] = torch.from_numpy(sample.text[field]).to(getattr(torch, dtype))
        return self._saved(tensors, {"caption1": sample.caption})

    def _saved(self, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> bytes:
        metadata = {"architecture": self._architecture.metadata, **about, "format_version": "1.0.1"}
        return _with_ordered_metadata(bytes(save(dict(tensors), metadata)))


def _with_ordered_metadata(data: bytes) -> bytes:
    """The same safetensors file with sorted metadata: ``save`` draws their order, so equal exports would differ."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[start:]

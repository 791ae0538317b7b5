"""Files of kohya's musubi-tuner: ``.safetensors`` of latents and of text, one folder for each resolution.

Source: kohya-ss/musubi-tuner 30c658c, ``src/musubi_tuner/dataset/cache_io.py``, ``bucket.py`` and
``image_video_dataset.py``, and the caching script of each model. It trains on the files that it finds in a
``cache_directory``, and its caching scripts delete those whose names they do not know. A name has the size of the
image; that of a video has the size of its bucket, and the frames of the clip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from latentcache.errors import UsageError
from latentcache.export import format as base
from latentcache.export.format import Architecture, Text
from latentcache.geometry.like.trainers import TRAINERS
from latentcache.geometry.sizes import Size


def _named(**fields: str) -> Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """What makes the tensors of a text: name of a tensor -> field."""

    def tensors(text: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: text[field] for name, field in fields.items()}

    return tensors


#: The code is at the end of the names of files.
_ROWS = (
    Architecture("qwen-image", 16, family="AutoencoderKLQwenImage", code="qi", dtype="bfloat16", is_scaled=True,
                 has_frames=True, texts=[Text(base.QWEN, (), _named(varlen_vl_embed=base.TEXT))]),
    Architecture("wan", 16, family="AutoencoderKLWan", code="wan", dtype="bfloat16", is_scaled=True,
                 has_frames=True, texts=[Text(base.WAN, (), _named(varlen_t5=base.TEXT))]),
    Architecture("hunyuan-video", 16, 0.476986, family="AutoencoderKLHunyuanVideo", code="hv", dtype="float16",
                 has_frames=True),
    Architecture("z-image", 16, 0.3611, 0.1159, family="AutoencoderKL", code="zi",
                 texts=[Text(base.Z_IMAGE, (), _named(varlen_llm_embed=base.TEXT))]),
    Architecture("flux-kontext", 16, 0.3611, 0.1159, family="AutoencoderKL", code="fk", is_scaled=True,
                 has_control=True,
                 texts=[Text(base.FLUX, (base.POOLED,), _named(t5_vec=base.TEXT, clip_l_pooler=base.POOLED))]),
)  # fmt: skip
#: Other models -> what their files hold and no cache does.
_OTHERS = {
    "framepack": "embeddings of SigLIP and sections of each video",
    "hunyuan-video-1.5": "two texts per caption, and embeddings of SigLIP",
    "qwen-image-edit": "embeddings of the caption together with the control image",
}


class Musubi(base.Format):
    """Files for musubi-tuner. See :class:`~latentcache.export.format.Format`."""

    name = "musubi"
    architectures = _ROWS
    latent_fields = (base.LATENTS, base.CONTROL)
    text_fields = (base.TEXT, base.POOLED)
    extensions = ("png", "jpg", "jpeg", "webp", "bmp", "avif", "mp4", "mov", "mkv", "webm", "m4v")
    shared = ()
    has_flips = False
    no_caption = "leaves them out"
    several_lines = "all of them"

    def __init__(self, request: base.Request) -> None:
        if request.architecture in _OTHERS:
            why = f"its files hold {_OTHERS[request.architecture]}, and no cache does"
            fix = f"let the trainer encode; known are {', '.join(row.name for row in _ROWS)}"
            raise UsageError(f"--architecture={request.architecture}: cannot be exported", why=why, fix=fix)
        super().__init__(request)
        wanted = self.request.wanted
        if self.takes_control and base.LATENTS in wanted and base.CONTROL not in wanted:
            raise UsageError(
                "--architecture=flux-kontext: the cache has no latents of control images",
                fix="run the same `latentcache build` with --controls FOLDER: only these are encoded",
            )

    def target(self, sample: base.Sample) -> str:
        """``images-2x`` or ``videos-81f-2x``, and the path of the image as one name: folders in it are not read."""
        kind = f"videos-{sample.frames}f" if sample.frames else "images"
        return f"{kind}-{sample.repeats}x/{self.flat(sample.target)}"

    def partner(self, sample: base.Sample, role: str, extension: str) -> str:
        """See ``Format``: a ``control_directory`` for each folder of images."""
        return f"controls-{sample.stem}{extension.lower()}" if role == base.CONTROL in self.request.wanted else ""

    def begin(self, samples: Sequence[base.Sample]) -> None:
        """See ``Format``."""
        super().begin(samples)
        if reg := [sample for sample in samples if sample.is_reg]:
            raise UsageError(
                f"{reg[0].name}: is a regularization image, and musubi-tuner knows none",
                where=reg[0].name,
                fix="build a cache of the other images",
            )

    def latent_files(self, sample: base.Sample) -> dict[str, base.Make]:
        """See ``Format``."""
        files = dict[str, base.Make]()
        stem = sample.stem.rpartition("/")[2]
        for dataset in self._datasets(sample):
            table = dataset.table
            bucket = table.nearest(sample.size) if self.geometry.upscale else table.within(sample.size)
            size = bucket if sample.frames else sample.size
            clip = f"_00000-{sample.frames:03d}" if sample.frames else ""
            name = f"{stem}{clip}_{size.width:04d}x{size.height:04d}_{self.architecture.code}.safetensors"
            files[f"{_cache(dataset)}/{name}"] = partial(self._latents, sample, size, bucket)
        return files

    def text_files(self, sample: base.Sample, text: Text) -> dict[str, base.Make]:
        """See ``Format``."""
        name = f"{sample.stem.rpartition('/')[2]}_{self.architecture.code}_te.safetensors"
        datasets = self._datasets(sample)
        return {f"{_cache(dataset)}/{name}": partial(self._texts, sample, text) for dataset in datasets}

    def settings(self) -> Mapping[str, bytes]:
        """See ``Format``."""
        config = self.request.trainer_config
        geometry = self.geometry
        batch = TRAINERS[self.name].settings(config).batch if config else 1
        lines = ["# Made by latentcache. Give it to musubi-tuner with --dataset_config.", "[general]"]
        general = {"caption_extension": ".txt", "batch_size": batch}
        general |= {"enable_bucket": not geometry.buckets, "bucket_no_upscale": not geometry.upscale}
        lines += base.toml(general)
        for dataset in self.datasets:
            first = dataset.samples[0]
            side = dataset.table.resolution
            settings: dict[str, Any] = {
                "resolution": [side.width, side.height],
                f"{'video' if first.frames else 'image'}_directory": self.path(dataset.folder),
                "cache_directory": self.path(_cache(dataset)),
                "num_repeats": first.repeats,
            }
            if first.frames:
                settings |= {"target_frames": [first.frames], "frame_extraction": "head"}
            if base.CONTROL in self.request.wanted:
                settings["control_directory"] = self.path(f"controls-{dataset.folder}")
            lines += ["", "[[datasets]]", *base.toml(settings)]
        return {"dataset.toml": "\n".join([*lines, ""]).encode()}

    def advice(self) -> Sequence[str]:
        """See ``Format``."""
        lines = [f"--dataset_config {self.path('dataset.toml')}; batch_size is in this file"]
        lines.append("caching scripts keep only files with names that they know: run none, or with --skip_existing")
        if self.text is None:
            lines.append("the trainer has no text: run its script that caches text, into the same folders")
        return lines

    def _datasets(self, sample: base.Sample) -> list[base.Dataset]:
        """Those of an image: one for each resolution."""
        return [dataset for dataset in self.datasets if dataset.folder == sample.folder]

    def _latents(self, sample: base.Sample, size: Size, bucket: Size) -> bytes:
        tensors = dict[str, torch.Tensor]()
        for name, latents in (("latents", sample.latents), ("latents_control", sample.controls)):
            if latents:
                values = self.tensor(latents, bucket)
                shape = "x".join(map(str, ((1,) if values.ndim == 3 else ()) + values.shape[1:]))
                tensors[f"{name}_{shape}_{self.architecture.dtype}"] = values
        about = {"width": str(size.width), "height": str(size.height)}
        about |= {"frame_count": str(sample.frames)} if sample.frames else {}
        return self._saved(tensors, about)

    def _texts(self, sample: base.Sample, text: Text) -> bytes:
        tensors = text.values(self.stored(sample.text))
        named = {f"{name}_{str(tensor.dtype).removeprefix('torch.')}": tensor for name, tensor in tensors.items()}
        return self._saved(named, {"caption1": sample.caption})

    def _saved(self, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> bytes:
        name = self.architecture.name.replace("-", "_")
        return base.safetensors(tensors, {"architecture": name, **about, "format_version": "1.0.1"})


def _cache(dataset: base.Dataset) -> str:
    """Its ``cache_directory``."""
    return f"cache/{dataset.folder}-{dataset.table.resolution}"

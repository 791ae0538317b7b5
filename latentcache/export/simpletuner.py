"""The caches of SimpleTuner, its two files about sizes, and its list of backends.

Source: bghira/SimpleTuner bc8e6ab, ``caching/vae.py``, ``caching/text_embeds.py``, ``metadata/backends/discovery.py``
and ``data_backend/factory.py`` of ``simpletuner/helpers``. A backend is a folder of images in one resolution. Latents
lie in its cache folder, named by the SHA-256 of the image's name without extension; a text lies in the folder of all
texts, named by its MD5. Files are made by ``torch.save`` of tensors and dicts of them, latents in float32 and scaled.

Two JSON files in the folder of images, keyed by absolute path, say which bucket and which crop an image has. Where
they are, SimpleTuner takes its sizes from them and opens no image. A third one goes into its output folder: the size
for each ratio, so that images that are added later get the sizes of the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from latentcache.errors import UsageError
from latentcache.export.format import (
    IDS,
    LATENTS,
    POOLED,
    TEXT,
    Content,
    Request,
    Sample,
    joined,
    saved,
)
from latentcache.geometry.like.simpletuner import SimpleTunerTable
from latentcache.value import Value

#: Images that it finds with Pillow alone.
_EXTENSIONS = ("bmp", "jpg", "jpeg", "png", "tif", "tiff", "webp")
#: Pipeline of diffusers -> ``model_family``, which is in the name of a text.
_FAMILIES = {"StableDiffusionXLPipeline": "sdxl", "FluxPipeline": "flux"}
#: Tokens of CLIP.
_CLIP_TOKENS = 77


class Backend(Value):
    """Images that are repeated as often, in one resolution."""

    name: str
    folder: str
    """Of its images, in the export."""
    table: SimpleTunerTable
    samples: Sequence[Sample]
    """Without values."""

    def latents(self, sample: Sample) -> str:
        """File of the latents of an image."""
        path, _, stem = sample.stem.removeprefix(f"{self.folder}/").rpartition("/")
        name = hashlib.sha256(stem.encode()).hexdigest()
        return f"vae/{self.name}/{f'{path}/' if path else ''}{name}.pt"


class SimpleTuner:
    """Files for SimpleTuner. See :class:`~latentcache.export.format.Format`."""

    name = "simpletuner"
    fields: Mapping[str, Sequence[str]] = {"latents": (LATENTS,), "text": (TEXT, POOLED, IDS)}
    is_scaled = True

    def __init__(self, request: Request) -> None:
        self._geometry, self._recipe, self._wanted = request.geometry, request.recipe, request.wanted
        self._tables = cast("Sequence[SimpleTunerTable]", request.geometry.like_tables())
        self._backends: Sequence[Backend] = ()
        self._family = ""
        self._dtypes: dict[str, torch.dtype] = {}
        self._text_of: dict[str, str] = {}
        """Caption -> target of the image whose files hold its text."""
        if request.recipe.encoder.normalization.kind == "batch-norm":
            raise UsageError(
                "--to simpletuner: latents of this VAE cannot be exported",
                why="SimpleTuner normalizes them in patches",
                fix="let the trainer encode the images",
            )

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sidecar and the JSON output say."""
        return {"model_family": self._family} if self._family else {}

    def check(self, content: Content) -> None:
        """See ``Format``."""
        if self._geometry.flip:
            raise UsageError(
                "--to simpletuner: the cache has flips, and SimpleTuner has no setting for them",
                fix="build a cache without --flip",
            )
        if TEXT not in content.wanted:
            return
        recipe = content.recipes[TEXT]
        pipeline = getattr(recipe, "pipeline", "plug-in")
        if pipeline not in _FAMILIES:
            raise UsageError(
                f"--fields: text of a {pipeline} cannot be exported",
                why=f"known are the texts of {' and '.join(_FAMILIES)}",
                fix="--fields latents, and let the trainer encode the text",
            )
        if pipeline == "FluxPipeline" and IDS not in content.wanted:
            raise UsageError(
                "prompt_ids: the cache holds none, and files of text need their attention masks",
                fix="run the same `latentcache build` with --prompt-ids: only token ids are made",
            )
        self._family = _FAMILIES[pipeline]
        self._dtypes = {name: getattr(torch, content.recipes[name].spec.dtype) for name in (TEXT, POOLED)}

    def target(self, sample: Sample) -> str:
        """``images-2x`` or ``reg-1x``, the folder of the data set, and the name of the image."""
        stem, _, extension = sample.target.rpartition(".")
        if extension.lower() not in _EXTENSIONS:
            stem, extension = stem or sample.target, "png"
        return f"{'reg' if sample.is_reg else 'images'}-{sample.repeats}x/{stem}.{extension}"

    def partner(self, sample: Sample, role: str, extension: str) -> str:
        """See ``Format``: a mask is in a folder of masks with the path of its image."""
        path = sample.stem.partition("/")[2]
        return f"masks-{sample.repeats}x/{path}.png" if role == "mask" and not sample.is_reg else ""

    def begin(self, folder: str, samples: Iterable[Sample]) -> None:
        """Sort the images into backends, and find the first image of each text."""
        groups = dict[str, list[Sample]]()
        for sample in samples:
            if not sample.has_caption:
                raise UsageError(
                    f"{sample.name}: has no caption, and SimpleTuner stops at such an image",
                    where=sample.name,
                    fix="write one, or build with --default-caption TEXT, which may be empty",
                )
            groups.setdefault(sample.target.partition("/")[0], []).append(sample)
            self._text_of.setdefault(sample.caption, sample.target)
        self._backends = [
            Backend(name=f"{name}-{table.resolution.width}", folder=name, table=table, samples=group)
            for name, group in sorted(groups.items())
            for table in self._tables
        ]

    def files(self, sample: Sample, fields: Sequence[str]) -> Mapping[str, Callable[[], bytes]]:
        """See ``Format``."""
        writers = dict[str, Callable[[], bytes]]()
        folder = sample.target.partition("/")[0]
        for backend in self._backends if LATENTS in fields else ():
            if backend.folder == folder:
                writers[backend.latents(sample)] = partial(_latents, sample, backend.table)
        if TEXT in fields and self._text_of[sample.caption] == sample.target:
            # The hash is only a name: it protects nothing.
            name = hashlib.md5(sample.caption.encode(), usedforsecurity=False).hexdigest()
            writers[f"text/{name}-{self._family}.pt"] = partial(self._text, sample)
        return writers

    def settings(self, folder: str, samples: Iterable[Sample]) -> Mapping[str, bytes]:
        """See ``Format``: the list of backends, and the sizes of each."""
        files = {"multidatabackend.json": self._listed(folder)}
        for table in self._tables if self._geometry.resolutions else ():
            sizes = {str(ratio): [size.width, size.height] for ratio, size in table.sizes.items()}
            files[f"output/aspect_resolution_map-{table.megapixels}.json"] = _json(sizes)
        for backend in self._backends:
            buckets, entries = dict[str, list[str]](), dict[str, Any]()
            for sample in backend.samples:
                path = joined(folder, sample.target)
                entries[path] = entry = self._entry(sample, backend.table)
                buckets.setdefault(str(entry["aspect_ratio"]), []).append(path)
            indices = {"config": {}, "aspect_ratio_bucket_indices": buckets}
            files[f"{backend.folder}/aspect_ratio_bucket_indices_{backend.name}.json"] = _json(indices)
            files[f"{backend.folder}/aspect_ratio_bucket_metadata_{backend.name}.json"] = _json(entries)
        return files

    def advice(self, folder: str, samples: Iterable[Sample]) -> Sequence[str]:
        """See ``Format``."""
        lines = [f"data_backend_config: {joined(folder, 'multidatabackend.json')}"]
        lines.append(f"aspect_bucket_alignment: {self._geometry.multiple}; override_dataset_config must be off")
        if self._geometry.resolutions:
            output = joined(folder, "output")
            lines.append(f"output_dir: {output}, or copy the file there into yours before you add images")
        if self._family:
            lines.append(
                f"model_family: {self._family}; caption_dropout_probability: 0, or the trainer encodes the empty"
                " prompt at every start; it also encodes validation prompts"
            )
        else:
            lines.append(f"the trainer encodes text itself, once, into {joined(folder, 'text')}")
        if any("mask" in sample.partners for sample in samples):
            lines.append("masks are written, and used by a backend whose images all have one")
        return lines

    def _entry(self, sample: Sample, table: SimpleTunerTable) -> dict[str, Any]:
        """Sizes of an image as (width, height), its crop as (top, left)."""
        bucket = table.nearest(sample.size)
        placement = self._recipe.geometry.place(sample.size, bucket)
        return {
            "original_size": [sample.size.width, sample.size.height],
            "crop_coordinates": [placement.top, placement.left],
            "target_size": [bucket.width, bucket.height],
            "intermediary_size": [placement.resize.width, placement.resize.height],
            "aspect_ratio": round(bucket.width / bucket.height, 2),
        }

    def _listed(self, folder: str) -> bytes:
        """``multidatabackend.json``."""
        backends = list[dict[str, Any]]()
        for backend in self._backends:
            entry: dict[str, Any] = {
                "id": backend.name,
                "type": "local",
                "dataset_type": "image",
                "instance_data_dir": joined(folder, backend.folder),
                "cache_dir_vae": joined(folder, f"vae/{backend.name}"),
                "resolution": backend.table.resolution.width,
                "resolution_type": "pixel_area",
                "crop": not backend.table.buckets,
                "crop_style": "center",
                "crop_aspect": "preserve" if backend.table.buckets else "square",
                "caption_strategy": "textfile",
                "disable_multiline_split": True,
                # There ``repeats`` counts further passes.
                "repeats": backend.samples[0].repeats - 1,
                "metadata_backend": "discovery",
            }
            if backend.samples[0].is_reg:
                entry["is_regularisation_data"] = True
            backends.append(entry)
            if all("mask" in sample.partners for sample in backend.samples):
                entry["conditioning_data"] = f"masks-{backend.name}"
                backends.append(
                    {
                        "id": f"masks-{backend.name}",
                        "type": "local",
                        "dataset_type": "conditioning",
                        "conditioning_type": "mask",
                        "instance_data_dir": joined(folder, backend.folder.replace("images", "masks")),
                        "caption_strategy": None,
                    }
                )
        text = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True}
        return _json([*backends, {**text, "cache_dir": joined(folder, "text")}], indent=2)

    def _text(self, sample: Sample) -> bytes:
        sequence, pooled = (torch.from_numpy(sample.text[name]).to(dtype) for name, dtype in self._dtypes.items())
        embeddings = {"prompt_embeds": sequence[None], "pooled_prompt_embeds": pooled}
        if self._family == "flux":
            mask = np.ascontiguousarray(sample.text[IDS][1:, _CLIP_TOKENS:]).astype(np.int64)
            embeddings |= {"time_ids": torch.zeros(1, len(sequence), 3), "attention_masks": torch.from_numpy(mask)}
        return saved(embeddings)


def _latents(sample: Sample, table: SimpleTunerTable) -> bytes:
    bucket = table.nearest(sample.size)
    return saved(torch.from_numpy(next(latent.values for latent in sample.latents if latent.bucket == bucket)))


def _json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode()

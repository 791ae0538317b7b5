"""The caches of SimpleTuner, its two files about sizes, and its list of backends.

Source: bghira/SimpleTuner bc8e6ab, ``caching/vae.py``, ``caching/text_embeds.py``, ``metadata/backends/discovery.py``
and ``data_backend/factory.py`` of ``simpletuner/helpers``. A backend is a folder of images in one resolution. Latents
are in its cache folder, named by the SHA-256 of the image's name without extension. A text is in the folder of all
texts, named by its MD5. ``torch.save`` writes tensors and dicts of tensors; latents are float32 and scaled.

Two JSON files in the folder of images, keyed by absolute path, have the bucket and the crop of each image. If they
are there, SimpleTuner takes its sizes from them and opens no image. A third one goes into its output folder: the size
for each ratio, so that images that you add later get the sizes of the others. SimpleTuner adds its settings to the
first file, and ratios to the third.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from latentcache.errors import UsageError
from latentcache.export import format as base
from latentcache.export.format import Text
from latentcache.geometry.like.simpletuner import SimpleTunerTable

#: Role of a mask or control image -> start of its folder, and ``conditioning_type``.
_ROLES = {"mask": ("masks", "mask"), base.CONTROL: ("controls", "reference_strict")}
#: Values of a token of SD 2, which has the pipeline of SD 1.
_SD2_WIDTH = 1024


class SimpleTuner(base.Format):
    """Files for SimpleTuner. See :class:`~latentcache.export.format.Format`."""

    name = "simpletuner"
    #: Named by their ``model_family``.
    texts = (
        Text(base.SD, name="sd1x"),
        Text(base.SDXL, (base.POOLED,), name="sdxl"),
        Text(base.SD3, (base.POOLED,), name="sd3"),
        Text(base.FLUX, (base.POOLED, base.IDS), name="flux"),
    )
    latent_fields = (base.LATENTS, base.CONTROL)
    optional = (base.CONTROL,)
    is_scaled = True
    extensions = ("bmp", "jpg", "jpeg", "png", "tif", "tiff", "webp")
    shared = ()
    has_flips = False
    draws_captions = True
    several_lines = "all of them"

    def __init__(self, request: base.Request) -> None:
        super().__init__(request)
        self._text_of: dict[str, str] = {}
        """Caption -> target of the image whose files hold its text."""
        if request.latents.encoder.normalization.kind == "batch-norm":
            raise UsageError(
                "--to simpletuner: latents of this VAE cannot be exported",
                why="SimpleTuner normalizes them in patches",
                fix="let the trainer encode the images",
            )
        family = self.text.name if self.text else ""
        is_sd2 = family == "sd1x" and getattr(request.recipes[base.TEXT], "width", 0) == _SD2_WIDTH
        self._family = "sd2x" if is_sd2 else family

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sidecar and the JSON output say."""
        return {"model_family": self._family} if self._family else {}

    def target(self, sample: base.Sample) -> str:
        """``images-2x`` or ``reg-1x``, the folder of the data set, and the name of the image."""
        return f"{'reg' if sample.is_reg else 'images'}-{sample.repeats}x/{self.readable(sample.target)}"

    def partner(self, sample: base.Sample, role: str, extension: str) -> str:
        """See ``Format``: a folder for each role, in which files have the name of their image."""
        start = _ROLES.get(role, ("", ""))[0]
        is_read = role != base.CONTROL or base.CONTROL in self.request.wanted
        name = f"{start}-{sample.repeats}x/{sample.target.partition('/')[2]}"
        return name if start and is_read and not sample.is_reg else ""

    def group(self, sample: base.Sample) -> str:
        """See ``Format``: one for all folders of the data set."""
        return sample.target.partition("/")[0]

    def begin(self, samples: Sequence[base.Sample]) -> None:
        """Sort the images into backends, and find the first image of each text."""
        super().begin(samples)
        has_several = any(sample.further for sample in samples)
        for sample in samples:
            if not sample.has_caption:
                raise UsageError(
                    f"{sample.name}: has no caption, and SimpleTuner stops at such an image",
                    where=sample.name,
                    fix="write one, or build with --default-caption TEXT, which may be empty",
                )
            for captioned in sample.captioned:
                if has_several and "\n" in captioned.caption:
                    raise UsageError(
                        f"{sample.name}: a caption has several lines",
                        where=sample.name,
                        why="where images have several captions, SimpleTuner takes each line for one",
                        fix="write it on one line, and build again",
                    )
                self._text_of.setdefault(captioned.caption, sample.target)

    def latent_files(self, sample: base.Sample) -> dict[str, base.Make]:
        """See ``Format``."""
        files, (folder, _, inside) = dict[str, base.Make](), sample.stem.partition("/")
        path, separator, stem = inside.rpartition("/")
        name = f"{path}{separator}{hashlib.sha256(stem.encode()).hexdigest()}.pt"
        for backend in self.datasets:
            if backend.folder == folder:
                files[f"vae/{_id(backend)}/{name}"] = partial(self._latents, sample, backend.table, "latents")
                if base.CONTROL in backend.roles:
                    control = f"vae/controls-{_id(backend)}/{name}"
                    files[control] = partial(self._latents, sample, backend.table, "controls")
        return files

    def text_files(self, sample: base.Sample, text: Text) -> dict[str, base.Make]:
        """See ``Format``: equal captions share a file, which the first image has."""
        files = dict[str, base.Make]()
        for captioned in sample.captioned:
            if self._text_of[captioned.caption] == sample.target:
                # The hash is only a name: it protects nothing.
                name = hashlib.md5(captioned.caption.encode(), usedforsecurity=False).hexdigest()
                files[f"text/{name}-{self._family}.pt"] = partial(self._texts, captioned)
        return files

    def settings(self) -> Mapping[str, bytes]:
        """See ``Format``: the list of backends, and the sizes of each."""
        files = {"multidatabackend.json": self._listed()}
        for name, table in self._maps().items():
            files[name] = _json(
                {str(ratio): [size.width, size.height] for ratio, size in table.size_of_ratio.items()}
            )
        for backend in self.datasets:
            buckets, entries = dict[str, list[str]](), dict[str, Any]()
            for sample in backend.samples:
                path = self.path(sample.target)
                entries[path] = entry = self._entry(sample, backend.table)
                buckets.setdefault(str(entry["aspect_ratio"]), []).append(path)
            files[_listing(backend, "indices")] = _json({"config": {}, "aspect_ratio_bucket_indices": buckets})
            files[_listing(backend, "metadata")] = _json(entries)
        return files

    @property
    def changing(self) -> Sequence[str]:
        """See ``Format``."""
        return [*self._maps(), *(_listing(backend, "indices") for backend in self.datasets)]

    def advice(self) -> Sequence[str]:
        """See ``Format``."""
        lines = [f"data_backend_config: {self.path('multidatabackend.json')}"]
        lines.append(f"aspect_bucket_alignment: {self.geometry.multiple}; override_dataset_config must be off")
        if self._maps():
            output = self.path("output")
            lines.append(f"output_dir: {output}, or copy the file there into yours before you add images")
        if self._family:
            lines.append(
                f"model_family: {self._family}; caption_dropout_probability: 0, or the trainer encodes the empty"
                " prompt at every start; it also encodes validation prompts"
            )
        else:
            lines.append(f"the trainer encodes text itself, once, into {self.path('text')}")
        if any(sample.partners for sample in self.samples):
            lines.append(
                "masks and control images are data sets for backends whose images all have one;"
                " conditioning_multidataset_sampling: combined, if they have both"
            )
        return lines

    def _maps(self) -> dict[str, SimpleTunerTable]:
        """Files with the size of each ratio, for resolutions that are areas."""
        tables = cast("Sequence[SimpleTunerTable]", self.tables)
        tables = [table for table in tables if table.buckets and not table.by_edge]
        return {f"output/aspect_resolution_map-{table.megapixels}.json": table for table in tables}

    def _entry(self, sample: base.Sample, table: SimpleTunerTable) -> dict[str, Any]:
        """Sizes of an image as (width, height), its crop as (top, left)."""
        bucket = table.nearest(sample.size)
        placement = self.request.latents.geometry.place(sample.size, bucket)
        return {
            "original_size": [sample.size.width, sample.size.height],
            "crop_coordinates": [placement.top, placement.left],
            "target_size": [bucket.width, bucket.height],
            "intermediary_size": [placement.resize.width, placement.resize.height],
            "aspect_ratio": round(bucket.width / bucket.height, 2),
        }

    def _listed(self) -> bytes:
        """``multidatabackend.json``."""
        backends = list[dict[str, Any]]()
        for backend in self.datasets:
            table = backend.table
            first = backend.samples[0]
            entry: dict[str, Any] = {
                "id": _id(backend),
                "type": "local",
                "dataset_type": "image",
                "instance_data_dir": self.path(backend.folder),
                "cache_dir_vae": self.path(f"vae/{_id(backend)}"),
                "resolution": table.resolution.width,
                "resolution_type": "pixel" if table.by_edge else "pixel_area",
                "crop": not table.buckets,
                "crop_style": "center",
                "crop_aspect": "preserve" if table.buckets else "square",
                "caption_strategy": "textfile",
                "disable_multiline_split": not any(sample.further for sample in backend.samples),
                # There ``repeats`` counts further passes.
                "repeats": first.repeats - 1,
                "metadata_backend": "discovery",
            }
            if first.is_reg:
                entry["is_regularisation_data"] = True
            backends.append(entry)
            for start, kind in (names for role, names in _ROLES.items() if role in backend.roles):
                conditioning = {
                    "id": f"{start}-{_id(backend)}",
                    "type": "local",
                    "dataset_type": "conditioning",
                    "conditioning_type": kind,
                    "instance_data_dir": self.path(backend.folder.replace("images", start)),
                    "cache_dir_vae": self.path(f"vae/{start}-{_id(backend)}"),
                    "caption_strategy": None,
                }
                entry.setdefault("conditioning_data", []).append(conditioning["id"])
                backends.append(conditioning)
        text = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True}
        return _json([*backends, {**text, "cache_dir": self.path("text")}], indent=2)

    def _latents(self, sample: base.Sample, table: SimpleTunerTable, name: str) -> bytes:
        return base.saved(self.tensor(getattr(sample, name), table.nearest(sample.size)))

    def _texts(self, sample: base.Sample) -> bytes:
        text = {name: values for name, values in sample.text.items() if name != base.IDS}
        embeddings = self.stored(text)
        embeddings[base.TEXT] = embeddings[base.TEXT][None]
        if self._family == "flux":
            mask = np.ascontiguousarray(base.text_parts(self.request, sample)["mask_2"])
            embeddings["time_ids"] = torch.zeros(1, len(sample.text[base.TEXT]), 3)
            embeddings["attention_masks"] = torch.from_numpy(mask)[None]
        return base.saved(embeddings)


def _id(backend: base.Dataset) -> str:
    return f"{backend.folder}-{backend.table.resolution.width}"


def _listing(backend: base.Dataset, kind: str) -> str:
    """File about the sizes of its images: of ``indices`` or ``metadata``."""
    return f"{backend.folder}/aspect_ratio_bucket_{kind}_{_id(backend)}.json"


def _json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode()

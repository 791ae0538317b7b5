"""Caches and exports of every trainer of images, with the stub encoder."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from captioned_images import data_and_cache
from safetensors.torch import load_file

STUB = {"resolutions": (256,)}
#: Trainer -> settings of a cache with its sizes.
LIKE = {
    "kohya": {**STUB, "like": "kohya", "bucket_step": 64, "min_side": 128, "max_side": 512},
    "onetrainer": {**STUB, "like": "onetrainer", "bucket_step": 64},
    "simpletuner": {**STUB, "like": "simpletuner", "bucket_step": 64},
    "musubi": {**STUB, "like": "musubi", "bucket_step": 16},
    "ai-toolkit": {**STUB, "like": "ai-toolkit", "bucket_step": 16},
}
#: Options of an export; latents of the stub have the shape of any model.
EXPORT = {trainer: ("--to", trainer) for trainer in LIKE}
EXPORT["kohya"] += ("--architecture", "sdxl", "--release", "stable")
EXPORT["musubi"] += ("--architecture", "z-image")
EXPORT["ai-toolkit"] += ("--architecture", "sdxl")


def cached(folder, trainer, **options):
    """Build a cache of four captioned images; return its data, itself, and a path for an export."""
    return data_and_cache(folder, **LIKE[trainer] | options)


def onetrainer_config(folder, *concepts, **values):
    """Write a settings file of OneTrainer."""
    values = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "resolution": "256", "concepts": concepts} | values
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return folder / "config.json"


def still(**more):
    """A concept of OneTrainer that changes no pixels."""
    return {"image": {"enable_crop_jitter": False, **more}}


def item(path):
    return torch.load(path, weights_only=True)


def hashed(stem):
    return hashlib.sha256(stem.encode()).hexdigest()


def latents_of(out, trainer, stem):
    """Latents of an image in the folder of a trainer, at the only resolution."""
    if trainer == "kohya":
        (file,) = out.rglob(f"{stem}.npz")
        with np.load(file) as archive:
            return torch.from_numpy(archive["latents"])
    if trainer == "onetrainer":
        (listing,) = out.glob("cache/image/*/variation-0/aggregate.pt")
        stems = [Path(entry["image_path"].replace("\\", "/")).stem for entry in item(listing)]
        return item(listing.with_name(f"{stems.index(stem)}.pt"))["latent_image"]
    if trainer == "simpletuner":
        return item(next(out.glob(f"vae/images-*/{hashed(stem)}.pt")))
    (file,) = out.rglob(f"{stem}_*.safetensors")
    (values,) = load_file(file).values()
    return values

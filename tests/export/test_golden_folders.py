"""Each form of a trainer's files stays what its own code accepts in ``tests/peers``: hashes of all files in one JSON.

If a form changes on purpose, run the tests of the trainers, then ``python tests/export/test_golden_folders.py``.
"""

import io
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from captioned_images import files_below
from safetensors.torch import load
from small_cache import build, draw

from latentcache.cli.app import main
from latentcache.export.format import (
    CONTROL,
    FLUX,
    IDS,
    LATENTS,
    LUMINA,
    MASK,
    POOLED,
    QWEN,
    SD,
    SD3,
    SDXL,
    TEXT,
    WAN,
    Z_IMAGE,
    Latent,
    Request,
    Sample,
)
from latentcache.export.images import TRAINER_FORMATS
from latentcache.fields.latents import EncoderSpec, GeometrySettings, LatentsRecipe, Normalization, PixelProfile
from latentcache.fields.prompt_embeds import PromptIdsRecipe, PromptRecipe
from latentcache.geometry.like.aitoolkit import step_of
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash

GOLDEN = Path(__file__).with_name("golden_folders.json")
#: Shapes of the embeddings of a caption, and tokens of each text encoder.
TEXTS = {
    SD: ({TEXT: (77, 768)}, (77,)),
    SDXL: ({TEXT: (77, 2048), POOLED: (1280,)}, (77, 77)),
    SD3: ({TEXT: (77 + 77, 4096), POOLED: (2048,)}, (77, 77, 77)),
    FLUX: ({TEXT: (512, 4096), POOLED: (768,)}, (77, 512)),
    LUMINA: ({TEXT: (9, 2304)}, (256,)),
    QWEN: ({TEXT: (9, 3584)}, (512,)),
    WAN: ({TEXT: (9, 4096)}, (512,)),
    Z_IMAGE: ({TEXT: (9, 2560)}, (512,)),
}
ROWS = {name: {row.name: row for row in form.architectures} for name, form in TRAINER_FORMATS.items()}
#: Steps of sides that are not 64, and options of an export of the stub's latents.
STEPS = {"musubi": 16, "ai-toolkit": 16}
WORDS = {"kohya": ["--architecture", "sdxl", "--release", "stable"], "musubi": ["--architecture", "z-image"]}
WORDS["ai-toolkit"] = ["--architecture", "sdxl"]
#: Trainer, architecture and release of kohya, pipeline of the text.
CASES = [
    *(("kohya", name, form, SDXL if name == "sdxl" else "") for name in ("sd", "sdxl")
      for form in ("stable", "plain", "suffixed")),
    ("kohya", "sd3", None, SD3), ("kohya", "flux", None, FLUX), ("kohya", "lumina", None, LUMINA),
    ("kohya", "hunyuan-image", None, ""),
    *((trainer, None, None, pipeline) for trainer in ("onetrainer", "simpletuner")
      for pipeline in (SD, SDXL, SD3, FLUX)),
    *((trainer, row.name, None, row.texts[0].pipeline if row.texts else "") for trainer in ("musubi", "ai-toolkit")
      for row in ROWS[trainer].values()),
]  # fmt: skip


def files_of(trainer, architecture, release, pipeline):
    """File -> hash, of two images: one of them is for regularization, and has two repeats."""
    is_plain, rows = trainer in ("simpletuner", "musubi"), ROWS[trainer] or ROWS["kohya"]
    about = rows[architecture or "sdxl"]
    scaling = Normalization(kind="scale-shift", scale=about.scale, shift=about.shift)
    encoder = EncoderSpec(
        family=about.family,
        fingerprint="",
        config="",
        channels=about.channels,
        factor=8,
        multiple=8,
        normalization=scaling,
    )
    sides = {"min_side": 128, "max_side": 512} if trainer == "kohya" else {}
    sides |= {"multiple": step_of(architecture) if trainer == "ai-toolkit" else 16} if trainer in STEPS else {}
    geometry = GeometrySettings(resolutions=(256,), flip=not is_plain, like=trainer, **sides)
    shapes, lengths = TEXTS.get(pipeline, ({}, ()))
    text = {"pipeline": pipeline, "fingerprint": "", "config": "", "tokenizer": "", "length": 1}
    recipes = {LATENTS: LatentsRecipe(geometry=geometry, pixels=PixelProfile(), encoder=encoder)}
    recipes |= {name: PromptRecipe(output=name, width=shape[-1], **text) for name, shape in shapes.items()}
    recipes |= {IDS: PromptIdsRecipe(lengths=lengths, **text)} if pipeline else {}
    more = [CONTROL] if trainer == "musubi" else [] if is_plain else [MASK]
    wanted = [LATENTS, *more, *shapes, *([IDS] if pipeline else [])]
    form = TRAINER_FORMATS[trainer](
        Request(
            recipes=recipes, wanted=wanted, geometry=geometry, root=Path("/data/cats"), folder="/out",
            architecture=architecture, release=release,
        )
    )  # fmt: skip
    samples, random = [], np.random.default_rng(0)
    for name, size, more in (
        ("a.jpg", Size(240, 400), {"has_alpha": release == "suffixed"}),
        ("cats/b.tiff", Size(400, 240), {"is_reg": trainer != "musubi", "repeats": 2, "class_words": "cat"}),
    ):
        bucket = geometry.like_tables()[0].nearest(size)
        shape = (about.channels, bucket.height // 8, bucket.width // 8)
        values, flipped = random.random((2, *shape), dtype=np.float32)
        text = {field: random.random(shape, np.float32) for field, shape in shapes.items()}
        text |= {IDS: random.integers(0, 2, (2, sum(lengths)), dtype=np.int32)} if pipeline else {}
        latents = [Latent(bucket=bucket, values=values, flipped=flipped)]
        masks = [Latent(bucket=bucket, values=random.random((1, *shape[1:]), dtype=np.float32))]
        controls = [Latent(bucket=bucket, values=flipped)] if CONTROL in form.request.wanted else []
        values = {"latents": latents, "masks": masks, "controls": controls}
        sample = Sample(name=name, target=name, size=size, caption=f"{name}, tag", text=text, **values, **more)
        samples.append(replace(sample, target=form.target(sample)))
    form.begin(samples)
    files = {file: make() for sample in samples for file, make in form.files(sample).items()}
    files |= form.settings() | {"advice": "\n".join(form.advice()).encode()}
    return {name: hashed(name, data) for name, data in sorted(files.items())}


def folder_of(trainer, scratch):
    """File -> hash, of a whole exported folder."""
    for number, (name, size) in enumerate([("p0", (400, 240)), ("p1", (240, 400)), ("more/p2", (300, 300))]):
        draw(scratch / f"cats/{name}.png", size, seed=number)
        (scratch / f"cats/{name}.txt").write_text(f"caption {number}, tag", "utf-8")
    build(scratch / "cats", scratch / "cache", like=trainer, resolutions=(256,), bucket_step=STEPS.get(trainer, 64))
    words = WORDS.get(trainer, [])
    out = scratch / "out"
    assert main(["export", str(scratch / "cache"), str(out), "--to", trainer, "--as", "C:\\sets\\run", *words]) == 0
    of_us = ("latentcache.json", "latentcache.files")
    return {name: hashed(name, (out / name).read_bytes()) for name in files_below(out) if name not in of_us}


def hashed(name, data):
    """Hash of a file; of what torch or safetensors read from one of theirs, whose bytes are not always the same."""
    if name.endswith(".png"):
        return "image"
    if name.endswith(".safetensors"):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        data = repr((sorted(header.get("__metadata__", {}).items()), sorted(described(load(data)).items()))).encode()
    if name.endswith(".pt"):
        data = repr(described(torch.load(io.BytesIO(data), weights_only=True))).encode()
    return content_hash(data).hex()[:16]


def described(value):
    """Nested values with the types, shapes and bytes of their tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), content_hash(value.float().numpy().tobytes()).hex()
    if isinstance(value, dict):
        return {key: described(entry) for key, entry in value.items()}
    return type(value)(map(described, value)) if isinstance(value, list | tuple) else value


def name_of(case):
    return " ".join(part for part in case if part)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_files_are_those_that_the_trainer_accepted(case):
    assert files_of(*case) == json.loads(GOLDEN.read_text("utf-8"))[name_of(case)]


@pytest.mark.parametrize("trainer", TRAINER_FORMATS)
def test_whole_folders_are_those_that_the_trainer_accepted(tmp_path, trainer):
    assert folder_of(trainer, tmp_path) == json.loads(GOLDEN.read_text("utf-8"))[f"{trainer} folder"]


if __name__ == "__main__":
    facts = {name_of(case): files_of(*case) for case in CASES}
    for name in TRAINER_FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            facts[f"{name} folder"] = folder_of(name, Path(folder))
    GOLDEN.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    sys.stdout.write(f"wrote {GOLDEN}\n")

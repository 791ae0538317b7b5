"""Each form of sd-scripts stays what its own code accepts in ``tests/peers``: names and hashes of files in one JSON.

If a form changes on purpose, run the tests of the trainers, then ``python tests/export/test_golden_kohya.py``.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from latentcache.export.format import IDS, LATENTS, POOLED, TEXT, Latent, Request, Sample
from latentcache.export.kohya import ARCHITECTURES, Kohya
from latentcache.fields.latents import EncoderSpec, GeometrySettings, LatentsRecipe, Normalization, PixelProfile
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash

GOLDEN = Path(__file__).with_name("golden_kohya.json")
GEOMETRY = GeometrySettings(resolutions=(256,), min_side=128, max_side=512, flip=True, like="kohya")
#: Shapes of the embeddings and of the token ids of a caption.
TEXTS = {
    "sdxl": {TEXT: (77, 2048), POOLED: (1280,), IDS: (2, 154)},
    "sd3": {TEXT: (77 + 256, 4096), POOLED: (2048,), IDS: (2, 154 + 256)},
    "flux": {TEXT: (512, 4096), POOLED: (768,), IDS: (2, 77 + 512)},
    "lumina": {TEXT: (9, 2304), IDS: (2, 256)},
}
CASES = [
    *((name, release) for name in ("sd", "sdxl") for release in ("stable", "plain", "suffixed")),
    *((name, None) for name in ("sd3", "flux", "lumina", "hunyuan-image")),
]


def folder(architecture, release):
    """File -> hash, of two images: one of them is for regularization, and has two repeats."""
    about = ARCHITECTURES[architecture]
    scaling = Normalization(kind="scale-shift", scale=about.scale, shift=about.shift)
    encoder = EncoderSpec(
        family="", fingerprint="", config="", channels=about.channels, factor=8, multiple=8, normalization=scaling
    )
    request = Request(
        recipe=LatentsRecipe(geometry=GEOMETRY, pixels=PixelProfile(), encoder=encoder),
        geometry=GEOMETRY,
        wanted=(LATENTS, TEXT, POOLED, IDS),
        root=Path("/data/cats"),
        trainer_config=None,
        architecture=architecture,
        release=release,
    )
    kohya, samples = Kohya(request), []
    fields = [LATENTS, *([TEXT] if about.text else [])]
    random = np.random.default_rng(0)
    for name, size, bucket, more in (
        ("a.jpg", Size(240, 400), Size(192, 320), {}),
        ("cats/b.tiff", Size(400, 240), Size(320, 192), {"is_reg": True, "repeats": 2, "class_words": "cat"}),
    ):
        shape = (about.channels, bucket.height // 8, bucket.width // 8)
        values, flipped = random.random((2, *shape), dtype=np.float32)
        text = {
            field: random.integers(0, 2, shape, dtype=np.int32) if field == IDS else random.random(shape, np.float32)
            for field, shape in TEXTS.get(architecture, {}).items()
        }
        latents = [Latent(bucket=bucket, values=values, flipped=flipped)]
        sample = Sample(name=name, target=name, size=size, caption=f"{name}, tag", latents=latents, text=text, **more)
        samples.append(replace(sample, target=kohya.target(sample)))
    files = {file: make() for sample in samples for file, make in kohya.files(sample, fields).items()}
    files |= kohya.settings("/out", samples)
    return {file: content_hash(data).hex() for file, data in sorted(files.items())}


@pytest.mark.parametrize(("architecture", "release"), CASES)
def test_files_are_those_that_the_trainer_accepted(architecture, release):
    golden = json.loads(GOLDEN.read_text("utf-8"))
    assert folder(architecture, release) == golden[f"{architecture} {release or ''}".strip()]


if __name__ == "__main__":
    facts = {
        f"{architecture} {release or ''}".strip(): folder(architecture, release) for architecture, release in CASES
    }
    GOLDEN.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    sys.stdout.write(f"wrote {GOLDEN}\n")

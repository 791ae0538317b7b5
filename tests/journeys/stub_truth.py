"""Expected output of the stub encoder, computed without the build code."""

import io
from functools import cache

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from latentcache.encoders.vae.builtin import StubEncoder, builtin_spec
from latentcache.fields.latents import LatentsSettings
from latentcache.fields.protocol import DescribeContext
from latentcache.fields.registry import field_kind, load
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash, entry_key
from latentcache.pipeline.settings import BuildSettings

FIELD = "latents"
_SIZE = Size(32, 32)
#: Recipes that differ in stored bytes.
RECIPES = tuple(
    LatentsSettings(model="stub", buckets=(_SIZE,), storage_dtype=dtype, latents=kept)
    for dtype, kept in (("float16", "mode"), ("float32", "mode"), ("float16", "moments"))
)
#: Content -> pixels. 10 has the pixels of 0 and 11 those of 1, with another comment.
COPIES = {0: 0, 1: 1, 2: 2, 3: 3, 10: 0, 11: 1}


def _pixels(content):
    return np.random.default_rng(COPIES[content]).integers(0, 256, (_SIZE.height, _SIZE.width, 3), dtype=np.uint8)


@cache
def bytes_of(content):
    info, buffer = PngInfo(), io.BytesIO()
    info.add_text("comment", str(content))
    Image.fromarray(_pixels(content)).save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


@cache
def recipe_of(number):
    describe = load(field_kind(FIELD).describer)
    return describe(RECIPES[number], DescribeContext()).recipe


@cache
def key_of(content, recipe):
    dims, part = (1, _SIZE.height, _SIZE.width), recipe_of(recipe).recipe_id[:8]
    return entry_key(kind=0, content=content_hash(bytes_of(content)), dims=dims, recipe=part)


@cache
def payload_of(content, recipe):
    spec = builtin_spec("stub", RECIPES[recipe].storage_dtype, RECIPES[recipe].latents)
    return StubEncoder(spec).encode(_pixels(content)[None])[0].tobytes()


def settings_of(recipe, data, out, **more):
    return BuildSettings(data=data, out=out, fields={FIELD: RECIPES[recipe]}, device="cpu", commit_every=1, **more)

"""What the stub encoder must have stored for a few images, worked out without the code that builds caches."""

import io
from functools import cache

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from latentcache.encoders.stub import StubEncoder
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.key import EntryKey
from latentcache.pipeline.recipes import resolve_recipe
from latentcache.pipeline.settings import BuildSettings, RecipeSettings

_SIZE = Size(32, 32)
#: Recipes that differ in what is stored.
RECIPES = tuple(
    RecipeSettings(model="stub", buckets=(_SIZE,), storage_dtype=dtype, latents=kept)
    for dtype, kept in (("float16", "mode"), ("float32", "mode"), ("float16", "moments"))
)
#: Content -> its pixels. 10 has the pixels of 0 and 11 those of 1, in files with another comment.
TWINS = {0: 0, 1: 1, 2: 2, 3: 3, 10: 0, 11: 1}


def _pixels(content):
    return np.random.default_rng(TWINS[content]).integers(0, 256, (_SIZE.height, _SIZE.width, 3), dtype=np.uint8)


@cache
def bytes_of(content):
    """The file, a PNG that fills its bucket."""
    info, buffer = PngInfo(), io.BytesIO()
    info.add_text("comment", str(content))
    Image.fromarray(_pixels(content)).save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


@cache
def _recipe(number):
    return resolve_recipe(RECIPES[number], None, cached_model=None, has_cuda=False)[0]


@cache
def key_of(content, recipe):
    """Under which its entry lies."""
    return EntryKey(content=content_hash(bytes_of(content)), bucket=_SIZE, recipe=_recipe(recipe).key_part).pack()


@cache
def payload_of(content, recipe):
    """What its entry holds."""
    encoder = StubEncoder(storage_dtype=RECIPES[recipe].storage_dtype, posterior=RECIPES[recipe].latents)
    return encoder.encode(_pixels(content)[None]).latents[0].tobytes()


def settings_of(recipe, data, out, **more):
    """A build of one of the recipes."""
    return BuildSettings(data=data, out=out, recipe=RECIPES[recipe], device="cpu", commit_every=1, **more)

"""Small files of records and caches of their tokens, by the stub tokeniser: what tests of tokens share."""

import json
import random

from latentcache.pipeline.token_build import build_tokens
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import load_tokens
from latentcache.store.token_reader import TokenReader


def texts(count, longest=60, seed=0):
    """``count`` different texts; with ``longest`` of 4000 about 130 of them fill two blocks."""
    draw = random.Random(seed)
    return [f"{number}: {'ab é' * draw.randint(0, longest // 4)}" for number in range(count)]


def write_texts(path, lines):
    """One record a line; what is no text is written as it is."""
    path.write_text("".join(f"{json.dumps({'text': one}) if isinstance(one, str) else one[0]}\n" for one in lines))
    return path


def build(data, cache=None, **settings):
    """A build by the stub, in this process unless told otherwise."""
    given = {"tokenizer": "stub", "workers": 0, "out": cache} | settings
    return build_tokens(TokenSettings(data=data, **given))


def opened(cache):
    """The current generation and a reader of it."""
    generation = load_tokens(cache)
    return generation, TokenReader(CacheLayout(cache), generation)


def spoken(reader):
    """Every document as its text again; the stub's ids are bytes, and the last ends the text."""
    documents = range(len(reader.documents))
    return [bytes(reader.ids(number)[:-1].astype("u1")).decode() for number in documents]


def flip(path, offset, mask=1):
    """Change one bit of a file that may only be read."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(bytes(data))


def tamper(cache, block=0, place=200):
    """Change a byte of the ids of a block; returns its shard's file."""
    generation = load_tokens(cache)
    shard = generation.shards[int(generation.blocks.shard[block])]
    path = cache / "shards" / shard / "data.mdb"
    flip(path, int(generation.blocks.offset[block]) + place)
    return path

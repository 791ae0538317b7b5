"""Small record files and token caches of the stub tokenizer."""

import dataclasses
import json
import random

from damaged import damage_payload

from latentcache.fields.input_ids import InputIdsSettings
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings
from latentcache.sources.options import SourceOptions
from latentcache.store.paths import CachePaths
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import open_snapshot

__all__ = ["FIELD", "build", "opened", "tamper", "texts", "write_texts"]
FIELD = "input_ids"
_RECIPE_FIELDS = {one.name for one in dataclasses.fields(InputIdsSettings)}


def texts(count, longest=60, seed=0):
    """``count`` different texts; about 130 with ``longest=4000`` fill two blocks."""
    draw = random.Random(seed)
    return [f"{number}: {'ab é' * draw.randint(0, longest // 4)}" for number in range(count)]


def write_texts(path, lines):
    """Write one record per line; of a tuple, write the first item."""
    path.write_text("".join(f"{json.dumps({'text': one}) if isinstance(one, str) else one[0]}\n" for one in lines))
    return path


def build(data, cache=None, **settings):
    """Build with the stub tokenizer, by default in this process."""
    given = {"workers": 0, "out": cache} | settings
    recipe = {"tokenizer": "stub"} | {name: given.pop(name) for name in list(given) if name in _RECIPE_FIELDS}
    source = {name: given.pop(name) for name in ("datasets", "text_lines") if name in given}
    if source:
        given["source"] = SourceOptions(**source)
    return build_cache(BuildSettings(data=data, fields={FIELD: InputIdsSettings(**recipe)}, **given))


def opened(cache):
    snapshot = open_snapshot(cache)
    return snapshot, EntryReader(CachePaths(cache), snapshot)


def tamper(cache, block=0, place=200):
    """Change a byte in a row's block of ids; return the sample name."""
    return damage_payload(cache, row=block, bit=1, field=FIELD, place=place)

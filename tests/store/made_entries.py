"""Entries and small caches for the tests of the store: real LMDB files, made in milliseconds."""

import contextlib
import math
import random

import numpy as np

from latentcache.geometry.placement import place_in
from latentcache.geometry.sizes import Size
from latentcache.identity.content import checksum, content_hash
from latentcache.identity.key import EntryKey
from latentcache.identity.stat import StatMemo
from latentcache.recipe import DTYPES, EncoderSpec, GeometrySettings, PixelProfile, Recipe
from latentcache.store.catalog import load_catalog
from latentcache.store.columns import StringColumn
from latentcache.store.entry import HEADER_BYTES, EntryFacts, EntryHeader, NewEntry, pack_facts, pack_header
from latentcache.store.generation import Rows, Samples, pack_memo, publish
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import ShardWriter

ENCODER = EncoderSpec(family="stub", fingerprint="ab" * 16, config="cd" * 16, channels=4, factor=8, multiple=8)
RECIPE = Recipe(geometry=GeometrySettings(resolutions=(64,)), pixels=PixelProfile(), encoder=ENCODER)
SQUARE = Size(64, 64)


def key_of(number, bucket=SQUARE):
    return EntryKey(content=content_of(number), bucket=bucket, recipe=RECIPE.key_part).pack()


def content_of(number):
    return content_hash(f"picture {number}".encode())


def payload_of(number, size):
    return random.Random(number).randbytes(size)


def header_of(number, payload, shape=(4, 8, 8), dtype="float16"):
    return EntryHeader(
        kind=1,
        dtype=dtype,
        shape=tuple(shape),
        payload_checksum=checksum(payload),
        content=content_of(number),
        recipe_id=RECIPE.recipe_id,
        original_size=Size(70 + number % 50, 90),
    )


def facts_of(number, bucket=SQUARE):
    placement = place_in(Size(70 + number % 50, 90), bucket)
    return EntryFacts(pixel_hash=content_hash(f"pixels {number}".encode()), placement=placement)


def new_entry(number, shape=(4, 8, 8), dtype="float16", bucket=SQUARE):
    """Entry ``number``: the same bytes whenever and wherever it is made."""
    payload = payload_of(number, math.prod(shape) * DTYPES[dtype][1])
    key = key_of(number, bucket)
    value = pack_header(header_of(number, payload, shape, dtype), key) + payload
    return NewEntry(key=key, value=value, facts=pack_facts(facts_of(number, bucket)))


def flat_entry(number, size):
    """An entry whose payload has any number of bytes."""
    return new_entry(number, shape=(size,), dtype="uint8")


def make_shard(folder, entries, **options):
    """A sealed shard; returns its folder."""
    writer = ShardWriter(folder.with_name(folder.name + ".open"), **options)
    writer.write(entries)
    return writer.seal()


def make_cache(root, count=6, shard="one", **more):
    """A finished cache of ``count`` entries, 4 x 8 x 8 float16, one bucket."""
    layout = CacheLayout(root)
    make_shard(layout.shards / shard, [new_entry(number) for number in range(count)])
    publish_entries(layout, range(count), **more)
    return layout


def publish_entries(layout, numbers, *, names=None, captions=None, refused=(), notes=(), facts=None):
    """Publish a generation of the given entries, which are in the cache's shards."""
    numbers = list(numbers)
    catalog = load_catalog(layout)
    found = [catalog.locate(key_of(number)) for number in numbers]
    shards = sorted({entry.shard for entry in found})
    placements = [entry.facts.placement for entry in found]
    count = len(numbers)
    rows = Rows(
        key=np.frombuffer(b"".join(entry.key for entry in found), np.uint8).reshape(-1, 32),
        shard=np.array([shards.index(entry.shard) for entry in found], np.int32),
        offset=np.array([entry.offset for entry in found], np.uint64),
        bucket=np.zeros(count, np.int32),
        sample=np.arange(count, dtype=np.int32),
        crop=np.array([(p.crop.top, p.crop.left) for p in placements], np.uint32).reshape(-1, 2),
        resize=np.array([(p.resize.height, p.resize.width) for p in placements], np.uint32).reshape(-1, 2),
        pixel_hash=np.frombuffer(b"".join(e.facts.pixel_hash for e in found), np.uint8).reshape(-1, 16),
    )
    samples = Samples(
        names=StringColumn.of(names or [f"picture_{number:04d}.png" for number in numbers]),
        captions=StringColumn.of(captions or [f"caption {number}" for number in numbers]),
        content=np.frombuffer(b"".join(content_of(n) for n in numbers), np.uint8).reshape(-1, 16),
        original_size=np.array([(70 + n % 50, 90) for n in numbers], np.uint32).reshape(-1, 2),
        stat=np.array([pack_memo(memo_of(n)) for n in numbers], np.uint64).reshape(-1, 6),
    )
    return publish(
        layout,
        recipe=RECIPE,
        rows=rows,
        samples=samples,
        buckets=[SQUARE],
        shards=shards,
        refused=refused,
        notes=notes,
        facts=facts or {"source": {"root": "pictures"}, "demo": False, "provenance": {"model": "stub"}},
    )


def memo_of(number):
    return StatMemo(size=1000 + number, mtime_ns=-5, ctime_ns=7, inode=2**64 - 1 - number, device=3, seen_ns=9)


def flip(path, offset, mask=0x10):
    """Flip bits of one byte, also of a sealed file."""
    with contextlib.suppress(OSError):
        path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ mask]))


def payload_offset(located):
    return located.offset + HEADER_BYTES


def open_shard(folder, count=30):
    """A shard as a dead builder leaves it, with values of 3112 bytes; returns its file."""
    writer = ShardWriter(folder)
    writer.write([flat_entry(number, 3000) for number in range(count)])
    writer.close()
    return folder / "data.mdb"

"""A tiny cache whose every byte is known: the test vectors of docs/format, for whoever writes a second reader.

Four pictures made by a formula, kept as PPM so that no codec has a say; the stub encoder, whose values are exact;
two shards, small and large values, a caption that is not ASCII and a name that is not UTF-8. The same entries come
out on every machine. Run it again only when the format changes; tests/golden compares.

    python tools/make_format_vectors.py            writes docs/format/vectors
    python tools/make_format_vectors.py FOLDER     writes elsewhere
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.stub import StubEncoder
from latentcache.geometry.placement import place
from latentcache.geometry.sizes import Size
from latentcache.identity.content import checksum, content_hash
from latentcache.identity.key import EntryKey
from latentcache.identity.stat import StatMemo
from latentcache.recipe import GeometrySettings, PixelProfile, Recipe
from latentcache.store.catalog import Located, load_catalog
from latentcache.store.columns import StringColumn
from latentcache.store.durable import write_json
from latentcache.store.entry import HEADER_BYTES, EntryFacts, EntryHeader, NewEntry, pack_facts, pack_header
from latentcache.store.generation import Rows, Samples, pack_memo, publish
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import ShardWriter

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "format" / "vectors"
BUCKETS = (Size(64, 64), Size(64, 96), Size(256, 192))
FIRST_VALUES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture. It covers its bucket as it is, so nothing is resized; at most a margin is cut off."""

    name: str
    caption: str
    size: Size
    shard: str


#: In the byte order of their names.
PICTURES = (
    Picture(name="a/wide.ppm", caption="a wide gradient", size=Size(64, 72), shard="small"),
    Picture(name="b/tall.ppm", caption="a tall gradient", size=Size(70, 64), shard="small"),
    Picture(name="caf\u00e9.ppm", caption="\u00abcaf\u00e9\u00bb \u753b\u50cf", size=Size(64, 96), shard="small"),
    Picture(name="raw-\udcff.ppm", caption="", size=Size(256, 192), shard="large"),
)
REFUSED = {"name": "d/broken.ppm", "cause": "truncated", "detail": "ends after 9 of 12 288 bytes"}
NOTE = {"name": "notes.md", "cause": "unlisted", "detail": ""}


def recipe() -> Recipe:
    """The recipe of the vectors."""
    geometry = GeometrySettings(resolutions=(), multiple=8, buckets=BUCKETS)
    return Recipe(geometry=geometry, pixels=PixelProfile(), encoder=StubEncoder().spec)


def pixels_of(size: Size) -> NDArray[np.uint8]:
    """(H, W, 3): red rises downwards and to the right, green to the right, blue is a chequered pattern of both."""
    y, x = np.mgrid[0 : size.height, 0 : size.width]
    channels = [(3 * y + 5 * x) % 256, (2 * x) % 256, (x ^ y) % 256]
    return np.stack(channels, axis=2).astype(np.uint8)


def file_of(picture: Picture) -> bytes:
    """The picture as a binary PPM file."""
    size = picture.size
    return b"P6\n%d %d\n255\n" % (size.width, size.height) + pixels_of(size).tobytes()


def entry_of(picture: Picture) -> NewEntry:
    """What a build would store for the picture."""
    (table,) = recipe().geometry.tables()
    placement = place(picture.size, table)
    if placement.resize != picture.size:
        raise ValueError(f"{picture.name} would be resized, and the vectors would depend on a resize kernel")
    crop = placement.crop
    cut = pixels_of(picture.size)[crop.top : crop.top + crop.size.height, crop.left : crop.left + crop.size.width]
    latents = StubEncoder().encode(np.ascontiguousarray(cut)[None]).latents[0]
    payload = latents.tobytes()
    content = content_hash(file_of(picture))
    key = EntryKey(content=content, bucket=placement.bucket, recipe=recipe().key_part)
    header = EntryHeader(
        kind=key.kind,
        dtype="float16",
        shape=latents.shape,
        payload_checksum=checksum(payload),
        content=content,
        recipe_id=recipe().recipe_id,
        original_size=picture.size,
    )
    facts = EntryFacts(pixel_hash=content_hash(cut.tobytes()), placement=placement)
    return NewEntry(key=key.pack(), value=pack_header(header, key.pack()) + payload, facts=pack_facts(facts))


def make_vectors(folder: Path) -> dict[str, Any]:
    """Write ``cache/`` and ``expected.json`` into a folder, in place of what is there; returns the latter."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    layout = CacheLayout(folder / "cache")
    for shard in sorted({picture.shard for picture in PICTURES}):
        writer = ShardWriter(layout.shards / f"{shard}.open", map_bytes=1 << 20)
        writer.write([entry_of(picture) for picture in PICTURES if picture.shard == shard])
        writer.seal()
    catalog = load_catalog(layout)
    found = [entry for picture in PICTURES if (entry := catalog.locate(entry_of(picture).key))]
    _publish(layout, found)
    expected = {
        "format": 1,
        "recipe_id": recipe().recipe_id.hex(),
        "entries": [_expected(picture) for picture in PICTURES],
        "refused": [REFUSED["name"]],
    }
    write_json(folder / "expected.json", expected)
    return expected


def _publish(layout: CacheLayout, found: list[Located]) -> None:
    """One generation of the entries, one row for each picture, with facts that are no machine's own."""
    shards = sorted({entry.shard for entry in found})
    places = [entry.facts.placement for entry in found]
    memo = StatMemo(size=0, mtime_ns=-1, ctime_ns=1, inode=2, device=3, seen_ns=4)
    rows = Rows(
        key=_column([entry.key for entry in found]),
        shard=np.array([shards.index(entry.shard) for entry in found], np.int32),
        offset=np.array([entry.offset for entry in found], np.uint64),
        bucket=np.array([BUCKETS.index(place.bucket) for place in places], np.int32),
        sample=np.arange(len(found), dtype=np.int32),
        crop=np.array([(place.crop.top, place.crop.left) for place in places], np.uint32),
        resize=np.array([(place.resize.height, place.resize.width) for place in places], np.uint32),
        pixel_hash=_column([entry.facts.pixel_hash for entry in found]),
    )
    samples = Samples(
        names=StringColumn.of(picture.name for picture in PICTURES),
        captions=StringColumn.of(picture.caption for picture in PICTURES),
        content=_column([entry.header.content for entry in found]),
        original_size=np.array([(p.size.height, p.size.width) for p in PICTURES], np.uint32),
        stat=np.array([pack_memo(memo)] * len(found), np.uint64),
    )
    publish(
        layout,
        recipe=recipe(),
        rows=rows,
        samples=samples,
        buckets=BUCKETS,
        shards=shards,
        refused=[REFUSED | {"hint": "", "content": "", "stat": None}],
        notes=[NOTE | {"hint": "", "content": "", "stat": None}],
        facts={
            "created": "2026-01-01T00:00:00+00:00",
            "source": {"root": "pictures", "relative": "../pictures", "captions": "sidecar"},
            "demo": False,
            "provenance": {"model": "stub", "latentcache": "vectors"},
        },
    )


def _column(values: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), -1)


def _expected(picture: Picture) -> dict[str, Any]:
    """What any reader must find for a picture."""
    entry = entry_of(picture)
    value = bytes(entry.value)
    values = np.frombuffer(value[HEADER_BYTES:], "<f2")
    key = EntryKey.unpack(entry.key)
    return {
        "key": entry.key.hex(),
        "name_hex": picture.name.encode("utf-8", "surrogateescape").hex(),
        "caption": picture.caption,
        "dtype": "float16",
        "shape": [4, key.bucket.height // 8, key.bucket.width // 8],
        "header": value[:HEADER_BYTES].hex(),
        "facts": entry.facts.hex(),
        "payload_checksum": f"{checksum(value[HEADER_BYTES:]):016x}",
        "first_values": [float(number) for number in values[:FIRST_VALUES]],
    }


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    print(f"{len(make_vectors(target)['entries'])} entries in {target}")

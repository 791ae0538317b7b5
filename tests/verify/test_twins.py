"""What is wrong although its checksum holds must not come back from a copy."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from small_cache import build
from test_drift import Changed
from test_entries import rewrite_entry

from latentcache.identity.content import checksum
from latentcache.store.generation import load_generation
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.verify.repair import repair_cache
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Depth
from latentcache.verify.twins import alike


@pytest.fixture
def twin(data, cache):
    """A file with the pixels of p0.png and other metadata, whose entry is a copy in a second shard."""
    more = PngImagePlugin.PngInfo()
    more.add_text("comment", "the same pixels")
    Image.open(data / "p0.png").save(data / "twin.png", pnginfo=more)
    report = build(data, cache)
    assert (report.encoded, len(load_generation(cache).shards)) == (0, 2)


def row_of(cache, name):
    generation = load_generation(cache)
    return generation.rows.sample.tolist().index(list(generation.samples.names).index(name))


def spoil(header, payload):
    values = np.frombuffer(payload, dtype="<f2").copy()
    values[7] = np.nan
    return replace(header, payload_checksum=checksum(values.tobytes())), values.tobytes()


def test_pixels_and_bytes_make_a_twin(cache, twin):
    layout, generation = CacheLayout(cache), load_generation(cache)
    first, second = (row_of(cache, name) for name in ("p0.png", "twin.png"))
    keys = {row: generation.rows.key[row].tobytes() for row in (first, second)}
    shards = {row: generation.shards[int(generation.rows.shard[row])] for row in (first, second)}
    found = alike(layout, {shards[first]: {keys[first]}})
    assert found == {shards[first]: {keys[first]}, shards[second]: {keys[second]}}
    assert alike(layout, {shards[second]: {keys[first]}}) == {}  # it is not in that shard
    assert alike(layout, {}) == {}


def test_a_mirror_image_that_looks_like_its_picture_is_a_twin(tmp_path):
    (tmp_path / "data").mkdir()
    ramp = np.minimum(np.arange(80), np.arange(80)[::-1]).astype(np.uint8)
    Image.fromarray(np.broadcast_to(ramp[None, :, None], (80, 80, 3))).save(tmp_path / "data" / "even.png")
    assert build(tmp_path / "data", tmp_path / "cache", flip=True).encoded == 1
    generation = load_generation(tmp_path / "cache")
    first, second = (key.tobytes() for key in generation.rows.key)
    found = alike(CacheLayout(tmp_path / "cache"), {name: {first} for name in generation.shards})
    assert set().union(*found.values()) == {first, second}


def test_drift_takes_the_copy_along(cache, data, twin):
    drifted = row_of(cache, "p0.png")
    fresh = Changed(cache, lambda row, values: -values if row == drifted else values)
    depth = Depth(full=True, isolate=False, reencode=5)
    done = repair_cache(cache, depth=depth, reencode=fresh, confirm=lambda plan: True)
    assert {item.path: item.reason for item in done.removals} == {"p0.png": "latents", "twin.png": "same-bytes"}
    assert not done.complete
    report = build(data, cache)
    assert report.encoded >= 1  # nothing is left to copy from
    assert verify_cache(cache, full=True).counts["ok"] == 5


def test_a_second_shard_with_the_same_key_goes_too(cache, data):
    layout = CacheLayout(cache)
    name = rewrite_entry(cache, 3, spoil)
    (shard,) = layout.sealed_shards()
    shutil.copytree(shard, layout.shards / "0123456789abcdef")
    done = repair_cache(cache, confirm=lambda plan: True)
    assert [item.path for item in done.removals] == [name]
    assert set(done.plan.shards) == {shard.name, "0123456789abcdef"}
    assert build(data, cache).encoded == 1
    assert verify_cache(cache, full=True).counts["ok"] == 4


def test_a_shard_without_an_index_gives_nothing_wrong_back(cache, data):
    """A build salvages such a shard; what is wrong must be out of it before."""
    layout = CacheLayout(cache)
    rewrite_entry(cache, 3, spoil)
    (shard,) = layout.sealed_shards()
    copy = layout.shards / "0123456789abcdef"
    shutil.copytree(shard, copy)
    (copy / "index.npy").write_bytes(b"gone")
    repair_cache(cache, confirm=lambda plan: True)
    assert build(data, cache).encoded == 1
    assert verify_cache(cache, full=True).counts["ok"] == 4
    assert len(load_index(layout.sealed_shards()[0]).rows) >= 1

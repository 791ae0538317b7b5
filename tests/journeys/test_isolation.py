"""A reader keeps its content during builds, repairs and gc; sources are never written."""

import json
import subprocess
import sys

import numpy as np
from commands import ROOT, build, draw_folder, look, noise, run, state_of
from damaged import flip

from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot

#: Reads epochs until it is stopped; prints after each whether all bytes equal the first epoch.
READER = """
import hashlib, json, sys
from latentcache import open_cache
loader = open_cache(sys.argv[1]).loader(batch_size=2, seed=3, prefetch=2)
def epoch():
    loader.close()  # so that every file is looked up anew
    pairs = ((b["latents"].numpy().tobytes(), b["keys"]["latents"].numpy().tobytes()) for b in loader)
    return [hashlib.sha256(latents + keys).hexdigest() for latents, keys in pairs]
first = epoch()
for line in sys.stdin:
    print(json.dumps(epoch() == first), flush=True)
"""


class Reader:
    def __init__(self, cache):
        words = [sys.executable, "-c", READER, str(cache)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, cwd=ROOT, text=True, **pipes)

    def is_right(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.communicate()


def collect(cache):
    return look("gc", cache, "--apply", "--keep", 1, "--json").json


def damage(cache):
    """Flip one bit of the current snapshot, in a shard that no older snapshot has."""
    snapshot, first = open_snapshot(cache), open_snapshot(cache, CachePaths(cache).snapshots()[0])
    rows = snapshot.fields["latents"]
    names = [snapshot.shards[number] for number in np.asarray(rows.shard).tolist()]
    entry = next(entry for entry, name in enumerate(names) if name not in first.shards)
    flip(cache / "shards" / names[entry] / "data.mdb", int(rows.offset[entry]) + 8, 4)


def test_a_reader_beside_build_repair_and_gc(tmp_path):
    data, cache = draw_folder(tmp_path / "data", 8), tmp_path / "cache"
    assert build(data, cache).status == 0
    reader = Reader(cache)
    try:
        assert reader.is_right()
        for number in range(7):  # one image is unchanged
            (data / f"{number:04}.png").write_bytes(noise(100 + number))
        sources = state_of(data)
        assert build(data, cache).json["counts"]["encoded"] == 7
        assert reader.is_right()
        damage(cache)
        assert run("verify", cache, "--repair", "--yes", "--json").json["repair"]["removed"] == 1
        assert reader.is_right()
        found = collect(cache)
        (held,) = [item for item in found["items"] if item["file"] == "snapshots/000001"]
        assert held["reason"] == "leased"
        assert "fuser" in held["until"]
        assert reader.is_right()
        assert build(data, cache).json["counts"]["encoded"] == 1
        collect(cache)
        assert reader.is_right()
    finally:
        reader.end()
    left = {(item["category"], item["reason"]) for item in collect(cache)["items"] if item["category"] != "removed"}
    assert not left, "the bytes of the removed entry stay in its shard"
    assert len(CachePaths(cache).snapshots()) == 1
    assert look("verify", cache, "--full", "--json").status == 0
    assert len(CachePaths(cache).sealed_shards()) == len(open_snapshot(cache).shards)
    assert state_of(data) == sources

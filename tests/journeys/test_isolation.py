"""A reader keeps what it opened, whatever builds, repairs and collections do beside it; sources are only read."""

import json
import subprocess
import sys

import pytest
from commands import ROOT, build, draw_folder, look, noise, run, state_of

from latentcache.store.snapshot import open_snapshot
from latentcache.store.paths import CachePaths

#: Reads epochs until it is told to stop; says after each whether every byte was what the first epoch had.
READER = """
import hashlib, json, sys
from latentcache import open_cache
loader = open_cache(sys.argv[1]).loader(batch_size=2, seed=3, prefetch=int(sys.argv[2]))
def epoch():
    loader._reader.close()  # so that every file is looked up anew
    return [hashlib.sha256(b["latents"].numpy().tobytes()).hexdigest() + ",".join(b["keys"]) for b in loader]
first = epoch()
for line in sys.stdin:
    print(json.dumps(epoch() == first), flush=True)
"""


class Reader:
    """A process that trains on a cache."""

    def __init__(self, cache, prefetch):
        words = [sys.executable, "-c", READER, str(cache), str(prefetch)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, cwd=ROOT, text=True, **pipes)

    def is_right(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.communicate()


def collect(cache):
    return look("gc", cache, "--apply", "--keep", 1, "--grace", 0, "--json").json


def damage(cache):
    """One bit of a payload of the current generation, in a shard that no older generation has."""
    snapshot = open_snapshot(cache)
    row = next(row for row, s in enumerate(snapshot.rows.shard) if snapshot.shards[s] not in first_shards(cache))
    path = cache / "shards" / snapshot.shards[snapshot.rows.shard[row]] / "data.mdb"
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(int(snapshot.rows.offset[row]) + 120)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def first_shards(cache):
    return open_snapshot(cache, CachePaths(cache).generations()[0]).shards


@pytest.mark.parametrize("prefetch", [2])
def test_a_reader_beside_everything(tmp_path, prefetch):
    data, cache = draw_folder(tmp_path / "data", 8), tmp_path / "cache"
    assert build(data, cache).code == 0
    reader = Reader(cache, prefetch)
    try:
        assert reader.is_right()
        for number in range(7):  # one image is left as it was
            (data / f"{number:04}.png").write_bytes(noise(100 + number))
        sources = state_of(data)
        assert build(data, cache).json["counts"]["encoded"] == 7
        assert reader.is_right()
        damage(cache)
        assert run("verify", cache, "--repair", "--yes", "--json").json["repair"]["removed"] == 1
        assert reader.is_right()
        found = collect(cache)
        (held,) = [item for item in found["items"] if item["file"] == "snapshots/000001"]
        assert (held["reason"], held["holders"][0]["pid"]) == ("pinned", reader.process.pid)
        assert reader.is_right()
        assert build(data, cache).json["counts"]["encoded"] == 1
        collect(cache)
        assert reader.is_right()
    finally:
        reader.end()
    assert {item["category"] for item in collect(cache)["items"]} <= {"removed", "compacted"}
    assert len(CachePaths(cache).generations()) == 1
    assert look("verify", cache, "--full", "--json").code == 0
    assert len(CachePaths(cache).all_sealed()) == len(open_snapshot(cache).shards)
    assert state_of(data) == sources

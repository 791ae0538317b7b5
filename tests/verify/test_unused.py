import shutil

import numpy as np
import pytest
from small_cache import build, damage_payload, draw

from latentcache.store.entry import HEADER_BYTES
from latentcache.store.generation import load_generation
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.verify.repair import repair_cache
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Depth, Selection
from latentcache.verify.unused import scan_unused


@pytest.fixture
def rebuilt(cache, data):
    """A cache of two shards, the first with an entry that no sample needs; gives the first picture of that entry."""
    kept = (data / "p0.png").read_bytes()
    draw(data / "p0.png", seed=90)
    assert build(data, cache).encoded == 1
    return kept


def orphan(cache):
    """Folder and row of the entry that nobody needs."""
    generation = load_generation(cache)
    needed = {key.tobytes() for key in generation.rows.key}
    for folder in CacheLayout(cache).sealed_shards():
        for row in load_index(folder).rows:
            if row["key"].tobytes() not in needed:
                return folder, row
    raise AssertionError("there is none")


def damage(cache, place=HEADER_BYTES + 9):
    folder, row = orphan(cache)
    data = folder / "data.mdb"
    data.chmod(0o644)
    with data.open("r+b") as file:
        file.seek(int(row["offset"]) + place)
        byte = file.read(1)[0]
        file.seek(int(row["offset"]) + place)
        file.write(bytes([byte ^ 1]))
    return folder.name, row["key"].tobytes().hex()


@pytest.mark.parametrize("isolate", [True, False])
def test_damage_that_no_sample_has_is_said_and_touches_no_sample(cache, rebuilt, isolate):
    shard, key = damage(cache)
    report = verify_cache(cache, depth=Depth(full=True, isolate=isolate))
    (finding,) = [f for f in report.findings if f.category != "provenance"]
    assert (finding.category, finding.reason, finding.key, finding.path) == ("corrupt", "unused", key, "")
    assert (finding.file, finding.found.startswith("checksum: expected")) == (f"shards/{shard}", True)
    assert finding.fix == f"latentcache verify {cache} --repair --yes"
    assert {name: report.counts[name] for name in ("ok", "orphan", "corrupt")} == {"ok": 4, "orphan": 0, "corrupt": 1}
    assert (report.exit_code(), report.unused_corrupt, report.samples) == (1, 1, 4)
    assert verify_cache(cache).exit_code() == 0  # the fast form reads no payload


def test_an_orphan_that_is_whole_is_one(cache, rebuilt):
    report = verify_cache(cache, full=True)
    assert (report.exit_code(), report.counts["orphan"], report.checked["payloads"]) == (0, 1, 5)


def test_a_header_that_is_not_the_one_of_the_index(cache, rebuilt):
    damage(cache, place=40)
    (finding,) = [f for f in verify_cache(cache, full=True).findings if f.category == "corrupt"]
    assert (finding.reason, finding.found) == ("unused", "its header is not the one in the index")


def test_a_repair_takes_it_out_and_no_build_takes_it_again(cache, data, rebuilt):
    damage(cache)
    done = repair_cache(cache, confirm=lambda plan: True)
    assert (done.done, done.complete, done.removals) == (True, True, ())
    again = verify_cache(cache, full=True)
    assert (again.exit_code(), again.counts["ok"], again.counts["orphan"]) == (0, 4, 0)
    (data / "p0.png").write_bytes(rebuilt)
    assert build(data, cache).encoded == 1
    assert verify_cache(cache, full=True).counts["ok"] == 4


def test_a_shard_that_the_generation_does_not_name(cache):
    """Left by a build that was killed before it published; the same keys as the entries that are needed."""
    layout = CacheLayout(cache)
    (shard,) = layout.sealed_shards()
    shutil.copytree(shard, layout.shards / "0123456789abcdef")
    report = verify_cache(cache, full=True)
    assert (report.exit_code(), report.counts["orphan"], report.checked["payloads"]) == (0, 0, 8)
    data = layout.shards / "0123456789abcdef" / "data.mdb"
    data.chmod(0o644)
    row = load_index(data.parent).rows[0]
    with data.open("r+b") as file:
        file.seek(int(row["offset"]) + HEADER_BYTES + 3)
        file.write(b"\xff\xff\xff")
    report = verify_cache(cache, full=True)
    assert (report.unused_corrupt, report.counts["ok"], report.exit_code()) == (1, 4, 1)
    done = repair_cache(cache, confirm=lambda plan: True)
    assert (done.removals, done.plan.shards) == ((), ("0123456789abcdef",))
    assert verify_cache(cache, full=True).exit_code() == 0


def test_slices_together_read_all_of_it(cache, rebuilt):
    damage(cache)
    slices = [Depth(selection=Selection(slice_number=n, slices=3), isolate=False) for n in (1, 2, 3)]
    assert sum(verify_cache(cache, depth=depth).unused_corrupt for depth in slices) == 1


def test_time_that_is_over_ends_it(cache, rebuilt):
    layout, generation = CacheLayout(cache), load_generation(cache)
    shard = orphan(cache)[0].name
    assert [*scan_unused(layout, generation, shard)][-1] == {"end": shard}
    assert [*scan_unused(layout, generation, shard, over=lambda: True)] == [{"shard": shard}]


def test_a_child_that_dies_there_says_so(cache, rebuilt, monkeypatch):
    shard = orphan(cache)[0].name
    passed = len(load_generation(cache).shards) + 1
    monkeypatch.setenv("LATENTCACHE_FAILPOINT", f"scan-shard:{passed}:kill")
    report = verify_cache(cache, full=True)
    (finding,) = [f for f in report.findings if f.category == "unverifiable"]
    assert (finding.reason, finding.file) == ("shard", f"shards/{shard}/data.mdb")


def test_damage_of_a_sample_stays_its_own(cache, data, rebuilt):
    name = damage_payload(cache)
    report = verify_cache(cache, full=True)
    assert (report.counts["corrupt"], report.unused_corrupt) == (1, 0)
    assert [f.path for f in report.findings if f.category == "corrupt"] == [name]
    assert np.count_nonzero([f.category == "orphan" for f in report.findings]) == 1

from pathlib import Path

import pytest
from small_tokens import build, opened, spoken, tamper, texts, write_texts

from latentcache.sources.corpus import scan_records
from latentcache.store.layout import CacheLayout
from latentcache.verify.collect import collect
from latentcache.verify.selection import Depth
from latentcache.verify.token_repair import repair_tokens

LINES = texts(200, longest=4000)


@pytest.fixture
def cache(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", LINES), tmp_path / "cache")
    return tmp_path / "cache"


def repaired(cache, yes=True, **more):
    return repair_tokens(cache, confirm=lambda plan: yes, open_records=lambda d, o: scan_records(d), **more)


def test_nothing_to_repair_and_nothing_said(cache):
    assert not repaired(cache).plan.needed
    tamper(cache, block=0)
    assert not repaired(cache, yes=False).done
    assert opened(cache)[0].number == 1


def test_a_damaged_block_goes_and_the_others_are_saved(cache):
    tamper(cache, block=0)
    before, old_reader = opened(cache)
    report = repaired(cache)
    after, reader = opened(cache)
    kept = [LINES[n] for n in range(200) if before.documents.block[n]]
    assert (report.done, report.complete, len(report.removals)) == (True, False, 1)
    assert spoken(reader) == kept
    assert (cache / report.log).exists()
    last = int(len(LINES) - 1)
    assert old_reader.ids(last).tolist() == reader.ids(len(kept) - 1).tolist()
    assert CacheLayout(cache).retired() == set(before.shards)
    assert after.shards != before.shards


def test_what_has_drifted_goes_too(cache):
    depth = Depth(full=True, reencode=200)
    report = repaired(cache, depth=depth, retokenise=lambda records: [None] * len(records))
    assert (report.done, len(opened(cache)[0].documents)) == (True, 0)
    assert build(Path(opened(cache)[0].source_root), cache).encoded == 200
    assert spoken(opened(cache)[1]) == LINES


def test_the_collector_copies_blocks_that_are_still_needed(cache, tmp_path):
    data = write_texts(tmp_path / "a.jsonl", [])
    wide = texts(600, longest=4000, seed=3)
    build(write_texts(data, wide), cache)
    build(write_texts(data, wide[-80:]), cache)
    before = opened(cache)[0]
    found = collect(cache, apply=True, keep=1, grace_s=0)
    after, reader = opened(cache)
    assert {"compacted", "removed"} <= {item.state for item in found.items}
    assert after.number == before.number + 1
    assert spoken(reader) == wide[-80:]
    assert after.fingerprint == before.fingerprint
    assert collect(cache, apply=True, keep=1, grace_s=0).num_bytes("removable") == 0
    assert build(data, cache).encoded == 0

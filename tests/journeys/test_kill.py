"""A build that is killed at any moment loses nothing that it acknowledged."""

import random
import time

import pytest
from commands import (
    acknowledged,
    build,
    draw_folder,
    entries,
    finished,
    look,
    start_build,
    state_of,
    undisturbed,
    wait_for,
)

NUM_IMAGES = 48


def killed_often(tmp_path, num_kills, seed):
    """Build with so many kills; every one is followed by a look at what is there."""
    data, cache, events = draw_folder(tmp_path / "data", NUM_IMAGES), tmp_path / "cache", tmp_path / "events"
    sources, chance = state_of(data), random.Random(seed)
    for _ in range(num_kills):
        process = start_build(data, cache, delay_ms=10, events=events)
        before = len(acknowledged(events))
        if chance.random() < 0.7:  # most of them while entries are made, the others anywhere
            wanted = before + chance.randint(1, 3)
            wait_for(lambda wanted=wanted: len(acknowledged(events)) >= wanted, process)
            time.sleep(chance.uniform(0, 0.02))
        else:
            time.sleep(chance.uniform(0.1, 0.9))
        process.kill()
        finished(process)
        if cache.exists() and (cache / "shards").exists():
            check(cache, events)
    return data, cache, events, sources


def check(cache, events):
    """Every acknowledged key is there and reads back whole; none was acknowledged twice."""
    keys, there = acknowledged(events), entries(cache)
    assert len(set(keys)) == len(keys)
    assert [key for key in keys if there.get(key, (None,))[0] is None] == []
    assert None not in {checksum for checksum, _ in there.values()}


def ends_like_an_undisturbed_build(data, cache, events, sources):
    keys = set(acknowledged(events))
    there = set(entries(cache)) if (cache / "shards").exists() else set()
    last = build(data, cache, events=events)
    assert last.status == 0
    assert last.json["counts"] == {
        "samples": NUM_IMAGES,
        "encoded": NUM_IMAGES - len(there),
        "cached": len(there),
        "duplicates": 0,
        "quarantined": 0,
        "no_caption": 0,
    }
    check(cache, events)
    assert keys <= there
    assert entries(cache) == undisturbed(NUM_IMAGES)
    assert look("verify", cache, "--full", "--json").json["counts"]["ok"] == NUM_IMAGES
    assert look("info", cache, "--json").json["complete"] is True
    assert state_of(data) == sources


def test_six_kills(tmp_path):
    ends_like_an_undisturbed_build(*killed_often(tmp_path, 6, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_kills(tmp_path, seed):
    ends_like_an_undisturbed_build(*killed_often(tmp_path, 10, seed=100 + seed))


def test_a_killed_build_leaves_no_lock_and_says_that_it_is_not_complete(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 30), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, events=events, armed="before-put:3:hang")
    wait_for(lambda: len(acknowledged(events)) == 2, process)
    process.kill()
    finished(process)
    assert (cache / "builder.lock").exists()
    told = look("info", cache, "--json").json
    assert (told["complete"], told["snapshot"], told["counts"]["samples"]) == (False, 0, 30)
    assert told["counts"]["entries"] >= 2
    unfinished = look("verify", cache, "--json")
    assert (unfinished.status, unfinished.json["error"]["slug"]) == (3, "cache-unfinished")
    assert build(data, cache, events=events).json["counts"]["encoded"] == 30 - told["counts"]["entries"]

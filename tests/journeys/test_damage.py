"""Damage in any file of a cache: verify finds it, no loader returns it, a build repairs it or names a fix."""

import json
import os
import shutil

import pytest
from commands import acknowledged, commands_are_put_together_once, start_build, wait_for
from damage import DOCUMENTS, IMAGES, WAYS, check, damage, files_of, served, served_documents
from small_cache import build, draw, draw_four
from small_tokens import build as build_records
from small_tokens import texts, write_texts

from latentcache.store.atomic_io import write_json
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import own_checksum

#: Parts of the seeds, ten in each.
MANY = [*range(4), *(pytest.param(part, marks=pytest.mark.slow) for part in range(4, 300))]


def make(folder):
    """A data folder with a rejected file, and a cache of two snapshots and a killed third build."""
    data, cache = draw_four(folder / "data"), folder / "whole"
    build(data, cache)
    draw(data / "p4.png", seed=4)
    (data / "bad.png").write_bytes(b"")
    build(data, cache, allow_failed="1")
    _killed(data, cache)
    return data, cache, served(cache)


def make_records(folder):
    """Records with one rejected, and a cache of two snapshots, unreferenced entries and a build state.

    Between the snapshots the last records were replaced.
    """
    data, cache = folder / "a.jsonl", folder / "records"
    lines = texts(60, longest=4000)
    build_records(write_texts(data, lines), cache)
    write_texts(data, [*lines[:20], *(f"new {one}" for one in lines[:3]), ("bad",)])
    build_records(data, cache, allow_failed="1")
    field = json.loads((CachePaths(cache).snapshot(2) / "manifest.json").read_bytes())["fields"]["input_ids"]
    fields = {"input_ids": {"recipe": field["recipe"], "provenance": field["provenance"]}}
    _write_state(cache, {"format": 1, "fields": fields, "source": {}, "part": "0/1", "samples": 24})
    return data, cache, served_documents(cache)


def _killed(data, cache):
    """Leave the files of a killed build: its state and an open shard with one commit."""
    new, events = [draw(data / f"p{number}.png", seed=number) for number in (5, 6)], cache.with_name("events")
    process = start_build(data, cache, "--batch-size", 1, "--bucket-step", 8, delay_ms=200, events=events)
    wait_for(lambda: acknowledged(events), process)
    process.kill()
    process.communicate()
    for path in new:
        path.unlink()
    state = json.loads(CachePaths(cache).building.read_bytes())
    state["fields"]["latents"]["provenance"]["model"] = "stub"
    _write_state(cache, state)
    assert CachePaths(cache).open_shards()


def _write_state(cache, state):
    write_json(CachePaths(cache).building, {**state, "checksum": own_checksum(state)})


@pytest.fixture
def quick(monkeypatch):
    """Disable fsync and cache the command objects, for speed."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    commands_are_put_together_once(monkeypatch.setattr)


def check_damage(folder, made, seed, kind=IMAGES):
    """Damage a copy and check it with every command."""
    data, intact, whole = made
    copy = folder / "cache"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(intact, copy)
    done = damage(copy, seed)
    try:
        check(copy, whole, data, kind)
    except Exception as error:
        error.add_note(done)
        raise


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("damage"))


def test_damage_covers_every_kind_of_file(made):
    kinds = {path.name for path in files_of(made[1])}
    assert {"data.mdb", "index.safetensors", "columns.safetensors", "manifest.json", "CURRENT", "BUILDING"} <= kinds
    assert {"rejected.jsonl", "builder.lock"} <= kinds
    assert len(set(WAYS)) >= 12


@pytest.mark.parametrize("part", MANY)
def test_damage_is_found_or_harmless(made, tmp_path, part, quick):
    for seed in range(part * 10, part * 10 + 10):
        check_damage(tmp_path, made, seed)


@pytest.fixture(scope="module")
def made_records(tmp_path_factory):
    return make_records(tmp_path_factory.mktemp("damaged-records"))


@pytest.mark.parametrize("part", MANY[3:])
def test_damage_to_records_is_found_or_harmless(made_records, tmp_path, part, quick):
    for seed in range(part * 10, part * 10 + 5):
        check_damage(tmp_path, made_records, seed, DOCUMENTS)

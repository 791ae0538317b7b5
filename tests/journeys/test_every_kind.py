"""Every guarantee, tested for each kind of this package and a toy kind."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import Future
from itertools import islice

import numpy as np
import pytest
from commands import ROOT, acknowledged, finished, look, state_of, wait_for
from damaged import damage_payload
from kinds import BLOCK, KINDS, UNIT, forget_kinds, num_entries, stored
from test_worker_processes import is_running, workers_of

from latentcache.errors import DeviceMemoryError
from latentcache.fields import registry
from latentcache.fields.protocol import WorkSize
from latentcache.fields.registry import field_kind, load
from latentcache.identity.content import checksum
from latentcache.pipeline import build
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot


@pytest.fixture(params=list(KINDS))
def kind(request, monkeypatch):
    forget_kinds(monkeypatch)
    monkeypatch.setattr(field_kind("mask"), "work", WorkSize(unit_jobs=16))  # as in slow_masks
    if KINDS[request.param].words:
        registry.register(KINDS[request.param].words[1:])
    yield KINDS[request.param]
    monkeypatch.undo()
    registry.field_kinds.cache_clear()


@pytest.fixture
def few(kind, tmp_path):
    data, cache = kind.data(tmp_path / "data", 6), tmp_path / "cache"
    assert kind.build(data, cache).json["counts"]["encoded"] == 6
    return data, cache


def change_encoder(kind, monkeypatch, change):
    """Replace the encoder by ``change(batch, encode)``; ``batch`` has prepared items."""
    producer = load(field_kind(kind.field).producer)
    real = producer.encode
    monkeypatch.setattr(producer, "encode", lambda self, batch: change(batch, lambda some: real(self, some)))


# builds


def test_an_up_to_date_build_loads_no_encoder(kind, few, monkeypatch):
    data, cache = few
    monkeypatch.setattr("latentcache.sources.known.RACY_NS", 0)
    words = ("build", data, "--out", cache, *kind.words, "--json")
    first = look(*words).json["snapshot"]  # its files are now old enough to be trusted
    monkeypatch.setattr("latentcache.pipeline.build.Run", None)
    monkeypatch.setattr(load(field_kind(kind.field).producer), "__init__", None)
    from latentcache.pipeline import build

    diffs, field_work = [], build.field_work
    monkeypatch.setattr(build, "field_work", lambda *given, **more: diffs.append(1) or field_work(*given, **more))
    before = state_of(cache / "shards")
    done = look(*words).json
    assert (done["counts"]["encoded"], done["counts"]["cached"], done["published"]) == (0, 6, False)
    assert (done["snapshot"], len(diffs), state_of(cache / "shards")) == (first, 1, before)


def test_an_input_that_cannot_be_used_is_quarantined_with_its_reason(kind, few):
    data, cache = few
    name = kind.spoil(data, 7)
    done = kind.build(data, cache)
    assert (done.status, done.json["counts"]["quarantined"], done.json["counts"]["cached"]) == (1, 1, 6)
    (item,) = [one for one in done.json["items"] if one["category"] == "quarantined"]
    assert item["path"] == name.removesuffix(":1")
    assert item["reason"]
    assert item["hint"]
    assert kind.build(data, cache, "--allow-failed", 1).status == 0
    assert kind.counts(cache, "--full") == {"ok": 6, "quarantined": 1}
    kind.write(data, 7)
    assert kind.build(data, cache).json["counts"]["encoded"] == 1


def test_a_batch_that_does_not_fit_is_halved(kind, tmp_path, monkeypatch):
    def two_at_most(batch, encode):
        if len(batch) > 2:
            raise DeviceMemoryError("the device is full")
        return encode(batch)

    change_encoder(kind, monkeypatch, two_at_most)
    data = kind.data(tmp_path / "data", 8)
    done = kind.build(data, tmp_path / "cache", "--batch-size", 8)
    assert (done.status, done.json["counts"]["encoded"]) == (0, 8)
    assert "the batch size is now 2" in done.err
    monkeypatch.undo()
    forget_kinds(monkeypatch)
    assert kind.build(data, tmp_path / "plain").status == 0
    assert stored(tmp_path / "cache", kind.field) == stored(tmp_path / "plain", kind.field)


def test_parts_merge_into_the_cache_of_one_build(kind, tmp_path):
    data, whole, merged = kind.data(tmp_path / "data", 9), tmp_path / "whole", tmp_path / "merged"
    parts = [tmp_path / f"part{number}" for number in range(3)]
    for number, part in enumerate(parts):
        assert kind.build(data, part, "--part", f"{number}/3").status == 0
    assert kind.build(data, whole).status == 0
    assert sum(len(stored(part, kind.field)) for part in parts) == 9
    done = look("merge", *parts, "--out", merged, *kind.words, "--json")
    assert (done.status, done.json["counts"]["encoded"]) == (0, 0)
    assert stored(merged, kind.field) == stored(whole, kind.field)
    assert list(open_snapshot(merged).samples.names) == list(open_snapshot(whole).samples.names)
    assert kind.counts(merged, "--full") == {"ok": 9}
    assert kind.build(data, merged).json["counts"]["encoded"] == 0


def test_training_runs_during_a_build(kind, tmp_path, monkeypatch):
    """A trainer opens each snapshot for an epoch; its checkpoint goes on with its own."""
    data, cache, plain = kind.data(tmp_path / "data", size=UNIT), tmp_path / "cache", tmp_path / "plain"
    assert kind.build(data, plain).status == 0
    wanted, epochs, states, publish = stored(plain, kind.field), [], [], build.publish

    def trained(*given, **named):
        report = publish(*given, **named)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it does not have all samples yet
            loader = kind.opened(cache).loader(batch_size=1, seed=3)
        batches = (batch[kind.field].numpy().tobytes() for batch in loader)
        served = list(islice(batches, 2))
        states.append(loader.state_dict())
        epochs.append([*served, *batches])
        return report

    monkeypatch.setattr(build, "publish", trained)
    monkeypatch.setattr(build, "until", lambda due, jobs: islice(jobs, kind.many // 3 - 1))
    assert kind.build(data, cache, "--publish-every", "10m", "--workers", 0).status == 0
    assert stored(cache, kind.field) == wanted
    counts = [len(epoch) for epoch in epochs]
    assert counts == [*range(counts[0], kind.many, counts[0]), kind.many]
    assert len(counts) > 2
    loader = kind.opened(cache).loader(batch_size=1)
    for state, epoch in list(zip(states, epochs, strict=True))[-2:]:
        loader.load_state_dict(state)
        assert [batch[kind.field].numpy().tobytes() for batch in loader] == epoch[2:]


# checks


def test_checks_of_every_depth(kind, few):
    data, cache = few
    assert kind.counts(cache) == kind.counts(cache, "--full") == kind.counts(cache, "--sample", "1/1") == {"ok": 6}
    part = kind.verify(cache, "--sample", "1/2").json
    assert (part["mode"], part["counts"]["ok"] + part["not_looked_at"]) == ("sample", 6)
    kind.write(data, 1, seed=90)
    assert kind.counts(cache) == {"ok": 5, "stale": 1}
    (data / kind.write(data, 1).name).unlink()
    assert kind.counts(cache) == {"ok": 5, "stale": 1}


def test_seven_nightly_parts_read_every_entry_once(kind, tmp_path):
    data, cache = kind.data(tmp_path / "data"), tmp_path / "cache"
    assert kind.build(data, cache).status == 0
    parts = [kind.verify(cache, "--sample", f"{number}/7").json for number in range(1, 8)]
    assert sum(part["checked"]["payloads"] for part in parts) == num_entries(cache, kind.field) > 2
    assert sum(part["counts"]["ok"] for part in parts) >= kind.many
    damage_payload(cache, field=kind.field)
    codes = [kind.verify(cache, "--sample", f"{number}/7").status for number in range(1, 8)]
    assert sorted(codes) == [0] * 6 + [1]


def test_re_encoding_finds_changed_bytes(kind, few, monkeypatch):
    cache = few[1]
    done = kind.verify(cache, "--reencode", 6).json
    assert (done["exit_code"], done["checked"]["reencoded"], done["counts"]["drift"]) == (0, 6, 0)

    def other(batch, encode):
        made = encode(batch)
        right = made.result() if isinstance(made, Future) else made
        return [dataclasses.replace(item, array=np.zeros_like(item.array)) for item in right]

    change_encoder(kind, monkeypatch, other)
    done = kind.verify(cache, "--reencode", 6)
    assert (done.status, done.json["counts"]["drift"]) == (1, 6)


def test_damage_is_found_by_one_check_repaired_and_built_again(kind, few):
    data, cache = few
    damage_payload(cache, row=2, field=kind.field)
    assert kind.counts(cache) == {"ok": 6}, "a fast check reads no payload"
    lost = kind.counts(cache, "--full")["corrupt"]
    removed = kind.verify(cache, "--repair", "--yes").json
    assert (removed["exit_code"], removed["repair"]["removed"]) == (1, 1)
    assert kind.counts(cache).get("missing") == lost
    assert not look("info", cache, *kind.words, "--json").json["complete"]
    assert kind.build(data, cache).json["counts"]["encoded"] == lost
    assert kind.counts(cache, "--full") == {"ok": 6}


def test_gc_copies_referenced_entries(kind, tmp_path):
    data, cache = kind.data(tmp_path / "data"), tmp_path / "cache"
    assert kind.build(data, cache).status == 0
    kept = stored(cache, kind.field)
    changed = kind.many - 1
    for number in range(changed):
        kind.write(data, number, seed=1000 + number, size=BLOCK)
    assert kind.build(data, cache).json["counts"]["encoded"] == changed
    wanted, size = stored(cache, kind.field), sum(path.stat().st_size for path in cache.rglob("data.mdb"))
    assert len(set(kept) & set(wanted)) == kind.many - changed
    dry = look("gc", cache, "--keep", 1, *kind.words, "--json").json
    assert "low-utilization" in {item["reason"] for item in dry["items"]}
    for _ in range(2):
        assert look("gc", cache, "--apply", "--keep", 1, *kind.words, "--json").status == 0
    assert stored(cache, kind.field) == wanted
    assert sum(path.stat().st_size for path in cache.rglob("data.mdb")) < size
    assert kind.verify(cache, "--full").json["counts"]["ok"] == kind.many
    assert kind.build(data, cache).json["counts"]["encoded"] == 0


def test_the_reference_reader_reads_it(kind, few):
    page = (ROOT / "docs/format/second-reader.md").read_text("utf-8")
    program = page.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", program, few[1]], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {key: (number, name.strip("'")) for field, key, *_, number, name in lines if field == kind.field}
    wanted = stored(few[1], kind.field)
    assert found == {key: (f"{checksum(payload):016x}", name) for key, (name, payload) in wanted.items()}


# identity


def test_run_settings_do_not_change_entries(kind, few, tmp_path, monkeypatch):
    data, cache = few
    monkeypatch.setenv("DELAY_MS", "1")
    other = tmp_path / "other"
    more = ("--batch-size", 3, "--decode-threads", 2, "--workers", 0, "--publish-every", "10m", "--commit-every", 2)
    assert look(*kind.build_words(data, other, *more, delay_ms=1), "--json").status == 0
    assert stored(other, kind.field) == stored(cache, kind.field)
    recipes = [open_snapshot(one).fields[kind.field].recipe_json for one in (cache, other)]
    assert recipes[0] == recipes[1]
    text = json.dumps(recipes[0])
    assert not [word for word in ("dropout", "shuffle", "batch", "seed", "worker", "delay") if word in text]
    before = state_of(cache)
    for seed in (0, 1):
        assert len(list(kind.opened(cache).loader(batch_size=2, seed=seed))) == 3
    assert state_of(cache) == before


# kills, signals and memory


def start_until_commit(kind, tmp_path, *more, wanted=1, **options):
    """Start a build with two workers and wait for its first commit."""
    data, cache, events = kind.data(tmp_path / "data", size=UNIT), tmp_path / "cache", tmp_path / "events"
    process = kind.start(data, cache, *kind.two, "--events", events, *more, **options)
    wait_for(lambda: len(acknowledged(events)) >= wanted, process)
    assert process.poll() is None, finished(process).err
    return process, data, cache, events


def goes_on(kind, data, cache, events):
    """Run the same command again: it reuses acknowledged entries and gives the cache of one build."""
    done = set(acknowledged(events))
    last = kind.finish(data, cache, *kind.two, "--events", events, delay_ms=0)
    assert last.status == 0, last.err
    keys, counts = acknowledged(events), last.json["counts"]
    assert len(keys) == len(set(keys))
    assert counts["encoded"] + counts["cached"] == kind.many
    assert counts["cached"] >= len(done)
    other = cache.with_name("other")
    assert kind.build(data, other).status == 0
    assert stored(cache, kind.field) == stored(other, kind.field)
    assert set(keys) <= set(stored(cache, kind.field))
    assert kind.counts(cache, "--full") == {"ok": kind.many}
    assert not CachePaths(cache).open_shards()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_replaced_worker_quarantines_no_sample(kind, tmp_path, number):
    process, data, cache, events = start_until_commit(kind, tmp_path, variables={"LATENTCACHE_WORKER_DEADLINE": "2"})
    victim = workers_of(process)[0]
    os.kill(victim, number)
    done = finished(process, 60)
    assert not is_running(victim)
    assert (done.status, done.json["worker_restarts"], done.json["counts"]["quarantined"]) == (0, 1, 0), done.err
    assert done.json["counts"]["encoded"] == kind.many
    goes_on(kind, data, cache, events)


@pytest.mark.slow
def test_a_signal_ends_a_build_with_a_hanging_worker(kind, tmp_path):
    process, data, cache, events = start_until_commit(kind, tmp_path)
    for worker in workers_of(process):
        os.kill(worker, signal.SIGSTOP)
    time.sleep(0.5)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert finished(process, 15).status == 130
    assert time.monotonic() - started < 10
    assert not CachePaths(cache).open_shards()  # the build seals shards of workers that it kills
    goes_on(kind, data, cache, events)

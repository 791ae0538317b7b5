"""Runs of whole fields: every job is settled, whatever happens to inputs, batches and workers."""

from __future__ import annotations

import json
import resource
import time

import pytest

from latentcache import failpoint
from latentcache.errors import DeviceError, EncoderError, WorkerError
from latentcache.identity.content import content_hash
from latentcache.pipeline.workers import resources
from latentcache.pipeline.workers.engine import EventLog
from latentcache.pipeline.workers.local import LocalEngine, worker_count
from latentcache.pipeline.workers.resources import BASE_BYTES
from latentcache.pipeline.workers.scheduler import Run
from latentcache.store.catalog import load_catalog
from latentcache.store.shard import load_index
from tests.pipeline.workers import toy_kinds

TEXTS = [f"word{number}" for number in range(40)]


def settled_samples(result) -> list[int]:
    return sorted([*result.read.sample.tolist(), *(sample for sample, _ in result.failed)])


def test_every_job_is_committed(toy):
    result = toy.run(TEXTS)
    stored = toy.stored()
    assert settled_samples(result) == list(range(40))
    assert (result.encoded, result.copied, result.failed) == (len(stored), 0, [])
    assert result.read.content[result.read.sample.tolist().index(7)].tobytes() == content_hash(b"word7")
    assert result.noise["largest"] == 0.5
    assert set(result.waits) == {"prepare", "encode", "write", "idle"}
    assert result.written_bytes > 0


def test_equal_encoder_input_is_copied(squares):
    """Items copied from a committed entry."""
    squares.run(["red one", "blue"])
    result = squares.run(["red  two", "green"], shards=load_catalog(squares.paths).folders)
    assert (result.encoded, result.copied) == (2, 2)
    assert squares.times("encode", "red") == 2
    stored = squares.stored()
    assert len(stored) == 8
    assert len(set(stored.values())) == 6


@pytest.mark.parametrize("workers", ["cpu*1", "cpu*3"])
def test_equal_items_are_stored_once(toy, workers):
    """The same key twice, in one batch, block or shard and in several: one item, counted once."""
    result = toy.run(["twin", "one", "twin", *TEXTS[:20], "twin"], device=workers, workers=int(workers[-1]))
    assert settled_samples(result) == list(range(24))
    variants = 2 if toy.name == "squares" else 1
    assert result.encoded == len(toy.stored()) == 22 * variants


def test_failures_keep_their_content_hash(toy):
    result = toy.run(["a fail-prepare", "b fail-encode", "c unusable-prepare", "d"])
    failures = dict(result.failed)
    assert [failures[sample].reason for sample in range(3)] == ["bad-toy", "bad-toy", "truncated"]
    assert failures[1].content == content_hash(b"b fail-encode")
    assert settled_samples(result) == [0, 1, 2, 3]


def test_the_limit_of_workers_follows_that_of_the_container(words, monkeypatch):
    """Inputs get a quarter of the container's memory, divided among workers."""
    limits, limit_memory = [], resources.limit_memory

    def limited(pid, size):
        limit_memory(pid, size)
        limits.append(resource.prlimit(pid, resource.RLIMIT_DATA)[0])

    monkeypatch.setattr("latentcache.pipeline.workers.local.limit_memory", limited)
    monkeypatch.setattr(resources, "host_memory", lambda: 2 << 30)
    assert words.run(TEXTS, workers=2).failed == []
    assert set(limits) == {BASE_BYTES + (2 << 30) // 4 // 2}


@pytest.mark.slow
def test_memory_that_is_not_enough_fails_one_sample(toy):
    """A worker with a memory limit is replaced and the sample retried; otherwise the sample fails."""
    result = toy.run([*TEXTS[:6], "hungry memory-prepare"])
    assert [(sample, failure.reason) for sample, failure in result.failed] == [(6, "out-of-memory")]
    assert settled_samples(result) == list(range(7))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prepare", "encode"])
def test_a_sample_that_kills_its_workers_is_quarantined(toy, stage):
    texts = [*TEXTS[:12], f"poison crash-{stage}", *TEXTS[12:24]]
    result = toy.run(texts)
    assert [sample for sample, _ in result.failed] == [12]
    assert result.failed[0][1].reason == {"prepare": "decoder-crash", "encode": "encoder-crash"}[stage]
    assert "SIGSEGV" in result.failed[0][1].detail
    assert settled_samples(result) == list(range(25))
    # Once with all, in four halves of a unit of sixteen, three times alone, twice by timing.
    assert toy.times(stage, "poison") <= 10
    assert result.restarts >= 3


def test_a_worker_that_dies_once_quarantines_none(squares):
    result = squares.run([*TEXTS[:10], "unlucky once-encode", *TEXTS[10:20]])
    assert (result.failed, settled_samples(result), result.restarts) == ([], list(range(21)), 1)
    assert any("SIGSEGV" in warning for warning in squares.warnings)


@pytest.mark.slow
def test_a_dead_encoder_quarantines_no_good_samples(toy):
    with pytest.raises(WorkerError, match="keep dying"):
        toy.run([f"w{number} crash-encode" for number in range(24)])


@pytest.mark.parametrize("deaths", range(1, 6))
def test_trouble_that_ends_rejects_no_good_sample(squares, deaths):
    """Each worker dies that encodes anything meanwhile, as if another program took the memory."""
    result = squares.run(TEXTS[:17], producer={"dead": 32, "trouble": deaths})
    assert (result.failed, settled_samples(result), result.restarts) == ([], list(range(17)), deaths)


def test_a_poison_sample_alone_in_a_run_is_compared_with_committed_work(squares):
    squares.run(["good"])
    result = squares.run(squares.jobs(["good", "bad crash-encode"])[1:], good=squares.jobs(["good"]))
    assert [failure.reason for _, failure in result.failed] == ["encoder-crash"]
    assert squares.times("encode", "good") == 4, "two variants, once more as the proof"
    with pytest.raises(WorkerError, match="keep dying") as caught:
        squares.run(["bad crash-encode"])
    assert "bad crash-encode alone, and there is no other sample" in caught.value.why
    assert "move bad crash-encode elsewhere" in caught.value.fix


def test_a_device_whose_workers_die_at_once_rests(squares):
    """Of two devices one never works."""
    texts = [f"{text} sleep-encode" for text in TEXTS * 3]
    result = squares.run(texts, device="cpu*2", producer={"open": "one-device"})
    assert (result.failed, settled_samples(result)) == ([], list(range(120)))
    assert 2 <= result.restarts <= 8, "12 s of work, and a process starts in half a second"


@pytest.mark.slow
def test_a_lost_device_ends_the_build_after_retries(toy):
    """Every sample succeeds at first; later each worker dies, also on good samples."""
    with pytest.raises(WorkerError, match="keep dying"):
        toy.run([f"v{number}" for number in range(30)], producer={"dead": 12})


def test_a_producer_that_cannot_be_opened_ends_the_build(words):
    with pytest.raises(EncoderError, match="the toy cannot be opened"):
        words.run(TEXTS, producer={"open": "fail"})
    with pytest.raises(WorkerError, match="no sample is to blame"):
        words.run(TEXTS, producer={"open": "die"})


def test_a_lost_device_is_tried_again(squares):
    result = squares.run([*TEXTS[:10], "w lost-encode"])
    assert (result.failed, settled_samples(result)) == ([], list(range(11)))
    assert any("lost its device" in warning for warning in squares.warnings)
    with pytest.raises(DeviceError, match="the device failed"):
        squares.run(["w lostalways-encode"])


def test_a_bug_is_raised_with_its_traceback(words):
    with pytest.raises(RuntimeError, match="w bug-prepare") as caught:
        words.run(["w bug-prepare"])
    assert "a bug" in str(caught.value.__notes__)


@pytest.mark.parametrize("order", ["hangonce-encode", "stoponce-prepare"])
def test_a_worker_that_hangs_or_is_stopped_is_replaced(toy, order, short_deadline):
    result = toy.run([*TEXTS[:6], f"w {order}"], batch_size=1)
    assert (result.failed, settled_samples(result), result.restarts) == ([], list(range(7)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prepare", "encode"])
def test_a_sample_that_always_hangs_is_quarantined(toy, stage, short_deadline):
    result = toy.run([*TEXTS[:6], f"w hang-{stage}"], batch_size=1)
    assert [sample for sample, _ in result.failed] == [6]
    assert "has not moved" in result.failed[0][1].detail


def test_a_thread_that_hangs_is_left_alone(words, short_deadline):
    result = words.run([*TEXTS[:6], "w hangonce-encode", *TEXTS[6:12]], workers=0, device="cpu", batch_size=1)
    assert (result.failed, settled_samples(result)) == ([], list(range(13)))
    assert len(words.stored()) == result.encoded


def test_commits_of_a_killed_worker_count(words, monkeypatch):
    """It is not encoded again, not lost, and its event is written."""
    monkeypatch.setenv(failpoint.VARIABLE, "after-commit:2:die")
    events = words.folder / "events"
    with EventLog(events) as log:
        result = words.run(TEXTS, commit_every=4, events=log)
    assert settled_samples(result) == list(range(40))
    keys = [bytes.fromhex(key) for line in events.read_text().splitlines() for key in json.loads(line)["keys"]]
    assert len(keys) == len(set(keys)) == result.encoded == len(words.stored())
    assert sum(load_index(folder).items for folder in words.paths.sealed_shards()) == result.encoded


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_request_commits_the_running_batch(toy, workers):
    began = time.monotonic()

    def progress(now):
        if now.encoded and not toy.stop.requested:
            toy.stop.request()

    texts = [f"{text} sleep-encode" for text in TEXTS * 4]
    device = "cpu" if not workers else f"cpu*{workers}"
    result = toy.run(texts, workers=workers, device=device, commit_every=4, progress=progress)
    assert toy.stop.requested
    assert time.monotonic() - began < 15
    assert 0 < result.encoded < len(texts)
    assert result.encoded == len(toy.stored())


def test_jobs_start_when_memory_is_free(words):
    taken = []

    def jobs():
        for job in words.jobs([f"w{number} sleep-encode" for number in range(400)]):
            taken.append(job.sample)
            yield job

    def progress(now):
        if now.encoded and not words.stop.requested:
            assert len(taken) < 400
            words.stop.request()

    with LocalEngine() as engine:
        run = Run(words.task(batch_size=4), jobs(), total=400, total_cost=4000, stop=words.stop, engine=engine)
        run.run(progress)
    assert words.stop.requested


def test_worker_counts(toy, monkeypatch):
    monkeypatch.setattr("latentcache.pipeline.workers.resources.cpu_count", lambda: 8)
    default = toy.task(device="auto", workers=None)
    assert worker_count(default, toy.kind, 100) == 0
    assert worker_count(default, toy.kind, 1 << 14) == (4 if toy.name == "words" else 0)
    assert worker_count(toy.task(device="cpu*2", workers=2), toy.kind, 100) == 2
    assert worker_count(toy.task(device="cpu", workers=0, needs_torch=True), toy.kind, 100) == 1


def test_values_that_the_kind_rejects_are_not_stored(squares, monkeypatch):
    made_of = toy_kinds.ToyProducer.made_of

    def made(self, word, variant=0):
        item = made_of(self, word, variant)
        item.array[0, 0] = float("nan") if word == b"bad" else 1
        return item

    monkeypatch.setattr(toy_kinds.ToyProducer, "made_of", made)
    result = squares.run(["a", "bad", "c"], workers=0, device="cpu")
    ((sample, failure),) = result.failed
    assert (sample, failure.reason, failure.content) == (1, "non-finite", content_hash(b"bad"))
    assert "--compute-dtype float32" in failure.hint
    assert len(squares.stored()) == 4

"""A worker by itself, told by a test what a build would tell it."""

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_builds import RECIPE, folder_of, recipe_of, within

from latentcache.encoders.describe import describe_model
from latentcache.encoders.stub import StubEncoder
from latentcache.geometry.sizes import Size
from latentcache.pipeline import worker as worker_module
from latentcache.pipeline.batch_size import COMPILED, ENOUGH, UNTIMED
from latentcache.pipeline.channel import Channel, channel_pair
from latentcache.pipeline.forms import planned_form
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.speed import StageClock
from latentcache.pipeline.survey import Memory, survey
from latentcache.pipeline.worker import Job, serve, sizes_for
from latentcache.sources.resolve import scan
from latentcache.store.catalog import Catalog
from latentcache.store.index import load_index


def job_for(tmp_path):
    settings = BuildSettings(data=tmp_path / "data", recipe=RECIPE, batch_size=2, commit_every=2)
    (tmp_path / "shards").mkdir(exist_ok=True)
    return Job(
        root=tmp_path / "data",
        shards=tmp_path / "shards",
        shard="one.open",
        recipe=recipe_of(),
        description=describe_model("stub"),
        settings=settings,
        device="cpu",
        budget_bytes=1 << 30,
        decode_threads=2,
        expected={Size(64, 64): 5},
    )


def at_work(job):
    line, theirs = channel_pair()
    channel = Channel(theirs)

    def run():
        serve(channel, None)
        channel.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    line.send("start", **job.form())
    return line, thread


def all_said(line, answer):
    found = []
    hear_until(lambda: line.ended, line, found, answer)
    line.close()
    return found


def hear_until(done, line, found, answer=lambda message: {"wanted": [0]}):
    """Answer what is asked and keep what is said."""
    while not done():
        for message in line.arrived():
            if message["kind"] == "take":
                line.send("answer", to=message["ask"], **answer(message))
            elif message["kind"] == "decoded":
                line.send("answer", to=message["ask"], fates=["encode"])
            found.append(message)
        time.sleep(0.002)


def kinds(said):
    return [message["kind"] for message in said]


def test_a_job_survives_the_journey(tmp_path):
    job = job_for(tmp_path)
    found = Job.of(json.loads(json.dumps(job.form())))
    assert found.form() == job.form()
    assert (found.recipe, found.description, found.root) == (job.recipe, job.description, job.root)


def test_it_makes_what_it_may_says_so_after_the_commit_and_seals_its_shard(tmp_path):
    data, job = folder_of(tmp_path / "data", 5), job_for(tmp_path)
    todo = survey(scan(data), job.recipe, Catalog([]), Memory({}, {}), max_pixels=10**8).todo
    line, thread = at_work(job)
    line.send("unit", items=[planned_form(planned) for planned in todo])
    line.send("no-more")
    said = within(20, lambda: all_said(line, lambda message: {"wanted": [0] if message["index"] else []}))
    assert kinds(said).count("take") == 5
    assert kinds(said).count("decoded") == 4  # the first one belongs to somebody else
    assert kinds(said)[-1] == "ended"
    assert StageClock.from_json(said[-1]["clock"]).pictures == {Size(64, 64): 4}
    committed = [bytes.fromhex(key) for message in said if message["kind"] == "committed" for key in message["keys"]]
    assert sorted(committed) == load_index(tmp_path / "shards" / "one").keys()
    assert len(committed) == 4
    thread.join(5)


def test_an_error_is_told_after_what_was_done_is_committed(tmp_path):
    data, job = folder_of(tmp_path / "data", 2), job_for(tmp_path)
    (tmp_path / "shards").rmdir()
    (tmp_path / "shards").write_text("in the way")
    todo = survey(scan(data), job.recipe, Catalog([]), Memory({}, {}), max_pixels=10**8).todo
    line, thread = at_work(job)
    line.send("unit", items=[planned_form(planned) for planned in todo])
    line.send("no-more")
    said = within(20, lambda: all_said(line, lambda message: {"wanted": [0]}))
    assert kinds(said)[-1] == "error"
    assert said[-1]["class"].endswith("Error")
    thread.join(5)


def test_a_build_that_hangs_up_is_the_end_in_order(tmp_path):
    data, job = folder_of(tmp_path / "data", 6), job_for(tmp_path)
    todo = survey(scan(data), job.recipe, Catalog([]), Memory({}, {}), max_pixels=10**8).todo
    line, thread = at_work(job)
    line.send("unit", items=[planned_form(planned) for planned in todo[:2]])
    found = []
    hear_until(lambda: "encoded" in kinds(found), line, found)
    line.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(load_index(tmp_path / "shards" / "one").keys()) == 2


def test_decoders_go_on_with_the_next_unit_while_the_device_is_busy(tmp_path, monkeypatch):
    """The word of a unit lies behind every picture that was decoded and not yet encoded."""
    data, job = folder_of(tmp_path / "data", 8), job_for(tmp_path)
    todo = survey(scan(data), job.recipe, Catalog([]), Memory({}, {}), max_pixels=10**8).todo
    busy, go_on = threading.Event(), threading.Event()

    class Waiting(StubEncoder):
        def encode(self, pixels, *, precise=False):
            busy.set()
            assert go_on.wait(20)
            return super().encode(pixels, precise=precise)

    monkeypatch.setattr(worker_module, "open_encoder", lambda *_, **__: Waiting())
    line, _ = at_work(job)
    found = []

    line.send("unit", items=[planned_form(planned) for planned in todo[:4]])
    within(20, lambda: hear_until(busy.is_set, line, found))
    line.send("unit", items=[planned_form(planned) for planned in todo[4:]])
    within(20, lambda: hear_until(lambda: kinds(found).count("decoded") == 8, line, found))
    assert "encoded" not in kinds(found)
    go_on.set()
    line.send("no-more")
    found += within(20, lambda: all_said(line, lambda message: {"wanted": [0]}))
    assert kinds(found)[-1] == "ended"
    assert sum(len(message["keys"]) for message in found if message["kind"] == "committed") == 8


def test_only_a_model_is_timed_and_only_where_no_size_was_asked_for(tmp_path):
    asked, free = BuildSettings(data=tmp_path, batch_size=3), BuildSettings(data=tmp_path)
    model = SimpleNamespace(kind="diffusers")
    many = {Size(64, 64): ENOUGH}
    assert sizes_for(free, describe_model("stub"), many).limit(Size(64, 64)) == UNTIMED
    assert sizes_for(asked, model, many).limit(Size(64, 64)) == 3
    assert sizes_for(free, model, many).timed(Size(64, 64), 1)
    assert not sizes_for(free, model, {}).timed(Size(64, 64), 1)


@pytest.mark.parametrize(("said", "compiled"), [("on", {Size(64, 64)}), ("auto", set()), ("off", set())])
def test_buckets_with_many_pictures_are_compiled_where_that_was_asked_for(tmp_path, monkeypatch, said, compiled):
    folder_of(tmp_path / "data", 1)
    job = job_for(tmp_path)
    job = replace(
        job, settings=replace(job.settings, compile=said), expected={Size(64, 64): COMPILED, Size(32, 64): 9}
    )
    todo = survey(scan(tmp_path / "data"), job.recipe, Catalog([]), Memory({}, {}), max_pixels=10**8).todo
    opened = []

    def opening(description, *, compiled, warn, **_):
        opened.append(compiled)
        warn("it is slow")
        return StubEncoder()

    monkeypatch.setattr(worker_module, "open_encoder", opening)
    line, _ = at_work(job)
    line.send("unit", items=[planned_form(planned) for planned in todo])
    line.send("no-more")
    told = within(20, lambda: all_said(line, lambda message: {"wanted": [0]}))
    assert opened == [compiled]
    assert [message["words"] for message in told if message["kind"] == "warned"] == ["it is slow"]

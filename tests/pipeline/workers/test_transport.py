import json
import threading
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache import errors
from latentcache.errors import CacheLockedError, InterruptedBuildError, LatentcacheError
from latentcache.fields.protocol import Failure, Group, Job, Output
from latentcache.pipeline.workers.transport import (
    Channel,
    as_error,
    channel_pair,
    error_form,
    failure_of,
    jobs_form,
    jobs_of,
)
from latentcache.pipeline.workers.worker import Task
from latentcache.value import parsed

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def received(build_end, count):
    found = []
    while len(found) < count and not build_end.ended:
        found += build_end.arrived()
    return found


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b"]), json_values), max_size=6))
def test_messages_arrive_complete_and_in_order_both_ways(messages):
    build_end, worker_end = channel_pair()
    channel = Channel(worker_end)
    for parts in messages:
        build_end.send("down", **parts)
        channel.send("up", **parts)
    assert [channel.receive() for _ in messages] == [{"kind": "down", **parts} for parts in messages]
    assert received(build_end, len(messages)) == [{"kind": "up", **parts} for parts in messages]
    channel.close()
    build_end.close()


def test_the_build_never_waits_for_a_worker_that_does_not_read():
    build_end, worker_end = channel_pair()
    for number in range(20):
        build_end.send("big", text="x" * 1_000_000, number=number)
    channel, found = Channel(worker_end), []
    reader = threading.Thread(target=lambda: found.extend(channel.receive()["number"] for _ in range(20)))
    reader.start()
    while reader.is_alive():
        build_end.flush()
    assert found == list(range(20))
    channel.close()
    build_end.close()


def round_trip(**parts):
    build_end, worker_end = channel_pair()
    channel = Channel(worker_end)
    try:
        channel.send("down", **parts)
        return {name: part for name, part in received(build_end, 1)[0].items() if name != "kind"}
    finally:
        channel.close()
        build_end.close()


def test_jobs_settings_and_failures_round_trip():
    outputs = (Output(item=3, group=0, variant=1), Output(item=4, group=2))
    inputs = {"image": {"path": "a\udcff.png"}}
    job = Job(sample=1, name="a\udcff.png", inputs=inputs, content=bytes(16), outputs=outputs, cost=7)
    failure = Failure(reason="empty", content=b"\x01" * 16, stat=(1, 2, 3, 4, 5, 6))
    groups = (Group(label="8x8", shape=(4, -1), dims=(1, 8, 8)),)
    task = Task(field="f", recipe={"a": 1}, producer={}, groups=groups, root="/data", cache="/cache", shard="s")
    found = round_trip(jobs=jobs_form({5: job}), failure=failure, task=task)
    assert jobs_of(found["jobs"]) == {5: job}
    assert failure_of(found["failure"]) == failure
    assert parsed(Task, found["task"]) == task


def test_arrays_and_numbers_of_numpy_are_plain_in_json():
    found = round_trip(
        a=np.arange(3), b=np.uint32(4), c=(np.float32(0.5), None), d=frozenset({1}), e=MappingProxyType({})
    )
    assert found == {"a": [0, 1, 2], "b": 4, "c": [0.5, None], "d": [1], "e": {}}
    with pytest.raises(TypeError):
        round_trip(a=object())


def subclasses(kind):
    return [kind, *(deeper for one in kind.__subclasses__() for deeper in subclasses(one))]


OF_THE_BUILD = (CacheLockedError, InterruptedBuildError)  # no worker raises them


@pytest.mark.parametrize(
    "kind", [one for one in subclasses(LatentcacheError) if hasattr(errors, one.__name__) and one not in OF_THE_BUILD]
)
def test_errors_keep_class_message_and_status(kind):
    error = kind("what", where="where", why="why", fix="fix", slug="slug")
    found = as_error(json.loads(json.dumps(error_form(error))))
    assert type(found) is kind
    assert (found.as_json(), found.exit_code) == (error.as_json(), error.exit_code)
    assert as_error(error_form(OSError(5, "broken", "/file"))).errno == 5
    assert isinstance(as_error(error_form(MemoryError("all"))), MemoryError)

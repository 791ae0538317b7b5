import os
import threading
import time

import pytest

from latentcache.errors import DeviceError, UsageError
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.workers import resources
from latentcache.pipeline.workers.resources import ByteBudget, devices_for, host_memory, parse_devices


def start_acquire(budget, size, answers=None):
    """Start a thread that acquires bytes; return it and the list of its results."""
    answers = [] if answers is None else answers
    thread = threading.Thread(target=lambda: answers.append((size, budget.acquire(size))), daemon=True)
    thread.start()
    thread.join(0.02)
    return thread, answers


def cgroups(folder, files, membership):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "self").write_text(membership)
    return host_memory(cgroup=folder, membership=folder / "self")


MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "", MACHINE),
        ({"a/b/memory.max": "max\n", "a/memory.max": "1000000\n"}, "0::/a/b\n", 1_000_000),
        ({"a/b/memory.max": "500\n", "a/memory.max": "1000\n"}, "0::/a/b\n", 500),
        ({"memory.max": "700\n"}, "0::/docker/not-mounted-here\n", 700),
        ({"memory/x/memory.limit_in_bytes": "900\n"}, "3:cpu:/x\n5:memory:/x\n", 900),
        ({"memory/memory.limit_in_bytes": f"{1 << 63}\n"}, "5:memory:/x\n", MACHINE),
        ({"memory/x/memory.limit_in_bytes": "900\n"}, "3:cpu:/x\n", MACHINE),
        ({"memory.max": "0\n"}, "0::/\n", MACHINE),
    ],
)
def test_limits_of_cgroups_count(tmp_path, files, membership, expected):
    assert cgroups(tmp_path, files, membership) == expected


def test_the_first_in_the_queue_is_served_first():
    """Small requests do not overtake a large one forever."""
    budget, answers = ByteBudget(10), []
    assert budget.acquire(9)
    threads = [start_acquire(budget, size, answers)[0] for size in (8, 1, 1)]
    time.sleep(0.02)
    assert answers == []
    budget.release(9)
    for thread in threads:
        thread.join(5)
    assert answers[0] == (8, True)
    assert len(answers) == 3


@pytest.fixture
def machine(monkeypatch):
    def with_cuda(count, visible=None):
        monkeypatch.setattr(resources, "cuda_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return with_cuda


def described(text):
    return [(device.label, device.name, dict(device.variables)) for device in devices_for(text, needs_torch=True)]


def test_a_list_of_devices():
    assert parse_devices("cpu*3") == [("cpu", None)] * 3
    assert parse_devices("cuda:1*2,cuda") == [("cuda", 1), ("cuda", 1), ("cuda", None)]


@pytest.mark.parametrize("text", ["", "gpu", "cpu:0", "auto*2", "auto,cpu", "cpu*0", "cuda:", "cpu*1000", "cpu,"])
def test_a_text_that_is_not_a_list_of_devices(text):
    with pytest.raises(UsageError, match="unknown device"):
        parse_devices(text)


def test_auto_is_every_cuda_device_each_seen_by_its_own_worker(machine):
    machine(3)
    assert described("auto") == [
        (f"cuda:{number}", "cuda", {"CUDA_VISIBLE_DEVICES": str(number)}) for number in range(3)
    ]
    for count in (0, 1):
        machine(count)
        assert described("auto") == [("auto", "auto", {})]


def test_hidden_devices_stay_hidden(machine):
    machine(2, visible="5,GPU-abc")
    assert [variables["CUDA_VISIBLE_DEVICES"] for _, _, variables in described("cuda:0,cuda:1")] == ["5", "GPU-abc"]


def test_a_missing_device_is_an_error_before_anything_starts(machine):
    machine(2)
    with pytest.raises(DeviceError, match="device='cuda:2': there is no such device") as error:
        devices_for("cuda:0,cuda:2", needs_torch=True)
    assert "2 CUDA devices" in error.value.why
    with pytest.raises(DeviceError, match=r"cuda:3'?: there is no such device"):  # an encoder without a device
        BuildSettings(data="images", device="cuda:3")
    with pytest.raises(UsageError, match="several kinds"):
        parse_devices("cpu,cuda:0")


def test_workers_on_the_processor_share_its_cores(machine, monkeypatch):
    machine(0)
    monkeypatch.setattr(resources, "cpu_count", lambda: 8)
    assert [variables for _, _, variables in described("cpu*2")] == [{"OMP_NUM_THREADS": "4"}] * 2
    assert described("cpu") == [("cpu", "cpu", {})]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [variables for _, _, variables in described("cpu*2")] == [{}, {}]

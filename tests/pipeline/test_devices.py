import pytest

from latentcache.errors import DeviceError, UsageError
from latentcache.pipeline import devices as devices_module
from latentcache.pipeline.devices import devices_for, parse_devices
from latentcache.pipeline.settings import BuildSettings


@pytest.fixture
def machine(monkeypatch):
    def with_cuda(count, visible=None):
        monkeypatch.setattr(devices_module, "cuda_count", lambda: count)
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
    monkeypatch.setattr(devices_module, "cpu_count", lambda: 8)
    assert [variables for _, _, variables in described("cpu*2")] == [{"OMP_NUM_THREADS": "4"}] * 2
    assert described("cpu") == [("cpu", "cpu", {})]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [variables for _, _, variables in described("cpu*2")] == [{}, {}]

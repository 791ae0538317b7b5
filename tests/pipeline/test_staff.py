import pytest
from small_builds import RECIPE, folder_of, recipe_of, settings
from tiny_vae import tiny_vae

from latentcache.encoders.describe import describe_model
from latentcache.encoders.protocol import Precision
from latentcache.errors import DeviceError, StoreError, WorkerError
from latentcache.pipeline import staff as staff_module
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.launch import WorkerProcess, WorkerThread
from latentcache.pipeline.staff import Reception, Task, Workers
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout


def workers_for(tmp_path, device="cpu", kind="stub", **changes):
    description = describe_model("stub")
    if kind != "stub":
        object.__setattr__(description, "kind", kind)
    task = Task(
        settings=settings(tmp_path / "data", **changes).__class__(
            data=tmp_path / "data", recipe=RECIPE, device=device, **changes
        ),
        root=tmp_path / "data",
        layout=CacheLayout(tmp_path / "cache"),
        recipe=recipe_of(),
        description=description,
    )
    return Workers(task, Reception(device), todo=())


@pytest.mark.parametrize(
    ("device", "kind", "in_process"),
    [
        ("cpu", "stub", True),
        ("auto", "stub", True),
        ("cpu*1", "stub", False),
        ("cpu*2", "stub", False),
        ("cpu", "diffusers", False),
    ],
)
def test_only_small_encoders_on_one_device_share_the_process(tmp_path, device, kind, in_process):
    workers = workers_for(tmp_path, device, kind)
    assert workers.in_process is in_process
    launched, job, shard = workers.hire(workers.devices[0], again=False)
    assert isinstance(launched, WorkerThread if in_process else WorkerProcess)
    assert job["shard"] == shard
    launched.kill()
    launched.line.close()
    launched.ended()


def test_memory_and_threads_are_shared_out(tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.pipeline.preflight.os.sched_getaffinity", lambda _: set(range(16)))
    workers = workers_for(tmp_path, "cpu*4", host_memory=1000)
    assert workers.decode_threads == 3
    assert workers._job(workers.devices[0], "x").budget_bytes == 250
    assert workers_for(tmp_path, "cpu").decode_threads == 15
    assert workers_for(tmp_path, "cpu*4", decode_threads=2).decode_threads == 2


def test_a_shard_that_the_system_does_not_give_is_not_called_damaged(tmp_path):
    data = folder_of(tmp_path / "data", 3)
    build_cache(settings(data, out=tmp_path / "cache"))
    (sealed,) = CacheLayout(tmp_path / "cache").sealed_shards()
    index, workers = sealed / "index.npy", workers_for(tmp_path)
    whole = index.read_bytes()
    index.write_bytes(whole[:-1])
    assert workers.left_by(f"{sealed.name}.open") == []
    index.unlink()
    index.symlink_to(index)
    with pytest.raises(StoreError, match="the system refuses to read") as caught:
        workers.left_by(f"{sealed.name}.open")
    assert caught.value.slug == "store"


def test_what_a_dead_worker_committed_is_sealed_and_known(tmp_path):
    data = folder_of(tmp_path / "data", 3)
    build_cache(settings(data, out=tmp_path / "cache"))
    layout = CacheLayout(tmp_path / "cache")
    (sealed,) = layout.sealed_shards()
    keys = load_index(sealed).keys()
    workers = workers_for(tmp_path)
    assert workers.left_by(f"{sealed.name}.open") == keys  # it died after it had sealed its shard
    sealed.rename(sealed.with_name(f"{sealed.name}.open"))
    assert workers.left_by(f"{sealed.name}.open") == keys
    assert layout.open_shards() == []
    assert workers.left_by("never.open") == []


def test_torch_is_asked_in_another_process_unless_it_is_here_already(monkeypatch):
    monkeypatch.setattr(staff_module.sys, "modules", {"torch": None})
    monkeypatch.setattr(staff_module, "resample_self_test", lambda: "here")
    reception = Reception("cpu")
    assert reception.resample_works() == "here"
    assert reception.early(staff_module.devices_for("cpu", needs_torch=True)[0]) is None


def test_the_process_that_was_asked_becomes_the_first_worker(monkeypatch):
    monkeypatch.setattr(staff_module.sys, "modules", {})
    reception = Reception("cpu")
    (device,) = staff_module.devices_for("cpu", needs_torch=True)
    assert isinstance(reception.resample_works(), bool)
    process = reception.early(device)
    assert isinstance(process, WorkerProcess)
    assert reception.early(device) is None
    process.kill()
    process.line.close()
    process.ended()
    reception.close()


def test_the_precision_is_found_by_a_worker_and_so_is_what_is_wrong_with_its_device(tmp_path, monkeypatch):
    monkeypatch.setattr(staff_module, "WorkerProcess", lambda *_, **__: WorkerThread())
    model = describe_model(str(tiny_vae(tmp_path / "vae")))
    reception = Reception("cpu")
    assert reception.find_precision(model, fold=True) == Precision(compute_dtype="float32")
    assert reception.early(staff_module.devices_for("cpu", needs_torch=True)[0]) is not None
    absent = Reception("xpu:7")
    with pytest.raises(DeviceError, match="xpu:7"):
        absent.find_precision(model, fold=True)
    assert absent.early(staff_module.devices_for("xpu:7", needs_torch=True)[0]) is None


def test_a_process_that_dies_over_the_question_is_an_error(monkeypatch):
    monkeypatch.setattr("latentcache.pipeline.launch._COMMAND", ("-c", "raise SystemExit('no such module: x')"))
    with pytest.raises(WorkerError, match="cannot be started") as error:
        Reception("cpu").find_precision(describe_model("stub"), fold=True)
    assert "no such module: x" in error.value.why

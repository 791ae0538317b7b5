"""A cache that is read from a URL: shards on a local disk, whole or a part of them, shared and safe."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from made_caches import documents, images, opened, texts
from s3_proxy import Fault
from s3_server import proxy, server
from torch.utils.data import DataLoader

from latentcache.errors import CorruptEntryError, DiskFullError, MissingEntryError, RemoteError, UsageError
from latentcache.store.paths import CachePaths
from latentcache.store.remote import bucket
from latentcache.store.remote.transfer import pull, push

__all__ = ["proxy", "server"]

SAMPLES, PER_SHARD = 240, 20


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """240 images of 64 x 64 latents in twelve shards."""
    return images(tmp_path_factory.mktemp("local") / "cache", [(512, 512)] * SAMPLES, seal_every=PER_SHARD)


@pytest.fixture(scope="module")
def pushed(server, local):
    """The URL of this cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        push(local, "s3://bucket/images")
    return "s3://bucket/images"


@pytest.fixture
def url(pushed, proxy):
    return pushed


def data_files(folder):
    """Sizes while no thread removes or renames: one that goes and the one that comes are not counted both."""
    descriptor = os.open(folder / "shards", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return {path.parent.name: path.stat().st_size for path in folder.glob("shards/*/data.mdb*")}
    finally:
        os.close(descriptor)


def served(loader):
    return [(batch["names"], batch["latents"].numpy().tobytes()) for batch in loader]


def size_of(local):
    return sum(data_files(local).values())


@pytest.mark.parametrize("shuffle_block", [None, 40])
def test_a_url_serves_what_the_folder_serves_and_each_byte_comes_once(url, proxy, local, tmp_path, shuffle_block):
    options = {"batch_size": 8, "seed": 3, "shuffle_block": shuffle_block}
    wanted = served(opened(local).loader(**options))
    assert served(opened(url, disk_cache=tmp_path / "disk").loader(**options)) == wanted
    assert proxy.data_bytes() == size_of(local)
    assert served(opened(url, disk_cache=tmp_path / "disk").loader(**options)) == wanted
    assert proxy.data_bytes() == size_of(local)
    assert data_files(tmp_path / "disk") == data_files(local)


@pytest.mark.parametrize("fraction", [0.3, 0.6])
def test_with_less_room_than_data_what_is_kept_is_kept(url, proxy, local, tmp_path, fraction):
    room, epochs = int(size_of(local) * fraction), 3
    options = {"batch_size": 8, "seed": 1, "shuffle_block": 2 * PER_SHARD}
    loader = opened(url, disk_cache=tmp_path / "disk", disk_cache_bytes=room).loader(**options)
    same = opened(local).loader(**options)
    moved, largest = [], 0
    for epoch in range(epochs):
        for source in (loader, same):
            source.set_epoch(epoch)
        before = proxy.data_bytes()
        for batch, wanted in zip(loader, same, strict=True):
            assert batch["names"] == wanted["names"]
            assert np.array_equal(batch["latents"], wanted["latents"])
            largest = max(largest, sum(data_files(tmp_path / "disk").values()))
        moved.append((proxy.data_bytes() - before) / size_of(local))
    assert largest <= room
    assert moved[0] <= 1.05
    kept = fraction - 4 / 12  # two windows of at most two shards and a half are in use
    assert max(moved[1:]) <= 1.05 - max(kept, 0)


def test_a_resume_and_ranks_serve_each_sample_once(url, local, tmp_path):
    cache = opened(url, disk_cache=tmp_path / "disk", disk_cache_bytes=size_of(local) // 2)
    names = []
    for rank in range(2):
        loader = cache.loader(batch_size=4, seed=1, rank=rank, world_size=2, shuffle_block=40)
        batches = iter(loader)
        names += [name for _ in range(7) for name in next(batches)["names"]]
        state = loader.state_dict()
        batches.close()  # it has shards that nothing else may take the room of
        resumed = cache.loader(batch_size=4, seed=1, rank=rank, world_size=2, shuffle_block=40)
        resumed.load_state_dict(state)
        names += [name for batch in resumed for name in batch["names"]]
    assert sorted(names) == sorted(opened(local).snapshots[0].samples.names)


def test_a_shuffle_over_more_than_there_is_room_for_is_an_error_that_says_what_fits(url, local, tmp_path):
    cache = opened(url, disk_cache=tmp_path / "disk", disk_cache_bytes=size_of(local) // 2)
    with pytest.raises(UsageError, match="more than disk_cache_bytes") as error:
        next(iter(cache.loader(batch_size=4)))
    assert "shuffle_block=60)" in error.value.fix
    assert next(iter(cache.loader(batch_size=4, shuffle_block=60)))["names"]


def test_rows_of_tokens_come_from_a_url(server, proxy, tmp_path):
    cache = documents(tmp_path / "cache", texts(200), seal_every=20)
    push(cache, "s3://bucket/tokens")
    loaders = [
        opened(path, **more).rows(chunk=64).loader(batch_size=4, shuffle_block=16)
        for path, more in ((cache, {}), ("s3://bucket/tokens", {"disk_cache": tmp_path / "disk"}))
    ]
    for batch, wanted in zip(*loaders, strict=True):
        assert np.array_equal(batch["input_ids"], wanted["input_ids"])


READ = (
    "import sys; from latentcache import open_cache\n"
    "cache = open_cache(sys.argv[1], disk_cache=sys.argv[2], disk_cache_bytes=int(sys.argv[3]) or None)\n"
    "loader = cache.loader(batch_size=4, seed=0, shuffle_block=40)\n"
    "print(sum(len(batch['names']) for batch in loader))"
)


@pytest.mark.parametrize("fraction", [0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_processes_of_a_node_share_what_is_fetched(url, proxy, local, tmp_path, fraction):
    room = int(size_of(local) * fraction)
    command = [sys.executable, "-W", "ignore", "-c", READ, url, str(tmp_path / "disk"), str(room)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {rank.communicate(timeout=120)[0].strip() for rank in ranks} == {str(SAMPLES)}
    assert proxy.data_bytes() <= size_of(local) * (1 if not room else 2)  # these do not wait for each other


def test_a_process_that_is_killed_leaves_no_half_shard(url, proxy, local, tmp_path):
    proxy.faults = [Fault("slow", "data.mdb")]
    command = [sys.executable, "-W", "ignore", "-c", READ, url, str(tmp_path / "disk"), "0"]
    rank = subprocess.Popen(command)
    while not list((tmp_path / "disk").glob("shards/*/data.mdb.part")):
        time.sleep(0.05)
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    proxy.faults = []
    assert len(served(opened(url, disk_cache=tmp_path / "disk").loader(batch_size=8))) == SAMPLES // 8
    assert data_files(tmp_path / "disk") == data_files(local)


def test_a_process_ends_soon_while_shards_are_fetched(url, proxy, tmp_path):
    proxy.faults = [Fault("trickle", "data.mdb", skip=6)]
    code = "from latentcache.store.remote import bucket; bucket.PART_BYTES = 1 << 14\n" + READ.replace(
        "print(sum(len(batch['names']) for batch in loader))",
        "batches = iter(loader); print(len(next(batches)['names']))",
    )
    started = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-c", code, url, str(tmp_path / "disk"), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"
    assert time.monotonic() - started < 40, "a shard takes 48 s"
    assert "Traceback" not in done.stderr


def test_a_store_that_does_not_answer_is_asked_again_and_that_is_said_once(proxy, local, tmp_path):
    push(local, "s3://bucket/asked")
    cache = opened("s3://bucket/asked", disk_cache=tmp_path / "disk")
    proxy.faults = [Fault("cut", "data.mdb", times=60)]
    with pytest.warns(UserWarning, match="trying again for 300 s") as warned:
        assert len(served(cache.loader(batch_size=8))) == SAMPLES // 8
    messages = [str(warning.message) for warning in warned]
    assert len([text for text in messages if "bucket/asked" in text]) == 1  # others are of threads of other tests


def test_a_store_that_never_answers_is_an_error_that_names_the_sample(url, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket.Bucket.__init__, "__kwdefaults__", {"retry_s": 2})
    cache = opened(url, disk_cache=tmp_path / "disk")
    proxy.faults = [Fault("cut", "data.mdb")]
    with (
        pytest.warns(UserWarning, match="trying again"),
        pytest.raises(RemoteError, match=r"the latents of \S+ cannot"),
    ):
        next(iter(cache.loader(batch_size=8)))
    proxy.faults = []
    assert len(served(cache.loader(batch_size=8))) == SAMPLES // 8


def test_a_disk_without_room_is_named_before_anything_is_fetched(url, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 100, 10, 10, 0, 0, 0, 0, 255)))
    with pytest.raises(DiskFullError, match="too small") as error:
        opened(url, disk_cache=tmp_path / "disk")
    assert "disk_cache_bytes=20480" in error.value.fix
    assert not proxy.data_bytes()


def test_a_shard_that_is_damaged_on_the_disk_is_named_with_the_fix(url, local, tmp_path):
    cache = opened(url, disk_cache=tmp_path / "disk")
    served(cache.loader(batch_size=8))
    paths = CachePaths(tmp_path / "disk")
    data = paths.data(cache.snapshots[0].shards[0])
    data.chmod(0o644)
    value = bytearray(data.read_bytes())
    value[8192:] = bytes(len(value) - 8192)
    data.write_bytes(value)
    with pytest.raises(CorruptEntryError) as error:
        served(opened(url, disk_cache=tmp_path / "disk").loader(batch_size=8))
    assert error.value.fix.startswith(f"mv {data}")
    data.unlink()
    assert len(served(opened(url, disk_cache=tmp_path / "disk").loader(batch_size=8))) == SAMPLES // 8


def test_a_folder_with_some_shards_is_neither_read_nor_pushed_as_a_whole_cache(url, tmp_path):
    next(
        iter(
            opened(url, disk_cache=tmp_path / "disk", disk_cache_bytes=3 << 20).loader(shuffle_block=20, batch_size=4)
        )
    )
    with pytest.raises(MissingEntryError) as error:
        served(opened(tmp_path / "disk").loader(batch_size=8))
    assert "latentcache pull URL" in error.value.fix
    with pytest.raises(MissingEntryError) as error:
        push(tmp_path / "disk", url)
    assert "latentcache pull URL" in error.value.fix
    pull(url, tmp_path / "disk")
    assert len(served(opened(tmp_path / "disk").loader(batch_size=8))) == SAMPLES // 8


def _read_in_child(cache, queue):
    try:
        queue.put(len(cache.loader(batch_size=8).batch([0])["names"]))
    except UsageError as error:
        queue.put(str(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_forked_child_is_told_to_spawn(url, tmp_path, method):
    cache = opened(url, disk_cache=tmp_path / "disk")
    cache.loader(batch_size=8).batch([0])
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(cache, queue))
    child.start()
    answer = queue.get(timeout=60)
    child.join()
    assert ("spawn" in answer) if method == "fork" else answer == 1


@pytest.mark.parametrize("fraction", [None, pytest.param(0.5, marks=pytest.mark.slow)])
def test_worker_processes_of_a_data_loader_read_what_the_sampler_has_fetched(url, proxy, local, tmp_path, fraction):
    room = None if fraction is None else int(size_of(local) * fraction)
    loader = opened(url, disk_cache=tmp_path / "disk", disk_cache_bytes=room).loader(batch_size=8, shuffle_block=40)
    workers = DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None, num_workers=2,
                         multiprocessing_context="spawn")  # fmt: skip
    assert sorted(name for batch in workers for name in batch["names"]) == sorted(
        opened(local).snapshots[0].samples.names
    )

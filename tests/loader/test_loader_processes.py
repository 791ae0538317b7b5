"""Loaders in processes of every kind and in threads: the same bytes everywhere, and nothing left open."""

import contextlib
import copy
import gc
import multiprocessing
import pickle
import threading
from pathlib import Path

import pytest
import torch
from loader_children import digests, go_on, serve_both
from small_cache import build, draw
from torch.utils.data import DataLoader

from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache

METHODS = ["fork", "spawn", "forkserver"]
SHAPES = [(96, 64), (64, 96), (80, 80)]
WAYS = pytest.mark.parametrize("options", [{}, {"mapped": True}, {"prefetch": 0}], ids=str)


def make(folder, count=17):
    for number in range(count):
        draw(folder / "data" / f"{number:02}.png", SHAPES[number % 3], seed=number)
    build(folder / "data", folder / "cache")
    return folder / "cache"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make(tmp_path_factory.mktemp("processes"))


@pytest.fixture
def opened(root):
    with open_cache(root) as cache:
        yield cache


def open_files(folder):
    """Shards below a folder that this process has open or mapped; a cache holds its generation all the while."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing itself
            found.append(str(link.readlink()))
    maps = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    return [path for path in found + maps if path.startswith(str(folder)) and path.endswith(".mdb")]


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


# processes


@pytest.mark.parametrize("method", METHODS)
def test_workers_keep_the_generation_and_stay_for_every_epoch(tmp_path, method):
    """While they start a build switches the generation; the parent is in a pass of its own and reads on."""
    root = make(tmp_path, count=11)
    training, validation = (part.loader(batch_size=1, seed=3) for part in open_cache(root).split(0.4))
    expected = [digests(loader) for loader in (training, validation)]
    own = iter(training)
    began = digests([next(own)])
    workers = DataLoader(
        training, batch_size=None, num_workers=2, multiprocessing_context=method, persistent_workers=True
    )
    epoch = iter(workers)
    (tmp_path / "data" / "03.png").unlink()
    draw(tmp_path / "data" / "04.png", seed=99)
    build(tmp_path / "data", root)
    assert open_cache(root).generation.number == 2
    assert [began + digests(own), digests(validation)] == expected
    assert digests(epoch) == expected[0]
    assert digests(workers) == expected[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_iterates_over_two_loaders_of_one_cache(opened, method):
    loaders = [part.loader(batch_size=2, seed=3) for part in opened.split(0.4)]
    expected = [digests(loader) for loader in loaders]
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=serve_both, args=(*loaders, results))
    child.start()
    assert [digests(loader) for loader in loaders] == expected
    assert results.get(timeout=60) == expected * 2
    child.join(60)
    assert child.exitcode == 0


@WAYS
def test_a_process_forked_in_the_middle_of_a_pass_goes_on(opened, options):
    loader = opened.loader(batch_size=1, seed=2, **options)
    whole = digests(loader)
    iterator = iter(loader)
    seen = digests([next(iterator) for _ in range(5)])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=go_on, args=(iterator, loader, results))
    child.start()
    assert results.get(timeout=60) == (whole[5:], whole)
    child.join(60)
    assert child.exitcode == 0
    assert seen + digests(iterator) == whole


@WAYS
def test_pickled_and_copied_in_the_middle_of_a_pass(opened, options):
    """A copy has the position and no part of the pass."""
    loader = opened.loader(batch_size=1, seed=5, **options)
    whole = digests(loader)
    iterator = iter(loader)
    next(iterator)
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert digests(other) == whole
        other.close()
    assert digests(iterator) == whole[1:]
    assert digests(pickle.loads(pickle.dumps(opened)).loader(batch_size=1, seed=5)) == whole


# threads


def in_threads(*calls):
    """What each call gives, all at once."""
    found, start = [None] * len(calls), threading.Barrier(len(calls))

    def work(place, call):
        start.wait()
        found[place] = call()

    threads = [threading.Thread(target=work, args=given) for given in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@WAYS
def test_two_threads_iterate_over_two_loaders_of_one_cache(opened, options):
    loaders = [opened.loader(batch_size=2, seed=seed, **options) for seed in (1, 2)]
    expected = [digests(loader) * 5 for loader in loaders]
    calls = [lambda loader=loader: [one for _ in range(5) for one in digests(loader)] for loader in loaders]
    assert in_threads(*calls) == expected


@WAYS
def test_two_threads_take_batches_of_one_loader(opened, options):
    loader = opened.loader(batch_size=2, seed=1, **options)
    expected = digests(loader)
    fresh = opened.loader(batch_size=2, seed=1, **options)  # nothing of it is open or planned yet
    steps = range(len(loader))
    calls = [lambda order=order: digests(fresh[step] for step in order) for order in (steps, reversed(steps))]
    assert in_threads(*calls) == [expected, expected[::-1]]


# closing


@WAYS
def test_closing_twice_is_closing_once_and_a_closed_loader_opens_again(root, options):
    loader = open_cache(root).loader(batch_size=2, **options)
    loader.close()
    kept = list(loader)
    expected = digests(kept)
    assert open_files(root)
    for _ in range(2):
        loader.close()
        assert open_files(root) == []
    assert digests(kept) == expected
    with loader as same:
        assert same is loader
        assert digests(loader) == expected
    assert open_files(root) == []


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}], ids=str)
def test_a_pass_does_not_end_early_in_silence(root, options):
    loader = open_cache(root).loader(batch_size=1, **options)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(UsageError, match="closed after 1 of 17 batches"):
        list(iterator)
    assert len(list(loader)) == 17
    loader.close()


def test_a_cache_closes_the_loaders_of_its_parts(root):
    with open_cache(root) as cache:
        loaders = [part.loader(batch_size=1) for part in (cache, *cache.split(0.5), cache.repeated(2))]
        expected = [digests(loader) for loader in loaders]
        assert len(open_files(root)) == len(loaders)
    assert open_files(root) == []
    cache.close()
    assert [digests(loader) for loader in loaders] == expected
    cache.close()
    assert open_files(root) == []


def whole_pass(cache, options):
    with cache.loader(batch_size=6, **options) as loader:
        list(loader)


def left_in_the_middle(cache, options):
    with cache.loader(batch_size=6, **options) as loader:
        next(iter(loader))


def never_closed(cache, options):
    next(iter(cache.loader(batch_size=6, **options)))


@pytest.mark.parametrize("options", [{}, {"mapped": True}], ids=str)
@pytest.mark.parametrize("use", [whole_pass, left_in_the_middle, never_closed])
def test_nothing_stays_open_after_many_caches(root, options, use):
    use(open_cache(root), options)
    gc.collect()
    before = num_descriptors()
    for _ in range(50):
        use(open_cache(root), options)
    wait_for_read_ahead()
    gc.collect()
    assert num_descriptors() <= before
    assert open_files(root) == []


def wait_for_read_ahead():
    for thread in threading.enumerate():
        if thread.name == "latentcache-read-ahead":
            thread.join(30)


def test_reading_takes_no_slot_and_writes_nothing(root):
    """LMDB keeps its readers in a lock file; there is none, and nothing else is made or touched."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    before = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    with open_cache(root).loader(batch_size=2) as loader:
        list(loader)
        assert not any(path.endswith("lock.mdb") for path in open_files(root))
    after = [
        (path, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(root.rglob("*")) if path.is_file()
    ]
    assert after == before
    assert not list(root.rglob("lock.mdb"))


def test_tensors_outlive_a_closed_loader(root):
    """Memory that was handed out is not used again by the loader that is opened once more."""
    loader = open_cache(root).loader(batch_size=1)
    kept = list(loader)
    before = [batch["latents"].clone() for batch in kept]
    loader.close()
    again = list(loader)
    assert all(
        torch.equal(batch["latents"], latents) for batch, latents in zip(kept + again, before * 2, strict=True)
    )
    loader.close()

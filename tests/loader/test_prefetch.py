import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from latentcache.errors import UsageError
from latentcache.loader import prefetch
from latentcache.loader.prefetch import announce, read_ahead, read_soon


def ahead(make, items, depth, **more):
    return read_ahead((partial(make, item) for item in items), depth, **more)


def running():
    return [thread for thread in threading.enumerate() if thread.name.startswith("latentcache-read-ahead")]


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


@pytest.fixture(autouse=True)
def _no_thread_of_another_test():
    """Wait for threads of iterators that other tests left."""
    gc.collect()
    wait_until(lambda: not running())


@pytest.mark.parametrize("depth", [0, 1, 2, 7, 50])
def test_the_same_results_in_the_same_order(depth):
    assert list(ahead(str, range(20), depth)) == [str(number) for number in range(20)]
    assert list(ahead(str, range(1), depth)) == ["0"]
    assert list(ahead(str, range(0), depth)) == []
    wait_until(lambda: not running())


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_queue_is_bounded(depth):
    results = []
    iterator = ahead(results.append, range(100), depth)
    for delivered in range(1, 9):
        next(iterator)
        wait_until(lambda: len(results) == delivered + depth)  # noqa: B023 -- waited for at once
        time.sleep(0.005)
        assert len(results) == delivered + depth
    iterator.close()


@pytest.mark.parametrize(("in_order", "most"), [(False, 2), (True, 1)])
def test_two_results_are_made_side_by_side(in_order, most):
    busy, seen = [], []

    def make(number):
        busy.append(number)
        time.sleep(0.002 * (1 + number % 3))
        seen.append(len(busy))
        busy.remove(number)
        return number

    assert list(ahead(make, range(30), 4, in_order=in_order)) == list(range(30))
    assert max(seen) == most


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_keeps_its_position(depth):
    def make(number):
        return 10 // (3 - number)

    iterator = ahead(make, range(6), depth)
    assert [next(iterator) for _ in range(3)] == [3, 5, 10]
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    wait_until(lambda: not running())


def close(iterator):
    iterator.close()


def drop_reference(iterator):
    del iterator
    gc.collect()


@pytest.mark.parametrize("leave", [close, drop_reference])
def test_the_threads_end_when_the_caller_leaves(leave):
    results = []
    holder = [ahead(results.append, range(10**6), 2)]
    for _ in range(4):
        next(holder[0])
    assert 1 <= len(running()) <= 2
    leave(holder.pop())
    wait_until(lambda: not running())
    assert len(results) <= 6


def continue_in_child(iterator, results):
    try:
        results.put(list(iterator))
    except UsageError as error:
        results.put(error.fix)


def test_an_iteration_does_not_go_on_in_a_forked_child():
    iterator = ahead(str, range(30), 2)
    assert [next(iterator) for _ in range(4)] == ["0", "1", "2", "3"]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=continue_in_child, args=(iterator, results))
    child.start()
    assert "iter(loader)" in results.get(timeout=30)
    child.join(30)
    assert child.exitcode == 0
    assert list(iterator) == [str(number) for number in range(4, 30)]


LEAVE = """
import sys
from latentcache import open_cache
loader = open_cache(sys.argv[1]).loader(batch_size=1, prefetch=int(sys.argv[2]))
it = iter(loader)
batch = next(it)
"""


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_interpreter_exits_with_unread_batches(seventeen, prefetch):
    command = [sys.executable, "-c", LEAVE, str(seventeen), str(prefetch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# announcing bytes to the kernel


def places(step):
    return [(3, step * 100 + number, 1) for number in range(20)]


def test_what_the_page_cache_lacks_is_announced(monkeypatch):
    announced = []
    monkeypatch.setattr(prefetch, "is_cached", lambda file, offset: offset != 10)
    monkeypatch.setattr(prefetch, "announce", announced.append)
    for step in range(3):
        read_soon(places(step))
    assert announced == [places(0)]


@pytest.mark.parametrize("length", [1, 4096, (128 << 10) + 1, 300_000])
def test_every_byte_is_announced_in_pieces(monkeypatch, tmp_path, length):
    announced_steps, real = [], os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: announced_steps.append(words) or real(*words))
    (tmp_path / "f").write_bytes(bytes(400_000))
    with (tmp_path / "f").open("rb") as file:
        announce([(file.fileno(), 50, length), (file.fileno(), 7, length)])
    assert max(words[2] for words in announced_steps) <= 128 << 10
    assert sum(words[2] for words in announced_steps) == 2 * length
    assert announced_steps[0][1] == 7

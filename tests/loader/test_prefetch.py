import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from latentcache.errors import MissingEntryError
from latentcache.loader import prefetch
from latentcache.loader.prefetch import announce, announced, read_ahead


class Work:
    def __init__(self, make, item, places=()):
        self.make, self.item, self.found = make, item, places

    def places(self):
        return self.found

    def begin(self):
        """Work that does not run in the background."""

    def finish(self):
        return self.make(self.item)


def ahead(make, items, depth):
    return read_ahead(lambda first: (Work(make, item) for item in items[first:]), depth)


def slowly(iterator, number):
    """Take results slowly, so that the thread makes the next ones."""
    results = []
    for _ in range(number):
        results.append(next(iterator))
        time.sleep(0.003)
    return results


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


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (2, 2), (4, 4)])
def test_the_queue_is_bounded(depth, most):
    made = []
    iterator = ahead(made.append, range(100), depth)
    slowly(iterator, 3)
    for delivered in range(4, 9):
        next(iterator)
        wait_until(lambda: len(made) == delivered + most)  # noqa: B023 -- waited for at once
        time.sleep(0.01)
        assert len(made) == delivered + most
    iterator.close()


@pytest.mark.parametrize("depth", [1, 2, 5, 50])
def test_caller_and_thread_results_keep_their_order(depth):
    def make(number):
        time.sleep(0.002 * (number % 3 == 0))
        return number, threading.get_ident()

    results = []
    for result in ahead(make, range(30), depth):
        results.append(result)
        time.sleep(0.002 * (len(results) % 7 < 3))  # a caller that is fast now and then
    assert [number for number, _ in results] == list(range(30))
    assert len({thread for _, thread in results}) == 2
    assert not running()


def test_a_fast_caller_computes_and_a_slow_caller_finds_results():
    assert list(ahead(lambda _: threading.get_ident(), range(300), 2)).count(threading.get_ident()) > 200
    makers = slowly(ahead(lambda _: threading.get_ident(), range(300), 2), 40)
    assert makers.count(threading.get_ident()) < 20


class BackgroundWork(Work):
    """Work that continues in the background."""

    def begin(self):
        if self.item == 12:
            raise MissingEntryError("gone")
        self.found.append(self.item)

    def finish(self):
        if self.item not in self.found:
            self.begin()
        return super().finish()


def test_results_and_errors_keep_their_order():
    begun, found = [], []

    works = [BackgroundWork(lambda item: -item, number, begun) for number in range(20)]

    def serve():
        for result in read_ahead(lambda first: iter(works[first:]), 2):
            found.append(result)
            assert len(begun) == len(found) + 2 - (len(found) > 10)

    with pytest.raises(MissingEntryError, match="gone"):
        serve()
    assert found == [-number for number in range(12)]


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
def test_the_thread_ends_when_the_caller_leaves(leave):
    made = []
    holder = [ahead(made.append, range(10**6), 2)]
    slowly(holder[0], 4)
    assert len(running()) == 1
    leave(holder.pop())
    wait_until(lambda: not running())
    assert len(made) <= 6


def continue_in_child(iterator, results):
    results.put((len(running()), list(iterator)))


def test_a_forked_child_goes_on_without_the_thread():
    iterator = ahead(str, range(30), 2)
    assert slowly(iterator, 4) == ["0", "1", "2", "3"]
    assert running()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=continue_in_child, args=(iterator, results))
    child.start()
    expected = [str(number) for number in range(4, 30)]
    assert results.get(timeout=30) == (0, expected)
    child.join(30)
    assert child.exitcode == 0
    assert list(iterator) == expected


LEAVE_WITH_TENSORS = """
import sys, time
import numpy as np
import torch
from latentcache.loader.prefetch import read_ahead

class Work:
    def __init__(self, make, number):
        self.finish, self.begin = lambda: make(number), lambda: None

class Lasting(np.ndarray):
    def __del__(self):
        time.sleep(0.4)

def make(number):
    time.sleep(float(sys.argv[1]) * (number > 2))
    return torch.from_numpy(np.zeros(4).view(Lasting))

for count, _ in enumerate(read_ahead(lambda first: (Work(make, number) for number in range(100)), 2)):
    time.sleep(0.1)
    if count == 2:
        break
time.sleep(0.2)
print("left")
"""


@pytest.mark.parametrize("seconds", ["0", "0.2"], ids=["waiting", "being-made"])
def test_the_interpreter_exits_with_unread_results(seconds):
    """A tensor freed late in an unjoined thread would abort the process."""
    command = [sys.executable, "-c", LEAVE_WITH_TENSORS, seconds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


def test_a_forgotten_iteration_is_collected():
    class Reader:
        def make(self, number):
            return number

    for _ in range(20):
        reader = Reader()
        forgotten = weakref.ref(reader)
        iterator = ahead(reader.make, range(100), 2)
        slowly(iterator, 3)
        assert len(running()) == 1
        del reader, iterator
        wait_until(lambda: forgotten() is None)  # noqa: B023 -- waited for at once
        wait_until(lambda: not running())


# announcing bytes to the kernel


@pytest.fixture
def announced_steps(monkeypatch):
    """Record the announced steps, as if nothing were cached."""
    found = []
    monkeypatch.setattr(prefetch, "is_cached", lambda file, place: False)
    monkeypatch.setattr(prefetch, "announce", lambda places: found.append(places[0][1]))
    return found


def works(places, count):
    return [Work(str, step, places(step)) for step in range(count)]


@pytest.mark.parametrize(("size", "ahead"), [(100, 12), (1 << 20, 8), (4 << 20, 2), (1 << 30, 2)])
def test_steps_are_announced_ahead_once(announced_steps, size, ahead):
    seen = [len(announced_steps) for _ in announced(works(lambda step: [(3, step, size)], 15))]
    assert (seen, announced_steps) == ([min(step + 1 + ahead, 15) for step in range(15)], list(range(15)))


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


def test_cached_data_is_not_announced(monkeypatch):
    looks = []
    monkeypatch.setattr(prefetch, "is_cached", lambda file, place: looks.append(place) or True)
    monkeypatch.setattr(prefetch, "announce", lambda places: pytest.fail("announced"))
    list(announced(works(lambda step: [(3, step * 100 + n, 1) for n in range(20)], 40)))
    assert len(looks) == 4 * 8 + 4

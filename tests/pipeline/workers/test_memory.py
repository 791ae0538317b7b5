import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.pipeline.workers.memory import ByteBudget, host_memory


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


def test_starving_means_no_running_thread_and_no_room():
    budget = ByteBudget(10)
    budget.acquire(8)
    assert not budget.starving(8)
    thread, _ = start_acquire(budget, 5)
    assert budget.starving(8)
    assert not budget.starving(4)
    budget.release(8)
    thread.join(5)
    assert not budget.starving(5)


def test_closing_rejects_every_request():
    budget = ByteBudget(10)
    budget.acquire(10)
    threads = [start_acquire(budget, 1) for _ in range(2)]
    budget.close()
    for thread, answers in threads:
        thread.join(5)
        assert answers == [(1, False)]
    assert not budget.acquire(1)


@given(st.integers(1, 50), st.lists(st.integers(1, 80), min_size=1, max_size=30), st.integers(1, 4))
def test_concurrent_requests_stay_within_the_limit(limit, sizes, num_threads):
    budget, work, lock, peaks = ByteBudget(limit), list(sizes), threading.Lock(), []

    def run():
        while True:
            with lock:
                if not work:
                    return
                size = work.pop()
            assert budget.acquire(size)
            peaks.append(budget._held)
            budget.release(size)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert max(peaks) <= max(limit, *sizes)
    assert (budget._held, len(peaks)) == (0, len(sizes))

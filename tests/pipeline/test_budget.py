import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_builds import within

from latentcache.pipeline.budget import ByteBudget, default_budget_bytes


def waiting(budget, size):
    """A thread that asks for bytes, and its answer once there is one."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(budget.acquire(size)), daemon=True)
    thread.start()
    deadline = time.monotonic() + 5
    while not budget._wanted and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread, answers


def test_the_default_is_a_quarter_of_the_memory_and_at_most_four_gibibytes():
    assert 0 < default_budget_bytes() <= 4 << 30


def test_bytes_that_fit_are_granted_at_once():
    budget = ByteBudget(10)
    assert budget.acquire(4)
    assert budget.acquire(6)
    assert not budget.starving(10)


def test_whoever_does_not_fit_waits_until_enough_is_released():
    budget = ByteBudget(10)
    budget.acquire(8)
    thread, answers = waiting(budget, 5)
    budget.release(2)
    time.sleep(0.02)
    assert answers == []
    budget.release(2)
    thread.join(5)
    assert answers == [True]


def test_a_request_beyond_the_budget_is_granted_when_nothing_else_is_held():
    budget = ByteBudget(10)
    assert within(5, lambda: budget.acquire(1000))
    thread, answers = waiting(budget, 1)
    assert answers == []
    budget.release(1000)
    thread.join(5)
    assert answers == [True]


def test_starving_means_that_nobody_is_at_work_and_nothing_fits():
    budget = ByteBudget(10)
    budget.acquire(8)
    assert not budget.starving(8)
    thread, _ = waiting(budget, 5)
    assert budget.starving(8)
    assert not budget.starving(4)  # another 4 are held by somebody at work, who will release them
    budget.release(8)
    thread.join(5)
    assert not budget.starving(5)


def test_closing_wakes_everybody_with_a_no():
    budget = ByteBudget(10)
    budget.acquire(10)
    thread, answers = waiting(budget, 1)
    budget.close()
    thread.join(5)
    assert answers == [False]
    assert not budget.acquire(1)


@given(st.integers(1, 50), st.lists(st.integers(1, 80), min_size=1, max_size=30), st.integers(1, 4))
def test_any_requests_by_any_number_of_threads_end_within_the_limit(limit, sizes, num_threads):
    budget, work, lock, peaks = ByteBudget(limit), list(sizes), threading.Lock(), []

    def run():
        while True:
            with lock:
                if not work:
                    return
                size = work.pop()
            assert budget.acquire(size)
            peaks.append((budget._held, size))
            budget.release(size)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert len(peaks) == len(sizes)
    assert all(held <= max(limit, size, *sizes) for held, size in peaks)
    assert budget._held == 0


@pytest.mark.parametrize("size", [1, 10, 11])
def test_what_is_released_is_free_again(size):
    budget = ByteBudget(10)
    for _ in range(3):
        assert within(5, lambda: budget.acquire(size))
        budget.release(size)

"""Numbers that workers read while they live, and copies that have numbers of their own."""

import copy
import multiprocessing
import pickle

import pytest
from loader_children import add_up, own_numbers

from latentcache.loader.shared_numbers import SharedNumbers

METHODS = ["fork", "spawn", "forkserver"]


@pytest.mark.parametrize("method", METHODS)
def test_a_process_reads_what_is_written_after_it_was_started(method):
    context = multiprocessing.get_context(method)
    numbers, turns = SharedNumbers(2**63 - 1, 0, 0), context.Queue()
    child = context.Process(target=add_up, args=(numbers, turns))
    child.start()
    numbers[0], numbers[1] = -5, 7
    turns.put(None)
    child.join(60)
    assert child.exitcode == 0
    assert numbers[2] == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_its_own(copied):
    numbers = SharedNumbers(3, -4)
    other = copied(numbers)
    numbers[0] = 9
    assert [other[0], other[1]] == [3, -4]
    assert numbers[0] == 9


@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_makes_them_its_own_tells_nobody_else(method):
    context = multiprocessing.get_context(method)
    numbers, results = SharedNumbers(1), context.Queue()
    child = context.Process(target=own_numbers, args=(numbers, results))
    child.start()
    assert results.get(timeout=60) == (1, False, True, 8)
    child.join(60)
    assert numbers[0] == 1
    numbers.own()
    numbers[0] = 5
    assert numbers[0] == 5

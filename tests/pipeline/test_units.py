import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.geometry.placement import place_in
from latentcache.geometry.sizes import Size
from latentcache.identity.stat import StatMemo
from latentcache.pipeline.units import MAX_UNIT, Unit, UnitQueue, cut
from latentcache.pipeline.work import Planned
from latentcache.sources.sample import Sample

STAT = StatMemo(size=1, mtime_ns=0, ctime_ns=0, inode=0, device=0)
BUCKETS = [Size(64, 64), Size(64, 128), Size(128, 64)]


def planned(index, bucket=BUCKETS[0]):
    sample = Sample(name=f"{index}.png", caption="", stat=STAT)
    return Planned(index=index, sample=sample, size=bucket, placements=(place_in(bucket, bucket),))


def indices(items):
    return [item.index for item in items]


@given(
    st.lists(st.integers(0, 2), max_size=1200).map(sorted),
    st.integers(1, 8),
    st.integers(1, 64),
)
def test_units_are_runs_of_one_bucket_in_the_order_of_the_plan(buckets, workers, batch_size):
    todo = [planned(index, BUCKETS[bucket]) for index, bucket in enumerate(buckets)]
    units = cut(todo, workers=workers, batch_size=batch_size)
    assert [item for unit in units for item in unit.items] == todo
    for unit in units:
        assert 1 <= len(unit.items) <= MAX_UNIT
        assert len({item.placements[0].bucket for item in unit.items}) == 1


def test_several_workers_all_get_some_and_no_unit_is_below_a_batch():
    todo = [planned(index) for index in range(100)]
    assert len(cut(todo, workers=1, batch_size=8)) == 1
    assert [len(unit.items) for unit in cut(todo, workers=2, batch_size=8)] == [8] * 12 + [4]
    assert len(cut(todo * 100, workers=4, batch_size=8)) == math.ceil(10_000 / 256)


def test_suspects_wait_until_a_worker_has_nothing_else():
    queue = UnitQueue([Unit(items=(planned(0),))])
    assert queue.blame(None, {1, 2}, [planned(1), planned(2), planned(3)], killed=False) == []
    fresh = [queue.next(idle=False), queue.next(idle=False)]
    assert [indices(unit.items) for unit in fresh] == [[3], [0]]
    assert queue.next(idle=False) is None
    suspects = queue.next(idle=True)
    assert (indices(suspects.items), suspects.suspect, suspects.strikes) == ([1, 2], True, 1)
    assert len(queue) == 0


def convicted_by(queue, kills, at_once=4):
    """Work through a queue with workers that a culprit ends; gives whom they accuse, what is done, and the deaths."""
    found, done, deaths = [], [], 0
    while (unit := queue.next(idle=True)) is not None:
        items = list(unit.items)
        while items:
            hand, items = items[:at_once], items[at_once:]
            if not any(item.index in kills for item in hand):
                done += hand
                continue
            deaths += 1
            assert deaths < 500
            begun = set(indices(hand))
            found += queue.blame(unit if unit.suspect else None, begun, hand + items, killed=False)
            break
    return indices(found), indices(done), deaths


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=5), st.integers(1, 8))
def test_culprits_are_convicted_and_nobody_else(count, kills, at_once):
    kills &= set(range(count))
    queue = UnitQueue(cut([planned(index) for index in range(count)], workers=1, batch_size=8))
    found, done, deaths = convicted_by(queue, kills, at_once)
    assert sorted(found) == sorted(kills)
    assert sorted(done) == sorted(set(range(count)) - kills)
    assert deaths <= len(kills) * (6 + 2 * math.log2(max(at_once, 1)))


def test_a_sample_is_not_convicted_for_one_death_alone():
    queue, item = UnitQueue([]), planned(7)
    assert queue.blame(None, {7}, [item], killed=False) == []
    first = queue.next(idle=True)
    assert queue.blame(first, {7}, [item], killed=False) == []
    second = queue.next(idle=True)
    assert queue.blame(second, {7}, [item], killed=False) == [item]


@pytest.mark.parametrize("kills", [1, 2])
def test_who_is_killed_from_outside_gets_one_more_try(kills):
    queue, item = UnitQueue([]), planned(7)
    queue.blame(None, {7}, [item], killed=True)
    for _ in range(kills):
        assert queue.blame(queue.next(idle=True), {7}, [item], killed=True) == []
    assert indices(queue.next(idle=True).items) == [7]


def test_a_worker_that_dies_of_nothing_accuses_nobody():
    queue = UnitQueue([])
    assert queue.blame(None, set(), [planned(1), planned(2)], killed=False) == []
    unit = queue.next(idle=False)
    assert (indices(unit.items), unit.suspect) == ([1, 2], False)

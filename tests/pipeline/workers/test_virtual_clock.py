"""The scheduler with a thousand virtual workers: a clock that jumps to the next event, nothing else is replaced."""

from __future__ import annotations

import heapq
import queue
import random
from collections import Counter, deque
from types import SimpleNamespace

import pytest

from latentcache.errors import WorkerError
from latentcache.fields.protocol import Job, Output, WorkSize
from latentcache.identity.content import content_hash
from latentcache.pipeline.workers import scheduler
from latentcache.pipeline.workers.engine import ENCODING, Committed, Encoded, Ended, Opened, Task, Work

JOBS_OF_A_UNIT = 8
TICK_S = 1.0


class Clock:
    """Virtual time with events, and the inbox of a run: what is posted within a tick arrives together."""

    def __init__(self):
        self.now, self._events, self._messages, self._count = 0.0, [], deque(), 0

    def monotonic(self):
        return self.now

    def at(self, time, event):
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def put(self, message):
        self._messages.append(message)

    def qsize(self):
        return len(self._messages)

    def get(self, timeout):
        if not self._messages:
            self.now += TICK_S
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
        if not self._messages:
            raise queue.Empty
        return self._messages.popleft()


class VirtualWorker:
    """Encodes one unit after the other."""

    def __init__(self, engine, slot, post):
        self._engine, self._slot, self.post = engine, slot, post
        self._speed, self._queue, self._busy = engine.speeds[slot % len(engine.speeds)], deque(), False
        self._keys = []
        self._is_new, self._ended = engine.is_new.pop(slot, True), False
        engine.clock.at(engine.clock.now, lambda: post(Opened({})))

    def send(self, message):
        if isinstance(message, Work):
            self._queue.append(message._replace(jobs=dict(message.jobs)))
            self._next()
        elif not self._ended:
            self._ended = True
            self._engine.is_new[self._slot] = False
            self._engine.clock.at(self._engine.clock.now, lambda: self.post(Ended()))

    def kill(self):
        self._end(Ended(died=True, is_new=self._is_new))

    def _next(self):
        if self._queue and not self._busy and not self._ended:
            work, self._busy = self._queue.popleft(), True
            cost = sum(job.cost for job in work.jobs.values())
            fate = self._engine.fate(self._slot, work)
            part = 1.0 if fate is None else self._engine.chance.random()
            self._engine.done_work += cost * part
            self._engine.clock.at(
                self._engine.clock.now + cost * part / self._speed, lambda: self._finished(work, fate)
            )

    def _finished(self, work, fate):
        self._busy = False
        if self._ended:
            return
        if fate is not None:
            self._end(fate._replace(is_new=self._is_new))
            return
        keys = b"".join(content_hash(job.content) + job.content for job in work.jobs.values())
        self._keys.append(keys)
        self.post(Encoded(work.unit))
        if not work.probe:
            self._engine.encoded.update(list(work.jobs))
            self.post(Committed(keys, len(keys), list(work.jobs), [], [], encoded=len(work.jobs)))
        self._next()

    def _end(self, end):
        if not self._ended:
            self._ended = True
            self._engine.ended(self._slot, lost=end.lost)
            self.post(end._replace(keys=b"".join(self._keys)))


class VirtualEngine:
    """Slots of three speeds; a lost machine comes back as a new slot after a while."""

    device = "cpu"
    pause_s = 20.0

    def __init__(self, clock, workers, fate, *, speeds=(1.0, 2.0, 4.0), seed=7):
        self.clock, self.fate, self.speeds, self.chance = clock, fate, speeds, random.Random(seed)
        self._slots, self._next = {number: f"slot {number}" for number in range(workers)}, workers
        self.encoded, self.done_work, self.is_new, self.losses = Counter(), 0.0, {}, 0

    def open(self, task, cost):
        return 1 << 40

    def slots(self):
        return self._slots

    def start(self, slot, post):
        return VirtualWorker(self, slot, post)

    def ask(self, target, /, **arguments):
        raise NotImplementedError

    def close(self):
        pass

    def ended(self, slot, *, lost):
        if lost:
            self.losses += 1
            del self._slots[slot]
            again = self._next + (slot - self._next) % len(self.speeds)  # a machine of the same speed
            self._next = again + 1
            self.clock.at(self.clock.now + self.pause_s, lambda: self._slots.setdefault(again, f"slot {again}"))


def jobs(count, cost=10):
    for number in range(count):
        content = number.to_bytes(16, "big")
        outputs = (Output(item=number, group=0),)
        yield Job(sample=number, name=f"job {number}", inputs={}, content=content, outputs=outputs, cost=cost)


def run(words, monkeypatch, engine, clock, count):
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(words.kind, "work", WorkSize(unit_jobs=JOBS_OF_A_UNIT, batch_items=JOBS_OF_A_UNIT))
    task = Task(field="words", recipe={}, producer={}, groups=(), root="", cache="")
    todo = scheduler.Run(task, jobs(count), total=count, total_cost=10 * count, stop=words.stop, engine=engine)
    todo._inbox = clock
    return todo.run()


@pytest.mark.parametrize("workers", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_workers_that_fail_lose_nothing_and_little_time(words, monkeypatch, workers):
    clock, count = Clock(), workers * 50 * JOBS_OF_A_UNIT

    def fate(slot, work):
        drawn = engine.chance.random()
        if drawn < 0.002:
            return Ended(died=True, lost=True, how="was lost")
        return Ended(died=True, how="died", begun={next(iter(work.jobs)): ENCODING}) if drawn < 0.003 else None

    engine = VirtualEngine(clock, workers, fate)
    result = run(words, monkeypatch, engine, clock, count)
    assert (result.done, result.failed, result.encoded) == (count, [], count)
    assert set(engine.encoded.values()) == {1}, "nothing acknowledged is encoded again"
    assert engine.losses > workers // 20
    speed = sum(engine.speeds[number % 3] for number in range(workers))
    assert clock.now <= 1.1 * engine.done_work / speed


def test_a_job_that_machines_are_lost_with_ends_the_build_and_is_named(words, monkeypatch):
    clock, leased = Clock(), []

    def fate(slot, work):
        if 77 not in work.jobs:
            return None
        leased.append(sorted(work.jobs))
        return Ended(died=True, lost=True, how="was lost")

    engine = VirtualEngine(clock, 4, fate)
    with pytest.raises(WorkerError, match="lost again and again") as caught:
        run(words, monkeypatch, engine, clock, 800)
    assert [len(unit) for unit in leased] == [8, 8, 8, 4, 2, 1, 1, 1, 1]
    assert "job 77" in caught.value.why
    assert sum(engine.encoded.values()) == 799, "all others are committed first"

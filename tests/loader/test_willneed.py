"""The page cache is asked what it holds; nothing here depends on how long a disk takes."""

import errno
import os

import numpy as np
import pytest
from small_cache import build, draw

from latentcache.errors import MissingEntryError
from latentcache.loader import willneed
from latentcache.loader.cache import open_cache
from latentcache.loader.willneed import WillNeed, announce, in_memory, is_memory, places_of, warm
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader

BYTES = 512


@pytest.fixture
def reader(tmp_path):
    for number in range(6):
        draw(tmp_path / "data" / f"p{number}.png", (80, 80), seed=number)
    build(tmp_path / "data", tmp_path / "cache")
    return EntryReader(CacheLayout(tmp_path / "cache"), load_generation(tmp_path / "cache"))


@pytest.fixture
def announced(monkeypatch):
    """Batches that the kernel is told of, of a disk that holds them alone."""
    found = []
    monkeypatch.setattr(willneed, "in_memory", lambda file, place: False)
    monkeypatch.setattr(willneed, "announce", lambda places, length: found.append((len(places), length)))
    return found


@pytest.fixture
def advice(monkeypatch):
    """What the kernel is told."""
    told, real = [], os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: told.append(words) or real(*words))
    return told


def evict(reader):
    """Ask for the shard to leave the page cache."""
    file = reader.descriptor(0)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def test_places_are_those_of_the_columns(reader):
    rows = np.array([4, 1])
    assert places_of(reader, rows) == [
        (reader.descriptor(0), int(reader.generation.rows.offset[row])) for row in rows
    ]


def test_what_is_in_memory_is_not_announced(reader, advice):
    warm(reader, [0])
    WillNeed(reader, lambda step: np.arange(6), lambda row: BYTES, 1).before(0)
    assert advice == []


@pytest.mark.parametrize("length", [1, 4096, (128 << 10) + 1, 300_000])
def test_every_byte_is_announced(reader, advice, length):
    places = places_of(reader, np.array([5, 2]))
    announce(places, length)
    assert {words[3] for words in advice} == {os.POSIX_FADV_WILLNEED}
    assert max(words[2] for words in advice) <= 128 << 10
    for file, start in places:
        pieces = [words for words in advice if words[0] == file and start <= words[1] < start + length]
        assert sum(words[2] for words in pieces) >= length


def test_each_step_is_announced_once_and_two_ahead(reader, announced):
    coming = WillNeed(reader, lambda step: np.array([step, step + 1]), lambda row: 100 + row, 5)
    seen = []
    for step in range(5):
        coming.before(step)
        seen.append([length - HEADER_BYTES - 100 for _, length in announced])
    assert seen == [[0, 1, 2], [0, 1, 2, 3], *[[0, 1, 2, 3, 4]] * 3]


def test_few_looks_while_all_is_in_memory_and_all_of_them_once_it_is_not(reader, monkeypatch):
    looks, there = [], [True]

    def look(file, place):
        looks.append(place)
        return there[0]

    monkeypatch.setattr(willneed, "in_memory", look)
    coming = WillNeed(reader, lambda step: np.arange(4), lambda row: BYTES, 40, ahead=0)
    counts = []
    for step in range(14):
        there[0] = step != 11
        before = len(looks)
        coming.before(step)
        counts.append(len(looks) - before)
    assert counts == [4] * 8 + [1] * 3 + [2] + [4] * 2  # the look that fails, then the batch up to its first


def test_steps_that_are_left_out_are_not_announced_later(reader, announced):
    coming = WillNeed(reader, lambda step: np.array([step % 6]), lambda row: 100 + row, 9)
    coming.before(5)
    coming.before(6)
    assert [length - HEADER_BYTES - 100 for _, length in announced] == [5, 0, 1, 2]


def test_a_shard_that_is_gone_is_left_to_the_read(reader):
    (data,) = reader.layout.shards.glob("*/data.mdb")
    data.unlink()
    WillNeed(reader, lambda step: np.array([step]), lambda row: BYTES, 3).before(0)
    with pytest.raises(MissingEntryError):
        places_of(reader, np.array([0]))


def steps_announced(reader, advice, **options):
    """How many entries are announced before each of 12 steps of two entries."""
    coming = WillNeed(reader, lambda step: np.array([step % 6, (step + 1) % 6]), lambda row: BYTES, 12, **options)
    found = []
    for step in range(12):
        advice.clear()
        coming.before(step)
        found.append(len(advice))
    return found


def test_a_file_system_that_cannot_say_is_asked_once_and_told_all_in_a_first_pass(reader, advice, monkeypatch):
    asked = []

    def refuse(*words):
        asked.append(words)
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(willneed, "is_memory", lambda file: False)
    assert in_memory(reader.descriptor(0), 0) is None
    asked.clear()
    assert steps_announced(reader, advice) == [6] + [2] * 9 + [0] * 2
    assert steps_announced(reader, advice, blind=False) == [0] * 12
    assert len(asked) == 2


def test_a_file_in_memory_is_told_from_one_on_a_disk(reader):
    memory, (end, other) = os.memfd_create("shard"), os.pipe()
    assert (is_memory(memory), is_memory(end)) == (True, False)
    for file in (memory, end, other):
        os.close(file)


def test_what_lies_in_memory_is_never_announced(reader, advice, monkeypatch):
    """As a tmpfs is: it cannot say (in Linux 6.18), and its files can be sealed."""
    monkeypatch.setattr(willneed, "in_memory", lambda file, place: None)
    monkeypatch.setattr(willneed, "is_memory", lambda file: True)
    assert steps_announced(reader, advice) == [0] * 12


def test_a_loader_announces_blindly_in_its_first_pass_alone(reader, advice, monkeypatch):
    monkeypatch.setattr(willneed, "in_memory", lambda file, place: None)
    monkeypatch.setattr(willneed, "is_memory", lambda file: False)
    loader, counts = open_cache(reader.layout.root).loader(batch_size=2, prefetch=0), []  # threads may announce twice
    for _ in range(2):
        advice.clear()
        list(loader)
        counts.append(len(advice))
    assert counts == [6, 0]


def test_a_read_that_fails_is_no_answer(reader):
    with pytest.raises(OSError, match="Bad file descriptor"):
        in_memory(10**6, 0)


def test_warming_reads_every_byte_of_the_shards_in_use(reader):
    cache = open_cache(reader.layout.root)
    (data,) = reader.layout.shards.glob("*/data.mdb")
    assert cache.warm() == data.stat().st_size == warm(reader, [0])


def test_an_epoch_from_a_cold_cache_is_the_same(reader):
    cache = open_cache(reader.layout.root)
    expected = [(batch["keys"], batch["latents"].clone()) for batch in cache.loader(batch_size=2)]
    evict(reader)
    for batch, (keys, latents) in zip(cache.loader(batch_size=2), expected, strict=True):
        assert batch["keys"] == keys
        assert batch["latents"].equal(latents)

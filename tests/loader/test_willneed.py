"""The page cache is asked what it holds; nothing here depends on how long a disk takes."""

import os

import numpy as np
import pytest
from small_cache import build, draw

from latentcache.errors import MissingEntryError
from latentcache.loader import willneed
from latentcache.loader.cache import open_cache
from latentcache.loader.willneed import WillNeed, announce, in_memory, places_of, warm
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
    """Batches that the kernel is told of."""
    found = []
    monkeypatch.setattr(willneed, "announce", lambda places, length: found.append((len(places), length)) or True)
    return found


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


def test_what_is_in_memory_is_not_announced(reader):
    warm(reader, [0])
    assert announce(places_of(reader, np.arange(6)), HEADER_BYTES + BYTES) is False


@pytest.mark.parametrize("length", [1, 4096, (128 << 10) + 1, 300_000])
def test_every_byte_of_what_is_not_in_memory_is_announced(reader, monkeypatch, length):
    told = []
    monkeypatch.setattr(willneed, "in_memory", lambda file, place: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: told.append(words))
    places = places_of(reader, np.array([5, 2]))
    assert announce(places, length) is True
    assert {words[3] for words in told} == {os.POSIX_FADV_WILLNEED}
    assert max(words[2] for words in told) <= 128 << 10
    for file, start in places:
        pieces = [words for words in told if words[0] == file and start <= words[1] < start + length]
        assert sum(words[2] for words in pieces) >= length


def test_advice_does_no_harm(reader, monkeypatch):
    monkeypatch.setattr(willneed, "in_memory", lambda file, place: False)
    assert announce(places_of(reader, np.arange(6)), HEADER_BYTES + BYTES) is True


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


def test_a_file_system_that_cannot_say_counts_as_cold(reader, monkeypatch):
    def refuse(*_):
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "preadv", refuse)
    assert in_memory(reader.descriptor(0), 0) is False


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

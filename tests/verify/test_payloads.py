import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from small_cache import build, damage_payload, draw_four

from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.verify import payloads
from latentcache.verify.payloads import not_finite, scan_shards
from latentcache.verify.portions import by_place

WORDS = {"float16": ("<f2", "<u2"), "float32": ("<f4", "<u4")}


@pytest.mark.parametrize("dtype", list(WORDS))
@given(data=st.data())
def test_exponent_bits_say_what_numpy_says(dtype, data):
    values, words = WORDS[dtype]
    found = data.draw(arrays.arrays(words, st.integers(1, 40)))
    assert not_finite(found, dtype) == (not np.isfinite(found.view(values)).all())


@given(arrays.arrays("<u2", st.integers(1, 40)))
def test_bfloat16_is_the_upper_half_of_float32(words):
    wide = (words.astype("<u4") << 16).view("<f4")
    assert not_finite(words, "bfloat16") == (not np.isfinite(wide).all())


def scan(cache, **more):
    return list(scan_shards(CacheLayout(cache), load_generation(cache), [0], **more))


def test_the_order_of_messages(shared):
    found = scan(shared[1])
    assert (found[0], found[-1]) == ({"shard": 0}, {"end": 0})
    assert sum(message.get("bytes", 0) for message in found) > 0
    assert [message["upto"] for message in found if "upto" in message][-1] == 4


def test_damage_names_its_row_and_the_rest_of_the_batch_is_fine(cache):
    damage_payload(cache, row=1)
    damaged = [message for message in scan(cache) if "row" in message]
    assert [(message["row"], message["category"], message["reason"]) for message in damaged] == [
        (1, "corrupt", "payload")
    ]


def test_only_what_is_chosen_is_read(cache):
    damage_payload(cache, row=1)
    chosen = np.array([True, False, True, False])
    found = scan(cache, chosen=chosen, pages=False)
    assert not [message for message in found if "row" in message]
    assert [message["upto"] for message in found if "upto" in message][-1] == 2


@pytest.fixture
def twice(tmp_path):
    """A cache in which every entry belongs to two samples."""
    draw_four(tmp_path / "data")
    draw_four(tmp_path / "data" / "again")
    build(tmp_path / "data", tmp_path / "cache")
    return tmp_path / "cache"


def test_an_entry_of_two_samples_is_damaged_for_both(twice):
    generation = load_generation(twice)
    offsets = generation.rows.offset
    assert len(np.unique(offsets)) == len(offsets) // 2
    assert not [message for message in scan(twice) if "row" in message]
    damage_payload(twice, row=2)
    damaged = {message["row"] for message in scan(twice) if "row" in message}
    assert damaged == set(np.flatnonzero(offsets == offsets[2]).tolist())


@pytest.mark.parametrize("read_bytes", [1, 3000, 1 << 21])
def test_entries_are_read_in_pieces_of_any_size(cache, monkeypatch, read_bytes):
    monkeypatch.setattr(payloads, "_READ_BYTES", read_bytes)
    assert not [message for message in scan(cache) if "row" in message]
    damage_payload(cache, row=3)
    assert [message["row"] for message in scan(cache) if "row" in message] == [3]


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=60), st.integers(1, 5000))
def test_runs_keep_order_miss_nothing_and_never_overlap(offsets, length):
    offsets = np.sort(np.array(offsets, dtype=np.int64))
    runs = list(payloads._runs(offsets, length))
    assert [offset for run in runs for offset in run] == offsets.tolist()
    for run in runs:
        gaps = np.diff(run) - length
        assert ((gaps >= 0) & (gaps <= payloads._GAP_BYTES)).all()
        assert len(run) == 1 or run[-1] + length - run[0] <= payloads._READ_BYTES


def test_one_place_with_two_keys_is_looked_at_closer():
    offsets, keys = np.array([8, 8], np.uint64), np.zeros((2, 32), np.uint8)
    assert payloads._distinct(offsets, keys).tolist() == [True, False]
    keys[1, 5] = 1
    assert payloads._distinct(offsets, keys) is None


def test_time_that_is_over_ends_the_shard_without_an_end(shared):
    assert scan(shared[1], over=lambda: True) == [{"shard": 0}]


def test_rows_are_read_bucket_by_bucket_and_then_by_place(shared):
    generation = load_generation(shared[1])
    (portion,) = by_place(generation, 0, None)
    places = list(zip(portion.bucket.tolist(), portion.offset.tolist(), strict=True))
    assert places == sorted(places)
    assert len(portion) == 4

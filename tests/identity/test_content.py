import math
import os
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.identity.content import (
    CONTENT_SLICE,
    MAX_DIM,
    RACY_NS,
    StatMemo,
    canonical_json,
    checksum,
    content_hash,
    entry_key,
    gaussian,
    json_hash,
)
from latentcache.sources.known import racy


def test_the_hashes_are_the_published_ones():
    # xxHash's own values for the empty input with seed 0
    assert content_hash(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"") == 0x2D06800538D394C2


def test_the_spelling_is_pinned():
    value = {"b": [1, None, True], "a": {"é": "x y"}, "c": (2,)}
    assert canonical_json(value) == b'{"a":{"\\u00e9":"x y"},"b":[1,null,true],"c":[2]}'
    assert json_hash(value) == content_hash(canonical_json(value))


@pytest.mark.parametrize(
    "value", [1.0, [1, 2.5], {"a": {"b": 0.1}}, (float("nan"),), {"a": [{"b": [float("inf")]}]}, {1.5: "a"}]
)
def test_nested_floats_are_rejected(value):
    with pytest.raises(TypeError, match=r"float|1\.5"):
        canonical_json(value)


@pytest.mark.parametrize("value", [{1: "a"}, {None: 1}, {"a": {True: 1}}, [{b"a": 1}]])
def test_non_text_names_are_rejected(value):
    with pytest.raises(TypeError, match="must be text"):
        canonical_json(value)


side = st.integers(1, MAX_DIM)
numbers = {"kind": st.integers(0, 255), "variant": st.integers(0, 255), "dims": st.tuples(side, side, side)}
hashes = {"content": st.binary(min_size=16, max_size=16), "recipe": st.binary(min_size=8, max_size=8)}
parts = st.fixed_dictionaries(numbers | hashes)


@given(parts, parts)
def test_the_order_of_bytes_is_the_order_of_the_fields(first, second):
    names = ("kind", "variant", "dims", "content", "recipe")
    order = [first[name] for name in names] < [second[name] for name in names]
    assert (entry_key(**first) < entry_key(**second)) == order


def test_the_layout_is_pinned():
    key = entry_key(kind=1, content=bytes(range(16)), dims=(1, 0x0102, 0x0304), recipe=b"recipe-8")
    assert key[CONTENT_SLICE] == bytes(range(16))
    assert key == bytes.fromhex("01 00 0001 0102 0304") + bytes(range(16)) + b"recipe-8"


@pytest.mark.parametrize("wrong", [{"content": b"short"}, {"recipe": bytes(9)}, {"dims": (1, 0, 1)}])
def test_values_too_large_for_a_key_are_rejected(wrong):
    with pytest.raises(ValueError, match="a key"):
        entry_key(**{"kind": 1, "content": bytes(16), "recipe": bytes(8), **wrong})


#: Changed noise changes every draw of every cache.
PINNED = ["-0x1.6f1fce0000000p+0", "0x1.356dfe0000000p+0", "-0x1.15f7980000000p+0"]
PINNED += ["0x1.33a2d40000000p+1", "0x1.5ce5c60000000p-2", "0x1.0fe3be0000000p-1"]
word = st.binary(max_size=40) | st.integers(-(2**63), 2**64 - 1)


def test_the_numbers_are_pinned():
    numbers = gaussian(6, b"read", 7, 2, bytes(range(32)))
    assert numbers.dtype == np.float32
    assert [value.hex() for value in numbers.tolist()] == PINNED


def test_numbers_are_normally_distributed():
    numbers = gaussian(1 << 20, b"normal").astype(np.float64)
    assert abs(numbers.mean()) < 0.004
    assert abs(numbers.var() - 1) < 0.006
    assert abs((numbers**3).mean()) < 0.012
    assert abs((numbers**4).mean() - 3) < 0.04
    below = np.arange(1, len(numbers) + 1) / len(numbers)
    normal = np.array([NormalDist().cdf(value) for value in np.sort(numbers)[::1000]])
    assert np.abs(normal - below[::1000]).max() < 1.63 / math.sqrt(len(numbers))  # Kolmogorov-Smirnov at 1 %


@given(first=st.lists(word, min_size=1, max_size=4), second=st.lists(word, min_size=1, max_size=4))
def test_other_seeds_give_other_numbers(first, second):
    same = [w % 2**64 if isinstance(w, int) else w for w in first] == [
        w % 2**64 if isinstance(w, int) else w for w in second
    ]
    assert np.array_equal(gaussian(16, *first), gaussian(16, *second)) == same


HOUR = 3_600_000_000_000
moments = st.integers(0, 2**62)
memos = st.builds(
    StatMemo, size=moments, mtime_ns=moments, ctime_ns=moments, inode=moments, device=moments, seen_ns=moments
)


def trusts(memo, now):
    return not racy(np.array([memo], dtype=np.uint64))[0] and memo.identity == now.identity


def old_memo(path):
    """A memo taken an hour after the last write, by the file's own times."""
    result = path.stat()
    return StatMemo.of(result, seen_ns=max(result.st_mtime_ns, result.st_ctime_ns) + HOUR)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"pixels")
    return path


def test_restored_mtime_is_detected(file):
    memo = old_memo(file)
    file.write_bytes(b"PIXELS")
    os.utime(file, ns=(memo.mtime_ns, memo.mtime_ns))
    now = StatMemo.of(file.stat())
    assert (now.size, now.mtime_ns) == (memo.size, memo.mtime_ns)
    assert not trusts(memo, now._replace(ctime_ns=memo.ctime_ns + 1))
    assert trusts(memo, now) is (now.ctime_ns == memo.ctime_ns)


def test_a_file_hashed_right_after_it_was_written_is_not_trusted(file):
    result = file.stat()
    latest = max(result.st_mtime_ns, result.st_ctime_ns)
    now = StatMemo.of(result)
    assert not trusts(StatMemo.of(result, seen_ns=latest), now)
    assert not trusts(StatMemo.of(result, seen_ns=latest + RACY_NS - 1), now)
    assert trusts(StatMemo.of(result, seen_ns=latest + RACY_NS), now)


@given(memos, st.sampled_from(["size", "mtime_ns", "ctime_ns", "inode", "device"]), st.sampled_from([-1, 1, HOUR]))
def test_any_single_difference_is_a_change(memo, name, difference):
    memo = memo._replace(seen_ns=max(memo.mtime_ns, memo.ctime_ns) + RACY_NS)
    assert trusts(memo, memo._replace(seen_ns=0))
    assert not trusts(memo, memo._replace(**{name: getattr(memo, name) + difference}))

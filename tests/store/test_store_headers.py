import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_entries import header_of, key_of, new_entry

from latentcache.errors import LatentcacheError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import checksum
from latentcache.store import headers as module
from latentcache.store.entry import HEADER_BYTES, pack_header, unpack_header
from latentcache.store.headers import KEYED_BYTES, SeenHeaders, headers_hold, keyed_headers, payload_checksums

SHAPE = 4, 8, 8


def keyed(entries):
    made = keyed_headers(np.frombuffer(b"".join(e.key for e in entries), np.uint8).reshape(-1, 32))
    for row, entry in enumerate(entries):
        made[row, 32:] = np.frombuffer(entry.value[:HEADER_BYTES], np.uint8)
    return made


def test_whole_headers_hold():
    entries = [new_entry(number) for number in range(5)]
    assert keyed(entries).shape == (5, KEYED_BYTES)
    assert headers_hold(keyed(entries), SHAPE, "float16")
    assert payload_checksums(keyed(entries)) == [checksum(entry.value[HEADER_BYTES:]) for entry in entries]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 8, 4), "float16"), ((2, 16, 8), "float16"), (SHAPE, "bfloat16"), ((256,), "float16")]
)
def test_another_shape_or_type_does_not(shape, dtype):
    assert not headers_hold(keyed([new_entry(0)]), shape, dtype)


@given(st.integers(0, 2), st.integers(0, KEYED_BYTES - 1), st.integers(1, 255))
def test_any_flipped_bit_of_key_or_header_is_seen(row, place, mask):
    headers = keyed([new_entry(number) for number in range(3)])
    headers[row, place] ^= mask
    assert not headers_hold(headers, SHAPE, "float16")


@given(place=st.integers(0, HEADER_BYTES - 9), value=st.integers(0, 255))
def test_it_believes_no_signed_header_that_unpacking_refuses(place, value):
    key, payload = key_of(1), new_entry(1).value[HEADER_BYTES:]
    data = bytearray(pack_header(header_of(1, payload), key)[:-8])
    data[place] = value
    signed = bytes(data) + checksum(key + bytes(data)).to_bytes(8, "little")
    headers = keyed_headers(np.frombuffer(key, np.uint8).reshape(1, 32))
    headers[0, 32:] = np.frombuffer(signed, np.uint8)
    try:
        header = unpack_header(signed, key)
    except LatentcacheError:
        assert not headers_hold(headers, SHAPE, "float16")
    else:
        assert headers_hold(headers, SHAPE, "float16") == ((header.shape, header.dtype) == (SHAPE, "float16"))
        assert header.original_size >= Size(1, 1)


def test_headers_that_were_seen_give_their_checksums():
    seen = SeenHeaders(10)
    assert seen.checksums(np.array([1]), SHAPE, "float16") is None
    seen.remember(np.array([4, 1]), SHAPE, "float16", [2**64 - 1, 0])
    assert seen.checksums(np.array([1, 4, 1]), SHAPE, "float16") == [0, 2**64 - 1, 0]
    assert seen.checksums(np.array([1, 2]), SHAPE, "float16") is None
    assert seen.checksums(np.array([1]), SHAPE, "bfloat16") is None
    assert seen.checksums(np.array([1]), SHAPE[::-1], "float16") is None


def test_a_row_is_believed_for_the_shape_it_was_seen_with_last():
    seen = SeenHeaders(3)
    seen.remember(np.array([0]), (1,), "float16", [7])
    seen.remember(np.array([0]), (2,), "float16", [8])
    assert seen.checksums(np.array([0]), (1,), "float16") is None
    assert seen.checksums(np.array([0]), (2,), "float16") == [8]


def test_more_shapes_than_can_be_told_apart_are_never_believed(monkeypatch):
    monkeypatch.setattr(module, "_MAX_FORMS", 3)
    seen = SeenHeaders(5)
    for length in range(1, 6):
        seen.remember(np.array([length - 1]), (length,), "float16", [length])
    found = [seen.checksums(np.array([length - 1]), (length,), "float16") for length in range(1, 6)]
    assert found == [[1], [2], None, None, None]

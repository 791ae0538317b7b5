import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import facts_of, header_of, key_of, new_entry

from latentcache.errors import CacheFormatError, CorruptEntryError
from latentcache.geometry.placement import Placement
from latentcache.geometry.sizes import Box, Size
from latentcache.identity.content import checksum
from latentcache.recipe import DTYPES
from latentcache.store import entry as entry_module
from latentcache.store.entry import (
    FACTS_BYTES,
    HEADER_BYTES,
    RECORD_BYTES,
    EntryFacts,
    EntryHeader,
    numpy_dtype,
    pack_facts,
    pack_header,
    pack_record,
    payload_array,
    unpack_facts,
    unpack_header,
    unpack_record,
)

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
hashes = st.binary(min_size=16, max_size=16)
keys = st.binary(min_size=32, max_size=32)
sides = st.integers(1, 2**32 - 1)
headers = st.builds(
    EntryHeader,
    kind=u8,
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(1, 200), min_size=1, max_size=8).map(tuple),
    payload_checksum=u64,
    content=hashes,
    recipe_id=hashes,
    original_size=st.builds(Size, sides, sides),
    true_length=u32,
    flags=u16,
)
headers = headers.filter(lambda header: header.payload_bytes < 2**64)
#: Where a crafted header lies: (offset, format, value).
LIES = {
    "no dimension": (7, "<B", 0),
    "nine dimensions": (7, "<B", 9),
    "255 dimensions": (7, "<B", 255),
    "unknown type": (6, "<B", 200),
    "type zero": (6, "<B", 0),
    "other type": (6, "<B", 4),
    "header of 64 bytes": (8, "<H", 64),
    "length too small": (16, "<Q", 511),
    "length too large": (16, "<Q", 2**63),
    "no rows": (32, "<I", 0),
    "a shape beyond memory": (32, "<I", 2**32 - 1),
    "a fourth dimension": (44, "<I", 1),
    "source of no height": (96, "<I", 0),
    "source of no width": (100, "<I", 0),
}


@given(headers, keys)
def test_unpack_undoes_pack(header, key):
    packed = pack_header(header, key)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed, key) == header
    assert unpack_header(packed + b"payload", key) == header


@settings(max_examples=5)
@given(headers, keys, st.integers(1, 255))
def test_every_changed_byte_is_refused(header, key, mask):
    packed = pack_header(header, key)
    for position in range(HEADER_BYTES):
        lying = bytearray(packed)
        lying[position] ^= mask
        with pytest.raises(CorruptEntryError):
            unpack_header(bytes(lying), key)


@given(headers, keys, keys)
def test_a_header_under_another_key_is_refused(header, key, other):
    packed = pack_header(header, key)
    if key == other:
        return
    with pytest.raises(CorruptEntryError, match="header checksum"):
        unpack_header(packed, other)


@given(headers, keys, st.integers(0, HEADER_BYTES - 1))
def test_a_short_header_is_refused(header, key, length):
    with pytest.raises(CorruptEntryError, match="112 bytes"):
        unpack_header(pack_header(header, key)[:length], key)


@given(st.binary(min_size=0, max_size=300), keys)
def test_noise_is_refused(data, key):
    with pytest.raises(CorruptEntryError):
        unpack_header(data, key)


def signed(packed, key):
    """A header whose checksum holds, whatever it says."""
    return bytes(packed[:104]) + struct.pack("<Q", checksum(key + bytes(packed[:104])))


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused_although_its_checksum_holds(lie):
    key = key_of(1)
    packed = bytearray(new_entry(1).value[:HEADER_BYTES])
    offset, form, value = LIES[lie]
    struct.pack_into(form, packed, offset, value)
    with pytest.raises(CorruptEntryError) as caught:
        unpack_header(signed(packed, key), key)
    assert caught.value.key == key.hex()
    assert caught.value.why


@settings(max_examples=500)
@given(st.binary(min_size=HEADER_BYTES - 13, max_size=HEADER_BYTES - 13), keys)
def test_a_crafted_header_is_refused_or_agrees_with_itself(noise, key):
    crafted = signed(b"LCE1\x01" + noise, key)
    try:
        header = unpack_header(crafted, key)
    except CorruptEntryError:
        return
    assert pack_header(header, key) == crafted


def test_a_newer_header_is_no_damage():
    key = key_of(1)
    packed = bytearray(new_entry(1).value[:HEADER_BYTES])
    packed[4] = 2
    with pytest.raises(CacheFormatError, match="entry format 2") as caught:
        unpack_header(signed(packed, key), key)
    assert caught.value.slug == "cache-format"
    assert "upgrade" in caught.value.fix


@pytest.mark.parametrize("shape", [(), (1,) * 9, (4, 0, 8)])
def test_an_impossible_shape_is_not_packed(shape):
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        pack_header(header_of(1, b"", shape), key_of(1))


def test_the_layout_is_pinned():
    key = bytes(range(32))
    header = EntryHeader(
        kind=1,
        dtype="bfloat16",
        shape=(16, 32, 48),
        payload_checksum=0x1122334455667788,
        content=b"c" * 16,
        recipe_id=b"r" * 16,
        original_size=Size(0x0A0B0C0D, 0x01020304),
        true_length=7,
        flags=0x8001,
    )
    front = "4c434531 01 01 03 03 7000 0180 07000000 00c0000000000000 8877665544332211"
    shape = "10000000 20000000 30000000" + "00000000" * 5
    expected = bytes.fromhex(front + shape) + b"c" * 16 + b"r" * 16 + bytes.fromhex("0d0c0b0a 04030201")
    packed = pack_header(header, key)
    assert packed[:104] == expected
    assert packed[104:] == struct.pack("<Q", checksum(key + expected))


placements = st.builds(
    lambda bucket, top, left, more: Placement(
        bucket=bucket,
        resize=Size(bucket.height + top + more, bucket.width + left + more),
        crop=Box(top=top, left=left, size=bucket),
    ),
    st.builds(Size, st.integers(1, 65_535), st.integers(1, 65_535)),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 3),
)
facts_made = st.builds(EntryFacts, pixel_hash=hashes, placement=placements)


@given(facts_made)
def test_facts_come_back(facts):
    packed = pack_facts(facts)
    assert len(packed) == FACTS_BYTES
    assert unpack_facts(packed, facts.placement.bucket) == facts


@pytest.mark.parametrize("length", [0, 31, 33])
def test_facts_of_another_length_are_refused(length):
    with pytest.raises(ValueError, match=str(length)):
        unpack_facts(bytes(length), Size(8, 8))


def test_a_crop_outside_the_picture_is_refused():
    with pytest.raises(ValueError, match="64x64 at 0, 1"):
        unpack_facts(bytes(16) + struct.pack("<4I", 64, 64, 0, 1), Size(64, 64))


def test_every_changed_byte_of_a_record_is_refused():
    made = new_entry(3)
    record = pack_record(made.value[:HEADER_BYTES], made.facts, made.key)
    assert len(record) == RECORD_BYTES
    header, facts = unpack_record(record, made.key)
    assert (header.content, facts) == (unpack_header(made.value, made.key).content, pack_facts(facts_of(3)))
    for position in range(RECORD_BYTES):
        lying = bytearray(record)
        lying[position] ^= 4
        with pytest.raises(CorruptEntryError):
            unpack_record(bytes(lying), made.key)


def test_a_record_of_another_length_is_refused():
    made = new_entry(3)
    record = pack_record(made.value[:HEADER_BYTES], made.facts, made.key)
    for data in (record[:-1], record + b"\0", record[:HEADER_BYTES]):
        with pytest.raises(CorruptEntryError):
            unpack_record(data, made.key)


def test_a_record_of_impossible_facts_is_refused_although_its_checksum_holds():
    made = new_entry(3)
    record = pack_record(made.value[:HEADER_BYTES], bytes(FACTS_BYTES), made.key)
    with pytest.raises(CorruptEntryError):
        unpack_record(record, made.key)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_has_its_size(dtype):
    code, size = DTYPES[dtype]
    assert numpy_dtype(dtype).itemsize == size
    assert numpy_dtype(dtype).byteorder in "<|="
    made = new_entry(1, shape=(2, 3), dtype=dtype)
    header = unpack_header(made.value, made.key)
    assert (header.dtype, header.payload_bytes, made.value[6]) == (dtype, 6 * size, code)
    array = payload_array(header, made.value[HEADER_BYTES:])
    assert array.shape == (2, 3)
    assert array.tobytes() == made.value[HEADER_BYTES:]


def test_an_array_is_a_view_of_the_payload():
    memory = bytearray(new_entry(1).value)
    array = payload_array(unpack_header(bytes(memory), key_of(1)), memoryview(memory)[HEADER_BYTES:])
    array[0, 0, 0] = np.float16(5)
    assert memory[HEADER_BYTES : HEADER_BYTES + 2] == np.float16(5).tobytes()


def test_the_header_ends_where_a_payload_is_aligned():
    first_byte_in_page = 16
    assert (first_byte_in_page + HEADER_BYTES) % 64 == 0
    assert entry_module._LAYOUT.size == HEADER_BYTES

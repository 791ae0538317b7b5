import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import CorruptEntryError
from latentcache.identity.content import checksum, content_hash
from latentcache.identity.key import KIND_TOKENS, EntryKey
from latentcache.store.blocks import BLOCK_BYTES, BlockFiller, Tokenised, check_spans, pack_block, unpack_block
from latentcache.store.entry import HEADER_BYTES, unpack_facts, unpack_header
from latentcache.token_recipe import TokenRecipe

SMALL = TokenRecipe(tokenizer="ab" * 16, num_ids=300)
LARGE = TokenRecipe(tokenizer="ab" * 16, num_ids=200_000)


def document(number, ids, runs=((0, 1),), recipe=SMALL, control=0):
    return Tokenised(
        content=content_hash(str(number).encode()),
        ids=np.array(ids, dtype=recipe.dtype),
        runs=np.array(runs, dtype=np.uint32).reshape(-1, 2),
        control_strings=control,
    )


def unpacked(entry):
    header = unpack_header(bytes(entry.value[:HEADER_BYTES]), entry.key)
    return unpack_block(header, bytes(entry.value[HEADER_BYTES:]))


@st.composite
def documents(draw, recipe):
    made = []
    for number in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 20))
        ids = draw(st.lists(st.integers(0, recipe.num_ids - 1), min_size=length, max_size=length))
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        runs = [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        made.append(document(number, ids, runs, recipe, draw(st.integers(0, 9))))
    return made


@pytest.mark.parametrize("recipe", [SMALL, LARGE])
def test_what_goes_in_comes_out(recipe):
    @given(documents(recipe))
    def check(made):
        found = unpacked(pack_block(made, recipe))
        assert found.ids.tolist() == [one for each in made for one in each.ids.tolist()]
        assert [one.tobytes() for one in found.content] == [each.content for each in made]
        assert found.length.tolist() == [len(each.ids) for each in made]
        assert found.control.tolist() == [each.control_strings for each in made]
        begin = 0
        for end, each in zip(found.span_ends.tolist(), made, strict=True):
            assert found.spans[begin:end].tolist() == each.runs.tolist()
            begin = end

    check()


def test_a_block_is_named_by_its_documents_and_is_an_entry_like_others():
    made = [document(1, [1, 2]), document(2, [3])]
    entry = pack_block(made, SMALL)
    key = EntryKey.unpack(entry.key)
    assert (key.kind, key.content, key.recipe) == (
        KIND_TOKENS,
        content_hash(made[0].content + made[1].content),
        SMALL.key_part,
    )
    header = unpack_header(bytes(entry.value[:HEADER_BYTES]), entry.key)
    assert (header.true_length, header.original_size.height, header.dtype) == (3, 2, "uint16")
    assert unpack_facts(entry.facts, key.bucket).pixel_hash == content_hash(
        np.array([1, 2, 3], dtype="<u2").tobytes()
    )
    assert pack_block(made[::-1], SMALL).key != entry.key


@pytest.mark.parametrize(
    "bad",
    [
        document(1, [], ()),
        document(1, [300], ()),
        document(1, [1], ((0, 2),)),
        document(1, [1, 2], ((0, 0),)),
        document(1, [1, 2, 3], ((0, 1), (1, 1))),
        document(1, [1, 2, 3], ((2, 1), (0, 1))),
        dataclasses.replace(document(1, [1]), content=b"short"),
    ],
)
def test_what_cannot_be_is_never_written(bad):
    with pytest.raises(ValueError):
        pack_block([bad], SMALL)
    with pytest.raises(ValueError):
        pack_block([], SMALL)


@given(st.data())
def test_a_table_that_lies_is_refused_whatever_its_checksum_says(data):
    entry = pack_block([document(1, [1, 2, 3]), document(2, [4], ((0, 1),))], SMALL)
    payload = bytearray(entry.value[HEADER_BYTES:])
    table = 4 * 2
    at = data.draw(st.integers(table, len(payload) - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    header = unpack_header(bytes(entry.value[:HEADER_BYTES]), entry.key)
    header = dataclasses.replace(header, payload_checksum=checksum(payload))
    try:
        found = unpack_block(header, bytes(payload))
    except CorruptEntryError:
        return
    # Only a run that is another run inside its document, or another count of control strings, can pass.
    assert found.length.tolist() == [3, 1]
    assert content_hash(found.content.tobytes()) == header.content
    check_spans(found.length, found.span_ends, found.spans)


@given(st.binary(max_size=200), st.integers(0, 1 << 32 - 1), st.integers(1, 1 << 31))
def test_any_bytes_are_a_block_or_are_refused(payload, tokens, count):
    entry = pack_block([document(1, [1])], SMALL)
    header = unpack_header(bytes(entry.value[:HEADER_BYTES]), entry.key)
    payload = payload[: len(payload) // 2 * 2] + b"\0\0"
    size = dataclasses.replace(header.original_size, height=count)
    hostile = dataclasses.replace(header, shape=(len(payload) // 2,), true_length=tokens, original_size=size)
    with pytest.raises(CorruptEntryError):
        unpack_block(hostile, payload)


def test_another_kind_or_length_is_refused():
    entry = pack_block([document(1, [1])], SMALL)
    header = unpack_header(bytes(entry.value[:HEADER_BYTES]), entry.key)
    payload = bytes(entry.value[HEADER_BYTES:])
    for changed, data in ((dataclasses.replace(header, kind=1), payload), (header, payload[:-2])):
        with pytest.raises(CorruptEntryError):
            unpack_block(changed, data)


def test_blocks_are_filled_in_order_and_never_overfull():
    made = [document(number, [number % 300] * (500 + 13 * number), ()) for number in range(300)]
    filler = BlockFiller(SMALL)
    full = [entry for one in made if (entry := filler.add(one)) is not None]
    last = filler.finish()
    assert last is not None
    assert filler.finish() is None
    entries = [*full, last]
    assert len(entries) > 2
    assert all(len(entry.value) <= BLOCK_BYTES for entry in entries)
    assert all(len(entry.value) > 0.95 * BLOCK_BYTES for entry in full)
    assert [one.tobytes() for entry in entries for one in unpacked(entry).content] == [one.content for one in made]


def test_filling_goes_on_where_it_stopped_after_any_full_block():
    made = [document(number, [1] * (1 + number * 7 % 90), ()) for number in range(200)]
    filler = BlockFiller(SMALL, 3000)
    whole = [entry.key for one in made if (entry := filler.add(one)) is not None]
    done = len(unpacked_documents(made, whole[:2]))
    again = BlockFiller(SMALL, 3000)
    rest = [entry.key for one in made[done:] if (entry := again.add(one)) is not None]
    assert whole[:2] + rest == whole


def unpacked_documents(made, keys):
    """The documents of the first blocks: all that stand before the block after them."""
    filler, seen = BlockFiller(SMALL, 3000), []
    for number, one in enumerate(made):
        entry = filler.add(one)
        if entry is not None:
            seen.append((entry.key, number))
    return made[: seen[len(keys) - 1][1]]


def test_a_document_longer_than_a_block_has_one_of_its_own():
    filler = BlockFiller(SMALL)
    assert filler.add(document(1, [1])) is None
    assert unpacked(filler.add(document(2, [2] * 200_000, ()))).length.tolist() == [1]
    assert unpacked(filler.add(document(3, [3]))).length.tolist() == [200_000]


def test_the_layout_of_the_table():
    entry = pack_block([document(1, [7, 8], ((1, 1),), control=5), document(2, [9], ())], SMALL)
    payload = bytes(entry.value[HEADER_BYTES:])
    ids, hashes = struct.pack("<3H", 7, 8, 9), document(1, [1]).content + document(2, [1]).content
    assert payload == ids + hashes + struct.pack("<6I", 2, 1, 1, 0, 5, 0) + struct.pack("<2I", 1, 1)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_vectors_of_the_format_are_what_is_written(dtype):
    path = Path(__file__).parents[2] / "docs" / "format" / "vectors" / "tokens.json"
    expected = json.loads(path.read_bytes())[dtype]
    recipe = TokenRecipe.from_json(expected["recipe"])
    made = [
        dataclasses.replace(
            document(0, one["ids"], one["runs"], recipe, one["control_strings"]),
            content=bytes.fromhex(one["content"]),
        )
        for one in expected["documents"]
    ]
    entry = pack_block(made, recipe)
    assert (entry.key.hex(), bytes(entry.value).hex(), entry.facts.hex()) == (
        expected["key"],
        expected["value"],
        expected["facts"],
    )
    assert recipe.recipe_id.hex() == expected["recipe_id"]

"""What stands in the rows of every kind of view, against lists made token by token."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokens import EOS, cache_of, chats, expected_row, texts
from torch.utils.data import DataLoader

from latentcache.loader.token_formats import TokenCollator

TEXTS = texts()
CHATS, SPANS = chats()
KINDS = {
    "padded": lambda cache: cache.padded(16, overflow="split"),
    "left": lambda cache: cache.padded(16, overflow="truncate_left", padding_side="left"),
    "packed": lambda cache: cache.packed(40, overflow="split"),
    "blocks": lambda cache: cache.blocks(24),
    "islands": lambda cache: cache.blocks(24, crossing=False, tail="drop"),
    "lengths": lambda cache: cache.padded(32, lengths=[8, 16, 32], overflow="split"),
}


@pytest.mark.filterwarnings("ignore:.*are left out")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", [False, True], ids=["texts", "chats"])
def test_rows_hold_what_their_plan_says(kind, chat):
    ids, spans = (CHATS, SPANS) if chat else (TEXTS, None)
    view = KINDS[kind](cache_of(ids, spans))
    numbers = [*range(len(view)), 0, len(view) - 1]
    for start in range(0, len(numbers), 7):
        rows = numbers[start : start + 7]
        batch = view.batch(rows)
        width = batch["input_ids"].shape[1]
        for place, row in enumerate(rows):
            expected = expected_row(view, row, width, ids, spans)
            assert set(batch) == set(expected)
            assert {name: batch[name][place].tolist() for name in batch} == expected


@pytest.mark.filterwarnings("ignore:.*are left out")
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_one_array_of_the_right_type_per_field(kind):
    view = KINDS[kind](cache_of(TEXTS))
    batch = view.batch([0, 2, 1])
    for name, tensor in batch.items():
        assert tensor.dtype == (torch.int32 if name == "seq_idx" else torch.int64)
        assert tensor.is_contiguous()
        assert tensor.numpy().flags.c_contiguous
    assert len({tensor.shape for tensor in batch.values()}) == 1


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=12), min_size=1, max_size=9), st.integers(2, 16))
def test_filling_with_the_id_that_ends_a_text_is_safe(ids, max_length):
    view = cache_of(ids, pad=EOS).padded(max_length, overflow="truncate_right")
    batch = view.batch(range(len(view)))
    for row, document in enumerate(ids):
        kept = document[:max_length]
        assert batch["labels"][row, 1 : len(kept)].tolist() == kept[1:]
        assert batch["attention_mask"][row].sum() == len(kept)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad", [70_000, -1], ids=["beyond the type of the store", "below it"])
def test_the_filling_need_not_fit_into_the_type_of_the_store(side, pad):
    view = cache_of(TEXTS, pad=pad).padded(32, padding_side=side)
    assert view.parts[0].dtype == np.uint16
    batch = view.batch(range(len(view)))
    filled = batch["attention_mask"] == 0
    assert filled.any()
    assert torch.equal(batch["input_ids"] == pad, filled)


def test_the_filling_is_that_of_the_recipe_or_ends_a_text():
    assert cache_of(TEXTS, pad_id=7).pad_id == 7
    assert cache_of(TEXTS, pad_id=7, pad=9).pad_id == 9
    assert cache_of(TEXTS).pad_id == EOS
    assert cache_of(TEXTS, eos_id=None).pad_id == 0


def test_rows_are_views_of_their_batch_and_become_it_again():
    view = cache_of(TEXTS).packed(40)
    rows = view.__getitems__([3, 0, 2])
    batch = TokenCollator()(rows)
    for name, tensor in batch.items():
        assert all(row[name]._base is tensor for row in rows)
    assert batch["input_ids"].data_ptr() == rows[0]["input_ids"].data_ptr()
    fewer = TokenCollator()(rows[1:])
    assert torch.equal(fewer["labels"], batch["labels"][1:])
    turned = TokenCollator()(rows[::-1])
    assert torch.equal(turned["labels"], batch["labels"].flip(0))


def test_one_row_has_the_length_of_the_view():
    view = cache_of(TEXTS).padded(32, lengths=[8, 16, 32])
    short = int(np.argmin(view.row_lengths))
    assert view[short]["input_ids"].shape == (32,)
    assert view[-1]["input_ids"].tolist() == view[len(view) - 1]["input_ids"].tolist()
    assert view.batch([short])["input_ids"].shape[1] < 32
    for wrong in (len(view), -len(view) - 1):
        with pytest.raises(IndexError):
            view[wrong]


def test_a_dataloader_fetches_whole_batches():
    view = cache_of(TEXTS).padded(32)
    loader = DataLoader(view, batch_size=4, collate_fn=TokenCollator())
    assert len(loader) == -(-len(view) // 4)
    seen = torch.cat([batch["input_ids"] for batch in loader])
    assert torch.equal(seen, view.batch(range(len(view)))["input_ids"])


def test_memory_is_used_again_only_when_nobody_refers_to_it():
    view = cache_of(TEXTS).padded(32)
    kept = view.batch([0, 1])
    before, row = kept["labels"].clone(), kept["input_ids"][1]
    content = row.tolist()
    del kept["input_ids"]
    places = set()
    for _ in range(9):
        batch = view.batch([2, 3])
        places.add(batch["input_ids"].data_ptr())
        del batch
    assert len(places) < 9
    assert torch.equal(kept["labels"], before)
    assert row.tolist() == content


def test_segments_of_a_packed_batch():
    view = cache_of([[2, 3, EOS], [4, EOS], [5, 6, 7, EOS]]).packed(8)
    batch = view.batch(range(len(view)))
    assert batch["seq_idx"].tolist() == [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    found = view.segments(batch)
    assert found["cu_seqlens"].dtype == torch.int32
    assert found["cu_seqlens"].tolist() == [0, 4, 7, 8, 10, 16]
    assert found["max_seqlen"] == 6


def test_a_view_travels():
    view = cache_of(TEXTS).packed(40)
    again = pickle.loads(pickle.dumps(view))
    assert torch.equal(again.batch([1, 0])["labels"], view.batch([1, 0])["labels"])


def test_what_is_left_out_is_listed():
    with pytest.warns(UserWarning, match="1 tokens of 1 documents are left out: nothing .* first is memory:2"):
        view = cache_of([[2, 3, EOS], [EOS], [4] * 9]).padded(8, overflow="drop")
    assert view.left == [("too_long", "memory:3", 9), ("idle", "memory:2", 1)]
    assert view.tokens_left == {"too_long": 9, "cut": 0, "idle": 1, "tail": 0}
    assert (len(view), view.tokens, view.fill) == (1, 3, 3 / 8)


def test_steps_as_a_trainer_counts_them():
    view = cache_of(texts(50)).padded(40)
    assert view.steps(2, batch_size=4) == 26
    assert view.steps(2, batch_size=4, grad_accum=3) == 10
    assert view.steps(1, batch_size=4, world_size=2) == 7
    assert view.steps(1, batch_size=4, world_size=2, drop_last=True) == 6
    assert view.steps(0.5, batch_size=4) == 7

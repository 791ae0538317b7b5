"""What batches of tokens say beside their tensors: rows that only fill, and the numbers of ``meta``."""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from made_tokens import cache_of, chats, texts
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from latentcache.errors import UsageError
from latentcache.loader.batch_facts import meta, without_labels
from latentcache.loader.iterable import as_iterable
from latentcache.loader.token_formats import TokenCollator
from latentcache.loader.token_stream import as_rows

TEXTS = [[number + 2, *row[1:]] for number, row in enumerate(texts(41, 60))]  # the first id tells the document
KINDS = ("padded", "packed", "blocks")


def view_of(kind="padded", ids=TEXTS, spans=None, **words):
    return getattr(cache_of(ids, spans), kind)(64, **words)


def test_what_only_fills_has_no_label():
    labels = torch.arange(6).reshape(3, 2)
    batch = without_labels({"labels": labels}, np.array([False, True, False]))
    assert batch["labels"].tolist() == [[0, 1], [-100, -100], [4, 5]]


def test_numbers_of_a_batch():
    batch = {
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "labels": torch.tensor([[-100, 4, -100], [5] * 3]),
    }
    found = meta(batch, np.array([False, True]), epoch=3, step=7)
    assert found == {"epoch": 3, "step_in_epoch": 7, "tokens": 2, "trainable_tokens": 4}


# mask


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("lengths", [None, [16, 32, 64]])
@pytest.mark.parametrize("size", [2, 4])
def test_every_row_has_its_labels_once_and_ranks_have_equal_steps(size, world_size, lengths):
    words = {"batch_size": size, "world_size": world_size, "small_buckets": "mask"}
    view = view_of(lengths=lengths)
    report = view.plan(**words)
    ranks = [list(view.loader(rank=rank, **words)) for rank in range(world_size)]
    assert [len(batches) for batches in ranks] == [report.steps] * world_size
    learned, filling = Counter(), 0
    for step in zip(*ranks, strict=True):
        assert {len(batch["labels"]) for batch in step} == {size}
        assert len({batch["labels"].shape for batch in step}) == 1
        for batch in step:
            fills = batch["is_pad_row"]
            assert (fills.dtype, fills.shape) == (torch.bool, (size,))
            filling += int(fills.sum())
            assert (batch["labels"][fills] == -100).all()
            assert batch["attention_mask"][:, 0].all()  # as a real row: none without attention
            assert (batch["labels"][~fills] != -100).any()  # no mean over nothing
            learned.update(batch["input_ids"][~fills][:, 0].tolist())
    assert learned == {document[0]: 1 for document in TEXTS}
    assert filling == report.rows_masked == report.steps * size * world_size - len(TEXTS)
    assert (report.samples_repeated, report.samples_dropped, report.blank_batches) == (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_an_epoch_with_other_sizes_counts_each_row_once(kind):
    view = view_of(kind)
    trainable = sum(int((batch["labels"] != -100).sum()) for batch in view.loader(batch_size=1))
    one = view.loader(batch_size=4, small_buckets="mask", seed=2)
    passing = iter(one)
    served = [next(passing) for _ in range(2)]
    state = json.loads(json.dumps(one.state_dict()))
    for rank in (0, 1):
        other = view.loader(batch_size=3, world_size=2, rank=rank, small_buckets="mask")
        other.load_state_dict(state)
        served += list(other)
    assert sum(int((batch["labels"] != -100).sum()) for batch in served) == trainable


def test_the_last_step_is_the_same_from_workers_and_by_number():
    loader = view_of().loader(batch_size=4, small_buckets="mask", prefetch=0)
    expected = [(batch["labels"].tolist(), batch["is_pad_row"].tolist()) for batch in loader]
    assert sum(sum(fills) for _, fills in expected) == 3
    for source in (loader, as_iterable(loader), pickle.loads(pickle.dumps(loader))):
        found = DataLoader(source, batch_size=None, num_workers=2)
        assert [(batch["labels"].tolist(), batch["is_pad_row"].tolist()) for batch in found] == expected
    assert [loader[step]["labels"].tolist() for step in range(len(loader))] == [labels for labels, _ in expected]


def test_forms_for_models_hold_nothing_a_model_does_not_know():
    for name in ("transformers", "flat"):
        batches = list(view_of("packed").loader(batch_size=4, small_buckets="mask", format=name))
        assert not any("is_pad_row" in batch for batch in batches)
    rows = list(as_rows(view_of().loader(batch_size=4, small_buckets="mask")))
    assert "is_pad_row" not in TokenCollator("transformers")(rows[-4:])
    assert TokenCollator()(rows[-4:])["is_pad_row"].sum() <= 3


def test_a_rank_without_a_row_is_said_before_it_is_trained_on():
    words = {"batch_size": 1, "world_size": 2, "small_buckets": "mask"}
    assert view_of().plan(**words).blank_batches == 1
    with pytest.warns(UserWarning, match="1 of 42 batches of all ranks hold nothing but rows that only fill"):
        next(iter(view_of().loader(**words)))
    with pytest.warns(UserWarning, match="1 of 42"):
        iter(as_iterable(view_of().loader(prefetch=0, **words)).__iter__()).__next__()


def test_a_blank_batch_is_nan_as_a_mean_and_nothing_as_a_share_of_all_labels():
    """What the Trainer of transformers does: it hands the model the number of labels of all ranks."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_key_value_heads=2, **sizes))
    batch = view_of().batch([0, 1])
    del batch["attention_mask"]
    blank = without_labels(batch, np.array([True, True]))
    assert torch.isnan(model(**blank).loss)
    loss = model(**blank, num_items_in_batch=torch.tensor(40)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.isnan().any() for parameter in model.parameters())


# meta


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_exact_with_read_ahead_and_after_a_resume(kind, prefetch):
    ids, spans = chats(60)
    view = view_of(kind, ids, spans)
    words = {"batch_size": 4, "seed": 1, "meta": True, "small_buckets": "mask", "prefetch": prefetch}
    loader = view.loader(**words)
    loader.set_epoch(2)
    found = []
    for batch in loader:
        real = ~batch["is_pad_row"]
        found.append(batch["meta"])
        assert found[-1] == {
            "epoch": 2,
            "step_in_epoch": len(found) - 1,
            "tokens": int(batch["attention_mask"][real].sum()),
            "trainable_tokens": int((batch["labels"] != -100).sum()),
        }
        assert {type(number) for number in batch["meta"].values()} == {int}
    assert sum(one["tokens"] for one in found) == view.tokens
    passing = iter(loader)
    for _ in range(3):
        next(passing)
    resumed = view.loader(**words)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch["meta"] for batch in resumed] == found[3:]


def test_steps_go_on_with_other_sizes_and_workers():
    view = view_of()
    one = view.loader(batch_size=4, meta=True)
    passing = iter(one)
    for _ in range(5):
        next(passing)
    other = view.loader(batch_size=3, meta=True, prefetch=0)
    other.load_state_dict(one.state_dict())
    left = other.remaining()
    assert [batch["meta"]["step_in_epoch"] for batch in other] == [5 + step for step in range(left)]
    stream = DataLoader(as_iterable(view.loader(batch_size=4, meta=True, prefetch=0)), batch_size=None, num_workers=2)
    assert [batch["meta"]["step_in_epoch"] for batch in stream] == list(range(11))
    loader = view.loader(batch_size=4, meta=True)
    assert loader[7]["meta"]["step_in_epoch"] == 7
    assert loader.batch([0, 1])["meta"]["step_in_epoch"] is None


def test_nothing_is_said_unless_asked_for():
    assert set(next(iter(view_of().loader(batch_size=4)))) == {"input_ids", "attention_mask", "labels"}
    with pytest.raises(UsageError, match="say something of the whole batch"):
        as_rows(view_of().loader(batch_size=4, meta=True))
